"""Everything attached to Slurm: the `Cluster` port over its commands, the agents, the plugins for sbatch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from penstock_scheduler.api.ports import Clock, ClusterParts, Leadership, SpecCheck
    from penstock_scheduler.rounds.settings import Settings
    from penstock_slurm.gateway import SlurmReader
    from penstock_slurm.settings import SlurmSettings


def open_cluster(settings: Settings, clock: Clock, check: SpecCheck, leadership: Leadership) -> ClusterParts:
    """The Slurm that the section `[slurm]` describes, which asks `leadership` before each write. Raises ConfigError."""
    from penstock_scheduler.api.ports import ClusterParts
    from penstock_scheduler.store.spool import Spool
    from penstock_slurm.act.submitter import SlurmSubmitter
    from penstock_slurm.cluster import SlurmCluster
    from penstock_slurm.gateway import CliGateway, abilities
    from penstock_slurm.gateway.pyslurm_reader import PyslurmReader
    from penstock_slurm.observe.cloud_nodes import SlurmCloudNodes
    from penstock_slurm.settings import SlurmSettings
    from penstock_slurm.share.agents import SlurmAgents
    from penstock_slurm.share.gpu_reservation import GpuReservations

    section = settings.section(SlurmSettings)
    commands = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s, leadership=leadership)
    reader: SlurmReader = PyslurmReader(commands.commands) if section.reader == "pyslurm" else commands
    stand_in = section.agents and not abilities.release(commands.version()).empty_tres_clears_gpus
    if stand_in:
        _expect_stand_in(commands, section)
    spool = Spool(section.spool_dir, alone=True, leadership=leadership)
    nodes = SlurmCloudNodes(section.cloud_partition, commands, spool) if section.cloud_partition else None
    submitter = SlurmSubmitter(commands, Spool(section.spool_dir, leadership=leadership), section, leadership)
    sharing = SlurmAgents(
        GpuReservations(commands),
        spool.folder,
        clock,
        stand_in=stand_in,
        patience_s=section.agent_patience_s,
        leadership=leadership,
    )
    cluster = SlurmCluster(reader, commands, spool, clock, section, check, nodes, sharing)
    agents = sharing if section.agents else None
    return ClusterParts(
        cluster, cluster.accounts, agents, agents, submitter, nodes, spool.folder, commands.gpu_ids, cluster.resume
    )


def _expect_stand_in(reader: SlurmReader, settings: SlurmSettings) -> None:
    """Raises ConfigError if no managed node has the GRES that jobs request in place of GPUs, if Slurm answers."""
    from penstock_scheduler.people.errors import ConfigError
    from penstock_slurm.gateway import SlurmError
    from penstock_slurm.share.agents import STAND_IN_REMEDY, without_stand_in

    try:
        nodes = reader.nodes()
    except SlurmError:
        return  # the loop will report it; jobs do not share on nodes without the GRES
    lacking = without_stand_in(nodes, settings.partitions)
    if lacking and not any(node.stand_in for node in nodes):
        raise ConfigError(
            "[slurm] agents = true: this Slurm starts jobs without GPUs only if they request another GRES, and no node has one "
            f"for that. Remedy: {STAND_IN_REMEDY}"
        )
    if lacking:
        names = ",".join(lacking[:8])
        text = f"jobs do not share GPUs there; {STAND_IN_REMEDY}"
        log.warning("nodes lack a GRES", extra={"nodes": names, "count": len(lacking), "text": text})
