"""What an API process asks of penstockd. `InProcess` is penstockd itself; `forwarding.OverSocket` asks another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from penstock_scheduler.api.access_messages import Identity
from penstock_scheduler.api.health_messages import Health, LeaderHealth
from penstock_scheduler.api.ledger_messages import BudgetView
from penstock_scheduler.api.messages import Drain, JobView, LogPart, OutputFiles
from penstock_scheduler.daemon.service.errors import Refusal, no_such_job
from penstock_scheduler.daemon.service.output import Stream, read_log
from penstock_scheduler.daemon.service.sessions import open_for
from penstock_scheduler.daemon.service.user_files import UserFiles
from penstock_scheduler.model.policy_choice import PolicyChoice

if TYPE_CHECKING:
    from penstock_scheduler.daemon.service.api import Call, Controls
    from penstock_scheduler.daemon.service.board import Board


class Chosen(BaseModel):
    """What admins have chosen, as of now, and what follows from it."""

    model_config = ConfigDict(frozen=True)

    policy: PolicyChoice
    paused: bool
    drains: tuple[Drain, ...]
    budgets: tuple[BudgetView, ...]
    prices: dict[str, float]
    """GPU type -> price of a GPU-hour at the site, USD."""

    @classmethod
    def of(cls, controls: Controls) -> Chosen:
        """What the controls of this process say."""
        rules = controls.rules
        return cls(
            policy=controls.chosen,
            paused=controls.paused,
            drains=rules.drains,
            budgets=rules.budgets,
            prices=rules.prices,
        )


class Daemon(Protocol):
    """penstockd, for an API process. Methods raise Refusal if it does not answer."""

    @property
    def silent_since_s(self) -> float | None:
        """When penstockd was last heard, s since 1970; None: it is there."""
        ...

    @property
    def leader(self) -> LeaderHealth | None:
        """Which of several penstockd leads, as far as this process knows. It asks nobody, so it answers at once."""
        ...

    @property
    def chosen(self) -> Chosen:
        """What admins have chosen."""
        ...

    async def answer(self, request: Request) -> Response | None:
        """penstockd's answer to a request that needs it; None: this process is penstockd and answers itself."""
        ...

    async def health(self, now_s: float) -> Health:
        """Whether penstockd can do its work."""
        ...

    async def read_log(self, call: Call, view: JobView, stream: Stream, offset: int, limit: int) -> LogPart:
        """A part of a job's output; see `output.read_log`."""
        ...

    async def close(self) -> None:
        """End what waits for requests. Called in the loop that served them."""
        ...

    async def begin_session(self, call: Call, found: Identity, response: Response) -> None:
        """Begin a browser session of somebody who has logged in, and put its cookie into the response."""
        ...

    async def find(self, call: Call, job: str) -> JobView:
        """A job that this process does not know. Raises Refusal 404 if nobody knows it, with what the cluster says of it."""
        ...


class InProcess:
    """penstockd in the same process; see `Daemon`."""

    silent_since_s = None

    def __init__(self, board: Board, controls: Controls) -> None:
        self._board, self._controls, self._files = board, controls, UserFiles()

    async def close(self) -> None:
        """See `Daemon`."""
        self._files.close()

    @property
    def leader(self) -> LeaderHealth | None:
        """See `Daemon`."""
        return self._controls.vitals.leader()

    @property
    def chosen(self) -> Chosen:
        """See `Daemon`."""
        return Chosen.of(self._controls)

    async def answer(self, request: Request) -> None:
        """See `Daemon`."""

    async def health(self, now_s: float) -> Health:
        """See `Daemon`."""
        return await asyncio.to_thread(self._controls.vitals.health, now_s)

    async def read_log(self, call: Call, view: JobView, stream: Stream, offset: int, limit: int) -> LogPart:
        """See `Daemon`."""

        async def find() -> OutputFiles | None:
            if self._board.submitter is None:
                return None
            return await call.api.cluster.call(call.identity.user, self._board.submitter.output, view.id, view.user)

        return await read_log(self._files, find, view, stream, offset, limit)

    async def begin_session(self, call: Call, found: Identity, response: Response) -> None:
        """See `Daemon`."""
        await open_for(call, found, response)

    async def find(self, call: Call, job: str) -> JobView:
        """See `Daemon`."""
        if self._board.submitter is not None:
            found = await call.api.cluster.call(call.identity.user, self._board.submitter.unmanaged, job)
            if found is not None and call.may_see(found.user):
                text = f"job {job[:50]} {found.text}"
                if found.later:
                    raise Refusal(503, "not-ready", f"{text}; ask again in a moment", retry_after_s=1)
                raise Refusal(404, "not-managed", text)
        raise no_such_job(job[:50])
