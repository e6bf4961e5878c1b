"""Measured tables of models, as in Sia's artifact: a folder for each, and `applications.csv` for all.
docs/admin/workloads.md.

A table is read when its model is first needed. Errors name the file and the line, as for a workload.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock_profiles.gpus import Gpus
from penstock_profiles.observations import Measured
from penstock_profiles.throughput import FloatArray, ThroughputParams, compute_time, step_time
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.workloads.table import BadInput, Columns, InputProblem, TableRows, Wrong, read_frame
from penstock_scheduler.simulator.workloads.workload import APPLICATIONS

if TYPE_CHECKING:
    import pandas as pd
    from scipy.interpolate import LinearNDInterpolator

Times = tuple[float, float]
"""Step time and its synchronising part, s."""

TIMES = ("step_time", "sync_time")


@dataclass(frozen=True, slots=True)
class ApplicationFacts:
    """A row of `applications.csv`; the defaults apply to a model without a row."""

    max_epochs: int | None = None
    """Epochs until a job is done; None: all that were recorded."""
    restart_s_simulated: float = 30.0
    """True cost of a restart, s."""
    restart_s_policy: float = 30.0
    """Cost of a restart that Sia's policy assumes, s."""
    slowdown: float = 1.0
    """Time of a step on a real cluster over that in the table."""


class TypeTable:
    """A model's step times on one GPU type.

    Args:
        placements: (GPUs on each node, atomic batch) -> times.
        scalability: (nodes, GPUs, atomic batch) -> mean times of larger placements.
    """

    def __init__(
        self,
        placements: dict[tuple[tuple[int, ...], int], Times],
        scalability: dict[tuple[int, int, int], Times],
    ) -> None:
        self._scalability = scalability
        self._of_shape: dict[tuple[int, ...], tuple[list[int], list[Times]]] = {}
        for (shape, batch), times in sorted(placements.items()):
            batches, values = self._of_shape.setdefault(shape, ([], []))
            batches.append(batch)
            values.append(times)
        self._largest = max(batch for _, batch in placements)
        self._known: dict[tuple[tuple[int, ...], int], Times | None] = {}

    def lookup(self, shape: Sequence[int], atomic_batch: int) -> Times | None:
        """Times of a micro-step, or None if it does not fit into memory.

        As in Sia's simulator (`Application.get_throughput`), a measured placement is interpolated linearly in the batch
        size, and any other by `LinearNDInterpolator` over (nodes, GPUs, batch size) of the placements' means and of the
        scalability table. Departures: outside of these points the reference fails, and our fit is used. The reference
        counts at most 16 nodes, and this all.
        """
        key = (canonical(shape), atomic_batch)
        if key not in self._known:
            self._known[key] = self._lookup(*key)
        return self._known[key]

    def max_atomic_batch(self, shape: Sequence[int]) -> int:
        """Largest batch size that was measured on these GPUs or, for another placement, on at least as many nodes and
        GPUs."""
        measured = self._of_shape.get(canonical(shape))
        if measured is not None:
            return measured[0][-1]
        nodes, gpus = len(shape), sum(shape)
        larger = [batch for (at_nodes, at_gpus, batch) in self._scalability if at_nodes >= nodes and at_gpus >= gpus]
        return max(larger, default=self._largest)

    def _lookup(self, shape: tuple[int, ...], atomic_batch: int) -> Times | None:
        if not 1 <= atomic_batch <= self.max_atomic_batch(shape):
            return None
        measured = self._of_shape.get(shape)
        if measured is not None and atomic_batch >= measured[0][0]:
            batches, values = measured
            right = bisect_left(batches, atomic_batch)
            if batches[right] == atomic_batch:
                return values[right]
            share = (atomic_batch - batches[right - 1]) / (batches[right] - batches[right - 1])
            below, above = values[right - 1], values[right]
            return below[0] + share * (above[0] - below[0]), below[1] + share * (above[1] - below[1])
        if measured is None and self._over_shapes is not None:
            step_s, sync_s = self._over_shapes([[len(shape), sum(shape), atomic_batch]])[0]
            if not np.isnan(step_s):
                return float(step_s), float(sync_s)
        step_s = float(step_time(self._fitted, len(shape), sum(shape), atomic_batch))
        return step_s, max(step_s - float(compute_time(self._fitted, atomic_batch)), 0.0)

    @cached_property
    def _points(self) -> tuple[FloatArray, FloatArray]:
        """All that was measured: (nodes, GPUs, batch), shape (points, 3), and times, shape (points, 2).

        In the reference's order and with its duplicates. Points on a grid have many triangulations, and Qhull's choice
        depends on the order: another order was seen to change step times by 6 %.
        """
        means: dict[tuple[int, int, int], list[Times]] = {}
        for shape, (batches, values) in self._of_shape.items():
            for batch, times in zip(batches, values, strict=True):
                means.setdefault((len(shape), sum(shape), batch), []).append(times)
        rows = [(place, np.mean(means[place], axis=0)) for place in sorted(means)]
        rows += [(place, np.array(times)) for place, times in self._scalability.items()]
        return np.array([place for place, _ in rows], dtype=np.float64), np.array([times for _, times in rows])

    @cached_property
    def _over_shapes(self) -> LinearNDInterpolator | None:
        """None if the points span no volume, so that nothing lies between them."""
        places, times = self._points
        if len(places) < 4 or np.linalg.matrix_rank(places - places[0]) < 3:
            return None
        # SciPy takes a second to load, and reading settings loads this module.
        from scipy.interpolate import LinearNDInterpolator

        return LinearNDInterpolator(places, times)

    @cached_property
    def _fitted(self) -> ThroughputParams:
        from penstock_profiles.fit import fit_throughput

        places, times = self._points
        params = fit_throughput(Measured(*places.T, *times.T)).params
        assert params is not None, "a fit without start has parameters"
        return params


