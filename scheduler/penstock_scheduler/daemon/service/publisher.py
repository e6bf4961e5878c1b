"""Publishes what penstockd knows to API processes of their own, through the store.

Jobs, rounds, tokens and ledger are in the store anyway. The rest that readers need is published after each tick, in one
transaction and only as far as it has changed. A job's GPU-seconds grow with time: their amount and rate are published, and again
only when the rate changes or the job reports progress.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from penstock_scheduler import __version__
from penstock_scheduler.api.estimate_messages import Estimates
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.port import Chosen
from penstock_scheduler.model import Node, Refusal, UnknownValue
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.published import LiveFigures

log = logging.getLogger(__name__)

BEAT, CLUSTER, CHOSEN, ROUND, ESTIMATES = "beat", "cluster", "chosen", "round", "estimates"
"""Names under which it is published."""

BEAT_S = 1.0
"""Longest time between two signs of life."""

OFF_GPU_S = 0.5
"""GPU-seconds by which what readers work out may differ from what was counted."""


class Beat(BaseModel):
    """A sign of life, and what has changed since the last one."""

    model_config = ConfigDict(frozen=True)

    time_s: float
    pid: int
    uid: int
    started_s: float
    version: str
    observed_s: float | None
    versions: dict[str, int]
    """Name -> grows when something else is published under it, or of `tokens`, when they change."""
    stopped: bool = False
    """penstockd was stopped, and this is its last one."""


class Round(BaseModel):
    """The newest round."""

    model_config = ConfigDict(frozen=True)

    number: int
    prices: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The newest observation, without its jobs."""

    nodes: tuple[Node, ...]
    refused: tuple[Refusal, ...]
    unknown: tuple[UnknownValue, ...]
    held: dict[str, int]
    """Node -> GPUs that Penstock's jobs hold there."""


_CLUSTER = TypeAdapter(Cluster)
_NONE = LiveFigures(at_s=0.0)


class Publisher:
    """Publishes in a thread of its own, so that no round waits for it.

    Args:
        chosen: what admins have chosen.
        tokens: a number that grows when tokens change.
    """

    def __init__(self, board: Board, chosen: Callable[[], Chosen], tokens: Callable[[], int]) -> None:
        self._board, self._chosen, self._tokens = board, chosen, tokens
        self._started_s = site_time_s()
        self._said: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._figures: dict[str, LiveFigures] = {}
        self._estimates: Estimates | None = None
        self._counted: tuple[float, Mapping[str, Mapping[str, float]]] | None = None
        self._old = set(board.store.jobs_with_figures())
        """Jobs whose figures an earlier penstockd has published."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._board.on_tick = self._wake.set
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        """End, and tell readers so."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self.publish()

    def publish(self) -> None:
        """Publish what has changed, now. A store that is away is logged once; the next call publishes the rest."""
        with self._lock:
            try:
                self._publish()
            except StoreError as error:
                if not self._failing:
                    log.error("nothing can be published to the API", extra={"text": str(error)})
                self._failing = True
            else:
                self._failing = False

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            try:
                self.publish()
            except Exception:  # a job that cannot be published must not end the signs of life
                log.exception("publishing failed unexpectedly; please report this as a bug")

    def _publish(self) -> None:
        board = self._board
        said = self._said | {CHOSEN: self._chosen().model_dump(mode="json")}
        if board.state is not None:
            held = dict(sorted(board.held.items()))
            known = Cluster(board.state.nodes, board.state.refused, board.state.unknown, held)
            said[CLUSTER] = _CLUSTER.dump_python(known, mode="json")
        if (newest := board.round) is not None:
            said[ROUND] = Round(number=newest[0], prices=newest[1]).model_dump(mode="json")
        if (estimates := board.estimates) is not None and estimates is not self._estimates:
            said[ESTIMATES] = estimates.model_dump(mode="json")
        values = {name: value for name, value in said.items() if value != self._said.get(name)}
        versions = self._versions | {name: self._versions.get(name, 0) + 1 for name in values}
        counted = board.counted
        figures, ended = self._changed_figures(counted)
        beat = Beat(
            time_s=site_time_s(),
            pid=os.getpid(),
            uid=os.geteuid(),
            started_s=self._started_s,
            version=__version__,
            observed_s=None if counted is None else counted[0],
            versions=versions | {"tokens": self._tokens()},
            stopped=self._stopping,
        )
        board.store.publish(values | {BEAT: beat.model_dump(mode="json")}, figures, ended)
        self._said, self._versions, self._estimates = said, versions, estimates
        self._figures = {job: each for job, each in (self._figures | figures).items() if job not in ended}
        self._old -= ended
        self._counted = counted

    def _changed_figures(
        self, counted: tuple[float, Mapping[str, Mapping[str, float]]] | None
    ) -> tuple[dict[str, LiveFigures], set[str]]:
        """The figures to publish, and the jobs whose figures are to be deleted."""
        if counted is None:
            return {}, set()
        now_s, gpu_seconds = counted
        before_s, before = self._counted or (now_s, {})
        reported = self._board.progress()
        news = {}
        for job in (jobs := gpu_seconds.keys() | reported.keys()):
            amounts, (progress, total) = gpu_seconds.get(job, {}), reported.get(job, (None, None))
            last = self._figures.get(job, _NONE)
            if (last.progress, last.total) == (progress, total) and _close(last, now_s, amounts):
                continue
            earlier, span_s = before.get(job, {}), now_s - before_s
            rates = {
                each: (amount - earlier[each]) / span_s
                for each, amount in amounts.items()
                if span_s > 0 and each in earlier
            }
            news[job] = LiveFigures(at_s=now_s, progress=progress, total=total, gpu_seconds=dict(amounts), per_s=rates)
        return news, (self._figures.keys() | self._old) - jobs


def _close(last: LiveFigures, now_s: float, amounts: Mapping[str, float]) -> bool:
    """Whether what readers work out from the last figures is near what was counted."""
    expected = last.gpu_seconds_at(now_s)
    types = expected.keys() | amounts.keys()
    return all(abs(expected.get(each, 0.0) - amounts.get(each, 0.0)) <= OFF_GPU_S for each in types)
