"""From the text that Slurm's commands print to records. No process is started here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from penstock_slurm.gateway.base import (
    STAND_IN,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    SlurmRun,
)
from penstock_slurm.gateway.hostlist import expand

JOB_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "State",
    "Reason",
    "Partition",
    "Name",
    "UserName",
    "UserID",
    "Account",
    "QOS",
    "NodeList",
    "ReqNodes",
    "NumNodes",
    "tres-per-node",
    "NumCPUs",
    "cpus-per-task",
    "NumTasks",
    "comment",
    "admin_comment",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "RestartCnt",
    "Requeue",
    "PriorityLong",
    "Reservation",
    "tres-alloc",
    "Dependency",
    "Licenses",
    "OverSubscribe",
    "Deadline",
    "TimeUsed",
)
"""What squeue is asked for, in the order in which `_job` takes it."""

NODE_KEYS = re.compile(
    r"(?:^|\s)(NodeName|Gres|GresUsed|State|Partitions|CPUAlloc|CPUTot|CPUEfctv|RealMemory|AllocMem|MemSpecLimit|SlurmdStartTime)"
    r"=(\S*)"
)
POWERED = frozenset({"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_UP"})
"""Nodes of which nobody expects that their slurmd has registered."""
REASON = re.compile(r"\sReason=(.*?)(?: \[[^\s\]]+@[^\s\]]+\])?(?=\s(?:Comment|Extra)=|\s*$)")
JOB_GRES = re.compile(r"\sJOB_GRES=(\S*)")
GPU_INDEXES = re.compile(r"\sNodes=\S+ .*?\bGRES=\S*?gpu:(?:[^:(,]+:)?\d+\(IDX:([^)]*)\)")
PARTITION_KEYS = re.compile(r"(?:^|\s)(PartitionName|Nodes|State|Default|MaxTime)=(\S*)")

RESERVATION_KEYS = re.compile(r"(?:^|\s)(ReservationName|StartTime|EndTime|Nodes|Flags|State)=(\S*)")
CONFIG_KEYS = re.compile(r"^(\w+) += (.*?) *$", re.MULTILINE)
LEAF_SWITCH = re.compile(r"^SwitchName=(\S+) Level=0 .*?Nodes=(\S+)", re.MULTILINE)
TRES_GPUS = re.compile(r"(?:^|,)gres/gpu(?::([^=,]+))?=(\d+)")

QOS_FIELDS = ("Name", "GrpTRES", "MaxTRESPerUser", "MaxTRESPerAccount")
EACH: tuple[Literal["", "user", "account"], ...] = ("", "user", "account")
"""For whom QOS_FIELDS' limits hold, in their order."""
ASSOCIATION_FIELDS = ("Account", "ParentName", "User", "Partition", "GrpTRES")

RUN_FIELDS = ("JobID", "Start", "End", "NodeList", "AllocTRES")

STATE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "$": "MAINT",
    "@": "REBOOT_ISSUED",
    "^": "REBOOT_REQUESTED",
    "-": "PLANNED",
}
"""One-letter endings of node states in sinfo's manual; scontrol writes words, but `DOWN*` was seen from it too."""

NOTHING = frozenset({"", "(null)", "N/A", "NONE", "None", "Unknown", "n/a"})


def squeue_format(separator: str) -> str:
    """Format of `squeue -O` that prints every field uncut (size 0) and followed by `separator`."""
    return ",".join(f"{field}:0{separator}" for field in JOB_FIELDS)


def parse_jobs(text: str, separator: str) -> tuple[SlurmJob, ...]:
    """Jobs from squeue's answer to `squeue_format(separator)`.

    Names and comments hold what users like, newlines included, so records are told apart by counting fields and never
    by lines; that is safe because nobody can know the separator beforehand.

    Raises:
        ValueError: not such an answer.
    """
    fields = text.split(separator)
    width = len(JOB_FIELDS)
    if (len(fields) - 1) % width or fields[-1].strip():
        raise ValueError(f"{len(fields) - 1} fields are not whole records of {width}")
    names = _Names()
    return tuple(_job(fields[at : at + width], names) for at in range(0, len(fields) - 1, width))


class _Names(dict[str, tuple[str, ...]]):
    """Host lists already expanded: thousands of jobs have few different ones."""

    def __missing__(self, text: str) -> tuple[str, ...]:
        names = self[text] = expand(text)
        return names