class ModelTables:
    """A model: its tables by GPU type, and its recorded trainings.

    Args:
        types: GPU type -> table.
        trainings: total batch size -> rows (progress in iterations of the initial batch, grad_sqr, grad_var), one per
            epoch.
        application: the row of the model in `applications.csv`.
    """

    def __init__(
        self, types: dict[str, TypeTable], trainings: dict[int, FloatArray], application: ApplicationFacts
    ) -> None:
        self.types, self.application = types, application
        self._batches = sorted(trainings)
        epochs = min(len(rows) for rows in trainings.values())
        epochs = min(epochs, application.max_epochs or epochs)
        self._rows = [trainings[batch][:epochs] for batch in self._batches]
        self.initial_batch, self.max_batch = self._batches[0], self._batches[-1]
        ends = np.min([rows[:, 0] for rows in self._rows], axis=0)
        self.epoch_iterations: list[float] = np.maximum.accumulate(ends).tolist()
        """Iterations at the initial batch that complete each epoch: the fewest of all batch sizes, as the reference."""

    def noise(self, batch: float) -> tuple[FloatArray, FloatArray]:
        """`grad_sqr` and `grad_var` of each epoch, linear between the recorded batch sizes and constant beyond them."""
        right = bisect_left(self._batches, batch, hi=len(self._batches) - 1)
        left = max(right - 1, 0)
        span = self._batches[right] - self._batches[left]
        share = min(max((batch - self._batches[left]) / span, 0.0), 1.0) if span else 0.0
        rows = self._rows[left] + share * (self._rows[right] - self._rows[left])
        return rows[:, 1], rows[:, 2]


