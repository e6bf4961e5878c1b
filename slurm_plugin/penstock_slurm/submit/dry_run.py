"""`penstock submit --dry-run`: what would become of a job now, and why, in words. Nothing is submitted or changed.

Decides on the newest round of penstockd, with the job added, by the site's policy. Who may not read the daemon's state folder
looks at Slurm itself: then what only the daemon knows (what jobs have reported, which of them are being stopped) is missing.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.families import load_families
from penstock_scheduler.clock import WallClock
from penstock_scheduler.errors import BadJobSpec, StoreError
from penstock_scheduler.forecast import ask, with_job, words
from penstock_scheduler.limits import LimitSettings, by_partition, site_limits
from penstock_scheduler.model import Job, JobSpec, Phase, Snapshot
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
"""Its name among the others."""

LATE_ROUNDS = 10
"""Rounds that may have been missed before the daemon is taken for dead."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What sbatch's options say of the job beside its job spec."""

    name: str
    user: str
    account: str = ""
    qos: str = ""
    partitions: tuple[str, ...] = ()
    reservation: str = ""
    time_limit_s: float | None = None


class _Onlooker(CliGateway):
    """Reads and leaves no word."""

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """Nothing."""


def explain(settings: Settings, spec: JobSpec, asked: Asked) -> Iterator[str]:
    """What to print, line by line.

    Raises:
        PenstockError: neither the daemon's state nor Slurm can be read, or no plan could be made.
    """
    daemon, slurm = settings.section(DaemonSettings), settings.section(SlurmSettings)
    sensitivities = Sensitivities(daemon.sensitivities, daemon.state_dir / LEARNED)
    models = SpecModels(load_families(daemon.families), daemon.restart_cost_s, sensitivities=sensitivities)
    models.check(spec)
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
        time_limit_s=asked.time_limit_s,
    )
    known = models.models([job], {node.gpu_type for node in snapshot.nodes})
    site = settings.section(LimitSettings)
    (job,), costs_s = by_partition(site.partitions, [job], known.restart_costs_s)
    known = dataclasses.replace(known, restart_costs_s=costs_s)
    limits = site_limits(site, [job])
    policy, _ = make_policy(daemon.policy, settings.policy(daemon.policy))
    answer = ask(policy, with_job(snapshot, job, known, limits), THIS)
    yield from words(answer, now_s, {job.id: job.name for job in snapshot.jobs})
    yield f"by the policy {policy.name} on {source}; others may come before the round that decides"


def _snapshot(settings: Settings, models: SpecModels, now_s: float) -> tuple[Snapshot, str]:
    """What to decide on, and its name."""
    daemon = settings.section(DaemonSettings)
    try:
        record = open_store(daemon.store or daemon.state_dir).last_round()
    except (StoreError, OSError):
        record = None
    if record is not None:
        age_s = now_s - record.snapshot.time_s
        if daemon.rounds == "events" or age_s < LATE_ROUNDS * daemon.round_s:
            return record.snapshot, f"round {record.snapshot.round} of penstockd, {age_s:.0f} s old"
    return _look(settings, models), "what Slurm shows, without the daemon's own knowledge"


def _look(settings: Settings, models: SpecModels) -> Snapshot:
    slurm = settings.section(SlurmSettings)
    gateway = _Onlooker(conf=slurm.conf, timeout_s=slurm.command_timeout_s)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        state = SlurmCluster(gateway, Spool(Path(folder)), WallClock(), slurm, models.check).observe()
    known = models.models(state.jobs, {node.gpu_type for node in state.nodes})
    limits = (*state.limits, *site_limits(settings.section(LimitSettings), state.jobs))
    return Snapshot(
        round=1,
        time_s=time.time(),
        nodes=state.nodes,
        jobs=state.jobs,
        models=known.estimators,
        restart_costs_s=known.restart_costs_s,
        limits=limits,
        unscaled=known.unscaled,
        unmeasured=known.unmeasured,
        remaining=known.remaining,
    )