def _job(fields: list[str], names: _Names) -> SlurmJob:
    (
        job_id,
        array_job,
        array_task,
        het_job,
        state,
        reason,
        partition,
        name,
        user,
        uid,
        account,
        qos,
        nodes,
        required_nodes,
        node_count,
        tres_per_node,
        cpus,
        cpus_per_task,
        tasks,
        comment,
        admin_comment,
        submit,
        eligible,
        start,
        end,
        time_limit,
        restarts,
        requeue,
        priority,
        reservation,
        tres_alloc,
        dependency,
        licenses,
        oversubscribe,
        deadline,
        time_used,
    ) = fields
    number = int(job_id)  # ignores the newline that ends the record before
    element = int(array_task) if array_task.isdigit() else None
    gpus_per_node, gpu_type = parse_tres_per_node(tres_per_node)
    return SlurmJob(
        id=str(number) if element is None else f"{int(array_job)}_{element}",
        number=number,
        name=_text(name),
        user=user,
        uid=int(uid),
        account=_text(account),
        partition=tuple(partition.split(",")),
        state=state,
        reason=_text(reason),
        nodes=names[nodes],
        required_nodes=names[required_nodes],
        node_count=int(node_count),
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        cpus=int(cpus),
        cpus_per_task=int(cpus_per_task) if cpus_per_task.isdigit() else 1,
        tasks=int(tasks) if tasks.isdigit() else 1,
        comment=_text(comment),
        admin_comment=_text(admin_comment),
        submit_s=float(submit),
        eligible_s=_time(eligible),
        start_s=None if state == "PENDING" else _time(start),
        end_s=_time(end),
        time_limit_s=duration_s(time_limit),
        restarts=int(restarts),
        requeue=requeue == "1",
        priority=int(priority),
        qos=_text(qos),
        array_job_id=None if element is None else int(array_job),
        array_task_id=element,
        het_job_id=int(het_job) if het_job.isdigit() else None,
        reservation=_text(reservation),
        gpus_counted=parse_tres(tres_alloc),
        dependency=_text(dependency),
        licenses=_text(licenses),
        exclusive=oversubscribe == "NO",
        deadline_s=_time(deadline),
        ran_s=duration_s(time_used),
    )


def _text(field: str) -> str:
    return "" if field == "(null)" else field


def _time(field: str) -> float | None:
    """Seconds since the epoch: SLURM_TIME_FORMAT=%s makes squeue print that."""
    return None if field in NOTHING else float(field)


def duration_s(field: str) -> float | None:
    """`1-02:03:04`, `02:03:04`, `5:00` (minutes and seconds) in seconds; None for UNLIMITED and its like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", field)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type from GRES such as `gpu:t4:4(S:0-1),shard:8`, `gpu:4` or `gpu:t4:2(IDX:0,2)`.

    Other GRES are left out. Idle untyped GPUs are `gpu:(null):0(IDX:N/A)` in GresUsed.
    """
    gpus: dict[str, int] = {}
    for kind, gpu_type, count in _gres_items(text):
        if kind == "gpu":
            gpus[gpu_type] = gpus.get(gpu_type, 0) + count
    return gpus


def parse_gpus_held(text: str) -> int | None:
    """GPUs of a running job on all its nodes, from `scontrol -o -d show job`; None where it does not say."""
    found = JOB_GRES.search(text)
    if found is None:
        return None
    return 0 if found[1] in NOTHING else sum(parse_gres(found[1]).values())


def parse_gpu_indexes(text: str) -> tuple[int, ...]:
    """Indexes of a running job's GPUs on its first node, from `scontrol -o -d show job`; () where it has none.

    Written `(IDX:0,2-3)`, of a job without GPUs on a site with GPUs `(IDX:)` or `(IDX:N/A)`.
    """
    found = GPU_INDEXES.search(text)
    indexes: list[int] = []
    for item in found[1].split(",") if found is not None else ():
        first, _, last = item.partition("-")
        if first.isdigit():
            indexes += range(int(first), int(last or first) + 1)
    return tuple(indexes)


def parse_tres_per_node(text: str) -> tuple[int | None, str | None]:
    """GPUs per node and their type, from `gres:gpu:4`, `gres/gpu:t4:2`, `gpu:2`, several by commas.

    (None, None) without GPUs. The type is None where none or several are named.
    """
    if not text or text in NOTHING:
        return None, None
    gpus = parse_gres(text)
    if not gpus:
        return None, None
    return sum(gpus.values()), (next(iter(gpus)) or None) if len(gpus) == 1 else None


