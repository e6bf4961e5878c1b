"""Checks of a site's configuration: the meaning of each part of it for adaptive jobs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from penstock_profiles.families import load_families
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.model import part_of_node
from penstock_scheduler.rounds.settings import DaemonSettings
from penstock_slurm.gateway import SlurmNode, SlurmPartition
from penstock_slurm.gateway.local_slurm import allocates_memory
from penstock_slurm.install.agents import MIG_TYPE, some
from penstock_slurm.install.answers import Finding
from penstock_slurm.install.checks import managed_nodes
from penstock_slurm.install.plan import InstallTarget

PARTITION = re.compile(r"^PartitionName=(\S+) .*?\bDefMemPerNode=UNLIMITED\b", re.MULTILINE)
"""In `scontrol -o show partition`: a partition whose jobs have all memory of their nodes by default."""


def check_site_shape(site: InstallTarget) -> Iterator[Finding]:
    """Findings about the managed partitions and their nodes. Raises PenstockError."""
    managed, partitions = managed_nodes(site)
    nodes = [node for node in managed if any(node.gpus.values())]
    families, gpus = load_families(site.settings.section(DaemonSettings).families), load_gpus()
    types = sorted({name for node in nodes for name in node.gpus if name})
    known = {name for family in families.on(types, gpus).values() for name in family.gpus}
    unlimited = set(PARTITION.findall(site.commands.run("scontrol", "-o", "show", "partition").stdout))
    yield from judge_site_shape(site.config, nodes, partitions, known, unlimited)


def judge_site_shape(
    config: Mapping[str, str],
    nodes: Sequence[SlurmNode],
    partitions: Iterable[SlurmPartition],
    known: Collection[str],
    unlimited: Collection[str],
) -> Iterator[Finding]:
    """Findings of `check_site_shape`.

    Args:
        config: `scontrol show config`.
        nodes: the nodes of the managed partitions that have GPUs.
        partitions: the managed partitions.
        known: GPU types whose speed the catalogue knows.
        unlimited: partitions without a default of memory.
    """
    yield from _of_types(nodes, known)
    memory = allocates_memory(config)
    for each in partitions:
        if each.whole_nodes:
            yield Finding(
                f"partition {each.name} gives each job whole nodes (OverSubscribe=EXCLUSIVE): adaptive jobs use it only if they "
                "are submitted to it, if they name no partition and it is Slurm's default, or if they ask for --exclusive, and "
                "then by whole nodes"
            )
        if each.most_cpus is not None:
            yield Finding(
                f"all jobs of partition {each.name} together have at most {each.most_cpus} CPUs of a node (MaxCPUsPerNode)"
            )
        if memory and each.name in unlimited:
            yield Finding(
                f"in partition {each.name}, a job without --mem has all memory of its node (DefMemPerNode=UNLIMITED), and no "
                "other job starts beside it; DefMemPerGPU or DefMemPerCPU in slurm.conf lets jobs share nodes"
            )


def _of_types(nodes: Sequence[SlurmNode], known: Collection[str]) -> Iterator[Finding]:
    """Findings about the types of the nodes' GPUs."""
    several = [node for node in nodes if len(node.gpus) > 1 and all(node.gpus)]
    if several:
        example = part_of_node(several[0].name, min(several[0].gpus))
        names = some([node.name for node in several])
        yield Finding(f"hosts with GPUs of several types ({names}): each type is a node of its own, such as {example}")
    for node in nodes:
        if len(node.gpus) > 1 and not all(node.gpus):
            yield Finding(
                f"host {node.name} has GPUs with a type and GPUs without one",
                "give all of them a Type in gres.conf; until then they count as one type, and a job may get a mixture",
            )
    types = sorted({name for node in nodes for name in node.gpus if name})
    if parts := [name for name in types if MIG_TYPE.search(name)]:
        yield Finding(f"MIG devices are GPU types of their own, and jobs do not share them: {some(parts)}")
    if slow := [name for name in types if name not in known]:
        yield Finding(
            f"the catalogue has no speed of {some(slow)}: until jobs have run there, such a type counts as fast as the others; "
            "a file of [daemon] families can name it (docs/admin/settings.md)"
        )