class Profiles:
    """A folder of measured tables. Raises ConfigError if there are no tables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = (
            sorted(path.name for path in folder.iterdir() if any(path.glob("validation-*.csv")))
            if folder.is_dir()
            else []
        )
        if not self.models:
            raise ConfigError(
                f"{folder} has no model; expected MODEL/placements-TYPE.csv and MODEL/validation-BATCH.csv"
            )
        self._applications = _read_applications(folder / "applications.csv")
        self._tables: dict[tuple[str, str], TypeTable] = {}
        self._trainings: dict[str, dict[int, FloatArray]] = {}

    def on(self, model: str, gpu_types: Iterable[str], gpus: Gpus) -> ModelTables | None:
        """A model on these types, by its name or that of its family; None if the folder has no such model.

        Raises:
            BadInput: a table is malformed, or describes a pipeline: its columns have another meaning.
        """
        name = next(
            (
                name
                for name in self.models
                if name == model or (name in APPLICATIONS and APPLICATIONS[name].family == model)
            ),
            None,
        )
        if name is None:
            return None
        folder = self.folder / name
        files = {path.stem.removeprefix("placements-"): path for path in sorted(folder.glob("placements-*.csv"))}
        by_type = {gpus.canonical(of_file): of_file for of_file in files}
        types = {}
        for gpu_type in gpu_types:
            of_file = gpu_type if gpu_type in files else by_type.get(gpus.canonical(gpu_type))
            if of_file is not None:
                if (name, of_file) not in self._tables:
                    self._tables[name, of_file] = _read_table(files[of_file], folder / f"scalability-{of_file}.csv")
                types[gpu_type] = self._tables[name, of_file]
        if name not in self._trainings:
            self._trainings[name] = _read_trainings(folder)
        return ModelTables(types, self._trainings[name], self.application(name))

    def application(self, model: str) -> ApplicationFacts:
        """The row of a model in `applications.csv`."""
        return self._applications.get(model, ApplicationFacts())


def canonical(shape: Sequence[int]) -> tuple[int, ...]:
    """The smallest rotation of a placement, as the tables name it: (8, 2, 4) is (2, 4, 8). Nodes without GPUs are
    dropped."""
    used = tuple(gpus for gpus in shape if gpus)
    return min(used[first:] + used[:first] for first in range(len(used)))


def _read_table(placements: Path, scalability: Path) -> TypeTable:
    exact = read_frame(placements, ("placement", "local_bsz", *TIMES), _placements)
    if exact.empty:
        raise BadInput([InputProblem(str(placements), None, "no row", "at least one measured placement")])
    if min(map(sum, exact["shape"])) > 1:
        found = "no placement of one GPU, as in the table of a pipeline"
        raise BadInput(
            [InputProblem(str(placements), None, found, "data-parallel training: pipelines are not simulated yet")]
        )
    larger: dict[tuple[int, int, int], Times] = {}
    if scalability.is_file():
        table = read_frame(scalability, ("num_nodes", "num_replicas", "local_bsz", *TIMES), _scalability)
        places = zip(table["num_nodes"], table["num_replicas"], table["local_bsz"], strict=True)
        larger = dict(zip(places, _times_of(table), strict=True))
    return TypeTable(
        dict(zip(zip(exact["shape"], exact["local_bsz"], strict=True), _times_of(exact), strict=True)), larger
    )


def _times_of(table: pd.DataFrame) -> Iterable[Times]:
    return zip(table["step_time"].tolist(), table["sync_time"].tolist(), strict=True)


def _placements(rows: TableRows) -> Columns:
    """Columns `shape` (GPUs on each node, a tuple), `local_bsz` (samples per GPU), `step_time` and `sync_time` (s)."""
    return {
        "shape": rows.each(rows.text("placement"), _shape, ()),
        "local_bsz": rows.whole("local_bsz", least=1),
        **_times(rows),
    }


def _shape(digits: str) -> tuple[int, ...]:
    if not digits.isdigit() or "0" in digits:
        raise Wrong(f"placement={digits!r}", "one digit from 1 to 9 for each node: the GPUs used there")
    return canonical([int(digit) for digit in digits])


def _scalability(rows: TableRows) -> Columns:
    """Columns `num_nodes`, `num_replicas` (GPUs), `local_bsz` (samples per GPU), `step_time` and `sync_time` (s)."""
    nodes, gpus = rows.whole("num_nodes", least=1), rows.whole("num_replicas")
    fewer = np.array(gpus) < np.array(nodes)
    rows.reject(
        fewer,
        lambda row: f"num_replicas={rows.raw('num_replicas')[row]!r}",
        "a whole number of at least num_nodes",
    )
    return {"num_nodes": nodes, "num_replicas": gpus, "local_bsz": rows.whole("local_bsz", least=1), **_times(rows)}


def _times(rows: TableRows) -> Columns:
    step_s, sync_s = rows.number("step_time", above=0), rows.number("sync_time", least=0)
    rows.reject(
        sync_s >= step_s,
        lambda row: f"sync_time={sync_s[row]:g} with step_time={step_s[row]:g}",
        "synchronising within the step, and some computing",
    )
    return {"step_time": step_s, "sync_time": sync_s}


def _read_trainings(folder: Path) -> dict[int, FloatArray]:
    trainings = {}
    for file in sorted(folder.glob("validation-*.csv")):
        batch = file.stem.removeprefix("validation-")
        if not batch.isdigit() or int(batch) < 1:
            raise BadInput(
                [InputProblem(str(file), None, f"the batch size {batch!r} in its name", "validation-BATCH.csv")]
            )
        table = read_frame(file, ("progress", "grad_sqr", "grad_var"), _training)
        if table.empty:
            raise BadInput([InputProblem(str(file), None, "no row", "one for each epoch")])
        trainings[int(batch)] = table.to_numpy(dtype=np.float64)
    return trainings


def _training(rows: TableRows) -> Columns:
    """Columns `progress` (iterations at the smallest batch so far, ascending), `grad_sqr` and `grad_var`."""
    progress = rows.number("progress", above=0)
    before = np.maximum.accumulate(np.concatenate([[0.0], np.nan_to_num(progress)[:-1]]))
    rows.reject(
        progress <= before,
        lambda row: f"progress={rows.raw('progress')[row]!r}",
        "a number above that of the row before",
    )
    sqr, var = rows.number("grad_sqr", least=0), rows.number("grad_var", least=0)
    rows.reject(sqr + var == 0, lambda row: "grad_sqr=0 and grad_var=0", "a gradient")
    return {"progress": progress, "grad_sqr": sqr, "grad_var": var}


def _read_applications(file: Path) -> dict[str, ApplicationFacts]:
    if not file.is_file():
        return {}
    numbers = ("restart_s_simulated", "restart_s_policy", "slowdown")
    table = read_frame(file, ("application", "max_epochs", *numbers), _applications)
    return {
        name: ApplicationFacts(**facts)
        for name, facts in zip(table["application"], table.drop(columns="application").to_dict("records"), strict=True)
    }


def _applications(rows: TableRows) -> Columns:
    """Columns `application` and the fields of `ApplicationFacts`."""
    return {
        "application": rows.text("application"),
        "max_epochs": rows.whole("max_epochs", least=1),
        "restart_s_simulated": rows.number("restart_s_simulated", least=0),
        "restart_s_policy": rows.number("restart_s_policy", least=0),
        "slowdown": rows.number("slowdown", above=0),
    }