def _gres_items(text: str) -> Iterator[tuple[str, str, int]]:
    """(name, type or "", count); a GRES without a count is one of it."""
    for item in re.sub(r"\((?!null\))[^)]*\)", "", text).split(","):
        parts = [part for part in re.split(r"[:/=]", item.strip()) if part != "no_consume"]
        if parts[0] == "gres":
            parts = parts[1:]
        count = int(parts.pop()) if len(parts) > 1 and parts[-1].isdigit() else 1
        gpu_type = parts[1] if len(parts) > 1 else ""
        if parts:
            yield parts[0], "" if gpu_type == "(null)" else gpu_type, count


def parse_state(text: str) -> frozenset[str]:
    """Words of a node's state: `IDLE+CLOUD+POWERED_DOWN`, `DOWN*`, `MIXED~+DRAIN`."""
    words: set[str] = set()
    for word in text.upper().split("+"):
        bare = word.rstrip("".join(STATE_SUFFIXES))
        words.add(bare)
        words.update(STATE_SUFFIXES[letter] for letter in word[len(bare) :])
    return frozenset(words - {""})


_HAS_STAND_IN = re.compile(rf"(?:^|,){STAND_IN}:no_consume(?::[1-9]\d*)?(?:,|$)", re.IGNORECASE)
"""One that is consumed would be the first job's alone."""


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Nodes from `scontrol -o -d show node`: one a line, `Key=value` in which only an admin can put spaces.

    Raises:
        ValueError, KeyError: not such an answer.
    """
    return tuple(_node(line) for line in text.splitlines() if line.startswith("NodeName="))


def _node(line: str) -> SlurmNode:
    keys: dict[str, str] = {}
    for key, value in NODE_KEYS.findall(line):
        keys.setdefault(key, value)  # the first counts: Reason and Comment, which hold any text, come last
    reason = REASON.search(line)
    state = parse_state(keys["State"])
    if keys.get("SlurmdStartTime") in NOTHING and not state & POWERED:
        # slurmctld is new and has not heard of it: where jobs ran before, it says MIXED and the like, and was seen (22.05.8)
        # to start jobs there without their GPUs.
        state |= {"UNKNOWN"}
    return SlurmNode(
        name=keys["NodeName"],
        gpus=parse_gres(keys["Gres"]) if keys["Gres"] not in NOTHING else {},
        gpus_used=parse_gres(keys["GresUsed"]) if keys.get("GresUsed", "") not in NOTHING else {},
        state=state,
        partitions=tuple(name for name in keys.get("Partitions", "").split(",") if name),
        cpus=int(keys.get("CPUEfctv", keys["CPUTot"])),
        cpus_used=int(keys["CPUAlloc"]),
        memory_mb=int(keys["RealMemory"]) - int(keys.get("MemSpecLimit", "0")),
        memory_used_mb=int(keys["AllocMem"]),
        reason=reason.group(1) if reason else "",
        stand_in=_HAS_STAND_IN.search(keys["Gres"]) is not None,
    )


def parse_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Partitions from `scontrol -o show partition`.

    Raises:
        ValueError, KeyError: not such an answer.
    """
    return tuple(_partition(line) for line in text.splitlines() if line.startswith("PartitionName="))


def _partition(line: str) -> SlurmPartition:
    keys = dict(PARTITION_KEYS.findall(line))
    return SlurmPartition(
        name=keys["PartitionName"],
        nodes=expand(keys["Nodes"]),
        up=keys["State"] == "UP",
        default=keys["Default"] == "YES",
        max_time_s=duration_s(keys["MaxTime"]),
    )


def parse_reservations(text: str) -> tuple[SlurmReservation, ...]:
    """Reservations from `scontrol -o show reservation` with SLURM_TIME_FORMAT=%s.

    Raises:
        ValueError, KeyError: not such an answer.
    """
    found = (dict(RESERVATION_KEYS.findall(line)) for line in text.splitlines() if line.startswith("ReservationName="))
    return tuple(
        SlurmReservation(
            name=keys["ReservationName"],
            start_s=float(keys["StartTime"]),
            end_s=float(keys["EndTime"]),
            nodes=expand(keys["Nodes"]),
            active=keys["State"] == "ACTIVE",
            flags=frozenset(keys["Flags"].split(",")) - NOTHING,
        )
        for keys in found
    )


