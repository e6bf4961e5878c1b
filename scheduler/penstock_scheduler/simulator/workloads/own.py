"""Penstock's own formats for workloads, CSV and JSON: docs/admin/workloads.md describes every column."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock_scheduler.errors import BadJobSpec
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.spec import validate_spec
from penstock_scheduler.simulator.workloads.table import (
    MAX_JOBS,
    BadInput,
    Problem,
    Problems,
    Row,
    open_text,
    unreadable,
)
from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob, Wrong, in_order, rigid_spec

FORMAT = "penstock-workload/1"
"""Value of the key `format` in JSON."""

MAX_JSON = 256 * 1024 * 1024
"""Characters of a JSON document, which is held as a whole."""

REQUIRED = ("id", "submit_s", "gpus")

COLUMNS = tuple(field.name for field in fields(WorkloadJob))
"""Of the CSV, and keys of each job in JSON."""

OPTIONAL = tuple(name for name in COLUMNS if name not in REQUIRED)

_TEXTS = ("id", "name", "user", "account", "gpu_type", "model", "sensitivity", "kind")
_WHOLE = ("gpus", "batch_size", "cpus")


def read_row(row: Row) -> WorkloadJob:
    """The job of a row of CSV. Raises Wrong."""
    values: dict[str, Any] = {name: row.fields[name].strip() for name in _TEXTS if row.text(name)}
    for name in COLUMNS:
        if name not in (*_TEXTS, "spec") and row.text(name):
            values[name] = row.whole(name) if name in _WHOLE else row.number(name)
    for name in REQUIRED:
        if name not in values:
            raise Wrong(f"nothing in column {name}", "a value for every job")
    return _job(values, row.text("spec"))


def read_json(file: Path) -> Workload:
    """A workload in JSON. Raises BadInput; problems of a job name it by its place in `jobs`."""
    try:
        with open_text(file) as lines:
            text = lines.read(MAX_JSON + 1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None
    if len(text) > MAX_JSON:
        raise BadInput(
            [Problem(str(file), None, f"more than {MAX_JSON >> 20} MiB of JSON", "CSV, which is read row by row")]
        )
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        raise BadInput([Problem(str(file), line, str(error), f'{{"format": "{FORMAT}", "jobs": [...]}}')]) from None
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
        raise BadInput([Problem(str(file), None, wrong.found, wrong.expected)]) from None


def write(workload: Workload, file: Path) -> None:
    """Write a workload, as JSON if the file's name ends so, else as CSV. Raises OSError."""
    if file.suffix == ".json":
        document = {
            "format": FORMAT,
            "name": workload.name,
            "source": workload.source,
            "jobs": [to_json(job) for job in workload.jobs],
        }
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    used = [name for name in COLUMNS if name in REQUIRED or any(_given(job, name) for job in workload.jobs)]
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(used)
        for job in workload.jobs:
            entry = to_json(job)
            row = [json.dumps(entry[name]) if name == "spec" and name in entry else entry.get(name) for name in used]
            writer.writerow(row)


def to_json(job: WorkloadJob) -> dict[str, Any]:
    """The job as an entry of `jobs`, without what is not given."""
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
        kind = str if name in _TEXTS else dict if name == "spec" else int if name in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            word = {str: "a text", dict: "an object", int: "a whole number"}.get(kind, "a number")  # type: ignore[arg-type]
            raise Wrong(f"{name}={value!r:.80}", word)
    for name in REQUIRED:
        if name not in values:
            raise Wrong(f"no key {name!r}", "one in every job")
    spec = values.pop("spec", None)
    return _job(values, "" if spec is None else json.dumps(spec))


def _job(values: Mapping[str, Any], spec: str) -> WorkloadJob:
    """The job of these values. Its job spec is JSON; without one it takes what was asked for."""
    gpus = values["gpus"]
    if gpus < 1:
        raise Wrong(f"gpus={gpus}", "at least 1; leave out jobs that use no GPU")
    return WorkloadJob(spec=_spec(spec) if spec else rigid_spec(gpus, None, values.get("batch_size")), **values)


@lru_cache(maxsize=4096)
def _spec(text: str) -> JobSpec:
    """Equal job specs are one object: a workload has many."""
    try:
        return validate_spec(json.loads(text))
    except json.JSONDecodeError as error:
        raise Wrong(f"spec={text[:80]!r}, which is not JSON: {error.msg}", 'such as {"max_gpus": 8}') from None
    except BadJobSpec as error:
        raise Wrong(f"a job spec of which {error}", "what `penstock schema spec` describes") from None


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
