"""The GPU-seconds of each job: GPUs that it holds times seconds, by GPU type, on the site's own nodes.

The round loop observes the cluster every few seconds. Each observation adds the time since the previous one:

1. A run counts from its start to its end by the cluster's own clock where the cluster tells these times. The sum then agrees
   with the cluster's accounts. These times are whole seconds, so a run that was counted up to now may turn out to have ended a
   moment earlier.
2. If the cluster does not tell when a run ended, its accounts may. Otherwise the run counts to the middle of the two
   observations between which it ended.
3. Time in which a job is suspended does not count. The exception is suspension between the last observation of a run and its end.
4. The first observation of a new daemon counts from the newest saved round on, because jobs run on without the daemon.
5. An observation may take long. A run that ended meanwhile counts up to the beginning of the observation. The next observation
   adds the rest, whether or not the cluster tells of that run again.
6. Nodes that a cloud fills do not count: they are paid for in dollars.

`GpuSeconds` reads no clock and asks no cluster, so that the same observations always give the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.model import ClusterState, EndedRun, Job, JobId, Phase, Placement

FORGET_S = 300.0
"""How long the GPU-seconds of an absent job are kept. By then, a saved round has its last ones. A job that is out of sight while
Slurm requeues it keeps its GPU-seconds."""

UNKNOWN_TYPE = "unknown type"
"""GPU type of what was held on nodes that the cluster no longer lists, and whose type has not been seen either."""

Charge = tuple[JobId, Placement, float]
"""Job, what it held, and for how many seconds."""


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A run of a job, counted up to some time."""

    held: Placement
    started_s: float | None
    """On the cluster's clock; None: the cluster does not tell."""
    restarts: int
    counted_s: float
    """Time up to which the run is counted."""
    sent: bool = False
    """Whether the run was only sent to the cluster, and not observed yet."""
    suspended_s: float = 0.0
    """How long the run had been suspended by `counted_s`."""


@dataclass(frozen=True, slots=True)
class UnknownEnds:
    """Jobs with runs whose end only the cluster's accounts can tell."""

    jobs: tuple[JobId, ...]
    since_s: float
    """The runs ended after this time."""


