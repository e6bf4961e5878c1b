"""How well the efficiency model predicts recorded trainings: `python benchmarks/efficiency.py PROFILES_DIR [--json]`.

PROFILES_DIR contains MODEL/validation-B.csv: one training of the model at total batch size B. Each epoch has a row with
its `progress` so far (steps at the initial, smallest B), `iteration` (steps at B), validation `metric`, and the
estimates `grad_sqr` and `grad_var`. docs/developer/data.md says where such files are published.

Gain: AdaScale's gain by `penstock_profiles.throughput`, against progress / iterations of each epoch of the runs above
the initial B. The figures are the median and the 90th percentile of the absolute relative error. The noise is that of

    same       the run itself, same epoch. The recorded progress is a sum of gains by this same noise, so this column
    only
               tests the formula and its unit; a scheduler has only the other three
    before     the run itself, one epoch before
    half       the run at the next smaller B, same epoch: a job that is about to double its batch
    initial    the run at the initial B, same epoch: a job that has only used it

Epochs late: does equal progress mean an equally good model? Take each value of the metric that was the best so far in
the run at B or in the initial run, and that both reach. The figure is how much later in progress (+) the run at B first
reached it, in epochs: the median, and the 90th percentile of the absolute value. Values that one run never reached show
only in the best metric.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from penstock_profiles.throughput import gain

SOURCES = ["same", "before", "half", "initial"]
COPIES = {"gpt_pmp"}
"""Models with exactly the same validation files as another model."""


def read_runs(folder: Path) -> dict[int, pd.DataFrame]:
    """The trainings of one model by batch size, the initial one first, with two more columns.

    `gain` is progress / iterations of the epoch; `best` the best metric so far, negative where lower is better.
    """
    files = {int(file.stem.removeprefix("validation-")): file for file in folder.glob("validation-*.csv")}
    runs = {batch: pd.read_csv(files[batch]) for batch in sorted(files)}
    metric = next(iter(runs.values()))["metric"]
    sign = 1 if metric.iloc[-1] > metric.iloc[0] else -1
    for batch, run in runs.items():
        before = run[["progress", "iteration"]].shift(1, fill_value=0)
        assert (run["iteration"] > before["iteration"]).all(), f"{files[batch]}: every epoch has steps"
        run["gain"] = (run["progress"] - before["progress"]) / (run["iteration"] - before["iteration"])
        run["best"] = (sign * run["metric"]).cummax()
    return runs


def gain_errors(runs: dict[int, pd.DataFrame]) -> pd.DataFrame:
    """Relative error of the predicted gain, + if too high: a row per batch size and epoch, a column per source."""
    initial, *batches = runs

    def foretold(noise: pd.DataFrame, batch: int) -> np.ndarray:
        pairs = zip(noise["grad_sqr"], noise["grad_var"], strict=True)
        return np.array([float(gain(sqr, var, batch, initial)) for sqr, var in pairs])

    parts = []
    for smaller, batch in zip(runs, batches, strict=False):
        run = runs[batch]
        part = pd.DataFrame(
            {
                "same": foretold(run, batch),
                "half": foretold(runs[smaller], batch),
                "initial": foretold(runs[initial], batch),
            }
        )
        part["before"] = part["same"].shift(1)
        parts.append(part[SOURCES].div(run["gain"], axis=0).sub(1).assign(batch=batch))
    return pd.concat(parts)


def epochs_late(run: pd.DataFrame, initial: pd.DataFrame) -> np.ndarray:
    """By how many epochs of progress `run` is later than `initial` at each best metric that both reach, shape
    (bests,)."""
    bests = np.union1d(run["best"], initial["best"])
    bests = bests[bests <= min(run["best"].max(), initial["best"].max())]
    first, expected = (frame["progress"].to_numpy()[np.searchsorted(frame["best"], bests)] for frame in (run, initial))
    return np.asarray((first - expected) / (initial["progress"].iloc[-1] / len(initial)))


def figures(errors: pd.DataFrame, late: np.ndarray, run: pd.DataFrame) -> dict[str, Any]:
    """Figures of one batch size, or of all batch sizes of a model together."""
    sizes = errors[SOURCES].abs()
    return {
        "gain_error_median": sizes.median().to_dict(),
        "gain_error_p90": sizes.quantile(0.9).to_dict(),
        "gain_bias_median": errors[SOURCES].median().to_dict(),
        "epochs_late_median": float(np.median(late)),
        "epochs_late_p90": float(np.quantile(np.abs(late), 0.9)),
        "best_metric": abs(float(run["best"].max())),
    }


def evaluate(runs: dict[int, pd.DataFrame]) -> dict[str, dict[str, Any]]:
    """Figures by batch size and, under "all", of all batch sizes together, with the initial run's best metric."""
    initial, *batches = runs
    errors = gain_errors(runs)
    late = {batch: epochs_late(runs[batch], runs[initial]) for batch in batches}
    all_late = np.concatenate([late[batch] for batch in batches])
    by_batch = {str(batch): figures(errors[errors["batch"] == batch], late[batch], runs[batch]) for batch in batches}
    return by_batch | {"all": figures(errors, all_late, runs[initial])}


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown, as in docs/developer/profiles.md."""
    lines = [
        f"| model | batch | {' | '.join(SOURCES)} | epochs late | best metric |",
        "| --- " * (len(SOURCES) + 4) + "|",
    ]
    for model, by_batch in results.items():
        for batch, said in by_batch.items():
            gains = [f"{said['gain_error_median'][name]:.1%} / {said['gain_error_p90'][name]:.1%}" for name in SOURCES]
            late = f"{said['epochs_late_median']:+.1f} / {said['epochs_late_p90']:.1f}"
            lines.append(f"| {model} | {batch} | {' | '.join(gains)} | {late} | {said['best_metric']:.4g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print only the last line")
    options = parser.parse_args()
    folders = sorted({file.parent for file in options.profiles_dir.glob("*/validation-*.csv")})
    if not folders:
        parser.error(f"{options.profiles_dir} has no MODEL/validation-B.csv; give the folder that holds the models")
    results = {folder.name: evaluate(read_runs(folder)) for folder in folders if folder.name not in COPIES}
    if not options.json:
        print(f"Python {platform.python_version()}, NumPy {np.__version__}; one recorded run per batch size, no seed")
        print(table(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
