"""Parses what scontrol prints. Starts no process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock_slurm.abilities import Release
from penstock_slurm.gateway.base import (
    STAND_IN,
    SlurmFeatures,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    Unknown,
)
from penstock_slurm.gateway.fields import NOTHING, Fields, duration_s
from penstock_slurm.gateway.hostlist import expand

NODE_KEYS = re.compile(
    r"(?:^|\s)(NodeName|Gres|GresUsed|State|Partitions|CPUAlloc|CPUTot|CPUEfctv|RealMemory|AllocMem|MemSpecLimit|SlurmdStartTime"
    r"|ActiveFeatures)"
    r"=(\S*)"
)
POWERED = frozenset({"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_UP"})
"""States of nodes whose slurmd need not have registered."""
REASON = re.compile(r"\sReason=(.*?)(?: \[[^\s\]]+@[^\s\]]+\])?(?=\s(?:Comment|Extra)=|\s*$)")
ANY_TEXT = re.compile(r"\s(?:Reason|Comment|Extra)=")
"""Values that admins write; they come after all that is read here."""
JOB_GRES = re.compile(r"\sJOB_GRES=(\S*)")
GPUS_OF_NODES = re.compile(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
GPU_IDS = re.compile(r"(?:^|,)gpu(?::[^:(),]+)?:\d+\(IDX:([\d,-]+)\)")
INDEX_RANGES = re.compile(r"(\d+)(?:-(\d+))?")
GPU_INDEXES = re.compile(r"\sNodes=\S+ .*?\bGRES=\S*?gpu:(?:[^:(,]+:)?\d+\(IDX:([^)]*)\)")
PARTITION_KEYS = re.compile(r"(?:^|\s)(PartitionName|Nodes|State|Default|MaxTime)=(\S*)")

PARTITION_STATES = frozenset({"UP", "DOWN", "DRAIN", "INACTIVE"})
RESERVATION_STATES = {"ACTIVE": True, "INACTIVE": False}
YES_NO = {"YES": True, "NO": False}

RESERVATION_KEYS = re.compile(r"(?:^|\s)(ReservationName|StartTime|EndTime|Nodes|Flags|State)=(\S*)")
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


def parse_gpu_ids(text: str) -> dict[str, tuple[int, ...]]:
    """Node -> indices of a running job's GPUs there, from `scontrol -o -d show job`; empty: it has none, or not known.

    A job's name is part of the text. If it looks like a node's record, a node has two, and nothing is known.
    """
    found: dict[str, tuple[int, ...]] = {}
    for nodes, gres in GPUS_OF_NODES.findall(text):
        ids: list[int] = []
        for listed in GPU_IDS.findall(gres):
            for first, last in INDEX_RANGES.findall(listed):
                ids += range(int(first), int(last or first) + 1)
        for node in expand(nodes):
            if node in found:
                return {}
            found[node] = tuple(sorted(ids))
    return {node: ids for node, ids in found.items() if ids}


def parse_tres_per_node(text: str) -> tuple[int | None, str | None]:
    """GPUs per node and their type, from `gres:gpu:4`, `gres/gpu:t4:2`, `gpu:2`, several by commas.

    (None, None) without GPUs. The type is None unless exactly one is named. Raises ValueError as `parse_gres`.
    """
    if not text or text in NOTHING:
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
        if parts[0] == "gres":
            parts = parts[1:]
        count = int(parts.pop()) if len(parts) > 1 and parts[-1].isdigit() else 1
        if parts[0] == "gpu" and len(parts) > 2:
            raise ValueError(f"{item!r} is not gpu:TYPE:COUNT")
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

        Values that cannot be read are the node's `unknown`.
        """
        before = self._seen if release == self._release else {}
        lines = [line for line in text.splitlines() if line.startswith("NodeName=")]
        found = [before.get(line) or _node(line, release) for line in lines]
        self._release, self._seen = release, dict(zip(lines, found, strict=True))
        return tuple(found)


def _node(line: str, release: Release) -> SlurmNode:
    values = dict(NODE_KEYS.findall(ANY_TEXT.split(line, maxsplit=1)[0]))
    node, reason = Fields(values), REASON.search(line)
    nothing: frozenset[str] = frozenset()
    state = node.read("State", parse_state, nothing)
    if state - release.node_states:
        node.unknown.append(Unknown("State", values["State"]))
    if values.get("SlurmdStartTime") in NOTHING and not state & POWERED:
        # slurmctld has restarted and the node has not registered. If jobs ran there, the state is MIXED or similar, and 22.05.8
        # was seen to start jobs there without their GPUs.
        state |= {"UNKNOWN"}
    reserved_mb = int(values.get("MemSpecLimit", "0"))
    nothing_used: dict[str, int] = {}
    gpus = node.read("Gres", _gpus, nothing_used)
    return SlurmNode(
        name=values["NodeName"],
        gpus=gpus,
        gpus_used=node.read("GresUsed", lambda text: _used(text, sum(gpus.values())), nothing_used),
        state=state,
        partitions=tuple(name for name in values.get("Partitions", "").split(",") if name),
        cpus=node.number("CPUEfctv" if "CPUEfctv" in values else "CPUTot"),
        cpus_used=node.number("CPUAlloc"),
        memory_mb=max(node.number("RealMemory") - reserved_mb, 0),
        memory_used_mb=node.number("AllocMem"),
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
    return tuple(_partition(line) for line in text.splitlines() if line.startswith("PartitionName="))


def _partition(line: str) -> SlurmPartition:
    values = dict(PARTITION_KEYS.findall(line))
    partition = Fields(values)
    state = partition.word("State", PARTITION_STATES)
    return SlurmPartition(
        name=values["PartitionName"],
        nodes=partition.read("Nodes", expand, ()),
        up=state == "UP",
        default=partition.read("Default", YES_NO.__getitem__, False),
        max_time_s=partition.read("MaxTime", duration_s, None),
        unknown=tuple(partition.unknown),
        state=state,
    )


def parse_reservations(text: str) -> tuple[SlurmReservation, ...]:
    """Reservations from `scontrol -o show reservation` with SLURM_TIME_FORMAT=%s.

    Raises:
        ValueError, KeyError: the text has another form. A reservation that cannot be read might be for any node.
    """
    found = (dict(RESERVATION_KEYS.findall(line)) for line in text.splitlines() if line.startswith("ReservationName="))
    return tuple(
        SlurmReservation(
            name=keys["ReservationName"],
            start_s=float(keys["StartTime"]),
            end_s=float(keys["EndTime"]),
            nodes=expand(keys["Nodes"]),
            active=RESERVATION_STATES[keys["State"]],
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
        accounting=accounting,
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
