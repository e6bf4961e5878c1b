"""Workloads as DataFrames: the columns that readers make, that Python users give and get, and that files have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.spec import validate_spec
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.simulator.workloads.table import BadInput, Column, Columns, InputProblem, Wrong
from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob, in_order, rigid_spec

if TYPE_CHECKING:
    import pandas as pd

REQUIRED = ("id", "submit_s", "gpus")

WORKLOAD: Mapping[str, str] = {
    "id": "object",
    "submit_s": "float64",
    "gpus": "int64",
    "spec": "object",
    "name": "object",
    "user": "object",
    "account": "object",
    "gpu_type": "object",
    "batch_size": "Int64",
    "model": "object",
    "duration_s": "Float64",
    "samples": "Float64",
    "epochs": "Float64",
    "time_limit_s": "Float64",
    "cpus": "Int64",
    "mem_mb": "Float64",
    "data_gb": "Float64",
    "sensitivity": "object",
    "kind": "object",
    "gpu_utilisation": "Float64",
    "gpu_mem_mb": "Float64",
}
"""Column -> dtype. The columns are the fields of `WorkloadJob`, which say what each means and in which unit. `object`
is text or None, and a JobSpec in `spec`; a missing number is NA."""

COLUMNS = tuple(WORKLOAD)
OPTIONAL = tuple(name for name in COLUMNS if name not in REQUIRED)
TEXTS = ("id", "name", "user", "account", "gpu_type", "model", "sensitivity", "kind")
WHOLE = ("gpus", "batch_size", "cpus")

_DEFAULTS = {field.name: None if field.default is MISSING else field.default for field in fields(WorkloadJob)}


def to_frame(workload: Workload) -> pd.DataFrame:
    """The jobs of a workload, one row each, with all columns of `WORKLOAD`."""
    import pandas as pd  # takes a second to load, and reading settings loads this module

    columns = {name: pd.Series([getattr(job, name) for job in workload.jobs], dtype=WORKLOAD[name]) for name in COLUMNS}
    return pd.DataFrame(columns)


def from_frame(frame: pd.DataFrame, name: str = "workload") -> Workload:
    """A workload from a DataFrame with columns of `WORKLOAD`. `spec` may also hold the job spec as a dict or as JSON.

    Raises:
        BadInput: a column is missing or unknown, or a row is no job; rows are counted from 0.
    """
    where = f"workload {name!r}"
    missing = [column for column in REQUIRED if column not in frame]
    if missing or set(frame) - set(COLUMNS):
        unknown = sorted(map(str, set(frame) - set(COLUMNS)))
        found = f"no column {missing[0]!r}" if missing else f"the column {unknown[0]!r}"
        raise BadInput([InputProblem(where, None, found, f"{', '.join(REQUIRED)}, and only {', '.join(COLUMNS)}")])
    columns: Columns = {}
    for column in COLUMNS:
        if column in frame:
            values = frame[column].astype(object)
            columns[column] = values.where(values.notna(), None).tolist()
    columns["gpus"] = [int(gpus) for gpus in columns["gpus"]]
    batches = columns.get("batch_size", [None] * len(frame))
    specs = columns.get("spec", [None] * len(frame))
    jobs, problems = [], []
    try:
        columns["spec"] = [
            _spec_of(spec, gpus, batch) for spec, gpus, batch in zip(specs, columns["gpus"], batches, strict=True)
        ]
    except Wrong as wrong:
        raise BadInput([InputProblem(where, None, wrong.found, wrong.expected)]) from None
    for row, job in enumerate(build_jobs(columns, [True] * len(frame))):
        if isinstance(job, Wrong):
            problems.append(InputProblem(f"{where}, row {row}", None, job.found, job.expected))
        elif job is not None:
            jobs.append(job)
    if problems:
        raise BadInput(problems)
    try:
        return Workload(name, in_order(jobs), "a DataFrame")
    except Wrong as wrong:
        raise BadInput([InputProblem(where, None, wrong.found, wrong.expected)]) from None


def _spec_of(value: object, gpus: int, batch_size: int | None) -> JobSpec:
    if isinstance(value, JobSpec):
        return value
    if value is None or value == "":
        if gpus < 1:
            raise Wrong(f"gpus={gpus}", "at least 1; leave out jobs that use no GPU")
        return rigid_spec(gpus, None, batch_size)
    return read_spec(value if isinstance(value, str) else json.dumps(value))


@lru_cache(maxsize=4096)
def read_spec(text: str) -> JobSpec:
    """The job spec in a text of JSON; one object for equal texts, because a workload has many. Raises Wrong."""
    try:
        return validate_spec(json.loads(text))
    except json.JSONDecodeError as error:
        raise Wrong(f"spec={text[:80]!r}, which is not JSON: {error.msg}", 'such as {"max_gpus": 8}') from None
    except BadJobSpec as error:
        raise Wrong(f"a bad job spec ({error})", "what `penstock config schema spec` describes") from None


def build_jobs(columns: Mapping[str, Column], valid: Sequence[bool]) -> Iterator[WorkloadJob | Wrong | None]:
    """The job of each row, what is wrong with it, or None for rows that are not valid.

    Args:
        columns: column of `WORKLOAD` -> a value for each row. NaN, None and empty texts are missing values.
        valid: whether each row is a job, shape (rows,).
    """
    values = [
        _values(name, columns[name]) if name in columns else repeat(default) for name, default in _DEFAULTS.items()
    ]
    for is_valid, *fields_of_job in zip(valid, *values, strict=False):
        if not is_valid:
            yield None
            continue
        try:
            yield WorkloadJob(*fields_of_job)
        except Wrong as wrong:
            yield wrong


def _values(name: str, values: Column) -> Sequence[Any]:
    """The values of a column as Python objects, missing ones as the field's default."""
    default = _DEFAULTS[name]
    if isinstance(values, np.ndarray):
        missing = np.isnan(values)
        numbers: list[Any] = values.tolist()
        return [default if gone else v for v, gone in zip(numbers, missing, strict=True)] if missing.any() else numbers
    if name in REQUIRED or name == "spec":
        return values
    return [default if value is None or value == "" else value for value in values]
