"""Simulated jobs: what each asks for, how fast it is, and what has happened to it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from penstock_profiles.estimators import AnyEstimator, Batch
from penstock_profiles.matrix import Configurations, best_batches
from penstock_profiles.noise import GradientNoise
from penstock_profiles.sensitivity import SensitivityProfile
from penstock_scheduler.model import Job, JobId, JobSpec, Placement
from penstock_scheduler.simulator.model_truth import Shape
from penstock_scheduler.simulator.truth import JobTruth, Measurement, advance, rate_at


class Learner(Protocol):
    """What is known about a job while it runs: to the job itself, and to the scheduler."""

    @property
    def estimator(self) -> AnyEstimator:
        """What the scheduler knows. The same object until something new is measured."""
        ...

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """GPU types on which a policy may measure it: see `JobFacts.unmeasured_types`."""
        ...

    def saw(self, gpu_type: str, seen: Measurement | None, noise: GradientNoise | None) -> None:
        """Take in what the job has measured while it ran."""
        ...

    @property
    def kin_gpus(self) -> int:
        """Most GPUs on which a job like it was measured, as far as it is believed to be like them."""
        ...

    @property
    def kin_work(self) -> tuple[float, ...]:
        """The whole work of such jobs."""
        ...

    @property
    def own_estimator(self) -> AnyEstimator:
        """The estimator by which the job itself chooses its batch size."""
        ...


@dataclass(slots=True)
class SimulatedRun:
    """A job's time on one placement."""

    start_s: float
    end_s: float
    placement: Placement
    ready_s: float
    """When the restart was over."""
    progress: float
    """Progress when it began."""
    rates: list[tuple[float, float]] = field(default_factory=list)
    """(from when on, progress per second), one for each batch size or epoch that was observed."""

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds that it held."""
        return self.placement.gpus * (self.end_s - self.start_s)


@dataclass(slots=True)
class SimulatedJob:
    """A job and what has happened to it. The cluster sets the fields from `shape` on."""

    id: JobId
    name: str
    spec: JobSpec
    truth: JobTruth
    """How fast it really is."""
    submit_s: float
    learner: Learner | None = None
    """None: it measures nothing, and trains with the batch size that its user asked for."""
    batch_size: int | None = None
    """Total batch size that its user asked for, samples; None: the model's initial one."""
    user: str = "user"
    account: str = ""
    time_limit_s: float | None = None
    """Time limit that its user gave, for backfill; None: none. The simulator does not end jobs at their time limit."""
    sensitivity: SensitivityProfile | None = None
    """How CPU and memory affect its speed; None: not at all, or unknown."""
    progress: float = 0.0
    """As of the last observation; for a job without a learner as of its last event, or `SimulatedCluster.close`."""
    allocation: Placement | None = None
    starts: int = 0
    most_gpus: int = 0
    """Most GPUs that it has run on."""
    failures: int = 0
    """Number of failures of its nodes while it ran."""
    finish_s: float | None = None
    runs: list[SimulatedRun] = field(default_factory=list)
    """One for each time that it held GPUs; the end of the last one is not known while it runs."""
    batch: Batch | None = None
    shape: Shape = ()
    """GPUs on each node of its allocation."""
    speed: float = 1.0
    """Factor on its rate, for effects outside the truth: neighbours, stragglers, CPUs and memory."""
    settled_s: float = 0.0
    """The time at which it had `progress`."""
    saved: float = 0.0
    """Progress in its last checkpoint."""
    end_event: int = -1
    """Number of the event at which it ends if nothing changes; -1: none."""
    known: tuple[AnyEstimator, str, Shape] | None = None
    """The estimator that chose the present batch size."""
    view: Job | None = None
    """The job as observed last."""
    leave_event: int = -1
    """Number of the event at which it leaves its GPUs; -1: it stays."""
    trains_until_s: float = math.inf
    startable_s: float = -math.inf
    """It cannot start before."""

    @property
    def work(self) -> float:
        """Progress at which it is done."""
        return self.truth.work

    @property
    def restarts(self) -> int:
        """Times that it was stopped and started again."""
        return max(self.starts - 1, 0)

    @property
    def rate(self) -> float:
        """Progress per second once it trains, by the progress of the last observation; 0 while it holds no GPU."""
        if self.allocation is None:
            return 0.0
        return self.speed * rate_at(self.truth, self.allocation.gpu_type, self.shape, self.batch, self.progress)

    @property
    def held(self) -> Placement:
        """Its allocation, when it must have one."""
        assert self.allocation is not None, "only a job with GPUs trains"
        return self.allocation

    def settle(self, now_s: float, checkpoint_s: float) -> None:
        """Bring its progress and its last checkpoint to `now_s`. It writes a checkpoint every `checkpoint_s` of
        training."""
        ready_s = self.runs[-1].ready_s
        saved_s = ready_s + (now_s - ready_s) // checkpoint_s * checkpoint_s
        if saved_s > max(ready_s, self.settled_s):
            self._train_until(saved_s)
            self.saved = self.progress
        self._train_until(now_s)

    def _train_until(self, until_s: float) -> None:
        seconds = min(until_s, self.trains_until_s) - max(self.settled_s, self.runs[-1].ready_s)
        if seconds > 0:
            gpu_type = self.held.gpu_type
            self.progress, _ = advance(self.truth, gpu_type, self.shape, self.batch, self.progress, seconds, self.speed)
        self.settled_s = until_s

    def done_s(self) -> float:
        """When its work will be done if nothing changes; infinite: never, or it leaves its GPUs before."""
        ready_s = max(self.settled_s, self.runs[-1].ready_s)
        gpu_type = self.held.gpu_type
        _, needed_s = advance(self.truth, gpu_type, self.shape, self.batch, self.progress, math.inf, self.speed)
        done = needed_s < math.inf and ready_s + needed_s <= self.trains_until_s
        return ready_s + needed_s if done else math.inf


