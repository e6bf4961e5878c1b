"""What every endpoint needs: the parts of the daemon, the caller, and what the caller may see and do.

An endpoint takes one argument for all of it, a `Call`, and declares the least role that it needs by the argument's type:

    @router.get("/jobs/{job}")
    async def get_job(job: str, call: User) -> JobView:
        return await call.job(job)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from penstock_profiles.wire import Report
from penstock_scheduler.accounts.rules import SchedulingRules
from penstock_scheduler.api.access_messages import Caller, Identity
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.api.ports import Burst, ModelSource, Submitter
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.errors import Refusal, no_such_job
from penstock_scheduler.daemon.service.guard import Bucket, Turns
from penstock_scheduler.daemon.service.identity import Gatekeeper, host_of, is_private
from penstock_scheduler.daemon.service.known import Known
from penstock_scheduler.daemon.service.leases import Leases
from penstock_scheduler.daemon.service.oidc import Provider
from penstock_scheduler.daemon.service.port import Daemon
from penstock_scheduler.daemon.service.report_writer import ReportWriter
from penstock_scheduler.daemon.service.settings import ApiSettings, PrivateData, may_see
from penstock_scheduler.daemon.service.vitals import Vitals
from penstock_scheduler.daemon.service.whatif import WhatIfTasks
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.report_quota import ReportQuota
from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.rounds.plan_gate import Approval
from penstock_scheduler.rounds.settings import Settings
from penstock_scheduler.safety.children import Pool
from penstock_scheduler.safety.open_files import Places

if TYPE_CHECKING:
    from penstock_scheduler.daemon.service.web.live import Live

CLUSTER_CALLS, CLUSTER_WAITING = 16, 1000
"""Calls to the cluster for users that run at once, and that wait. Each runs a command or two of Slurm."""

MAX_LISTENERS = 400
"""Requests that listen to events at the same time. A user holds at most as many as are free."""

_RANK: dict[str, int] = {"nobody": -1, "job": 0, "user": 1, "operator": 2, "admin": 3}
"""Each role may do what the roles below it may do."""


class Controls(Protocol):
    """The parts of penstockd that admins may change and that the API reads. `LiveScheduler` implements it."""

    settings: Settings
    rules: SchedulingRules
    vitals: Vitals

    @property
    def chosen(self) -> PolicyChoice:
        """The policy that decides, with all settings."""
        ...

    def set_policy(self, choice: PolicyChoice) -> PolicyChoice:
        """Decide by this policy from the next round on. Returns the choice with all settings. Raises ConfigError."""
        ...

    @property
    def paused(self) -> bool:
        """Whether an admin has paused the decisions."""
        ...

    def set_paused(self, paused: bool) -> None:
        """Stop or resume deciding rounds."""
        ...

    def approve(self, number: int, by: str) -> Approval:
        """Approve the stops of a refused round, in the name of a user. Raises PenstockError."""
        ...

    def may_lead(self, successor: str) -> str:
        """Who may lead next, by name, if this one or any (empty) is asked for. Raises NoStandby."""
        ...

    def hand_over(self, successor: str) -> None:
        """Let another penstockd lead, of this name or any, from now on."""
        ...

    @property
    def cloud(self) -> Burst | None:
        """The cloud, or None if the site has none."""
        ...

    @property
    def kin(self) -> KinOfJobs:
        """Lessons of ended jobs."""
        ...

    @property
    def store_place(self) -> str:
        """The store, a folder or a URL, for processes of their own."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the API has of penstockd in the same process."""

    board: Board
    controls: Controls
    models: ModelSource
    """For forecasts; the round loop has its own, in its own thread."""
    check_spec: Callable[[JobSpec], None]
    """Raises BadJobSpec."""
    learn: Callable[[Sequence[Report]], None]
    """Takes in reports for the models."""


