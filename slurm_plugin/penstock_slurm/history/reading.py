"""Reads the history of GPU jobs from Slurm. `penstock observe` calls Slurm nowhere else.

It runs two commands, and both only read: `sacct`, and `scontrol show`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock_scheduler.people.errors import PenstockError
from penstock_slurm.gateway.accounts import parse_counts, parse_memory, parse_tres
from penstock_slurm.gateway.base import SlurmNode, slurm_time
from penstock_slurm.gateway.cli import CommandReader
from penstock_slurm.gateway.commands import SlurmCommandRunner
from penstock_slurm.gateway.fields import duration_s, megabytes, time_s
from penstock_slurm.gateway.hostlist import HostLists

FIELDS = (
    *("JobIDRaw", "User", "Account", "Partition", "State", "Submit", "Eligible", "Start", "End", "TimelimitRaw"),
    *("ReqTRES", "AllocTRES", "NodeList"),
)
"""Fields of sacct. None is a text that a user can write a bar into."""

USED_FIELDS = ("JobIDRaw", "TRESUsageInTot")

WITHOUT_GPUS = "jobs without GPUs"
WAITING = ("PENDING", "REQUEUED", "RUNNING")
"""States of a record that may have no start yet."""

TIMEOUT_S = 600.0
"""Of one command: a month of a busy site takes slurmdbd minutes."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """One record of a GPU job in Slurm's accounting. A job that Slurm requeued has one for each time it was queued."""

    job_id: str
    user: str
    account: str
    partition: str
    """The first one of several that the job named."""
    state: str
    """Slurm's word without additions, such as COMPLETED, FAILED, TIMEOUT, CANCELLED, RUNNING, PENDING."""
    ready_s: float
    """From when on it waited for resources, s since 1970: its submission, or the end of its dependencies or begin time."""
    start_s: float | None
    """If it has started."""
    end_s: float | None
    """If it has ended."""
    gpus: int
    """On all nodes: what it held, or what it asked for if it has not started."""
    gpu_type: str
    """The type of all its GPUs, if that is known."""
    asked_type: str | None
    """The type that its request named."""
    limit_s: float | None
    """Its time limit, if it has one."""
    cpus: int
    """On all nodes, as `gpus`."""
    memory_mb: int
    """On all nodes, as `gpus`; 0 if Slurm does not allocate memory."""
    nodes: tuple[str, ...]
    """Those that it held."""
    node_count: int
    """Nodes that it held, or that it asked for at least."""

    @property
    def ran_s(self) -> float:
        """How long it has run, s; 0 if it has not ended."""
        return 0.0 if self.start_s is None or self.end_s is None else max(self.end_s - self.start_s, 0.0)


@dataclass(frozen=True, slots=True)
class StepUse:
    """The CPU time and memory that a job used."""

    cpu_s: float
    """On all CPUs, in all steps of all its runs."""
    memory_mb: float
    """Most of one step, as Slurm sampled it."""


@dataclass(frozen=True)
class History:
    """GPU jobs that waited or ran in a period, and the cluster as it is now."""

    begin_s: float
    end_s: float
    runs: tuple[PastRun, ...]
    """By the time from which on they waited."""
    others: tuple[PastRun, ...]
    """Jobs without GPUs that ran on nodes with GPUs."""
    nodes: tuple[SlurmNode, ...]
    """With GPUs."""
    memory: bool
    """Whether Slurm allocates memory."""
    left_out: dict[str, int]
    """Reason -> number of records that do not count."""

    @cached_property
    def gpus(self) -> dict[str, int]:
        """GPU type -> GPUs of all nodes."""
        found: Counter[str] = Counter()
        for node in self.nodes:
            found.update(node.gpus)
        return dict(sorted(found.items()))

    @cached_property
    def types_of_partition(self) -> dict[str, list[str]]:
        """Partition -> the GPU types of its nodes."""
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            for partition in node.partitions:
                found.setdefault(partition, set()).update(node.gpus)
        return {partition: sorted(types) for partition, types in found.items()}


def read_history(conf: Path | None, begin_s: float, end_s: float, partitions: Collection[str] = ()) -> History:
    """The history of a period.

    Args:
        conf: slurm.conf. The default is that of SLURM_CONF, or Slurm's own.
        begin_s, end_s: s since 1970.
        partitions: only jobs of these, and nodes in these. By default all.

    Raises:
        PenstockError: Slurm does not answer, has no accounting or no such partition, or its accounting counts no GPUs.
    """
    reader = CommandReader(SlurmCommandRunner(conf, TIMEOUT_S))
    features = reader.features()
    if not features.accounting:
        raise PenstockError(
            "this Slurm has no accounting (AccountingStorageType), and without it no history: install slurmdbd"
        )
    known = {each.name for each in reader.partitions()}
    if unknown := sorted(set(partitions) - known):
        raise PenstockError(f"Slurm has no partition {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    nodes = tuple(
        node
        for node in reader.nodes()
        if sum(node.gpus.values()) and (not partitions or set(partitions) & set(node.partitions))
    )
    text = _sacct(conf, begin_s, end_s, partitions, FIELDS)
    types = {node.name: next(iter(node.gpus)) if len(node.gpus) == 1 else "" for node in nodes}
    runs, others, left_out = parse_history(text, types)
    if not runs and nodes and left_out.get(WITHOUT_GPUS):
        raise PenstockError(
            f"none of {left_out[WITHOUT_GPUS]} jobs has GPUs in Slurm's accounting. If some had: add gres/gpu to "
            "AccountingStorageTRES in slurm.conf and restart slurmctld, which counts them from then on"
        )
    return History(begin_s, end_s, runs, others, nodes, features.memory, left_out)