def choose_batches(jobs: Iterable[SimulatedJob]) -> list[SimulatedJob]:
    """Let jobs that hold GPUs choose the batch size that is best by what they know. Returns the jobs that changed
    it."""
    totals: list[tuple[SimulatedJob, int | None]] = []
    learning: list[tuple[SimulatedJob, AnyEstimator, str, Shape]] = []
    for job in jobs:
        if job.learner is None:
            totals.append((job, job.batch_size))
            continue
        known = (job.learner.own_estimator, job.held.gpu_type, job.shape)
        if job.known is None or known[0] is not job.known[0] or known[1:] != job.known[1:]:
            job.known = known
            learning.append((job, *known))
    if not learning:
        return _with_batches(totals)
    where = Configurations(
        tuple(gpu_type for *_, gpu_type, _ in learning),
        tuple(len(shape) for *_, shape in learning),
        tuple(sum(shape) for *_, shape in learning),
    )
    best = best_batches([estimator for _, estimator, *_ in learning], where)
    for (job, *_), batch, gpus in zip(learning, best, where.gpus, strict=True):
        totals.append((job, None if batch is None else gpus * batch.atomic_batch * (batch.accumulation_steps + 1)))
    return _with_batches(totals)


def _with_batches(totals: Iterable[tuple[SimulatedJob, int | None]]) -> list[SimulatedJob]:
    """Let jobs train with these total batch sizes. Returns the jobs with a new batch size."""
    changed = []
    for job, total in totals:
        before, job.batch = job.batch, job.truth.batch(job.held.gpu_type, job.shape, total)
        if job.batch != before:
            changed.append(job)
    return changed


class SimulatedClock:
    """Time that passes only in `sleep`.

    `next_event_s` tells when something happens that ends a sleep early; None: sleeps are never cut short.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self.next_event_s: Callable[[], float] | None = None

    def now_s(self) -> float:
        """Seconds since the start of the simulation, plus its start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Jump ahead. An infinite sleep in which nothing ever happens takes no time."""
        until_s = self._now_s + seconds
        if self.next_event_s is not None:
            until_s = min(until_s, max(self.next_event_s(), self._now_s))
        if math.isfinite(until_s):
            self._now_s = until_s


What = Literal["end", "leave", "slice", "fail", "repair"]
"""End and leave are of a job; a slice, a failure and a repair are of a node."""


class Event(NamedTuple):
    """A future event. Events at the same time happen in the order in which they were foreseen."""

    at_s: float
    number: int
    what: What
    subject: str
    """Job or node."""


class Events:
    """Future events. A stale event, which later changes prevent, never happens.

    Args:
        is_stale: whether an event is stale.
        dropped: called with each stale event that is removed.
    """

    def __init__(self, is_stale: Callable[[Event], bool], dropped: Callable[[Event], None]) -> None:
        self._is_stale, self._dropped = is_stale, dropped
        self._numbers = itertools.count()
        self._heap: list[Event] = []

    def push(self, at_s: float, what: What, subject: str) -> int:
        """Foresee an event; returns its number."""
        number = next(self._numbers)
        heapq.heappush(self._heap, Event(at_s, number, what, subject))
        return number

    def next_s(self) -> float:
        """Time of the next event; infinite: there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            self._dropped(heapq.heappop(self._heap))
        return self._heap[0].at_s if self._heap else math.inf

    def pop(self, until_s: float) -> Event | None:
        """Remove and return the next event that happens at or before `until_s`; None: there is none."""
        while self._heap and self._heap[0].at_s <= until_s:
            event = heapq.heappop(self._heap)
            if not self._is_stale(event):
                return event
            self._dropped(event)
        return None

    def first_s(self, wanted: Callable[[Event], bool]) -> float:
        """Time of the first event that is `wanted`, which is called in the order of time; infinite: there is none."""
        passed, found_s = [], math.inf
        while self._heap and found_s == math.inf:
            passed.append(event := heapq.heappop(self._heap))
            if not self._is_stale(event) and wanted(event):
                found_s = event.at_s
        for event in passed:
            heapq.heappush(self._heap, event)
        return found_s
