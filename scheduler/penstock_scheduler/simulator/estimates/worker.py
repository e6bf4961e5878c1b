"""Estimates in a process of its own: `python -m penstock_scheduler.simulator.estimates.worker`, started by penstockd.

It reads the store and writes a line of JSON, a `Found`, to standard output for each round that it has estimated. It has the
lowest priority, takes at most a share of one core, and skips the rounds that come meanwhile. It ends when its standard input
ends, which it does with penstockd. Its settings come as one line of JSON on standard input.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from penstock_profiles.families import load_families
from penstock_scheduler.api.estimate_messages import Estimates, JobEstimate, NewJobs, TimeRange
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Job, Phase, Snapshot
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import BadJobSpec, PenstockError
from penstock_scheduler.people.safe_text import guard
from penstock_scheduler.rounds.one_thread import one_blas_thread
from penstock_scheduler.simulator.estimates import NOTES, EstimatesOrder, Found
from penstock_scheduler.simulator.estimates.estimating import CHANCE, Estimated, JobRanges, Range, estimate
from penstock_scheduler.simulator.estimates.held import Held, Notes
from penstock_scheduler.simulator.estimates.past import NEWEST, Past, PastJob
from penstock_scheduler.store.sql import SqlStore, open_store

LOOK_S = 1.0
"""How often it looks for a newer round."""
LONGEST_S = 60.0
"""Processor time for the estimates of one round. What is not played until then is not known."""
NOTE_S = 3600.0
"""Time from one round whose ranges are noted to the next."""
MEMORY_BYTES = 4 * 2**30
"""Address space of the process."""


class PastJobs:
    """The jobs of a store, read once and then as they change."""

    def __init__(self, store: SqlStore, specs: SpecModels) -> None:
        self._store, self._specs = store, specs
        self._read = store.newest_job_change()
        self._jobs = {view.id: past for _, view in store.jobs(limit=NEWEST) if (past := self._past(view)) is not None}

    def now(self, record: RoundRecord) -> Past:
        """What is known at a round. Raises StoreError."""
        while changed := self._store.jobs_changed(self._read):
            for number, view in changed:
                self._read = number
                if (past := self._past(view)) is not None:
                    self._jobs[view.id] = past
        newest = sorted(self._jobs.values(), key=lambda past: past.job.submit_s)[-NEWEST:]
        self._jobs = {past.job.id: past for past in newest}
        return Past(newest, record.snapshot.time_s)

    def _past(self, view: JobView) -> PastJob | None:
        """A job as an earlier one; None: this site cannot read its job spec any more."""
        try:
            self._specs.check(view.spec)
        except BadJobSpec:
            return None
        partitions = (view.partition,) if view.partition else ()
        job = Job(
            view.id, view.name, view.user, view.spec, partitions, Phase.QUEUED, view.submit_s, account=view.account
        )
        ended_s = view.end_s if view.state == "ended" else None
        return PastJob(job, sum(view.gpu_seconds.values()), ended_s, view.start_s)


def messages_of(found: Mapping[str, JobRanges], at_s: float) -> dict[str, JobEstimate]:
    """Estimates for clients."""

    def times(of: Range | None) -> TimeRange | None:
        return None if of is None else _times(of, at_s)

    return {
        job: JobEstimate(
            at_s=at_s, probability=CHANCE, start=times(each.start), end=times(each.end), unknown=each.unknown
        )
        for job, each in found.items()
    }


def _times(of: Range, at_s: float) -> TimeRange:
    return TimeRange(from_s=at_s + of.low_s, to_s=at_s + of.high_s if math.isfinite(of.high_s) else None)


class Estimating:
    """The estimates of one round after the other, as penstockd shows them.

    Args:
        notes: those of the last process; None: there are none.
    """

    def __init__(self, specs: SpecModels, notes: Notes | None = None) -> None:
        self._specs, self._held, self._noted_s = specs, Held(notes), -math.inf

    def of(self, record: RoundRecord, past: Past, most_s: float | None = None) -> Found:
        """The estimates of a round.

        Args:
            past: as of the round.
            most_s: processor time that it may take, s; None: as long as it takes.
        """
        snapshot = record.snapshot
        drawn, seconds = _drawn(record, past, self._specs, most_s)
        shown = drawn.widened(self._held.widths(past))
        due = abs(snapshot.time_s - self._noted_s) >= NOTE_S
        if due:
            self._noted_s = snapshot.time_s
            draw = np.random.default_rng(snapshot.round)
            self._held.note(snapshot.jobs, drawn.jobs, snapshot.time_s, draw)
        notes = self._held.notes.model_dump(mode="json") if due else None
        return Found(estimates=_messages(snapshot, shown, seconds), notes=notes)


def _drawn(record: RoundRecord, past: Past, specs: SpecModels, most_s: float | None) -> tuple[Estimated, float]:
    """The ranges as they are drawn, and the processor time that it took, s."""
    begun_s = time.process_time()
    types = {node.gpu_type for node in record.snapshot.nodes}
    names = tuple(sorted({name for node in record.snapshot.nodes for name in node.partitions}))

    def facts(jobs: Sequence[Job]):  # type: ignore[no-untyped-def]
        return specs.facts(jobs, types)

    found = estimate(record, past.within(names), facts, most_s=most_s)
    return found, time.process_time() - begun_s


def _messages(snapshot: Snapshot, found: Estimated, seconds: float) -> Estimates:
    at_s = snapshot.time_s
    return Estimates(
        round=snapshot.round,
        at_s=at_s,
        seconds=seconds,
        jobs=messages_of(found.jobs, at_s),
        new=[
            NewJobs(gpus=gpus, at_s=at_s, probability=CHANCE, start=_times(each, at_s))
            for gpus, each in found.new.items()
        ],
    )


def main() -> int:
    """Entry point. Exit status: 0 its input ended, 1 it cannot run."""
    guard(rich=False)
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    order = EstimatesOrder.model_validate_json(sys.stdin.readline())
    try:
        with one_blas_thread():
            _run(order)
    except PenstockError as error:
        print(f"penstock-estimates: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _run(order: EstimatesOrder) -> None:
    store = open_store(order.store)
    specs = SpecModels(load_families(order.families), order.restart_cost_s)
    jobs = PastJobs(store, specs)
    kept = store.control(NOTES)
    estimating = Estimating(specs, None if kept is None else Notes.model_validate(kept))
    done = -1
    while True:
        record = _newest(store, done)
        pause_s = LOOK_S
        if record is not None:
            done = record.snapshot.round
            found = estimating.of(record, jobs.now(record), LONGEST_S)
            print(json.dumps(found.model_dump(mode="json")), flush=True)  # noqa: T201
            seconds = found.estimates.seconds
            pause_s = max(order.every_s, seconds / order.cores - seconds)
        if select.select([sys.stdin], [], [], pause_s)[0]:
            return  # nothing is ever written there, so the input has ended


def _newest(store: SqlStore, done: int) -> RoundRecord | None:
    """The newest round if it is newer than this one."""
    try:
        newest = store.summaries(None, 1)
        return store.round(newest[0].round) if newest and newest[0].round > done else None
    except PenstockError:
        return None  # the next look may find it


if __name__ == "__main__":
    sys.exit(main())
