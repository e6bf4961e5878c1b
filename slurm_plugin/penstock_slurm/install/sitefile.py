"""What job_submit.lua knows, in files that `penstock slurm sync` writes: penstock_site.lua about the site, and
penstock_starts.lua about when new jobs start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock_scheduler.api.estimate_messages import NewJobs, new_jobs_line
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import clock
from penstock_slurm.gateway import SlurmNode, SlurmPartition
from penstock_slurm.observe.view import UNTYPED
from penstock_slurm.settings import SlurmSettings

NAME = "penstock_site.lua"
STARTS = "penstock_starts.lua"

FRESH_S = 900.0
"""How old an estimate may be that sbatch prints: three times as old as `sync` makes it."""

FLAG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
"""A name that a flag can have as its value, as in penstock.lua and flags.c."""

_LUA_SAFE = re.compile(r"[A-Za-z0-9._+@:/-]+")


def site_lua(
    settings: SlurmSettings,
    partitions: Sequence[SlurmPartition],
    nodes: Sequence[SlurmNode],
    families: Collection[str],
    admins: Collection[int],
    *,
    cloud: bool,
    memory: bool,
) -> str:
    """The file's text. It does not depend on the order in which Slurm lists the site.

    Args:
        families: model families of the catalogue. Those that a flag cannot name are left out.
        admins: user ids that may change adaptive jobs: root's and SlurmUser's.
        cloud: whether the site has a cloud that jobs may burst to.
        memory: whether Slurm allocates memory; without that, --mem=0 does not mean a whole node.

    Raises:
        PenstockError: a managed partition does not exist, or none of them has a GPU.
    """
    by_name = {partition.name: partition for partition in partitions}
    missing = [name for name in settings.partitions if name not in by_name]
    if missing:
        raise PenstockError(
            f"[slurm] partitions: Slurm has no partition {', '.join(missing)}; the partitions are {', '.join(sorted(by_name))}"
        )
    ours = [
        node for node in nodes if not set(settings.partitions).isdisjoint(node.partitions) and any(node.gpus.values())
    ]
    plain_after_s = settings.plain_after_s
    lines = [
        "-- Written by `penstock slurm sync`, which overwrites it.",
        "return {",
        f"  admins = {{{', '.join(f'[{uid}] = true' for uid in sorted(admins))}}},",
        f"  cloud = {str(cloud).lower()},",
        f"  memory = {str(memory).lower()},",
        f"  spool = {_lua(str(settings.spool_dir.absolute()))},",
        *([] if plain_after_s is None else [f"  plain_after_s = {plain_after_s:.0f},"]),
        *(_table("adopt", (f"[{_lua(each)}] = true" for each in sorted(settings.adopt))) if settings.adopt else []),
        *_table("families", (f"[{_lua(name)}] = true" for name in sorted(families) if FLAG_NAME.fullmatch(name))),
        *_table("features", _features(ours)),
        *_table("nodes", map(_node, sorted(ours, key=lambda node: node.name))),
        *_table("partitions", (_partition(by_name[name], nodes) for name in settings.partitions)),
        "}",
    ]
    if not ours:
        raise PenstockError(
            f"no node of the partitions {', '.join(settings.partitions)} has GPUs (GRES gpu); powered-down cloud nodes "
            "show only with PrivateData=cloud in slurm.conf"
        )
    return "\n".join(lines) + "\n"


def _table(name: str, entries: Iterable[str]) -> list[str]:
    """Lines of a Lua table in the file's table."""
    return [f"  {name} = {{", *(f"    {entry}," for entry in entries), "  },"]


def _features(nodes: Sequence[SlurmNode]) -> Iterator[str]:
    """Each active feature with the nodes that have it."""
    for feature in sorted({feature for node in nodes for feature in node.features}):
        names = sorted(node.name for node in nodes if feature in node.features)
        yield f"[{_lua(feature)}] = {{{', '.join(f'[{_lua(name)}] = true' for name in names)}}}"


def _node(node: SlurmNode) -> str:
    """The amounts that a job can ask for on a node."""
    return f"[{_lua(node.name)}] = {{cpus = {node.cpus}, memory_mb = {node.memory_mb}, tmp_mb = {node.tmp_mb}}}"


def _partition(partition: SlurmPartition, nodes: Sequence[SlurmNode]) -> str:
    """A partition's limits, and the GPUs of each type on each of its nodes."""
    types: dict[str, dict[str, int]] = {}
    for node in nodes:
        for gpu_type, gpus in node.gpus.items() if partition.name in node.partitions else ():
            if gpus:
                types.setdefault(gpu_type or UNTYPED, {})[node.name] = gpus
    limits = {"most_cpus": partition.most_cpus, "most_memory_mb": partition.most_memory_mb}
    most = "".join(f", {word} = {limit}" for word, limit in limits.items() if limit is not None)
    lines = [f"{{name = {_lua(partition.name)}{most}, types = {{"]
    for each, sizes in sorted(types.items()):
        shown = ", ".join(f"[{_lua(node)}] = {gpus}" for node, gpus in sorted(sizes.items()))
        lines.append(f"      [{_lua(each)}] = {{{shown}}},")
    return "\n".join([*lines, "    }}"])


def starts_lua(new: Sequence[NewJobs]) -> str:
    """The text of penstock_starts.lua."""
    lines = ["-- Written by `penstock slurm sync`, which overwrites it.", "return {"]
    for each in new:
        said = f"{new_jobs_line(each)}, as of {clock(each.at_s)}"
        lines.append(f'  [{each.gpus}] = {{until_s = {each.at_s + FRESH_S:.0f}, text = "{said}"}},')
    return "\n".join([*lines, "}"]) + "\n"


def _lua(text: str) -> str:
    if not _LUA_SAFE.fullmatch(text):
        raise PenstockError(
            f"{text!r} has characters that a name in Slurm should not have, so it cannot be written to {NAME}"
        )
    return f'"{text}"'