class GpuSeconds:
    """The GPU-seconds of each job, kept up to date with each observation.

    Args:
        attained: GPU-seconds so far, job -> GPU type -> GPU-seconds.
        jobs: the jobs of the newest saved round.
        observed_s: when these jobs were observed; None: there is no saved round.
    """

    def __init__(
        self,
        attained: Mapping[JobId, dict[str, float]] | None = None,
        jobs: Iterable[Job] = (),
        observed_s: float | None = None,
    ) -> None:
        self.attained = dict(attained or {})
        """Job -> GPU type -> GPU-seconds, each at least 0. Each change makes a new mapping, so a snapshot may keep it."""
        self._rests: list[Charge] = []
        """The rests of runs that ended during the newest observation, which the next observation adds to `attained`."""
        self._absent_since_s: dict[JobId, float] = {}
        self._observed_s = observed_s
        self._state: ClusterState | None = None
        """The newest observation."""
        jobs = tuple(jobs)
        self._runs: dict[JobId, CountedRun] = {} if observed_s is None else _present_runs(jobs, observed_s)
        self._submitted_s = {job.id: job.submit_s for job in jobs if job.id in self.attained}
        """When the jobs in `attained` were submitted, as far as they have been seen."""

    @property
    def so_far(self) -> Mapping[JobId, Mapping[str, float]]:
        """`attained`, and the rest of runs that ended during the newest observation: what a job that is gone has used in all."""
        if not self._rests:
            return self.attained
        found = dict(self.attained)
        add(found, self._rests)
        return found

    def unknown_ends(self, state: ClusterState) -> UnknownEnds | None:
        """What to ask the cluster's accounts before this state is counted; None: the state itself tells everything."""
        present, ended = _present_and_ended(state)
        unknown = _unknown(self._over(present), present, ended)
        if not unknown:
            return None
        return UnknownEnds(tuple(unknown), min(run.counted_s for run in unknown.values()) - 1)

    def count(
        self,
        state: ClusterState,
        now_s: float,
        recorded: Sequence[EndedRun] = (),
        cloud_nodes: Collection[str] = frozenset(),
    ) -> None:
        """Add the time since the previous observation.

        Args:
            state: the new observation.
            now_s: when the observation began.
            recorded: what the cluster's accounts say about `unknown_ends`.
            cloud_nodes: names of nodes that a cloud fills; runs on them do not count.
        """
        since_s = now_s if self._observed_s is None else self._observed_s
        present, ended = _present_and_ended(state)
        self._forget_former(state)
        runs, over = _present_runs(state.holding, now_s), self._over(present)
        from_accounts = _recorded(recorded, _unknown(over, present, ended)) if recorded else {}
        charges = [
            *[rest for rest in self._rests if rest[0] not in ended],  # else `_last_runs` has them
            *_over_runs(over, present, ended, runs, from_accounts, now_s),
            *self._present(runs, since_s, now_s),
            *self._last_runs(ended, from_accounts, since_s, now_s),
        ]
        charges = [(job_id, self._typed(job_id, held), seconds) for job_id, held, seconds in charges]
        self._forget(present, now_s)
        self._rests = [
            (job_id, self._typed(job_id, last.held), last.ended_s - max(now_s, last.started_s))
            for job_id, last in ended.items()
            if last.ended_s > now_s and job_id not in from_accounts and not in_cloud(last.held, cloud_nodes)
        ]
        add(self.attained, [charge for charge in charges if not cloud_nodes or not in_cloud(charge[1], cloud_nodes)])
        for job_id in self._submitted_s.keys() - self.attained.keys():
            del self._submitted_s[job_id]
        for job_id in (self.attained.keys() - self._submitted_s.keys()) & present.keys():
            self._submitted_s[job_id] = present[job_id].submit_s
        self._runs, self._observed_s, self._state = runs, now_s, state

    def sent(self, jobs: Iterable[Job], placements: Mapping[JobId, Placement], now_s: float) -> None:
        """Starts were sent to the cluster: these runs may begin and end before the next observation."""
        for job in jobs:
            if job.id in placements and job.id not in self._runs and not job.leaving:
                self._runs[job.id] = CountedRun(placements[job.id], None, job.restarts, now_s, sent=True)

    def _over(self, present: Mapping[JobId, Job]) -> dict[JobId, CountedRun]:
        """Counted runs that the new observation no longer shows."""
        return {
            job_id: run
            for job_id, run in self._runs.items()
            if (job := present.get(job_id)) is None or job.restarts != run.restarts or job.leaving
        }

    def _present(self, runs: Mapping[JobId, CountedRun], since_s: float, now_s: float) -> Iterator[Charge]:
        """Runs that go on."""
        for job_id, run in runs.items():
            known = self._runs.get(job_id)
            if known is None or known.sent or known.restarts != run.restarts:
                begin_s = _begin_s(run.started_s, since_s)
                # A run that was out of sight for one observation may have been suspended before that, too.
                suspended_s = min(run.suspended_s, max(now_s - begin_s, 0.0))
            else:
                begin_s = known.counted_s
                suspended_s = run.suspended_s - known.suspended_s
            yield job_id, run.held, max(now_s, begin_s) - begin_s - suspended_s

    def _last_runs(
        self,
        ended: Mapping[JobId, EndedRun],
        from_accounts: Mapping[JobId, Sequence[EndedRun]],
        since_s: float,
        now_s: float,
    ) -> Iterator[Charge]:
        """Runs of jobs that are gone, by the cluster's own times."""
        for job_id, last in ended.items():
            if job_id in from_accounts:
                continue
            known = self._runs.get(job_id)
            if known is not None and known.started_s == last.started_s:
                yield job_id, last.held, min(last.ended_s, now_s) - known.counted_s
            elif last.ended_s > since_s:
                yield job_id, last.held, min(last.ended_s, now_s) - _begin_s(last.started_s, since_s)

    def _typed(self, job_id: JobId, held: Placement) -> Placement:
        """What a run held. Where the cluster no longer lists its nodes, their type is that of the newest observed run there."""
        if held.gpu_type or (known := self._runs.get(job_id)) is None or known.held.nodes != held.nodes:
            return held
        return replace(held, gpu_type=known.held.gpu_type)

    def _forget_former(self, state: ClusterState) -> None:
        """Drop what jobs have attained whose ids other jobs have now."""
        for job in (*state.changed(self._state), *(each.job for each in state.waiting)):
            if is_another(job, self._submitted_s.get(job.id)):
                self.attained.pop(job.id, None)
                self._runs.pop(job.id, None)
                del self._submitted_s[job.id]

    def _forget(self, present: Mapping[JobId, Job], now_s: float) -> None:
        """Drop the GPU-seconds of jobs that have been absent for long."""
        absent = self.attained.keys() - present.keys()
        self._absent_since_s = {job: self._absent_since_s.get(job, now_s) for job in absent}
        gone = {job for job, since_s in self._absent_since_s.items() if now_s - since_s >= FORGET_S}
        self.attained = {job: attained for job, attained in self.attained.items() if job not in gone}


