"""Parses what scontrol prints. Starts no process."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from penstock_slurm.gateway.abilities import Release, release
from penstock_slurm.gateway.base import (
    STAND_IN,
    SlurmFeatures,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    Unknown,
)
from penstock_slurm.gateway.fields import ARGUMENT, NOTHING, Fields, duration_s, limit_or_none
from penstock_slurm.gateway.hostlist import MOST, expand, numbers
from penstock_slurm.gateway.local_slurm import allocates_memory
from penstock_slurm.gateway.node_states import OFF

NODE_KEYS = re.compile(
    r"\s(Gres|GresUsed|State|Partitions|CPUAlloc|CPUTot|CPUEfctv|RealMemory|AllocMem|MemSpecLimit|TmpDisk|SlurmdStartTime"
    r"|ActiveFeatures|Sockets|CoresPerSocket)"
    r"=(\S*)"
)
RESUME_TIMEOUT_S = 60.0
"""Slurm's default."""

REASON = re.compile(r"\sReason=(.*?)(?: \[[^\s\]]+@[^\s\]]+\])?(?=\s(?:Comment|Extra)=|\s*$)")
ANY_TEXT = re.compile(r"\s(?:Reason|Comment|Extra)=")
"""Values that admins write; they come after all that is read here."""
FEW = 8
"""Most values of a key that occurs several times that are shown."""


def records(text: str, key: str) -> list[str]:
    """The records of an answer of `scontrol -o`, each of which begins with `key=`: what follows that, first the name.

    An admin can write newlines into names, reasons and comments, so a line may be the rest of the record before it.
    """
    return f"\n{text}".rstrip("\n").split(f"\n{key}=")[1:]


def keyed(pattern: re.Pattern[str], text: str) -> Fields:
    """The values of a record by their keys. A key that occurs twice is unknown, because a value can look like another key."""
    found: dict[str, list[str]] = {}
    for key, value in pattern.findall(text):
        found.setdefault(key, []).append(value)
    fields = Fields({key: values[0] for key, values in found.items() if not values[1:]})
    fields.unknown += [Unknown(key, f" {key}=".join(values[:FEW])) for key, values in found.items() if values[1:]]
    return fields


