"""Holds opportunistic jobs beside a guaranteed job to their share of the GPU's time, whether they cooperate or not.

A job that uses Penstock's executor pauses between its steps, by its compute share. The agent counts the GPU time that
each job really uses (`penstock_slurm.agent.gpu_time`). A job that uses more than its share, since it does not report,
reports what is not true, evaluates without steps or has very long steps, is *driven*: the agent itself freezes and
thaws its processes, so that it has its share and no more.

1. Each job has a credit of GPU time. It grows by `share` seconds in a second, up to `MOST_CREDIT_S`, and falls by the
   GPU time that the job uses.
2. A job whose credit falls below `-DEBT_S`, or below its usual step up to `MOST_DEBT_S`, is driven from then on. It
   is told a share of 1, so that it does not pause a second time by itself. Several jobs beside one guaranteed job
   divide these by their number.
3. A driven job is frozen while its credit is used up, and in each control period at share 0. If it uses `DEBT_S` of the
   GPU although it is frozen, somebody has thawed it, and it is frozen again. Not before: Slurm thaws a job that it
   ends, which may then save.
4. A driven job that reports is tried without that after `TRIAL_S`, and after twice as long each further time. On trial
   it may save up nothing, and is driven again the sooner the more often it was driven: with what it takes at once, the
   guaranteed job must still keep its speed within a minute.

Where GPU time is unknown, a job that reports is believed, and a job that does not is taken to use its GPU all the time
that it is not frozen. A client of NVIDIA's MPS cannot be frozen, and neither can any job if the agent's unit does not
permit it; the job's user is told.
"""

from __future__ import annotations

import contextlib
import logging
import math

from penstock_profiles.nvml import SAMPLED_S
from penstock_scheduler.api.agent_messages import OrderedJob
from penstock_scheduler.model import Pack
from penstock_scheduler.rounds.sharing.control import Steps
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.containment import Containment
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.gpu_time import GpuTimes, Meter
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.observed import Observed, steps_between
from penstock_slurm.agent.state import LocalJob

log = logging.getLogger(__name__)

MOST_CREDIT_S = 0.3
"""Most GPU time that the opportunistic jobs of a pack may save up together, since they use it up at once."""

DEBT_S = 0.3
"""GPU time beyond its share after which a job is driven."""

MOST_DEBT_S = 1.0
"""The same for a job of long steps, which it cannot interrupt."""

TURN_S = 0.1
"""GPU time that a driven job uses before it is frozen again, about: the time between two looks of the agent."""

TRIAL_S = 60.0
"""How long a job is driven at first before it is tried again."""

FROZEN_S = 5.0
"""A job that the agent keeps frozen for longer counts as frozen. Shorter pauses are a part of being driven."""

MOST_DOUBLINGS = 6
"""After this many times the time does not grow any more."""


