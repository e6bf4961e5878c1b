"""Penstock's own formats for workloads, CSV and JSON. docs/admin/workloads.md describes every column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock_scheduler.simulator.workloads.frames import COLUMNS, REQUIRED, TEXTS, WHOLE, read_spec
from penstock_scheduler.simulator.workloads.table import (
    MAX_JOBS,
    BadInput,
    Columns,
    InputProblem,
    Problems,
    TableRows,
    Wrong,
    open_text,
    unreadable,
)
from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob, in_order, rigid_spec

FORMAT = "penstock-workload/1"
"""Value of the key `format` in JSON."""

MAX_JSON = 256 * 1024 * 1024
"""Characters of a JSON document, which is held in memory as a whole."""


def read_rows(rows: TableRows) -> Columns:
    """Penstock's own CSV."""
    columns: Columns = {name: rows.text(name) for name in TEXTS}
    for name in COLUMNS:
        if name not in (*TEXTS, "spec"):
            given = rows.given(name)
            if name in WHOLE:
                numbers = rows.whole(name, where=given)
                columns[name] = [number if known else None for number, known in zip(numbers, given, strict=True)]
            else:
                columns[name] = rows.number(name, where=given)
    for name in REQUIRED:
        rows.reject(~rows.given(name), lambda row, name=name: f"nothing in column {name}", "a value for every job")  # type: ignore[misc]
    none = np.array([gpus is not None and gpus < 1 for gpus in columns["gpus"]], dtype=np.bool_)
    rows.reject(none, lambda row: f"gpus={columns['gpus'][row]}", "at least 1; leave out jobs that use no GPU")
    specs = rows.each(rows.text("spec"), lambda text: read_spec(text) if text else None, None)
    columns["spec"] = [
        rigid_spec(gpus, None, batch) if spec is None and valid else spec
        for spec, gpus, batch, valid in zip(specs, columns["gpus"], columns["batch_size"], rows.valid, strict=True)
    ]
    return columns


def read_json(file: Path) -> Workload:
    """A workload in JSON. Raises BadInput, which names jobs by their place in `jobs`."""
    try:
        with open_text(file) as lines:
            text = lines.read(MAX_JSON + 1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None
    if len(text) > MAX_JSON:
        raise BadInput(
            [InputProblem(str(file), None, f"more than {MAX_JSON >> 20} MiB of JSON", "CSV, which is read row by row")]
        )
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        raise BadInput(
            [InputProblem(str(file), line, str(error), f'{{"format": "{FORMAT}", "jobs": [...]}}')]
        ) from None
    jobs: list[WorkloadJob] = []
    problems = Problems(file)
    try:
        for place, entry in enumerate(_entries(document)):
            try:
                jobs.append(_from_json(entry))
            except Wrong as wrong:
                problems.add(None, Wrong(f"in jobs[{place}] {wrong.found}", wrong.expected))
        problems.raise_if_any()
        return Workload(str(document.get("name") or file.stem), in_order(jobs), str(document.get("source", "")))
    except Wrong as wrong:
        raise BadInput([InputProblem(str(file), None, wrong.found, wrong.expected)]) from None


def write(workload: Workload, file: Path) -> None:
    """Write a workload, as JSON if the name of the file ends in `.json`, else as CSV. Raises OSError."""
    if file.suffix == ".json":
        document = {
            "format": FORMAT,
            "name": workload.name,
            "source": workload.source,
            "jobs": [to_json(job) for job in workload.jobs],
        }
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    import pandas as pd  # takes a second to load, and reading settings loads this module

    entries = [to_json(job) for job in workload.jobs]
    used = [name for name in COLUMNS if name in REQUIRED or any(name in entry for entry in entries)]
    table = pd.DataFrame({name: [entry.get(name) for entry in entries] for name in used}, dtype=object)
    if "spec" in used:
        table["spec"] = [None if spec is None else json.dumps(spec) for spec in table["spec"]]
    with file.open("w", encoding="utf-8", newline="") as out:
        table.to_csv(out, index=False, lineterminator="\n")


def to_json(job: WorkloadJob) -> dict[str, Any]:
    """The job as an entry of `jobs`, without values that are not given."""
    entry = {name: getattr(job, name) for name in COLUMNS if _given(job, name)}
    if "spec" in entry:
        entry["spec"] = job.spec.model_dump(mode="json", exclude_defaults=True)
    return entry


def _given(job: WorkloadJob, name: str) -> bool:
    value = getattr(job, name)
    if name == "spec":
        return bool(value != rigid_spec(job.gpus, None, job.batch_size))
    return value not in (None, "") and not (name == "user" and value == "user")


def _from_json(entry: object) -> WorkloadJob:
    if not isinstance(entry, dict):
        raise Wrong(f"{entry!r:.80}", "an object with the keys of docs/admin/workloads.md")
    values: dict[str, Any] = {name: value for name, value in entry.items() if value is not None}
    for name, value in values.items():
        if name not in COLUMNS:
            raise Wrong(f"the key {name!r}", f"only {', '.join(COLUMNS)}")
        kind = str if name in TEXTS else dict if name == "spec" else int if name in WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            expected = {str: "a text", dict: "an object", int: "a whole number"}.get(kind, "a number")  # type: ignore[arg-type]
            raise Wrong(f"{name}={value!r:.80}", expected)
    for name in REQUIRED:
        if name not in values:
            raise Wrong(f"no key {name!r}", "one in every job")
    spec = values.pop("spec", None)
    return _job(values, "" if spec is None else json.dumps(spec))


def _job(values: Mapping[str, Any], spec: str) -> WorkloadJob:
    """The job of these values. `spec` is JSON; an empty text stands for a rigid job."""
    gpus = values["gpus"]
    if gpus < 1:
        raise Wrong(f"gpus={gpus}", "at least 1; leave out jobs that use no GPU")
    return WorkloadJob(spec=read_spec(spec) if spec else rigid_spec(gpus, None, values.get("batch_size")), **values)


def _entries(document: object) -> list[object]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Wrong(
            f"format {document.get('format')!r}" if isinstance(document, dict) else f"{document!r:.40}",
            f'an object with "format": "{FORMAT}"',
        )
    if not isinstance(document.get("jobs"), list):
        raise Wrong('no list "jobs"', "one")
    entries: list[object] = document["jobs"]
    if len(entries) > MAX_JOBS:
        raise Wrong(f"{len(entries)} jobs", f"at most {MAX_JOBS}; split the workload")
    return entries