def add(attained: dict[JobId, dict[str, float]], charges: Iterable[Charge]) -> None:
    """Add to the GPU-seconds of jobs, each of which gets a new mapping."""
    for job_id, held, seconds in charges:
        before, gpu_type = attained.get(job_id, {}), held.gpu_type or UNKNOWN_TYPE
        attained[job_id] = before | {gpu_type: max(before.get(gpu_type, 0.0) + held.gpus * seconds, 0.0)}


def in_cloud(held: Placement, cloud_nodes: Collection[str]) -> bool:
    """Whether a run is on nodes that a cloud fills, which are paid for in dollars."""
    return any(node in cloud_nodes for node in held.nodes)


def _present_and_ended(state: ClusterState) -> tuple[Mapping[JobId, Job], dict[JobId, EndedRun]]:
    """The jobs that are there, and the last runs of jobs that are gone."""
    return state.present, {run.job: run for run in state.ended if run.job not in state.present}


def _over_runs(
    over: Mapping[JobId, CountedRun],
    present: Mapping[JobId, Job],
    ended: Mapping[JobId, EndedRun],
    runs: Mapping[JobId, CountedRun],
    from_accounts: Mapping[JobId, Sequence[EndedRun]],
    now_s: float,
) -> Iterator[Charge]:
    """The rest of counted runs that are over. `_last_runs` has the runs of jobs that are gone and have a known end."""
    for job_id, before in over.items():
        if job_id in from_accounts:
            for each in from_accounts[job_id]:
                begin_s = before.counted_s if each.started_s == before.started_s else each.started_s
                ended_s = each.ended_s if job_id in present else min(each.ended_s, now_s)
                yield job_id, each.held, ended_s - begin_s
        elif job_id not in ended:
            yield job_id, before.held, _rest_s(before, present.get(job_id), runs.get(job_id), now_s)


def _present_runs(jobs: Iterable[Job], now_s: float) -> dict[JobId, CountedRun]:
    """Job -> its present run, of jobs that hold GPUs which count."""
    return {
        job.id: CountedRun(
            job.allocation,
            job.started_s,
            job.restarts,
            max(now_s, job.started_s or 0.0),
            suspended_s=job.suspended_s,
        )
        for job in jobs
        if job.allocation is not None and not job.leaving and job.phase in (Phase.RUNNING, Phase.STOPPING)
    }


def _unknown(
    over: Mapping[JobId, CountedRun], present: Mapping[JobId, Job], ended: Mapping[JobId, EndedRun]
) -> dict[JobId, CountedRun]:
    """Of the runs that are over, those with an end that the observation does not tell."""

    def told(job_id: JobId, run: CountedRun) -> bool:
        job = present.get(job_id)
        if job is None:
            return job_id in ended and ended[job_id].started_s == run.started_s
        return job.stopped_s is not None and job.restarts <= run.restarts + 1

    return {job_id: run for job_id, run in over.items() if not told(job_id, run)}


def _recorded(recorded: Sequence[EndedRun], unknown: Mapping[JobId, CountedRun]) -> dict[JobId, list[EndedRun]]:
    """Job -> all of its runs in the accounts since it was last counted."""
    found: dict[JobId, list[EndedRun]] = {}
    for each in recorded:
        # A run that ended in the very second of the last observation ended after it, if that observation showed it.
        run = unknown.get(each.job)
        if run is not None and (each.started_s == run.started_s or each.ended_s > run.counted_s):
            found.setdefault(each.job, []).append(each)
    return found


def _begin_s(started_s: float | None, since_s: float) -> float:
    """When a run begins to count that the observation at `since_s` did not show. One that began in that second began after it."""
    return since_s if started_s is None or started_s <= since_s - 1 else started_s


def _rest_s(run: CountedRun, job: Job | None, after: CountedRun | None, now_s: float) -> float:
    """Seconds of a run that is over which are not counted yet.

    Args:
        run: the run as it was last observed or sent.
        job: its job now; None: the job is out of sight.
        after: the job's present run.
        now_s: the time.
    """
    if job is not None and job.restarts > run.restarts + 1:
        return 0.0  # after two restarts the time of the first one is unknown
    if job is not None and job.stopped_s is not None:
        return min(job.stopped_s, now_s) - run.counted_s
    if run.started_s is None and not run.sent:
        return 0.0  # this cluster tells no times
    if run.sent and job is None:
        return 0.0  # it never began, as far as is known
    latest = (now_s, job.requeued_s if job is not None else None, after.started_s if after is not None else None)
    latest_s = min(time_s for time_s in latest if time_s is not None)
    ended_s = math.floor((run.counted_s + max(latest_s, run.counted_s)) / 2)
    return (max(ended_s, run.counted_s) - run.counted_s) / 2 if run.sent else ended_s - run.counted_s