class DutyCycles:
    """See the module. Call `check` in each tick, before jobs are asked to move.

    Args:
        state: the node's state.
        groups: the groups that run.
        containment: tells users.
        freezer: freezes processes.
        gpu_times: the source of GPU times; None: they are unknown.
    """

    def __init__(
        self,
        state: NodeState,
        groups: Groups,
        containment: Containment,
        freezer: Freezer,
        gpu_times: GpuTimes | None,
    ) -> None:
        self._state, self._groups, self._containment = state, groups, containment
        self._freezer, self._gpu_times = freezer, gpu_times
        self._begun = False
        """Whether this agent has looked at its jobs yet. Jobs that an earlier one had frozen may have been thawed since then."""

    @property
    def driving(self) -> bool:
        """Whether some job is driven, or was until a short time ago and is on trial, so that ticks should be short."""
        since_s = self._state.now_s - TRIAL_S
        return any(each.driven or since_s < each.driven_until_s < math.inf for each in self._state.jobs.values())

    def check(self) -> None:
        """Count what each job has used, and freeze or thaw it."""
        with self._state.guard("watch over the jobs that it has frozen"):
            if self._freezer.beat() or not self._begun:
                self._let_go()
            self._begun = True
        shared = [job for job in self._state.ordered_jobs if self._beside(job, self._state.jobs[job.job]) is not None]
        if shared:
            self._state.glance_at_processes()  # a job may have made processes since the last look
        for job in self._state.ordered_jobs:
            local = self._state.jobs[job.job]
            with self._state.guard("hold it to its share", job.job):
                pack = self._beside(job, local)
                if pack is None:
                    self._release(job, local)
                else:
                    self._hold(job, local, pack)

    def close(self) -> None:
        """Thaw what the agent itself has frozen. Slurm calls it running, so only the agent's guard would."""
        self._let_go()
        self._freezer.close()

    def _let_go(self) -> None:
        for job in self._state.ordered_jobs:
            local = self._state.jobs[job.job]
            if local.stopped:
                with self._state.guard("thaw it", job.job):
                    self._state.glance_at_processes()  # this may come before the first tick
                    self._thaw(job, local)

    def _beside(self, job: OrderedJob, local: LocalJob) -> Pack | None:
        """The pack in which the job runs beside a guaranteed job; None: it does not."""
        pack = self._groups.pack_of(job.job)
        # What the driver is restoring must not be frozen, and cannot use the GPU yet.
        here = job.running and not local.gone and local.state == "running" and not local.cuda_checkpointed
        return pack if here and pack is not None and pack.guaranteed not in (None, job.job) else None

    def _release(self, job: OrderedJob, local: LocalJob) -> None:
        """Let a job go that is not beside a guaranteed job any more."""
        observed = self._state.observed(job.job)
        observed.meter, observed.credit_s = Meter(), 0.0
        if local.stopped:
            self._thaw(job, local)
        local.driven = False

    def _hold(self, job: OrderedJob, local: LocalJob, pack: Pack) -> None:
        state, observed = self._state, self._state.observed(job.job)
        if local.stopped and not local.driven:
            self._thaw(job, local)  # it could not be thawed before
        share, now_s = self._groups.compute(job.job), state.now_s
        passed_s = min(max(now_s - observed.metered_s, 0.0), 2 * state.settings.sample_s)
        observed.metered_s = now_s
        before, observed.counted = observed.counted, observed.first
        steps = steps_between(before, observed.counted)
        if steps.count:
            observed.step_s = min(observed.step_s or steps.mean_s, steps.mean_s)
        used_s = self._used_s(job, local, observed, steps, passed_s)
        observed.escaped_s += used_s if local.stopped else 0.0
        if share > 0 and observed.had_share == 0 and not local.driven:
            # Its pause may have passed while its share was 0. Over many periods that would count as taking too much, but
            # the control has measured what it does.
            observed.credit_s = max(observed.credit_s, 0.0)
        observed.had_share = share
        others = len(pack.jobs) - 1  # all of them together slow the guaranteed job down
        on_trial = local.driven_times > 0 and not local.driven
        most_s = 0.0 if on_trial else MOST_CREDIT_S / others
        observed.credit_s = min(observed.credit_s + share * passed_s - used_s, most_s)
        if share >= 1:
            observed.credit_s = 0.0
        if not local.driven:
            silent = not observed.statuses and local.begun_s < math.inf
            debt_s = DEBT_S / others / (1 + local.driven_times)
            allowed_s = min(max(debt_s, observed.step_s), MOST_DEBT_S / others)
            if not silent and observed.credit_s >= -allowed_s:
                return
            if why := self._hindrance(job, local):
                self._tell(job, pack, share, f"was left as it is, since {why}", silent=silent)
                return
            self._begin_driving(job, local, pack, share, silent=silent)
        self._drive(job, local, observed, share)

    def _used_s(self, job: OrderedJob, local: LocalJob, observed: Observed, steps: Steps, passed_s: float) -> float:
        """GPU time that the job has used since the last look, s."""
        counters = self._gpu_times(self._state.living.get(job.slurm_job, [])) if self._gpu_times is not None else None
        if counters is not None:
            # A new process may go on from the counter of an earlier one with its number.
            return min(observed.meter.used_s(counters), passed_s + SAMPLED_S)
        if observed.statuses and (local.stopped or not local.driven):
            # A step is reported when it is over, and may have begun before the share was what it is.
            return min(steps.count * steps.mean_s, passed_s)
        return 0.0 if local.stopped or local.begun_s == math.inf else passed_s

    def _hindrance(self, job: OrderedJob, local: LocalJob) -> str:
        """Why a job is not frozen, as the end of a sentence; "": it can be."""
        if local.mps:
            return "a client of NVIDIA's MPS is not frozen"
        return self._freezer.trouble(self._state.living.get(job.slurm_job, []))

    def _begin_driving(self, job: OrderedJob, local: LocalJob, pack: Pack, share: float, *, silent: bool) -> None:
        local.driven, local.driven_times = True, local.driven_times + 1
        local.driven_until_s = math.inf if silent else self._state.now_s + self._trial_s(local)
        # The jobs of a pack take turns. All at once they would slow the guaranteed job down for a moment beyond doubt.
        self._state.observed(job.job).credit_s -= TURN_S * pack.jobs.index(job.job) / len(pack.jobs)
        log.info("drives a job", extra={"job": job.job, "share": round(share, 4), "silent": silent})
        if silent or local.driven_times > 1:
            done = "is frozen from time to time by the agent of its node, so that it keeps to its share"
            self._tell(job, pack, share, done, silent=silent)

    @staticmethod
    def _trial_s(local: LocalJob) -> float:
        """How long a job is driven before it is tried again, s."""
        return float(TRIAL_S * 2 ** min(local.driven_times - 1, MOST_DOUBLINGS))

    def _tell(self, job: OrderedJob, pack: Pack, share: float, done: str, *, silent: bool) -> None:
        wait_s = self._state.settings.start_wait_s
        did = f"has reported no step within {wait_s:g} s" if silent else f"did not keep to {share:.1%} of a GPU's time"
        text = f"{did} beside guaranteed job {pack.guaranteed}"
        remedy = "a program that uses Penstock's executor keeps to its share by itself"
        self._containment.contain(job, "share", text, kill=False, otherwise=f"{done}; {remedy}")

    def _drive(self, job: OrderedJob, local: LocalJob, observed: Observed, share: float) -> None:
        now_s = self._state.now_s
        local.why = (
            "is frozen from time to time by the agent of its node, since it does not keep to its share by itself"
        )
        if observed.statuses:  # the clock may have been set back
            local.driven_until_s = min(local.driven_until_s, now_s + self._trial_s(local))
        if now_s >= local.driven_until_s and observed.statuses and share > 0 and observed.credit_s >= 0:
            local.driven, local.why = False, ""
            self._thaw(job, local)
        elif share == 0 or observed.credit_s <= 0:
            if not local.stopped or observed.escaped_s > DEBT_S:
                self._freeze(job, local)
        elif local.stopped:
            self._thaw(job, local)

    def _freeze(self, job: OrderedJob, local: LocalJob) -> None:
        if not local.stopped:
            local.stopped, local.stopped_s = True, self._state.now_s
        self._state.observed(job.job).escaped_s = 0.0
        self._state.save()  # an agent that starts again must thaw it
        try:
            self._freezer.freeze(self._state.living.get(job.slurm_job, []))
        except OSError:
            local.driven = False
            with contextlib.suppress(OSError):  # else the next tick tries that again
                self._thaw(job, local)
            raise

    def _thaw(self, job: OrderedJob, local: LocalJob) -> None:
        self._freezer.thaw(self._state.living.get(job.slurm_job, []))
        local.frozen_s += frozen_for_s(local, self._state.now_s)
        local.stopped = False


def frozen_for_s(local: LocalJob, now_s: float) -> float:
    """For how long a job has been frozen; 0: it is not, or so shortly that this is one of the pauses of a driven job."""
    passed_s = now_s - local.stopped_s if local.stopped else 0.0
    return passed_s if passed_s >= FROZEN_S else 0.0
