"""Reading workloads: the format of a file and its jobs, or all problems with it before anything runs."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.gpus import UnknownGpuError, load_gpus
from penstock_scheduler.simulator.workloads import own, public
from penstock_scheduler.simulator.workloads.frames import OPTIONAL, REQUIRED, build_jobs
from penstock_scheduler.simulator.workloads.table import (
    MAX_JOBS,
    BadInput,
    Columns,
    InputProblem,
    Problems,
    TableRows,
    Wrong,
    bounded,
    open_text,
    read_chunks,
    unreadable,
)
from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob, in_order


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format of tables."""

    about: str
    columns: tuple[str, ...]
    convert: Callable[[TableRows], Columns]
    """Columns of jobs (`frames.WORKLOAD`) of a chunk of rows."""
    header: bool = True
    separator: str = ","
    dated: bool = False
    """Whether its times are dates. The first submission becomes time 0."""
    optional: tuple[str, ...] | None = None
    """Other columns that it may have; None: any, which are ignored."""


FORMATS = {
    "penstock": TraceFormat("Penstock's own CSV", REQUIRED, own.read_rows, optional=OPTIONAL),
    "sacct": TraceFormat(
        "`sacct --parsable2`", public.SACCT_COLUMNS, public.sacct, separator=public.SACCT_SEPARATOR, dated=True
    ),
    "sia": TraceFormat(
        "windows of Pollux and Sia", ("name", "time", "application", "num_replicas", "batch_size"), public.sia
    ),
    "philly": TraceFormat(
        "Philly, as in Sia's artifact", ("timestamp", "duration", "num_gpus", "cluster"), public.philly, dated=True
    ),
    "tiresias": TraceFormat(
        "Tiresias", ("job_id", "num_gpu", "submit_time", "model_name", "duration"), public.tiresias
    ),
    "starburst": TraceFormat("Starburst", ("job_id", "arrival_h", "runtime_h", "gpus"), public.starburst),
    "synergy": TraceFormat(
        "Synergy, without header",
        ("job_id", "model", "arrival_s", "iterations", "gpus"),
        public.synergy,
        header=False,
    ),
    "openb": TraceFormat(
        "Alibaba's openb pods",
        (
            "name",
            "cpu_milli",
            "memory_mib",
            "num_gpu",
            "gpu_spec",
            "qos",
            "creation_time",
            "deletion_time",
            "scheduled_time",
        ),
        public.openb,
    ),
}
"""Value of `--format` -> format."""


def read_workload(
    file: Path, format_name: str | None = None, gpu_types: Collection[str] = (), most_jobs: int = MAX_JOBS
) -> Workload:
    """The workload in a file: Penstock's JSON or CSV, a public trace, or the output of sacct; plain or gzip.

    Args:
        file: to read.
        format_name: one of `FORMATS`; None: detected from the first line.
        gpu_types: types of the cluster, which are valid beside those of the catalogue.
        most_jobs: more jobs are an error, so that memory is bounded for any file.

    Raises:
        BadInput: with up to 20 problems, each with its line, what was found and what is expected.
    """
    first = _first_line(file)
    if format_name is None and first.lstrip().startswith("{"):
        workload = own.read_json(file)
        problems = Problems(file)
        for job in workload.jobs:
            if (wrong := _wrong_job(job, gpu_types)) is not None:
                problems.add(None, Wrong(f"in job {job.id!r} {wrong.found}", wrong.expected))
        problems.raise_if_any()
        return workload
    with _no_garbage_collection():
        return _read_table(file, format_name or detect(file, first), gpu_types, most_jobs)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off. Jobs have no reference cycles, and a search for cycles in 82,247 jobs takes a sixth
    of the reading time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_table(file: Path, format_name: str, gpu_types: Collection[str], most_jobs: int) -> Workload:
    trace = FORMATS[format_name]
    jobs: list[WorkloadJob] = []
    left_out: Counter[str] = Counter()
    lines: dict[str, int] = {}
    problems = Problems(file)
    for rows in read_chunks(file, trace.columns, trace.header, trace.separator, trace.optional):
        columns = trace.convert(rows)
        left_out += rows.left_out
        for line, job in zip(rows.lines, build_jobs(columns, rows.valid.tolist()), strict=True):
            wrong = job if isinstance(job, Wrong) else rows.wrong.get(line)
            if isinstance(job, WorkloadJob):
                before = lines.setdefault(job.id, line)
                wrong = _wrong_job(job, gpu_types) if before == line else _twice(job, before)
                if wrong is None and len(jobs) == most_jobs:
                    expected = f"at most {most_jobs} jobs in one workload, so that they fit into memory; split the file"
                    raise BadInput([InputProblem(str(file), line, "yet another job", expected)])
                jobs.append(job)
            if wrong is not None:
                problems.add(line, wrong)
    problems.raise_if_any()
    if not jobs:
        found = ", ".join(["no job", *(f"{count} {why}" for why, count in left_out.items())])
        raise BadInput([InputProblem(str(file), None, found, "at least one job that uses GPUs")])
    if trace.dated:
        start_s = min(job.submit_s for job in jobs)
        for job in jobs:  # nothing else refers to them yet, and copies would take as long as reading the file
            object.__setattr__(job, "submit_s", job.submit_s - start_s)
    return Workload(_stem(file), in_order(jobs), f"{trace.about}, {file.name}", tuple(sorted(left_out.items())))


