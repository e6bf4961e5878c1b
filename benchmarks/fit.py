"""How well a fitted model predicts larger placements: `python benchmarks/fit.py PROFILES_DIR [--plot FILE] [--json]`.

PROFILES_DIR contains a folder for each model with `placements-TYPE.csv` (placement, local_bsz, step_time, sync_time)
and `scalability-TYPE.csv` (num_nodes, num_replicas, local_bsz, step_time, sync_time), as in Sia's artifact. For each
model and type, both fits see the placements of up to 8 GPUs and predict every measured step on more GPUs. The error is
|predicted / measured - 1| of the step time, and likewise of throughput, its inverse.

The paper's fit is Sia's (section 3.3 and the artifact): root mean squared logarithmic errors, its regularisation,
bounds and missing-data rules, minimised by L-BFGS-B; only the gradient is analytic instead of automatic.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy
from scipy.optimize import minimize

from penstock_profiles.fit import fit_throughput
from penstock_profiles.observations import Measured
from penstock_profiles.throughput import step_time

LARGEST_SEEN = 8
"""GPUs of the largest placement that a fit sees."""

FEWEST = 20
"""A pair counts only if at least this many points are seen, and as many held out."""

COLUMNS = ["num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"]
OBSERVATIONS = 50
TRIALS = 20


class Pair(NamedTuple):
    model: str
    gpu_type: str
    seen: Measured
    held_out: Measured


class Errors(NamedTuple):
    """Relative errors on the held-out points: median and 90th percentile."""

    step_median: float
    step_p90: float
    throughput_median: float
    throughput_p90: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, metavar="PROFILES_DIR")
    parser.add_argument("--plot", type=Path, help="draw the residuals to this file (SVG or PNG)")
    parser.add_argument("--json", action="store_true", help="print only the last line")
    options = parser.parse_args()
    pairs = read_pairs(options.profiles)
    if not pairs:
        raise SystemExit(
            f"{options.profiles} has no model with {FEWEST} steps measured up to {LARGEST_SEEN} GPUs and beyond"
        )
    ours: list[Errors] = []
    papers: list[Errors] = []
    fit_ms: list[float] = []
    residuals = []
    say = (lambda *_: None) if options.json else print
    say(f"{'':22}{'points':>12}   {'step time, median / p90':^34}   {'throughput, median / p90':^34}")
    say(f"{'model':14}{'type':8}{'seen':>6}{'held':>6}   {'ours':^17}{'paper':^17}   {'ours':^17}{'paper':^17}  growth")
    for pair in pairs:
        fit = fit_throughput(pair.seen)
        params = fit.params
        assert params is not None, fit.failure
        paper = fit_as_the_paper(pair.seen)
        predicted = step_time(params, *pair.held_out[:3])
        ours.append(errors(predicted, pair.held_out.step_s))
        papers.append(errors(paper(*pair.held_out[:3]), pair.held_out.step_s))
        fit_ms.append(time_a_fit(pair.seen))
        residuals.append((pair, predicted, paper(*pair.held_out[:3])))
        a, b = ours[-1], papers[-1]
        say(
            f"{pair.model:14}{pair.gpu_type:8}{len(pair.seen.nodes):6d}{len(pair.held_out.nodes):6d}   "
            f"{cell(a[:2])}{cell(b[:2])}   {cell(a[2:])}{cell(b[2:])}  {params.growth:5.2f}"
        )
    average = np.mean(ours, axis=0), np.mean(papers, axis=0)
    say(f"{'mean':34}   {cell(average[0][:2])}{cell(average[1][:2])}   {cell(average[0][2:])}{cell(average[1][2:])}")
    worse = max(
        (a.step_median - b.step_median, p.model, p.gpu_type) for a, b, p in zip(ours, papers, pairs, strict=True)
    )
    better = sum(bool(a.step_median < b.step_median) for a, b in zip(ours, papers, strict=True))
    say(
        f"better in the median in {better} of {len(pairs)} pairs; "
        f"the worst change is {100 * worse[0]:+.1f} points, {worse[1]} on {worse[2]}"
    )
    say(
        f"a fit of {OBSERVATIONS} observations: median {statistics.median(fit_ms):.1f} ms over the pairs, "
        f"longest {max(fit_ms):.1f} ms (target 5)"
    )
    say(f"Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}")
    if options.plot:
        plot(residuals, options.plot)
    print(
        json.dumps(
            {
                "median_rel_err": round(float(average[0][0]), 5),
                "p90_rel_err": round(float(average[0][1]), 5),
                "paper_median_rel_err": round(float(average[1][0]), 5),
                "paper_p90_rel_err": round(float(average[1][1]), 5),
                "pairs_better": better,
                "pairs": len(pairs),
                "fit_ms_median": round(statistics.median(fit_ms), 3),
            }
        )
    )


def read_pairs(folder: Path) -> list[Pair]:
    """All models and types with measured steps on up to and on more than `LARGEST_SEEN` GPUs."""
    pairs = []
    for path in sorted(folder.glob("*/placements-*.csv")):
        steps = read_steps(path)
        if steps is None:
            continue
        small = steps.num_replicas <= LARGEST_SEEN
        seen = steps[small & steps.placed].drop_duplicates()
        held_out = steps[~small].drop(columns="placed").drop_duplicates()
        if min(len(seen), len(held_out)) >= FEWEST:
            pairs.append(
                Pair(path.parent.name, path.stem.removeprefix("placements-"), as_measured(seen), as_measured(held_out))
            )
    return pairs


def read_steps(path: Path) -> pd.DataFrame | None:
    """All steps of a model on one type, from its placements and larger shapes; None if there are none of this
    format."""
    if not path.exists():
        return None
    placements = pd.read_csv(path, dtype={"placement": str})
    placements["num_nodes"] = placements.placement.str.len()
    placements["num_replicas"] = placements.placement.map(lambda digits: sum(map(int, digits)))
    placements["placed"] = True
    shapes = path.with_name(path.name.replace("placements", "scalability"))
    tables = [placements, pd.read_csv(shapes).assign(placed=False)] if shapes.exists() else [placements]
    if any(not set(COLUMNS) <= set(table.columns) for table in tables):
        return None
    steps = pd.concat([table.drop_duplicates()[[*COLUMNS, "placed"]] for table in tables], ignore_index=True)
    return steps[(steps.step_time > steps.sync_time) & (steps.sync_time >= 0)]


def as_measured(table: pd.DataFrame) -> Measured:
    return Measured(*(table[column].to_numpy(np.float64) for column in COLUMNS))


def errors(predicted: np.ndarray, step_s: np.ndarray) -> Errors:
    step, rate = np.abs(predicted / step_s - 1), np.abs(step_s / predicted - 1)
    return Errors(*np.quantile(step, [0.5, 0.9]), *np.quantile(rate, [0.5, 0.9]))


def cell(pair: tuple[float, ...]) -> str:
    return f"{100 * pair[0]:6.1f} / {100 * pair[1]:5.1f} %"


def time_a_fit(seen: Measured) -> float:
    """Milliseconds of a fit of `OBSERVATIONS` points, drawn without order; median of `TRIALS`."""
    rows = np.random.default_rng(0).permutation(len(seen.nodes))[:OBSERVATIONS]
    points = Measured(*(column[rows] for column in seen))
    all_ms = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        fit_throughput(points)
        all_ms.append(1000 * (time.perf_counter() - begun))
    return statistics.median(all_ms)


def fit_as_the_paper(seen: Measured) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Sia's fit of Sia's formula; returns a function that predicts step times."""
    N, K, m, step_s, sync_s = seen
    log_compute, log_step = np.log(step_s - sync_s), np.log(step_s)
    across, within = N > 1, (N == 1) & (K > 1)
    further = np.maximum(K - 2, 1e-8)

    def predict(
        p: np.ndarray, N: np.ndarray, K: np.ndarray, m: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        more = np.maximum(K - 2, 1e-8)
        compute = p[0] + p[1] * m
        sync = np.where(N > 1, p[2] + p[3] * more, np.where(K > 1, p[4] + p[5] * more, 1e-8))
        return compute, sync, (compute ** p[6] + sync ** p[6]) ** (1 / p[6])

    def loss(p: np.ndarray) -> tuple[float, np.ndarray]:
        compute, sync, step = predict(p, N, K, m)
        of_compute, of_step = np.log(compute) - log_compute, np.log(step) - log_step
        rms_compute, rms_step = np.sqrt(np.mean(of_compute**2)), np.sqrt(np.mean(of_step**2))
        value = rms_compute + rms_step + 1e-3 * (p[6] - 1) ** 2 + 1e-2 * ((p[3] / p[2]) ** 2 + (p[5] / p[4]) ** 2)
        d_compute, d_step = of_compute / (len(m) * max(rms_compute, 1e-12)), of_step / (len(m) * max(rms_step, 1e-12))
        part = compute ** p[6] / step ** p[6]
        by_compute, by_sync = d_compute / compute + d_step * part / compute, d_step * (1 - part) / sync
        by_gamma = (part * np.log(compute) + (1 - part) * np.log(sync) - np.log(step)) / p[6]
        gradient = [by_compute.sum(), (by_compute * m).sum()]
        for link in (across, within):
            gradient += [by_sync[link].sum(), (by_sync * further)[link].sum()]
        gradient.append((d_step * by_gamma).sum() + 2e-3 * (p[6] - 1))
        for a in (2, 4):
            gradient[a] -= 2e-2 * p[a + 1] ** 2 / p[a] ** 3
            gradient[a + 1] += 2e-2 * p[a + 1] / p[a] ** 2
        return value, np.array(gradient)

    start, low, high = (
        np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001]),
        np.array([1e-8] * 6 + [1]),
        np.array([np.inf] * 6 + [10]),
    )
    fixed = {0: (step_s - sync_s).mean() / 2} if len(np.unique(m)) == 1 else {}
    fixed |= {} if across.any() else {2: 1e-8, 3: 1e-8}
    fixed |= {} if within.any() else {4: 1e-8, 5: 1e-8}
    fixed |= {} if (K > 2).any() else {3: 1e-8, 5: 1e-8}
    for index, value in fixed.items():
        start[index] = low[index] = high[index] = value
    p = minimize(loss, start, jac=True, bounds=list(zip(low, high, strict=True)), tol=1e-5).x
    if not across.any():
        p[2], p[3] = max(p[2], 1.1 * p[4]), max(p[3], 1.1 * p[5])
    return lambda N, K, m: predict(p, N, K, m)[2]