ARRAY_LIMIT = re.compile(r"JobId=\d+ ArrayJobId=\d+ ArrayTaskId=\S+(?: ArrayTaskThrottle=(\d+))? JobName=")
"""How a record begins. What users write comes after it."""
JOB_GRES = re.compile(r"\s(JOB_GRES)=(\S*)")
GPUS_OF_NODES = re.compile(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
GPU_IDS = re.compile(r"(?:^|,)gpu(?::[^:(),]+)?:\d+\(IDX:([\d,-]+)\)")
PARTITION_KEYS = re.compile(
    r"\s(Nodes|State|Default|MaxTime|OverSubscribe|MaxCPUsPerNode|MaxMemPerNode|PriorityTier|PreemptMode|GraceTime)"
    r"=(\S*)"
)

PARTITION_STATES = frozenset({"UP", "DOWN", "DRAIN", "INACTIVE"})
RESERVATION_STATES = {"ACTIVE": True, "INACTIVE": False}
YES_NO = {"YES": True, "NO": False}

RESERVATION_KEYS = re.compile(r"\s(StartTime|EndTime|Nodes|Flags|State)=(\S*)")
LICENCE = re.compile(r"LicenseName=(\S+) .*?\bFree=(\d{1,10})\b")
RESERVATION_NAME = re.compile(r"(.*?)(?=\sStartTime=|$)", re.DOTALL)
CONFIG_KEYS = re.compile(r"^(\w+) += (.*?) *$", re.MULTILINE)
SHARED_GRES = re.compile(r"(?:^|,)(?:shard|mps)(?::(?!\d+(?:\(|,|$))([^:,()]+|\(null\)))?:(\d+)(?:\(([^)]*)\))?")
"""GRES that are parts of GPUs: GPU type, number in use, and what Slurm adds in parentheses."""

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


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type from GRES such as `gpu:t4:4(S:0-1),shard:8`, `gpu:4` or `gpu:t4:2(IDX:0,2)`.

    Ignores other GRES. Idle untyped GPUs are `gpu:(null):0(IDX:N/A)` in GresUsed.

    Raises:
        ValueError: GPUs are written in another form.
    """
    gpus: dict[str, int] = {}
    for kind, gpu_type, count in _gres_items(text):
        if kind == "gpu":
            gpus[gpu_type] = gpus.get(gpu_type, 0) + count
    return gpus


def parse_array_limit(text: str) -> int | None:
    """How many elements of its array may run at once, from an element's record in `scontrol -o show job`. None: any number.

    Raises:
        ValueError: the text is no record of an element.
    """
    found = ARRAY_LIMIT.match(text)
    if found is None:
        raise ValueError("no record of an array's element")
    return None if found[1] is None else int(found[1])


def parse_gpus_held(text: str) -> int | None:
    """GPUs of a running job on all its nodes, from `scontrol -o -d show job`.

    None if it does not say, or says it twice: a job's name and paths are part of the text.
    """
    record = keyed(JOB_GRES, text)
    return record.read("JOB_GRES", lambda text: sum(_gpus(text).values()), None)


def parse_gpu_ids(text: str) -> dict[str, tuple[int, ...]]:
    """Node -> indices of a running job's GPUs there, from `scontrol -o -d show job`; empty: it has none.

    The text has `(IDX:0,2-3)`, or for a job without GPUs `(IDX:)` or `(IDX:N/A)`. A job's name and paths are part of it. If one
    of them looks like the record of a node, there is one node too many.

    Raises:
        ValueError: a node has two records, one cannot be read, or they name more nodes and GPUs than any Slurm has.
    """
    found: dict[str, tuple[int, ...]] = {}
    left = MOST
    for nodes, gres in GPUS_OF_NODES.findall(text):
        listed = ",".join(GPU_IDS.findall(gres))
        ids = tuple(sorted(map(int, numbers(listed)))) if listed else ()
        names = expand(nodes)
        if (left := left - len(names) - len(ids)) < 0:
            raise ValueError(f"records of more than {MOST} nodes and GPUs")
        for node in names:
            if node in found:
                raise ValueError(f"two records of node {node}")
            found[node] = ids
    return {node: ids for node, ids in found.items() if ids}


def parse_tres_per_node(text: str) -> tuple[int | None, str | None]:
    """GPUs per node and their type, from `gres:gpu:4`, `gres/gpu:t4:2`, `gpu:2`, several by commas.

    (None, None) without GPUs. The type is None unless exactly one is named. Raises ValueError as `parse_gres`.
    """
    if text in NOTHING:
        return None, None
    gpus = parse_gres(text)
    if not gpus:
        return None, None
    return sum(gpus.values()), (next(iter(gpus)) or None) if len(gpus) == 1 else None


def parse_cpus_per_gpu(text: str) -> int | None:
    """CPUs for each GPU, from squeue's `gres:gpu:3` or `gres/gpu:3`; None without. Raises ValueError as `parse_gres`."""
    return parse_tres_per_node(text)[0]


def _gres_items(text: str) -> Iterator[tuple[str, str, int]]:
    """(name, type or "", count) of each GRES. One without a count counts 1."""
    for item in re.sub(r"\((?!null\))[^)]*\)", "", text).split(","):
        parts = [part for part in re.split(r"[:/=]", item.strip()) if part != "no_consume"]
        if parts[:1] == ["gres"]:
            del parts[0]
        if not parts:
            raise ValueError(f"{item!r} names no GRES")
        count = int(parts.pop()) if len(parts) > 1 and parts[-1].isdigit() else 1
        if parts[0] == "gpu" and len(parts) > 2:
            raise ValueError(f"{item!r} is not gpu:TYPE:COUNT")
        gpu_type = "".join(parts[1:2])
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


def parse_nodes(text: str, release: Release) -> tuple[SlurmNode, ...]:
    """Nodes from one answer of scontrol; see `NodeReader.read`."""
    return NodeReader().read(text, release)


class NodeReader:
    """Reads scontrol's answers one after another. A node whose line is as in the last answer is the very object made then."""

    def __init__(self) -> None:
        self._release: Release | None = None
        self._seen: dict[str, SlurmNode] = {}

    def read(self, text: str, release: Release) -> tuple[SlurmNode, ...]:
        """Nodes from `scontrol -o -d show node`: one a line, as `Key=value`. Only admins can write values with spaces.

        Values that cannot be read are the node's `unknown`. So is all that is said of a node of which there are two records: one
        of them may be the comment of another node.
        """
        before = self._seen if release == self._release else {}
        lines = records(text, "NodeName")
        found = [before.get(line) or _node(line, release) for line in lines]
        self._release, self._seen = release, dict(zip(lines, found, strict=True))
        nodes = {node.name: node for node in found}
        if len(nodes) < len(found):
            for name, count in Counter(node.name for node in found).items():
                if count > 1:
                    two = Unknown("NodeName", f"{name}, in {count} records")
                    nodes[name] = dataclasses.replace(nodes[name], state=frozenset(), unknown=(two,))
        return tuple(nodes.values())


def _node(line: str, release: Release) -> SlurmNode:
    node, reason = keyed(NODE_KEYS, ANY_TEXT.split(line, maxsplit=1)[0]), REASON.search(line)
    values, nothing, name = node.values, frozenset[str](), line.partition(" ")[0]
    if ARGUMENT.fullmatch(name) is None:
        node.unknown.append(Unknown("NodeName", name))  # no job can be sent there
    state = node.read("State", parse_state, nothing)
    if state - release.node_states:
        node.unknown.append(Unknown("State", values["State"]))
    if values.get("SlurmdStartTime") in NOTHING and not state & OFF:
        # slurmctld has restarted and the node has not registered. If jobs ran there, the state is MIXED or similar, and 22.05.8
        # was seen to start jobs there without their GPUs.
        state |= {"UNKNOWN"}
    reserved_mb = node.number("MemSpecLimit") if "MemSpecLimit" in values else 0
    sockets, cores = (node.number(key) if key in values else 0 for key in ("Sockets", "CoresPerSocket"))
    nothing_used: dict[str, int] = {}
    gpus = node.read("Gres", _gpus, nothing_used)
    return SlurmNode(
        name=name,
        gpus=gpus,
        gpus_used=node.read("GresUsed", lambda text: _used(text, sum(gpus.values())), nothing_used),
        state=state,
        partitions=tuple(name for name in values.get("Partitions", "").split(",") if name),
        cpus=node.number("CPUEfctv" if "CPUEfctv" in values else "CPUTot"),
        cpus_used=node.number("CPUAlloc"),
        core_cpus=max(node.number("CPUTot") // max(sockets * cores, 1), 1) if sockets * cores else 1,
        socket_cpus=max(node.number("CPUTot") // sockets, 1) if sockets else 1,
        memory_mb=max(node.number("RealMemory") - reserved_mb, 0),
        memory_used_mb=node.number("AllocMem"),
        tmp_mb=node.number("TmpDisk") if "TmpDisk" in values else 0,
        reason=reason.group(1) if reason else "",
        stand_in=_HAS_STAND_IN.search(values.get("Gres", "")) is not None,
        unknown=tuple(node.unknown),
        features=tuple(sorted(set(values.get("ActiveFeatures", "").split(",")) - NOTHING)),
    )


def _gpus(gres: str) -> dict[str, int]:
    return {} if gres in NOTHING else parse_gres(gres)


def _used(gres: str, most: int) -> dict[str, int]:
    """GPUs in use, also those of which jobs have a part (`shard`, `mps`), which Slurm gives to no other job whole.

    Slurm may say how many parts of each GPU are in use: `shard:t4:3(2/4,1/4)`. If it does not, each part counts as one of
    another GPU: Penstock must take no GPU for free that has a job.

    Args:
        gres: GresUsed.
        most: GPUs of the node.
    """
    used = _gpus(gres)
    for gpu_type, count, details in SHARED_GRES.findall(gres):
        each = [int(part) for part in re.findall(r"(\d+)/\d+", details)]
        gpus = sum(part > 0 for part in each) if sum(each) == int(count) else int(count)
        if gpus:
            key = "" if gpu_type == "(null)" else gpu_type
            used[key] = used.get(key, 0) + min(gpus, most)
    return used


def parse_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Partitions from `scontrol -o show partition`. Values that cannot be read are the partition's `unknown`."""
    return tuple(_partition(line) for line in records(text, "PartitionName"))


def _partition(line: str) -> SlurmPartition:
    partition = keyed(PARTITION_KEYS, line)
    state = partition.word("State", PARTITION_STATES)
    return SlurmPartition(
        name=line.partition(" ")[0],
        nodes=partition.read("Nodes", expand, ()),
        up=state == "UP",
        default=partition.read("Default", YES_NO.__getitem__, False),
        max_time_s=partition.read("MaxTime", duration_s, None),
        whole_nodes=partition.values.get("OverSubscribe") == "EXCLUSIVE",
        most_cpus=_limit(partition, "MaxCPUsPerNode"),
        most_memory_mb=_limit(partition, "MaxMemPerNode"),
        tier=partition.number("PriorityTier") if "PriorityTier" in partition.values else 0,
        frees=frees_gpus(partition.values.get("PreemptMode", "")),
        grace_s=float(partition.number("GraceTime")) if "GraceTime" in partition.values else 0.0,
        unknown=tuple(partition.unknown),
        state=state,
    )


def _limit(partition: Fields, name: str) -> int | None:
    return partition.read(name, limit_or_none, None) if name in partition.values else None


def parse_licences(text: str) -> dict[str, int]:
    """Licence -> how many are free, from `scontrol -o show licenses`.

    Raises:
        ValueError: a record has another form.
    """
    found = {}
    for line in text.splitlines():
        if line.startswith("LicenseName="):
            match = LICENCE.match(line)
            if match is None:
                raise ValueError(f"a licence without a number that is free: {line[:100]}")
            found[match[1]] = int(match[2])
    return found


def parse_reservations(text: str) -> tuple[SlurmReservation, ...]:
    """Reservations from `scontrol -o show reservation` with SLURM_TIME_FORMAT=%s.

    Values that cannot be read are the reservation's `unknown`; then `nodes` are all that it may be for.
    """
    return tuple(_reservation(line) for line in records(text, "ReservationName"))


def _reservation(line: str) -> SlurmReservation:
    found, name = keyed(RESERVATION_KEYS, line), RESERVATION_NAME.match(line)
    no_flags: frozenset[str] = frozenset()
    no_nodes: tuple[str, ...] = ()
    start_s, end_s = found.read("StartTime", float, 0.0), found.read("EndTime", float, 0.0)
    active = found.read("State", RESERVATION_STATES.__getitem__, True)
    flags = found.read("Flags", lambda text: frozenset(text.split(",")) - NOTHING, no_flags)
    nodes = found.read("Nodes", expand, no_nodes)
    if not nodes:
        values = [value for key, value in RESERVATION_KEYS.findall(line) if key == "Nodes"]
        nodes = tuple(node for value in values for node in Fields({"": value}).read("", expand, no_nodes))
    unknown = tuple(found.unknown)
    return SlurmReservation(name[1] if name is not None else "", start_s, end_s, nodes, active, flags, unknown)


UNITS: Mapping[str, Literal["core", "socket"]] = {"CR_CORE": "core", "CR_SOCKET": "socket"}
"""Words of SelectTypeParameters -> the unit in which Slurm allocates CPUs."""


PREEMPTS_BY: Mapping[str, Literal["partition", "qos"]] = {
    "preempt/partition_prio": "partition",
    "preempt/qos": "qos",
}


def frees_gpus(mode: str) -> bool:
    """Whether jobs that are preempted leave their GPUs by this PreemptMode. A suspended job keeps them."""
    return not {"REQUEUE", "CANCEL"}.isdisjoint(mode.upper().split(","))


def parse_features(text: str) -> SlurmFeatures:
    """Features from `scontrol show config`. AccountingStorageEnforce=limits enforces limits, and `safe` implies it.

    Raises:
        KeyError: the text has another form.
    """
    keys = dict(CONFIG_KEYS.findall(text))
    accounting = keys["AccountingStorageType"].endswith("/slurmdbd")
    consumes = keys.get("SelectTypeParameters", "").upper()
    return SlurmFeatures(
        cluster=keys["ClusterName"],
        accounting=accounting,
        topology=keys.get("TopologyPlugin", "").endswith("/tree"),
        limits=accounting and bool({"limits", "safe", "all"} & set(keys["AccountingStorageEnforce"].split(","))),
        fair_share=accounting and keys["PriorityType"].endswith("/multifactor"),
        memory=allocates_memory(keys),
        cpus_by=next((unit for word, unit in UNITS.items() if word in consumes), ""),
        counts_gpus=accounting and "gres/gpu" in keys.get("AccountingStorageTRES", "").split(","),
        resume_timeout_s=resume_timeout_s(keys),
        preempts_by=PREEMPTS_BY.get(keys.get("PreemptType", ""), ""),
        preempted_frees=frees_gpus(keys.get("PreemptMode", "")),
        preempt_exempt_s=exempt_s(keys.get("PreemptExemptTime", "00:00:00")),
        gpu_types_stay="SLURM_VERSION" in keys
        and release(parse_version(f"slurm {keys['SLURM_VERSION']}")).gpu_types_stay,
    )


def exempt_s(text: str) -> float:
    """PreemptExemptTime, s; 0 if none is set, infinite if it cannot be read."""
    try:
        return duration_s(text) or 0.0
    except ValueError:
        return math.inf


def resume_timeout_s(keys: Mapping[str, str]) -> float | None:
    """ResumeTimeout, such as `60 sec`; None without a ResumeProgram. One that cannot be read counts as Slurm's default."""
    if keys.get("ResumeProgram", "(null)") in NOTHING:
        return None
    number = keys.get("ResumeTimeout", "").split(" ")[0]
    return float(number) if number.isdigit() else RESUME_TIMEOUT_S


def parse_switches(text: str, lost: list[str]) -> dict[str, str]:
    """Node -> switch of level 0, from `scontrol show topology`. Lines that cannot be read are added to `lost`."""
    found: dict[str, str] = {}
    for name, nodes in LEAF_SWITCH.findall(text):
        try:
            found |= dict.fromkeys(expand(nodes), name)
        except ValueError:
            lost.append(f"SwitchName={name} Nodes={nodes}")
    return found


def parse_version(text: str) -> tuple[int, int]:
    """(22, 5) from `slurm-wlm 22.05.8` or `slurm 22.05.8`.

    Raises:
        ValueError: the text has no version.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError("no version number")
    return int(match.group(1)), int(match.group(2))
