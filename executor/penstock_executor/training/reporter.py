"""The thread that sends reports and reads requests, so that training never waits for the daemon."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock_executor.allocation import Allocation
from penstock_executor.client import Client, present_request, reconnect
from penstock_executor.environment import EnvironmentDisagrees
from penstock_executor.giving_up import can_give_up
from penstock_executor.gpu_samples import EVERY_S as SAMPLED_EVERY_S
from penstock_executor.gpu_samples import GpuSamples
from penstock_profiles.wire import Body, Ended, Observation, Request, Started

if TYPE_CHECKING:
    from penstock_executor.training.processes import Group  # which imports PyTorch

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two checks for a request."""

SUPERSEDED_EVERY_S = 2.0

WAITING = 64
"""The most reports that wait for the thread. If there are more, the oldest are dropped."""

CLOSE_S = 5.0
"""How long the end of a run waits for a file system that does not respond."""


def failed(group: Group, epoch: int, checkpoints: Path | None, progress: float, error: BaseException) -> str:
    """The error, with the process in which it occurred. Another process than the first reports it here.

    The first process reports its own errors by its `Reporter`. It may fail only because another one has: the daemon keeps
    what it hears first. For one that was killed, which says nothing, the others speak.
    """
    text = f"{type(error).__name__}: {error}"
    if group.world == 1:
        return text
    text = f"rank {group.rank} on {socket.gethostname()}: {text}"
    try:
        client = reconnect(epoch, checkpoints)
        if not any(isinstance(each, Ended) for each in client.reported()) and (cause := group.siblings.cause(error)):
            log.error("%s", cause)
            text = f"{cause}. Then {text}"
        if group.rank:
            client.close("failed", progress, text)
    except (OSError, EnvironmentDisagrees) as failure:
        log.warning("epoch=%d cannot report its failure: %s", epoch, failure)
    return text


class Reporter:
    """Sends reports through a `Client` in a thread of its own. No other code may use that client.

    Args:
        client: of this run.
        on_report: called in the thread with each report after it was sent.
        suspends: whether the run can move off its GPUs on request.
    """

    def __init__(self, client: Client, on_report: Callable[[Body], None], *, suspends: bool = False) -> None:
        self._client, self._suspends = client, suspends
        self.has_daemon = client.has_daemon
        self._on_report = on_report
        self._waiting: deque[Body] = deque(maxlen=WAITING)
        self._wake = threading.Event()
        self._end: tuple[Literal["completed", "stopped", "superseded", "failed"], float, str] | None = None
        self.request: Request | None = None
        """The daemon's newest request. The run sets it to None when it handles it."""
        self.superseded = self._has_started = False
        self._thread = threading.Thread(target=self._run, name="penstock-reporter", daemon=True)
        self._thread.start()

    def put(self, body: Body) -> None:
        """Queue a report. Never waits, never raises."""
        self._waiting.append(body)
        self._wake.set()

    def put_started(self, gpus: Allocation, progress: float, total: float | None, *, saves: bool) -> None:
        """Report the beginning of the run, once.

        Args:
            gpus: of the run.
            progress: in samples.
            total: progress at which the job is done, if it is known.
            saves: whether the run can save, as giving up nodes needs.
        """
        if self._has_started:
            return
        self._has_started = True
        environment, gives_up_nodes = self._client.environment, can_give_up() and saves
        self.put(
            Started(
                gpu_type=gpus.gpu_type,
                gpu_ids=gpus.gpu_ids,
                progress=progress,
                total=total,
                gives_up_nodes=gives_up_nodes,
                left_nodes=environment.left_nodes,
                restarts=environment.restarts if gives_up_nodes or environment.left_nodes else None,
            )
        )

    def close(
        self, outcome: Literal["completed", "stopped", "superseded", "failed"], progress: float, text: str = ""
    ) -> None:
        """Report the end of the run, and end the thread. Waits at most `CLOSE_S`."""
        if self._end is None:
            self._end = outcome, progress, text
            self._wake.set()
            self._thread.join(CLOSE_S)

    def take_request(self) -> str | None:
        """The number of the daemon's request for a checkpoint, which the run answers now; None if there is none."""
        request = self.request
        if request is None or request.kind != "checkpoint":
            return None
        self.request = None
        return request.id

    def kept_nodes(self) -> tuple[str, ...]:
        """The nodes to go on with, if the daemon still asks the run to give up the others."""
        request, environment = self.request, self._client.environment
        if request is None:
            return ()
        stands = present_request(environment) == request.id and set(request.keep_nodes) < set(environment.nodes)
        if can_give_up() and stands:
            return request.keep_nodes
        self.request = None  # withdrawn, or the run before has served it
        return ()

    def _run(self) -> None:
        checked_s = sampled_s = 0.0
        samples = GpuSamples(self._client.environment.gpu_ids)
        while self._end is None or self._waiting:
            try:
                if time.monotonic() - sampled_s >= SAMPLED_EVERY_S:
                    samples.sample()
                    sampled_s = time.monotonic()
                self._send(samples)
                self.request = self._client.poll(suspends=self._suspends) or self.request
                if time.monotonic() - checked_s >= SUPERSEDED_EVERY_S:
                    self.superseded = self._client.superseded
                    checked_s = time.monotonic()
            except Exception:  # no error may stop the training
                log.exception("epoch=%d cannot report or read requests; retrying", self._client.epoch)
            self._wake.wait(0.0 if self._end else POLL_S)
            self._wake.clear()
        samples.close()
        self._client.close(*self._end)

    def _send(self, samples: GpuSamples) -> None:
        while self._waiting:
            body = self._waiting.popleft()
            if isinstance(body, Observation):
                body = body.model_copy(update=samples.take())
            self._client.report(body)
            self._on_report(body)