def _twice(job: WorkloadJob, before: int) -> Wrong:
    return Wrong(f"job {job.id!r}, which is in line {before} too", "each job once")


def detect(file: Path, first_line: str) -> str:
    """Name of the format that has the columns of the first line. Raises BadInput, which names the closest format and
    the missing columns."""
    separator = public.SACCT_SEPARATOR if public.SACCT_SEPARATOR in first_line else ","
    found = [name.strip().strip('"') for name in first_line.strip().split(separator)]
    of_separator = {name: trace for name, trace in FORMATS.items() if trace.separator == separator and trace.header}
    for name, trace in of_separator.items():
        if set(trace.columns) <= set(found):
            return name
    if separator == "," and len(found) == len(FORMATS["synergy"].columns) and found[0].isdigit():
        return "synergy"
    shared = {name: len(set(trace.columns) & set(found)) for name, trace in of_separator.items()}
    closest = max(shared, key=lambda name: (shared[name] / len(of_separator[name].columns), name))
    if shared[closest] == 0:
        known = "; ".join(f"{name}: {trace.separator.join(trace.columns)}" for name, trace in FORMATS.items())
        raise BadInput([InputProblem(str(file), 1, repr(first_line[:80].strip()), f"the columns of one of {known}")])
    missing = [name for name in of_separator[closest].columns if name not in found]
    columns = f"{', '.join(missing)} too, as {of_separator[closest].about} has"
    raise BadInput([InputProblem(str(file), 1, f"the columns {separator.join(found)[:200]}", columns)])


def _first_line(file: Path) -> str:
    try:
        with open_text(file) as lines:
            first = next(bounded(file, lines, [0]), "")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None
    if not first.strip():
        raise BadInput([InputProblem(str(file), 1, "nothing", "a header line with the names of the columns")])
    return first


def _wrong_job(job: WorkloadJob, gpu_types: Collection[str]) -> Wrong | None:
    """What is wrong with a job that names a GPU type which neither the cluster nor the catalogue has; None: nothing."""
    if job.gpu_type is None and job.spec.gpu_types is None:
        return None
    for name in {job.gpu_type, *(job.spec.gpu_types or ())} - {None}:
        if name not in gpu_types and not _in_catalogue(str(name)):
            known = ", ".join([*gpu_types, *load_gpus()])
            return Wrong(f"the GPU type {name!r}", f"one of {known}, or one that you name with --gpu-types")
    return None


@functools.cache
def _in_catalogue(name: str) -> bool:
    if name in public.OPENB_TYPES.values():
        return True
    try:
        load_gpus().type_of(name)
    except UnknownGpuError:
        return False
    return True


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rsplit(".", 1)[0]
