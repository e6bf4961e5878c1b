"""The nodes of a loopback or simulated cluster, from a line such as `t4:6x4,rtx:3x8,a100:2x8`."""

import re
from dataclasses import dataclass

from penstock_scheduler.people.errors import ConfigError

DEFAULT_SPEC = "t4:6x4,rtx:3x8,a100:2x8"

_PART = re.compile(
    r"(?P<type>[A-Za-z][A-Za-z0-9_.]*):(?P<nodes>[0-9]+)x(?P<gpus>[0-9]+)(:(?P<cpus>[0-9]+)c)?(:(?P<memory_gb>[0-9]+)g)?",
    re.ASCII,
)
_REMEDY = (
    "write TYPE:NODESxGPUS, such as t4:6x4 for 6 nodes with 4 GPUs of type t4 each; "
    "t4:6x4:48c:192g if each has 48 CPUs and 192 GB for jobs"
)
_RESERVED = frozenset({"all", "default"})


class SpecError(ConfigError, ValueError):
    """The text that describes the nodes is wrong."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node: its Slurm name (`t4-00`), the type and number of its GPUs, and CPUs and memory if they are given."""

    name: str
    gpu_type: str
    gpus: int
    cpus: int | None = None
    memory_mb: int | None = None


def parse_nodes(text: str, most: int | None = None) -> tuple[NodeSpec, ...]:
    """The nodes that `text` describes, in its order.

    `text` has comma-separated parts TYPE:NODESxGPUS, or TYPE:NODESxGPUS:CPUSc:MEMORYg with the CPUs and GB of each node. A type
    may occur twice, for nodes of different sizes; its numbering continues.

    Raises:
        SpecError: a part has another form, a count is zero, or there are more than `most` nodes.
    """
    nodes: list[NodeSpec] = []
    of_type: dict[str, int] = {}
    for place, part in enumerate((part.strip() for part in text.split(",")), start=1):
        where = f"part {place} of the node spec {text!r}"
        match = _PART.fullmatch(part)
        if match is None:
            raise SpecError(f"{where}, {part!r}, is not understood; {_REMEDY}")
        gpu_type, count, gpus = match["type"], int(match["nodes"][:9]), int(match["gpus"][:9])
        if gpu_type in _RESERVED:
            raise SpecError(f"{where}, {part!r}: Slurm or Penstock uses the name {gpu_type!r}; choose another GPU type")
        cpus = int(match["cpus"][:9]) if match["cpus"] else None
        memory_mb = 1000 * int(match["memory_gb"][:9]) if match["memory_gb"] else None
        if cpus == 0 or memory_mb == 0:
            raise SpecError(f"{where}, {part!r}, has a zero: leave CPUs or memory out if they do not matter; {_REMEDY}")
        if count == 0 or gpus == 0:
            raise SpecError(f"{where}, {part!r}, has a zero: give at least 1 node and 1 GPU; {_REMEDY}")
        if most is not None and len(nodes) + count > most:
            raise SpecError(f"{where}, {part!r}, makes more than {most} nodes, too many for one machine; give fewer")
        if gpus > 64:
            raise SpecError(f"{where}, {part!r}: {gpus} GPUs on a node are more than 64; give more nodes instead")
        first = of_type.get(gpu_type, 0)
        names = (f"{gpu_type.replace('.', '-')}-{number:02d}" for number in range(first, first + count))
        nodes += [NodeSpec(name, gpu_type, gpus, cpus, memory_mb) for name in names]
        of_type[gpu_type] = first + count
    return tuple(nodes)