def plot(residuals: list[tuple[Pair, np.ndarray, np.ndarray]], path: Path) -> None:
    """Predicted over measured step time against GPUs, a panel for each pair."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 4
    figure, axes = plt.subplots(
        -(-len(residuals) // columns),
        columns,
        figsize=(11, 1.7 * -(-len(residuals) // columns)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axis in axes.flat[len(residuals) :]:
        axis.set_visible(False)
    for axis, (pair, ours, papers) in zip(axes.flat, residuals, strict=False):
        K = pair.held_out.replicas
        axis.axhline(1, color="0.6", linewidth=0.8)
        axis.plot(
            K * 0.97, papers / pair.held_out.step_s, ".", color="#c44e52", markersize=3, alpha=0.5, label="paper's fit"
        )
        axis.plot(K * 1.03, ours / pair.held_out.step_s, ".", color="#1f6feb", markersize=3, alpha=0.5, label="ours")
        axis.set_title(f"{pair.model}, {pair.gpu_type}", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([8, 16, 32, 64], ["8", "16", "32", "64"])
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.2, 6)
        axis.set_yticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"], fontsize=7)
        axis.tick_params(labelsize=7)
    axes[0, 0].legend(fontsize=7, loc="upper left", frameon=False, handletextpad=0)
    figure.supxlabel("GPUs", fontsize=9)
    figure.supylabel("predicted / measured step time", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
