"""Everything attached to Slurm: the `Cluster` port over its commands or pyslurm, and the loopback cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_scheduler.ports import Clock, WishCheck
    from penstock_scheduler.settings import Settings
    from penstock_slurm.cluster import SlurmCluster


def open_cluster(settings: Settings, clock: Clock, check: WishCheck) -> SlurmCluster:
    """The Slurm that the section `[slurm]` describes. Raises ConfigError."""
    from penstock_scheduler.spool import Spool
    from penstock_slurm.cloud_nodes import SlurmCloudNodes
    from penstock_slurm.cluster import SlurmCluster
    from penstock_slurm.gateway import CliGateway, open_gateway
    from penstock_slurm.settings import SlurmSettings
    from penstock_slurm.submitter import SlurmSubmitter

    section = settings.section(SlurmSettings)
    gateway = open_gateway(section.backend, conf=section.conf, timeout_s=section.command_timeout_s)
    commands = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)  # there is no other way to sbatch
    spool = Spool(section.spool_dir)
    nodes = SlurmCloudNodes(section.cloud_partition, commands) if section.cloud_partition else None
    return SlurmCluster(gateway, spool, clock, section, check, SlurmSubmitter(commands, spool, section), nodes)
