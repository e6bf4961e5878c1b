"""Queues: each job gets exactly what it asks for, in some order. They are baselines for comparison, and what sites use today.

1. **Sort** the jobs by the policy's order.
2. **Start** each waiting job on its *request*: the most GPUs that it asks for and that exist, of its first GPU type that has
   enough free GPUs.
3. **Stop at the first job that does not fit.** All jobs behind it wait, unless backfill lets them start. *Out of order*, all
   that fit start; jobs with many GPUs may then wait for long.

The orders:

- `fifo`: by submission.
- `srtf`: shortest remaining time first, by model and remaining work, or else by the time limit. Unknown times come last.
- `las`: least attained service first, in GPU-seconds, after Tiresias (Gu et al., NSDI '19). It needs no durations.
- `ftf`: finish-time fairness, after Themis (Mahajan et al., NSDI '20): the largest `rho` first. A job's fair share is the
  cluster divided by the number of jobs now (in Themis: by their average number). A job that asks for more than its share
  would be slowed down in proportion.
- `slurm-backfill`: Slurm's scheduler with its backfill plugin, for comparison; see `SlurmBackfill`.

`srtf`, `las` and `ftf` preempt: in each round, a job that does not fit takes GPUs from the jobs furthest behind it that may be
moved. A job is stopped only if another job gets its GPUs. The orders do not weigh the cost of a restart (`restart_cost_s`).
So `las` and `ftf` compare jobs in steps (`STEP_GPU_S`, `STEP_RHO`), and small differences stop no job.

*EASY backfill* (Lifka, JSSPP '95) reserves GPUs for the first job that does not fit, at the earliest time at which enough GPUs
will be free. Jobs behind it may start if those GPUs are still free at that time. A job of unknown length takes no GPU that is
reserved for later. If the time is unknown, no job passes the first one.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from penstock_scheduler.model import Configuration, Job, Snapshot
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.queue_round import SOONEST_END_S, Backfill, QueuePolicy

SLURM_UNLIMITED_S = 365 * 86_400.0
"""Time limit that Slurm's backfill plugin assumes for a job that has none, seconds."""

STEP_GPU_S = 3600.0
"""Step in which `las` compares GPU-seconds. Exactly compared, two equal jobs would swap every round."""

STEP_RHO = 0.1
"""Step in which `ftf` compares rho."""


class QueueSettings(BaseModel):
    """Sections `[policy.fifo]`, `[policy.srtf]`, `[policy.las]` and `[policy.ftf]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    backfill: Backfill = Field(
        default="none",
        description="Which jobs behind the first one that does not fit may start. easy: those that do not delay it; "
        "out-of-order: all that fit.",
    )


class SlurmBackfillSettings(BaseModel):
    """Section `[policy.slurm-backfill]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    default_time_limit_s: PositiveFloat | None = Field(
        default=None,
        description="Time limit of jobs without one: the partition's DefaultTime. null: a year, as in Slurm.",
    )


class Fifo(QueuePolicy):
    """First in, first out; running jobs are not moved."""

    name = "fifo"

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings.backfill)
        self.front_only = settings.backfill == "none"
        """Whether only the free GPUs and the front of the queue, by (submission, id), matter. Running jobs stay, and all
        jobs behind the first one that does not fit wait, so a snapshot may leave both out."""

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """The same for all jobs, so age decides."""
        return 0.0


class Srtf(QueuePolicy):
    """Shortest remaining time first."""

    name = "srtf"
    preempts = True

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings.backfill)

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """Remaining seconds where the job runs, or, if it does not run, on its preferred configuration."""
        left_s = common.remaining_s(snapshot, job, *_where(job, request))
        return math.inf if left_s is None else left_s


class Las(QueuePolicy):
    """Least attained service first."""

    name = "las"
    preempts = True

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings.backfill)

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """GPU-seconds so far."""
        return _in_steps(sum(snapshot.facts[job.id].attained_gpu_s.values()), STEP_GPU_S)


class Ftf(QueuePolicy):
    """Least fairly treated first, by finish-time fairness."""

    name = "ftf"
    preempts = True

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings.backfill)

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """Minus rho, see `rho`."""
        return _in_steps(-rho(snapshot, job, *_where(job, request)), STEP_RHO)


def rho(snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float:
    """Finish-time fairness of Themis: time from submission to end here, relative to that alone on its fair share, > 0.

    If the remaining time is unknown, the job is expected to run for as long again as it has run. `inf` if it has not run.
    """
    ran_s = common.ran_s(snapshot, job, option.gpus)
    left_s = common.remaining_s(snapshot, job, option, goodput)
    if left_s is None:
        left_s = ran_s
    share = sum(node.gpus_for_us for node in snapshot.nodes) / len(snapshot.jobs)
    alone_s = (ran_s + left_s) * max(option.gpus / share, 1.0) if share > 0 else 0.0
    return (snapshot.time_s - job.submit_s + left_s) / alone_s if alone_s > 0 else math.inf


class SlurmBackfill(QueuePolicy):
    """FIFO with conservative backfill and fixed requests, as Slurm schedules with its defaults.

    The oldest job has the highest priority. For each of the first `reservations` waiting jobs, GPUs are reserved at the earliest
    time at which, by the time limits, the running jobs and the jobs before it leave enough free. A job for which that time is
    now starts. (EASY backfill reserves GPUs for one job only.) No GPUs are reserved for a job that would start after
    `window_s`. So, as in Slurm, a large job can wait for long among jobs without time limits. Slurm's other priority
    factors, its nice values and its preemption are not modelled.
    """

    name = "slurm-backfill"
    reservations = 500  # SchedulerParameters=bf_max_job_test
    window_s = 86_400.0  # bf_window

    def __init__(self, settings: SlurmBackfillSettings) -> None:
        super().__init__("easy")
        self._unlimited_s = settings.default_time_limit_s or SLURM_UNLIMITED_S

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """The same for all jobs, so age decides."""
        return 0.0

    def seconds(self, snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float:
        """The remaining part of its time limit."""
        limit_s = job.time_limit_s if job.time_limit_s is not None else self._unlimited_s
        return max(limit_s - common.ran_s(snapshot, job, option.gpus), SOONEST_END_S)


def _where(job: Job, request: common.Request) -> tuple[Configuration, float]:
    """The configuration on which a job runs, if its request has it, or else the preferred one; and the goodput there."""
    held = job.running_on
    if held is not None and held.configuration in request:
        return held.configuration, request[held.configuration]
    return next(iter(request.items()), (Configuration(1, job.spec.max_gpus, ""), 0.0))


def _in_steps(value: float, step: float) -> float:
    return math.floor(value / step) * step if math.isfinite(value) else value
