"""Simulations of one workload, as DataFrames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Simulations of one workload, as DataFrames. Each frame has the columns `policy` and `seed`; missing numbers are
    NaN or NA.

    Attributes:
        jobs: a row for each job of each simulation; `metrics.JobRow` describes the columns. Times are in seconds since
            the start of the workload.
        rounds: a row for each tick of the loop; `run.Tick` describes the columns. In rows with `decided` a round was
            decided.
        summary: a row for each simulation; `metrics.Summary` describes the columns. `interrupted`: stopped by Ctrl-C.
    """

    jobs: pd.DataFrame
    rounds: pd.DataFrame
    summary: pd.DataFrame

    def write(self, folder: Path, suffix: str = "csv") -> None:
        """Write `jobs` and `rounds` into a folder, with suffix `csv` or `parquet`.

        Raises:
            OSError: a file cannot be written.
            ImportError: Parquet without pyarrow.
        """
        for name, frame in (("jobs", self.jobs), ("rounds", self.rounds)):
            file = folder / f"{name}.{suffix}"
            if suffix == "parquet":
                frame.to_parquet(file, engine="pyarrow", index=False)
                continue
            with file.open("w", encoding="utf-8", newline="") as out:
                frame.to_csv(out, index=False, lineterminator="\n")
