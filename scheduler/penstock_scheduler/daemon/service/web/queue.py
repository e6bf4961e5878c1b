"""The page of jobs: who waits and why, who runs, who is refused, and the viewer's jobs that have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from penstock_scheduler.api.estimate_messages import JobEstimate, TimeRange
from penstock_scheduler.api.history_messages import AllocationSpan, QueueEntry
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.daemon.service.api import Call
from penstock_scheduler.daemon.service.web.cells import IDLE_BELOW, World
from penstock_scheduler.daemon.service.web.cluster import Scope, scope_of
from penstock_scheduler.daemon.service.web.render import Fragments, block

TEMPLATE = "queue.html"
PAGE = 100
"""Most rows of a page."""

State = Literal["waiting", "running", "refused", "ended"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Query:
    """Which jobs to show; empty: all."""

    state: State = "waiting"
    user: str = ""
    account: str = ""
    partition: str = ""
    code: str = ""
    after: int = 0
    """Rows that earlier pages have shown."""

    @property
    def filters(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.user or self.account or self.partition or self.code)

    def takes(self, user: str, account: str, partition: str, code: str = "") -> bool:
        """Whether a job with these belongs to it."""
        wanted = ((self.user, user), (self.account, account), (self.partition, partition), (self.code, code))
        return all(not value or value == given for value, given in wanted)


@dataclass(frozen=True, slots=True)
class Row:
    """A job, as the viewer may see it."""

    job: str
    name: str
    user: str
    account: str
    partition: str
    own: bool
    """Whether the viewer may open its page and read why it waits."""
    gpus: str = ""
    position: int | None = None
    code: str = ""
    text: str = ""
    needs: str = ""
    since_s: float | None = None
    start: TimeRange | None = None
    """Estimated, with a probability of 80 %; None: not known."""
    unknown: str = ""
    """Why the start is not known; empty: it is, or nothing was estimated."""
    progress: float | None = None
    busy: float | None = None
    idle: bool = False
    state: str = ""
    end_s: float | None = None


def fragments(call: Call, world: World, query: Query, ended: Sequence[JobView] = ()) -> Fragments:
    """The page. `ended`: the newest jobs that have ended, of those that the viewer may see."""
    rows = [_ended(view) for view in ended] if query.state == "ended" else _rows(call, world, query.state)
    found = (
        [row for row in rows if query.takes(row.user, row.account, row.partition, row.code)] if query.filters else rows
    )
    shown = found[query.after : query.after + PAGE]
    counts = {state: None if state == "ended" else len(_rows(call, world, state)) for state in STATES}
    hidden = sum(entry.code != "refused" for entry in world.queue) - (counts["waiting"] or 0)
    parts = {
        "rows": "".join(_row(query.state, row) for row in shown),
        "counts": block(TEMPLATE, "counts", counts=counts, hidden=hidden, state=query.state),
        "more": block(TEMPLATE, "more", query=query, found=len(found), shown=len(shown), page=PAGE),
    }
    return Fragments(parts, "", {"query": query, "choices": _choices(call, world, query.state, rows), "states": STATES})


_kept: WeakKeyDictionary[World, dict[tuple[Scope, State], Mapping[str, Sequence[str]]]] = WeakKeyDictionary()
"""World -> what there is to choose from, by who looks at which jobs."""


def _choices(call: Call, world: World, state: State, rows: Sequence[Row]) -> Mapping[str, Sequence[str]]:
    kept = _kept.setdefault(world, {})
    # Of refused jobs and of those that have ended, users see their own alone.
    who = scope_of(call) if call.sees_all or state in ("waiting", "running") else call.identity.user
    if (who, state) not in kept:
        names = ("user", "account", "partition", "code")
        kept[who, state] = {name: _some(getattr(row, name) for row in rows) for name in names}
    return kept[who, state]


def _some(values: Iterable[str]) -> list[str]:
    """What there is to choose from, most frequent first."""
    return [value for value, _ in Counter(value for value in values if value).most_common(200)]


@lru_cache(maxsize=16_384)
def _row(state: State, row: Row) -> str:
    return block(TEMPLATE, "row", state=state, row=row)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A row as the job's user sees it, and as others do."""

    user: str
    full: Row
    outside: Row


_pairs: WeakKeyDictionary[World, dict[State, list[_Pair]]] = WeakKeyDictionary()
"""World -> rows, made once for all viewers."""


def _rows(call: Call, world: World, state: State) -> list[Row]:
    """The rows that the viewer may see. Of refused jobs, only their users and operators see that there are any."""
    if world not in _pairs:
        _pairs[world] = {
            "waiting": [_entry(entry, _estimate(world, entry)) for entry in world.queue if entry.code != "refused"],
            "refused": [_entry(entry, None) for entry in world.queue if entry.code == "refused"],
            "running": sorted((_span(world, span) for span in world.spans), key=_newest, reverse=True),
        }
    pairs, me = _pairs[world][state], call.identity.user
    if call.sees_all:
        return [pair.full for pair in pairs]
    if state == "refused" or not call.may_see_of("jobs", ""):
        return [pair.full for pair in pairs if pair.user == me]
    return [pair.full if pair.user == me else pair.outside for pair in pairs]


def _newest(pair: _Pair) -> tuple[float, str]:
    return pair.full.since_s or 0.0, pair.full.job


def _estimate(world: World, entry: QueueEntry) -> JobEstimate | None:
    return None if world.estimates is None else world.estimates.of(entry.job, entry.submit_s, waits=True)


def _entry(entry: QueueEntry, estimate: JobEstimate | None) -> _Pair:
    full = Row(
        job=entry.job,
        name=entry.name,
        user=entry.user,
        account=entry.account,
        partition=entry.partition,
        own=True,
        position=entry.position,
        code=entry.code,
        text=entry.text,
        needs=entry.needs,
        since_s=entry.submit_s,
        start=None if estimate is None else estimate.start,
        unknown="" if estimate is None or estimate.start is not None else estimate.unknown,
    )
    return _Pair(entry.user, full, replace(full, own=False, text="", needs="", unknown=""))


def _span(world: World, span: AllocationSpan) -> _Pair:
    view, busy = world.jobs.get(span.job), world.busy.get(span.job)
    full = Row(
        job=span.job,
        name="" if view is None else view.name,
        user=span.user,
        account=span.account,
        partition=span.partition,
        own=True,
        gpus=f"{span.gpus} {span.gpu_type}",
        since_s=span.from_s,
        progress=None if view is None else progress(view),
        busy=busy,
        idle=busy is not None and busy < IDLE_BELOW,
    )
    return _Pair(span.user, full, replace(full, own=False, name="", progress=None))


def _ended(view: JobView) -> Row:
    return Row(
        job=view.id,
        name=view.name,
        user=view.user,
        account=view.account,
        partition=view.partition,
        own=True,
        state=view.ended,
        text=view.ended_text,
        since_s=view.submit_s,
        end_s=view.end_s,
    )


def progress(view: JobView) -> float | None:
    """Share of all work that is done, to a thousandth; None: not known."""
    if view.progress is None or not view.total:
        return None
    return round(min(view.progress / view.total, 1.0), 3)
