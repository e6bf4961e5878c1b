"""Parses what scontrol and squeue print. Starts no process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock_slurm.gateway.accounts import parse_tres
from penstock_slurm.gateway.base import (
    STAND_IN,
    SlurmFeatures,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
)
from penstock_slurm.gateway.hostlist import HostLists, expand

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
"""The fields that squeue prints, in the order of `_job`."""

NODE_KEYS = re.compile(
    r"(?:^|\s)(NodeName|Gres|GresUsed|State|Partitions|CPUAlloc|CPUTot|CPUEfctv|RealMemory|AllocMem|MemSpecLimit|SlurmdStartTime)"
    r"=(\S*)"
)
POWERED = frozenset({"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_UP"})
"""States of nodes whose slurmd need not have registered."""
REASON = re.compile(r"\sReason=(.*?)(?: \[[^\s\]]+@[^\s\]]+\])?(?=\s(?:Comment|Extra)=|\s*$)")
JOB_GRES = re.compile(r"\sJOB_GRES=(\S*)")
GPU_INDEXES = re.compile(r"\sNodes=\S+ .*?\bGRES=\S*?gpu:(?:[^:(,]+:)?\d+\(IDX:([^)]*)\)")
PARTITION_KEYS = re.compile(r"(?:^|\s)(PartitionName|Nodes|State|Default|MaxTime)=(\S*)")

RESERVATION_KEYS = re.compile(r"(?:^|\s)(ReservationName|StartTime|EndTime|Nodes|Flags|State)=(\S*)")
CONFIG_KEYS = re.compile(r"^(\w+) += (.*?) *$", re.MULTILINE)
LEAF_SWITCH = re.compile(r"^SwitchName=(\S+) Level=0 .*?Nodes=(\S+)", re.MULTILINE)

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
"""One-letter suffixes of node states from sinfo's manual. scontrol prints names, but sometimes also `DOWN*`."""

NOTHING = frozenset({"", "(null)", "N/A", "NONE", "None", "Unknown", "n/a"})


def squeue_format(separator: str) -> str:
    """Format for `squeue -O` that prints every field at its full length (size 0) and followed by `separator`."""
    return ",".join(f"{field}:0{separator}" for field in JOB_FIELDS)


def parse_jobs(text: str, separator: str) -> tuple[SlurmJob, ...]:
    """Jobs from squeue's answer to `squeue_format(separator)`.

    Names and comments can hold any text, also newlines. So records are found by counting fields, not by lines. That is safe
    because users cannot know the separator beforehand.

    Raises:
        ValueError: the text has another form.
    """
    fields = text.split(separator)
    width = len(JOB_FIELDS)
    if (len(fields) - 1) % width or fields[-1].strip():
        raise ValueError(f"{len(fields) - 1} fields are not whole records of {width}")
    names = HostLists()
    return tuple(_job(fields[at : at + width], names) for at in range(0, len(fields) - 1, width))


def _job(fields: list[str], names: HostLists) -> SlurmJob:
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
    number = int(job_id)  # ignores the newline at the end of the previous record
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
    """Seconds since the epoch, which squeue prints with SLURM_TIME_FORMAT=%s."""
    return None if field in NOTHING else float(field)


def duration_s(field: str) -> float | None:
    """Seconds of `1-02:03:04`, `02:03:04` or `5:00` (minutes and seconds); None for other text, such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", field)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type from GRES such as `gpu:t4:4(S:0-1),shard:8`, `gpu:4` or `gpu:t4:2(IDX:0,2)`.

    Ignores other GRES. Idle untyped GPUs are `gpu:(null):0(IDX:N/A)` in GresUsed.
    """
    gpus: dict[str, int] = {}
    for kind, gpu_type, count in _gres_items(text):
        if kind == "gpu":
            gpus[gpu_type] = gpus.get(gpu_type, 0) + count
    return gpus


def parse_gpus_held(text: str) -> int | None:
    """GPUs of a running job on all its nodes, from `scontrol -o -d show job`; None if it does not say."""
    found = JOB_GRES.search(text)
    if found is None:
        return None
    return 0 if found[1] in NOTHING else sum(parse_gres(found[1]).values())


def parse_gpu_indexes(text: str) -> tuple[int, ...]:
    """Indexes of a running job's GPUs on its first node, from `scontrol -o -d show job`; () if it has none.

    The text has `(IDX:0,2-3)`, or for a job without GPUs `(IDX:)` or `(IDX:N/A)`.
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

    (None, None) without GPUs. The type is None unless exactly one is named.
    """
    if not text or text in NOTHING:
        return None, None
    gpus = parse_gres(text)
    if not gpus:
        return None, None
    return sum(gpus.values()), (next(iter(gpus)) or None) if len(gpus) == 1 else None


def _gres_items(text: str) -> Iterator[tuple[str, str, int]]:
    """(name, type or "", count) of each GRES. One without a count counts 1."""
    for item in re.sub(r"\((?!null\))[^)]*\)", "", text).split(","):
        parts = [part for part in re.split(r"[:/=]", item.strip()) if part != "no_consume"]
        if parts[0] == "gres":
            parts = parts[1:]
        count = int(parts.pop()) if len(parts) > 1 and parts[-1].isdigit() else 1
        gpu_type = parts[1] if len(parts) > 1 else ""
        if parts:
            yield parts[0], "" if gpu_type == "(null)" else gpu_type, count


def parse_state(text: str) -> frozenset[str]:
    """The names in a node's state, such as `IDLE+CLOUD+POWERED_DOWN`, `DOWN*` or `MIXED~+DRAIN`."""
    words: set[str] = set()
    for word in text.upper().split("+"):
        bare = word.rstrip("".join(STATE_SUFFIXES))
        words.add(bare)
        words.update(STATE_SUFFIXES[letter] for letter in word[len(bare) :])
    return frozenset(words - {""})


_HAS_STAND_IN = re.compile(rf"(?:^|,){STAND_IN}:no_consume(?::[1-9]\d*)?(?:,|$)", re.IGNORECASE)
"""The GRES must be `no_consume`, or only one job could have it."""


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Nodes from `scontrol -o -d show node`: one a line, as `Key=value`. Only admins can write values with spaces.

    Raises:
        ValueError, KeyError: the text has another form.
    """
    return tuple(_node(line) for line in text.splitlines() if line.startswith("NodeName="))


def _node(line: str) -> SlurmNode:
    keys: dict[str, str] = {}
    for key, value in NODE_KEYS.findall(line):
        keys.setdefault(key, value)  # The first one counts: Reason and Comment, which can hold any text, come last.
    reason = REASON.search(line)
    state = parse_state(keys["State"])
    if keys.get("SlurmdStartTime") in NOTHING and not state & POWERED:
        # slurmctld has restarted and the node has not registered. If jobs ran there, the state is MIXED or similar, and 22.05.8
        # was seen to start jobs there without their GPUs.
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
        ValueError, KeyError: the text has another form.
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
        ValueError, KeyError: the text has another form.
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
    """Features from `scontrol show config`. AccountingStorageEnforce=limits enforces limits, and `safe` implies it.

    Raises:
        KeyError: the text has another form.
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
        ValueError: the text has another form.
    """
    return {node: name for name, nodes in LEAF_SWITCH.findall(text) for node in expand(nodes)}


def parse_version(text: str) -> tuple[int, int]:
    """(22, 5) from `slurm-wlm 22.05.8` or `slurm 22.05.8`.

    Raises:
        ValueError: the text has no version.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError("no version number")
    return int(match.group(1)), int(match.group(2))