def parse_features(text: str) -> SlurmFeatures:
    """From `scontrol show config`. Limits hold with AccountingStorageEnforce=limits, or safe, which stands for it too.

    Raises:
        KeyError: not such an answer.
    """
    keys = dict(CONFIG_KEYS.findall(text))
    accounting = keys["AccountingStorageType"].endswith("/slurmdbd")
    return SlurmFeatures(
        cluster=keys["ClusterName"],
        topology=keys.get("TopologyPlugin", "").endswith("/tree"),
        limits=accounting and bool({"limits", "safe", "all"} & set(keys["AccountingStorageEnforce"].split(","))),
        fair_share=accounting and keys["PriorityType"].endswith("/multifactor"),
        memory="MEMORY" in keys.get("SelectTypeParameters", ""),
        counts_gpus=accounting and "gres/gpu" in keys.get("AccountingStorageTRES", "").split(","),
    )


def parse_switches(text: str) -> dict[str, str]:
    """Node -> switch of level 0, from `scontrol show topology`.

    Raises:
        ValueError: not such an answer.
    """
    return {node: name for name, nodes in LEAF_SWITCH.findall(text) for node in expand(nodes)}


def parse_tres(text: str) -> dict[str, int]:
    """GPUs of TRES such as `cpu=4,gres/gpu=2,gres/gpu:a100=2` by type, "" for all together."""
    return {gpu_type: int(count) for gpu_type, count in TRES_GPUS.findall(text)}


def parse_qos(text: str) -> tuple[SlurmLimit, ...]:
    """Limits from `sacctmgr -nP show qos` with QOS_FIELDS.

    Raises:
        ValueError: not such an answer.
    """
    return tuple(
        SlurmLimit(gpus, gpu_type, qos=name, each=each)
        for name, *limits in _rows(text, len(QOS_FIELDS))
        for tres, each in zip(limits, EACH, strict=True)
        for gpu_type, gpus in parse_tres(tres).items()
    )


def parse_associations(text: str) -> tuple[SlurmLimit, ...]:
    """Limits from `sacctmgr -nP show assoc` with ASSOCIATION_FIELDS; an account's holds for those below it, too.

    Raises:
        ValueError: not such an answer.
    """
    rows = _rows(text, len(ASSOCIATION_FIELDS))
    below: dict[str, list[str]] = {}
    for account, parent, user, *_ in rows:
        if not user:
            below.setdefault(parent, []).append(account)

    def with_those_below(account: str) -> tuple[str, ...]:
        return (account, *(name for child in below.get(account, ()) for name in with_those_below(child)))

    return tuple(
        SlurmLimit(gpus, gpu_type, accounts=(account,) if user else with_those_below(account), user=user)
        for account, _, user, partition, tres in rows
        for gpu_type, gpus in parse_tres(tres).items()
        if not partition
    )


def parse_fair_shares(text: str) -> dict[tuple[str, str], float]:
    """(account, user) -> factor, from `sshare -nPa -o Account,User,FairShare`. Accounts have none; those lines fall out.

    Raises:
        ValueError: not such an answer.
    """
    return {(account, user): float(factor) for account, user, factor in _rows(text, 3) if user and factor}


def parse_runs(text: str) -> tuple[SlurmRun, ...]:
    """Runs that are over, from `sacct -D -X -n -P` with RUN_FIELDS and SLURM_TIME_FORMAT=%s.

    Raises:
        ValueError: not such an answer.
    """
    runs = []
    names = _Names()
    for job_id, start, end, nodes, tres in _rows(text, len(RUN_FIELDS)):
        if start.isdigit() and end.isdigit() and int(end) >= int(start):
            runs.append(SlurmRun(job_id, float(start), float(end), names[nodes], parse_tres(tres).get("", 0)))
    return tuple(runs)


def _rows(text: str, width: int) -> list[list[str]]:
    """Lines of fields between bars; accounts are indented to show what is below what."""
    rows = [[field.strip() for field in line.split("|")] for line in text.splitlines() if line]
    if any(len(row) != width for row in rows):
        raise ValueError(f"lines are not of {width} fields")
    return rows


def parse_version(text: str) -> tuple[int, int]:
    """(22, 5) from `slurm-wlm 22.05.8` or `slurm 22.05.8`.

    Raises:
        ValueError: no version in it.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError("no version number")
    return int(match.group(1)), int(match.group(2))