class Api:
    """What endpoints use, and what the API itself keeps in memory.

    Endpoints that `forwarding.by_daemon` names run in penstockd only, and may use `here`. All others use only what every API
    process has: `known`, `store` and `daemon`.

    Args:
        here: penstockd's parts; None: penstockd is another process.
    """

    def __init__(self, settings: ApiSettings, known: Known, daemon: Daemon, here: Parts | None = None) -> None:
        self.settings = settings
        self.known = known
        self.store = known.store
        self.daemon = daemon
        self._here = here
        self.gatekeeper = Gatekeeper(settings, known.store)
        self.provider = (
            None if settings.oidc is None or (here is not None and not settings.embedded) else Provider(settings.oidc)
        )
        """Where browsers may log in; None: only here. penstockd behind a penstock-api needs none."""
        self.requests = Bucket(settings.requests_per_s, settings.burst)
        self.submissions = Bucket(settings.submissions_per_hour / 3600, settings.submissions_per_hour)
        self.submitting: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """(user, key) of the submissions in progress."""
        self.owning: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """(user, owner) of the submissions in progress."""
        self.leases = None if here is None else Leases(here.board)
        self.writer = ReportWriter(known.store)
        self.epochs: dict[str, int] = {}
        self.quota = ReportQuota()
        """Job -> the newest epoch of its reports, as far as it has been read."""
        self.deciding = Turns(1)
        """Explanations and forecasts decide rounds. One does so at a time, for one user after another."""
        self.cluster = Pool("calls to the cluster", CLUSTER_CALLS, CLUSTER_WAITING)
        """For what asks the cluster something for a user, so that no user can take the threads of the API."""
        self.waiting = Places(settings.max_waiting)
        """For requests that wait for a change."""
        self.listening = Places(MAX_LISTENERS)
        """For requests that listen to events."""
        self._whatif = None if here is None else WhatIfTasks(here.controls.store_place)
        self.live: Live | None = None
        """What keeps open pages up to date, from the first page on."""

    @property
    def here(self) -> Parts:
        """penstockd's parts. Only for endpoints that run in penstockd."""
        assert self._here is not None, "`forwarding.by_daemon` names the endpoints that need penstockd"
        return self._here

    @property
    def whatif(self) -> WhatIfTasks:
        """The replays of recorded history. Only for endpoints that run in penstockd."""
        assert self._whatif is not None, "`forwarding.by_daemon` names the endpoints that need penstockd"
        return self._whatif

    def close(self) -> None:
        """End the processes of its own."""
        if self._whatif is not None:
            self._whatif.close()

    @property
    def board(self) -> Board:
        """penstockd's board; see `here`."""
        return self.here.board

    @property
    def controls(self) -> Controls:
        """penstockd's controls; see `here`."""
        return self.here.controls

    @property
    def submitter(self) -> Submitter:
        """What submits jobs to the cluster. Raises Refusal 503 if the cluster takes none."""
        if self.board.submitter is None:
            raise Refusal(503, "not-ready", "this cluster takes no submissions; set [daemon] cluster = 'slurm'")
        return self.board.submitter

    async def identify(self, request: Request) -> None:
        """Identify the caller for `admit`. Raises Refusal if there is no caller, or the caller sends too many requests."""
        identity = await self.gatekeeper.identify(request)
        if not is_private(request) and (pause_s := self.requests.take(identity.user or host_of(identity.address))) > 0:
            limit = f"{self.settings.requests_per_s:g} requests per second"
            raise Refusal(429, "too-many", f"you sent more than {limit}; wait and try again", retry_after_s=pause_s)
        self.known.counters["requests"] += 1
        request.state.identity = identity

    async def admit(self, request: Request, role: Caller) -> Call:
        """The request of an identified caller. Raises Refusal if the caller has a lower role."""
        identity: Identity = request.state.identity
        call = Call(self, request, identity)
        if _RANK[identity.role] < _RANK[role]:
            if request.method != "GET":
                await call.audit(allowed=False)
            raise Refusal(403, "not-allowed", f"this needs the role {role} or above; your role is {identity.role}")
        return call

    async def job(self, job: str) -> JobView | None:
        """A job, live or ended; None: there is none. Live jobs are in memory."""
        if (view := self.known.live_job(job)) is not None or not storable(job):
            return view
        return await asyncio.to_thread(self.store.job, job)

    @contextmanager
    def place_to_wait(self, user: str) -> Iterator[None]:
        """Hold one of the places for requests that wait. Raises Refusal 503 if there is none for this user."""
        if not self.waiting.take(user):
            held = self.waiting.held(user)
            text = f"{held} of your requests wait already, and others need the rest; ask without the parameter wait"
            raise Refusal(503, "busy", text, retry_after_s=5)
        try:
            yield
        finally:
            self.waiting.give_back(user)


