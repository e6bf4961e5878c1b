"""`penstock submit --dry-run`: prints whether and where a job would start now, and why. It submits and changes nothing.

The site's policy decides on penstockd's newest round with the job added. Without permission to read the daemon's state folder,
the decision uses only Slurm's records. It then lacks what only the daemon knows, such as the jobs' reports and the departing
jobs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.families import load_families
from penstock_scheduler.burst.choices import check_cloud
from penstock_scheduler.clock import WallClock
from penstock_scheduler.errors import BadJobSpec, StoreError
from penstock_scheduler.forecast import ask, describe, with_job
from penstock_scheduler.limits import LimitSettings, by_partition, site_limits
from penstock_scheduler.model import Job, JobSpec, NodeChoice, Phase, Snapshot
from penstock_scheduler.models import SpecModels
from penstock_scheduler.policies import make_policy
from penstock_scheduler.sensitivities import LEARNED, Sensitivities
from penstock_scheduler.settings import DaemonSettings, Settings
from penstock_scheduler.spool import Spool
from penstock_scheduler.store import open_store
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway.cli import CliGateway
from penstock_slurm.settings import SlurmSettings

THIS = "this job"
"""Id of the new job among those of the round."""

LATE_ROUNDS = 10
"""After this many rounds without a new one, the daemon is taken to be down."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Properties of the job that come from sbatch's options, not from its job spec."""

    name: str
    user: str
    account: str = ""
    qos: str = ""
    partitions: tuple[str, ...] = ()
    reservation: str = ""
    time_limit_s: float | None = None
    nodes: NodeChoice | None = None


class _ReadOnlyGateway(CliGateway):
    """Does not write the comments that the daemon would."""

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """Do nothing."""


def explain(settings: Settings, spec: JobSpec, asked: Asked) -> Iterator[str]:
    """The lines to print.

    Raises:
        PenstockError: neither the daemon's state nor Slurm can be read, or no plan could be made.
    """
    daemon, slurm = settings.section(DaemonSettings), settings.section(SlurmSettings)
    sensitivities = Sensitivities(daemon.sensitivities, daemon.state_dir / LEARNED)
    models = SpecModels(load_families(daemon.families), daemon.restart_cost_s, sensitivities=sensitivities)
    models.check(spec)
    check_cloud(spec, has_cloud=daemon.cloud is not None)
    unmanaged = [name for name in asked.partitions if name not in slurm.partitions]
    if unmanaged:
        managed = ", ".join(slurm.partitions)
        raise BadJobSpec(f"Penstock does not manage partition {', '.join(unmanaged)}; it manages {managed}")
    now_s = time.time()
    snapshot, source = _snapshot(settings, models, now_s)
    mine = asked.partitions or slurm.partitions[:1]
    job = Job(
        THIS,
        asked.name,
        asked.user,
        spec,
        (*mine, *(name for name in slurm.partitions if name not in mine)),
        Phase.QUEUED,
        now_s,
        account=asked.account,
        qos=asked.qos,
        reservation=asked.reservation,
        nodes=asked.nodes,
        time_limit_s=asked.time_limit_s,
    )
    site = settings.section(LimitSettings)
    (job,), known = by_partition(
        site.partitions, [job], models.facts([job], {node.gpu_type for node in snapshot.nodes})
    )
    limits = site_limits(site, [job])
    policy, _ = make_policy(settings.policy)
    answer = ask(policy, with_job(snapshot, job, known, limits), THIS)
    yield from describe(answer, now_s, {job.id: job.name for job in snapshot.jobs})
    yield f"Decided by the policy {policy.name} on {source}; other jobs may arrive before the real round."


def _snapshot(settings: Settings, models: SpecModels, now_s: float) -> tuple[Snapshot, str]:
    """The snapshot to decide on, and its name in the output."""
    daemon = settings.section(DaemonSettings)
    try:
        record = open_store(daemon.store or daemon.state_dir).last_round()
    except (StoreError, OSError):
        record = None
    if record is not None:
        age_s = now_s - record.snapshot.time_s
        if daemon.rounds == "events" or age_s < LATE_ROUNDS * daemon.round_s:
            return record.snapshot, f"round {record.snapshot.round} of penstockd, {age_s:.0f} s old"
    return _observe(settings, models), "Slurm's records only, without what penstockd knows"


def _observe(settings: Settings, models: SpecModels) -> Snapshot:
    slurm = settings.section(SlurmSettings)
    gateway = _ReadOnlyGateway(conf=slurm.conf, timeout_s=slurm.command_timeout_s)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        state = SlurmCluster(gateway, Spool(Path(folder)), WallClock(), slurm, models.check).observe()
    limits = (*state.limits, *site_limits(settings.section(LimitSettings), state.jobs))
    return Snapshot(
        round=1,
        time_s=time.time(),
        nodes=state.nodes,
        jobs=state.jobs,
        facts=models.facts(state.jobs, {node.gpu_type for node in state.nodes}),
        limits=limits,
    )