def read_used(conf: Path | None, begin_s: float, end_s: float, partitions: Collection[str] = ()) -> dict[str, StepUse]:
    """Job -> what it used. Jobs without samples are missing. See `read_history`."""
    return parse_used(_sacct(conf, begin_s, end_s, partitions, USED_FIELDS, steps=True))


def _sacct(
    conf: Path | None,
    begin_s: float,
    end_s: float,
    partitions: Collection[str],
    fields: Sequence[str],
    *,
    steps: bool = False,
) -> str:
    span = ("-S", slurm_time(begin_s), "-E", slurm_time(end_s))
    chosen = ("-r", ",".join(sorted(partitions))) if partitions else ()
    return SlurmCommandRunner(conf, TIMEOUT_S).read(
        *("sacct", "-a", "-D", "-n", "-P", *(() if steps else ("-X",)), *span, *chosen, "-o", ",".join(fields)),
        variables={"SLURM_TIME_FORMAT": "%s"},
    )


def parse_used(text: str) -> dict[str, StepUse]:
    """The use of jobs, from `sacct -D -n -P` with USED_FIELDS: a record for each job and each of its steps."""
    found: dict[str, StepUse] = {}
    for line in filter(None, text.split("\n")):
        step, _, used = line.partition("|")
        parts = dict(part.split("=", 1) for part in used.split(",") if "=" in part)
        job_id, is_step, _ = step.partition(".")
        if not is_step or not parts.keys() & {"cpu", "mem"}:
            continue
        before = found.get(job_id, StepUse(0.0, 0.0))
        with suppress(ValueError):  # a step that cannot be read has no samples
            cpu_s, memory_mb = duration_s(parts.get("cpu", "00:00")) or 0.0, megabytes(parts.get("mem", "0M"))
            found[job_id] = StepUse(before.cpu_s + cpu_s, max(before.memory_mb, memory_mb))
    return found


def parse_history(
    text: str, types: Mapping[str, str]
) -> tuple[tuple[PastRun, ...], tuple[PastRun, ...], dict[str, int]]:
    """`History.runs`, `others` and `left_out`, from `sacct -D -X -n -P` with FIELDS and SLURM_TIME_FORMAT=%s.

    Args:
        text: what sacct printed.
        types: node with GPUs -> the type of all its GPUs, for a site that does not count each type; "" for several types.
    """
    left_out: Counter[str] = Counter()
    lists = HostLists()
    runs, others = [], []
    for line in filter(None, text.split("\n")):
        row = line.split("|")
        try:
            run = _run(row, types, lists)
        except ValueError:  # also of another number of fields
            run = "records that cannot be read"
        if isinstance(run, str):
            left_out[run] += 1
        elif run.gpus:
            runs.append(run)
        else:
            left_out[WITHOUT_GPUS] += 1
            if not types.keys().isdisjoint(run.nodes):
                others.append(run)
    return tuple(sorted(runs, key=lambda run: run.ready_s)), tuple(others), dict(left_out)


def _run(row: Sequence[str], types: Mapping[str, str], lists: HostLists) -> PastRun | str:
    """A record, or why it does not count. Raises ValueError if it cannot be read."""
    job_id, user, account, partition, state, submit, eligible, start, end, limit, requested, allocated, nodes = row
    asked, held = parse_tres(requested), parse_tres(allocated)
    gpus = (held or asked).get("", 0) or sum((held or asked).values())
    start_s, word = time_s(start) or None, state.split(" ")[0]  # a cancelled job's is `CANCELLED by 1000`
    if gpus and start_s is None and word not in WAITING:
        return "jobs that ended before they started"
    gpu_type, amounts = _only_type(held or asked), allocated or requested
    if held and not any(held.keys() - {""}):
        of_nodes = {types.get(node, "") for node in lists[nodes]}
        gpu_type = of_nodes.pop() if len(of_nodes) == 1 else None
    counts = parse_counts(amounts)
    return PastRun(
        job_id=job_id,
        user=user,
        account=account,
        partition=partition.split(",")[0],
        state=word,
        ready_s=max(float(submit), time_s(eligible) or 0.0),
        start_s=start_s,
        end_s=time_s(end) or None,
        gpus=gpus,
        gpu_type=gpu_type or "",
        asked_type=_only_type(asked),
        limit_s=float(limit) * 60 if limit.isdigit() else None,
        cpus=counts.get("cpu", 0),
        memory_mb=parse_memory(amounts),
        nodes=lists[nodes],
        node_count=max(counts.get("node", 0), 1),
    )


def _only_type(tres: Mapping[str, int]) -> str | None:
    """The GPU type, if there is exactly one."""
    named = [name for name, count in tres.items() if name and count]
    return named[0] if len(named) == 1 else None