@dataclass(frozen=True)
class Call:
    """One request of a known caller."""

    api: Api
    request: Request
    identity: Identity

    @property
    def sees_all(self) -> bool:
        """Whether the caller may see the jobs of all users."""
        return _RANK[self.identity.role] >= _RANK["operator"]

    def may_see(self, user: str) -> bool:
        """Whether the caller may see the jobs of this user."""
        return self.sees_all or user == self.identity.user

    def may_see_of(self, what: PrivateData, user: str) -> bool:
        """Whether the caller may see this about the jobs of a user, by the site's `private_data`."""
        private = self.api.settings.private_data
        return may_see(what, user, self.identity.user, sees_all=self.sees_all, private=private)

    async def audit(self, *, allowed: bool, text: str = "", target: str | None = None) -> None:
        """Add the request to the audit log. `target`: what it was about; None: its path says so."""
        await asyncio.to_thread(
            self.api.store.note,
            self.identity.user,
            self.identity.role,
            f"{self.request.method} {self.request.scope['route'].path}",
            self.request.url.path.removeprefix("/v1/") if target is None else target,
            allowed=allowed,
            text=text,
            address=self.identity.address,
            token=self.identity.token or "",
        )

    async def job(self, job: str) -> JobView:
        """A job that the caller may see. Raises Refusal 404 for any other job, whether or not it exists."""
        view = await self.api.job(job)
        if view is not None:
            if self.may_see(view.user):
                return view
            if self.request.method != "GET":
                await self.audit(allowed=False, text="the job belongs to another user")
            raise no_such_job(job[:50])
        refusal = self.api.known.refusal(job)
        if refusal is not None and self.may_see(refusal.user):
            raise Refusal(404, "not-managed", f"Penstock does not manage job {job}: {refusal.text}")
        if not storable(job):
            raise no_such_job(job[:50])
        return await self.api.daemon.find(self, job)

    async def expect_owner(self, view: JobView) -> bool:
        """Ask the cluster whose job this is, right before an act on it: what this process remembers may be of another job.

        Returns:
            Whether there is anything to act on: the job may have ended.

        Raises:
            Refusal: 404, its id is another user's job now, or another job's; 503.
        """
        found = await self.api.cluster.call(self.identity.user, self.api.submitter.owned, view.id)
        if found is None:
            return False
        mine = self.sees_all or (found.user == self.identity.user and self.identity.uid in (None, found.uid))
        seen = view.version > 0  # before, its time of submission is by this host's clock
        if not mine or found.user != view.user or (seen and is_another(found, view.submit_s)):
            await self.audit(allowed=False, text=f"the cluster says that the job is {found.user}'s")
            raise no_such_job(view.id)
        return True


def api_of(request: Request) -> Api:
    """The API that serves a request."""
    return cast("Api", request.app.state.api)


def need(role: Caller) -> Any:
    """A dependency that identifies the caller and requires a role.

    This is one dependency, not a chain of them: most of the cost of a small request is FastAPI's work for each dependency.
    """

    async def admit(request: Request) -> Call:
        return await api_of(request).admit(request, role)

    return Depends(admit)


Anybody = Annotated[Call, need("nobody")]
AnyRole = Annotated[Call, need("job")]
User = Annotated[Call, need("user")]
Operator = Annotated[Call, need("operator")]
Admin = Annotated[Call, need("admin")]


def storable(text: str | None) -> bool:
    """Whether a database takes this text: PostgreSQL takes neither NUL nor half a surrogate pair."""
    return text is None or (text.isprintable() and len(text) <= 1000)
