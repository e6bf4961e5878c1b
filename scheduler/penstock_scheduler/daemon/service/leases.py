"""Leases: a job whose owner wishes it is cancelled once nobody has renewed its lease for long enough.

So the job of an Airflow task ends that was stopped while neither penstockd nor anything else could be told. A lease only counts
the time in which penstockd runs: it begins anew when penstockd starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from penstock_scheduler.api.messages import OwnerView
from penstock_scheduler.daemon.service.board import Board, has_other_key
from penstock_scheduler.people.errors import PenstockError, StoreError

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval of the checks."""

Cancel = Callable[[str, tuple[str, str], Callable[[], bool]], Awaitable[bool]]
"""Cancels a job of (user, owner), unless the last argument says that its lease is renewed by then. Returns whether it did."""


@dataclass(slots=True)
class _Lease:
    user: str
    owner: str
    lease_s: float
    until_s: float


class Leases:
    """The leases of live jobs. Its methods belong to the API's event loop.

    Args:
        now_s: a monotonic clock.
    """

    def __init__(self, board: Board, now_s: Callable[[], float] = time.monotonic) -> None:
        self._board, self._now_s = board, now_s
        self._leases: dict[str, _Lease] = {}

    def begin(self, user: str, owner: OwnerView) -> None:
        """Begin the lease of an owner's job anew, or end it if the owner wishes none."""
        if owner.job is None:
            return
        self._leases.pop(owner.job, None)
        if owner.lease_s is not None:
            self._leases[owner.job] = _Lease(user, owner.name, owner.lease_s, self._now_s() + owner.lease_s)

    def renew(self, user: str, jobs: Iterable[str]) -> list[str]:
        """Renew the leases of a user's jobs. Returns those that have one."""
        renewed = []
        for job in jobs:
            lease = self._leases.get(job)
            if lease is not None and lease.user == user:
                lease.until_s = self._now_s() + lease.lease_s
                renewed.append(job)
        return renewed

    def load(self) -> None:
        """Begin the leases of all live jobs anew. Raises StoreError."""
        for user, owner in self._board.store.leased_owners():
            if owner.job is None or owner.job in self._leases:
                continue
            view = self._board.live_job(owner.job)
            if view is not None and not has_other_key(view, owner.key):
                self.begin(user, owner)

    def expired(self) -> list[tuple[str, _Lease]]:
        """The jobs whose leases have run out."""
        return [(job, lease) for job, lease in self._leases.items() if self._now_s() >= lease.until_s]

    async def run(self, cancel: Cancel) -> None:
        """Cancel the jobs whose leases have run out, without end."""
        loaded = False
        while True:
            await asyncio.sleep(CHECK_S)
            if not loaded:
                try:
                    self.load()
                except StoreError as error:
                    log.warning("the leases of jobs cannot be read yet", extra={"text": str(error)})
                    continue
                loaded = True
            for job, lease in self.expired():
                try:
                    await self._end(job, lease, cancel)
                except PenstockError as error:
                    log.warning("a job without an owner is not cancelled yet", extra={"job": job, "text": str(error)})
                    lease.until_s = self._now_s() + min(lease.lease_s, 60.0)

    async def _end(self, job: str, lease: _Lease, cancel: Cancel) -> None:
        """Cancel a job whose lease has run out. It tells why before the cluster can tell of its end."""
        view = await asyncio.to_thread(self._board.job, job)
        if view is None or view.state == "ended" or self._board.submitter is None:
            self._leases.pop(job, None)
            return
        span = f"{lease.lease_s / 3600:.3g} h" if lease.lease_s >= 3600 else f"{lease.lease_s:.0f} s"
        text = f"was cancelled because nothing had waited for it for {span}, the lease of its owner {lease.owner}"

        def over() -> bool:
            if self._leases.get(job) is not lease or self._now_s() < lease.until_s:
                return False
            self._board.endings[job] = text
            return True

        try:
            if not await cancel(job, (lease.user, lease.owner), over):
                return
        except PenstockError:
            self._board.endings.pop(job, None)
            raise
        self._leases.pop(job, None)
        log.warning("job without an owner cancelled", extra={"job": job, "text": text})
        note = partial(self._board.store.note, lease.user, "user", "lease", f"jobs/{job}", allowed=True, text=text)
        await asyncio.to_thread(note)
