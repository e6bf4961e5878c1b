"""The API itself: one function an endpoint, each with who may call it. See docs/user/api.md."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from penstock_profiles.files import NoRegularFile, open_regular
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import Report
from penstock_scheduler import __version__
from penstock_scheduler.errors import BadJobSpec, ClusterAway, ConfigError, PenstockError, RoundFailed, StoreError
from penstock_scheduler.explain import explain, words
from penstock_scheduler.forecast import ask, with_job
from penstock_scheduler.forecast import words as told
from penstock_scheduler.limits import PartitionRules, by_partition
from penstock_scheduler.messages import (
    MAX_LOG_BYTES,
    MAX_PAGE,
    MAX_WAIT_S,
    AuditPage,
    BudgetView,
    ClusterView,
    ConfigurationView,
    Decision,
    Drain,
    Drained,
    DrainOrder,
    ErrorAnswer,
    ExplanationView,
    Forecast,
    Health,
    History,
    Identity,
    JobPage,
    JobView,
    LedgerPage,
    LogPart,
    NewToken,
    NodeView,
    OutcomeView,
    Pause,
    PolicyChange,
    PolicyChoice,
    PolicyView,
    ProfileList,
    RefusedReport,
    ReportBatch,
    ReportReceipt,
    Role,
    RoundPage,
    RoundView,
    ShareOption,
    ShareView,
    Submission,
    TokenOrder,
    TokenView,
)
from penstock_scheduler.model import Job, JobSpec, Phase, ReasonCode
from penstock_scheduler.policies import make_policy, policy_names
from penstock_scheduler.ports import ModelSource, Submitter
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.rules import SchedulingRules, drained
from penstock_scheduler.service import metrics, page
from penstock_scheduler.service.board import Board, allocation_view
from penstock_scheduler.service.errors import Refusal, no_such_job
from penstock_scheduler.service.guard import Bucket, LimitBodies, check_report
from penstock_scheduler.service.identity import Gatekeeper, is_page
from penstock_scheduler.service.settings import ApiSettings
from penstock_scheduler.shares import ShareUse
from penstock_scheduler.store import NoSuchRow, SqlStore, summarise
from penstock_scheduler.units import duration

log = logging.getLogger(__name__)

STALE_S = 120.0
"""A daemon that has not seen the cluster for so long is not ready."""

MAX_LISTENERS = 200
LISTENER_QUEUE = 1000
KEEP_ALIVE_S = 15.0
OBSERVATIONS = 200
RESULTS = MAX_PAGE
FORECAST = "forecast"
"""Id of the job that a forecast adds to the snapshot."""

_RANK: dict[str, int] = {"job": 0, "user": 1, "operator": 2, "admin": 3}
_SEES_ALL = ("operator", "admin")

RoundNumber = Annotated[int, Path(ge=0, le=2**62)]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Controls:
    """What admins may change of the round loop, and what the service asks of the daemon."""

    policy: Callable[[], tuple[str, dict[str, Any]]]
    set_policy: Callable[[str, dict[str, Any]], dict[str, Any]]
    """Returns all settings. Raises ConfigError."""
    paused: Callable[[], bool]
    set_paused: Callable[[bool], None]
    settings: Callable[[], dict[str, Any]]
    """By section, secrets masked."""
    rules: SchedulingRules


class ReportWriter:
    """Commits reports of many requests together: an answer waits for one commit, and a commit serves all that wait."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._waiting: list[tuple[list[Report], asyncio.Future[list[bool]]]] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "reports")
        """Of its own: a commit does not queue behind whatever else the service has its threads do."""

    async def add(self, reports: list[Report]) -> list[bool]:
        """Of each report, whether it was new; all are on disk then. Raises StoreError: none is."""
        future: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
        self._waiting.append((reports, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        return await future

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                news = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._store.add_reports, [report for reports, _ in batch for report in reports]
                )
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            at = 0
            for reports, future in batch:
                if not future.done():
                    future.set_result(news[at : at + len(reports)])
                at += len(reports)


def make_app(
    settings: ApiSettings,
    board: Board,
    controls: Controls,
    models: ModelSource,
    check_spec: Callable[[JobSpec], None],
    learn: Callable[[Sequence[Report]], None] = lambda reports: None,
) -> FastAPI:
    """The API over a board."""
    store = board.store
    gatekeeper = Gatekeeper(settings, store)
    requests = Bucket(settings.requests_per_s, settings.burst)
    submissions = Bucket(settings.submissions_per_hour / 3600, settings.submissions_per_hour)
    writer = ReportWriter(store)
    waiting = 0
    submitting: dict[tuple[str, str], asyncio.Lock] = {}
    forecasting = asyncio.Semaphore(1)
    epochs: dict[str, int] = {}

    responses: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
    app = FastAPI(
        title="Penstock",
        version=__version__,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses=responses,
        separate_input_output_schemas=False,
    )
    app.add_middleware(LimitBodies)

    # --- errors

    def problem(status: int, code: str, message: str, retry_after_s: float | None = None) -> JSONResponse:
        headers = {} if retry_after_s is None else {"Retry-After": str(max(round(retry_after_s + 0.5), 1))}
        return JSONResponse({"error": {"code": code, "message": message}}, status, headers)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        board.counters[f"refused {error.status}"] += 1
        answer = problem(error.status, error.code, str(error), error.retry_after_s)
        if error.status == 401 and is_page(request):
            answer.headers["WWW-Authenticate"] = 'Basic realm="Penstock: a token as the password"'
        return answer

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        board.counters["refused 422"] += 1
        told = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        return problem(422, "bad-body", "; ".join(told)[:2000].encode(errors="replace").decode())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "no-such-path", 405: "no-such-method", 413: "too-large"}
        answer = problem(error.status_code, codes.get(error.status_code, "bad-request"), str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(PenstockError)
    async def failed(request: Request, error: PenstockError) -> JSONResponse:
        if isinstance(error, NoSuchRow):
            return problem(404, "no-such-round", str(error))
        if isinstance(error, StoreError):
            board.counters["store away"] += 1
            return problem(503, "store-away", str(error), 2)
        if isinstance(error, ClusterAway):
            return problem(503, "cluster-away", str(error), 5)
        if isinstance(error, BadJobSpec):
            return problem(422, "bad-spec", str(error))
        if isinstance(error, ConfigError):
            return problem(422, "bad-body", str(error))
        return problem(503, "not-ready", str(error), 5)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed, and should not have: please report it", exc_info=error)
        return problem(500, "our-fault", "something that should not happen did; see the daemon's log")

    # --- who

    async def identify(request: Request) -> Identity:
        identity = await gatekeeper.identify(request)
        if (pause_s := requests.take(identity.user)) > 0:
            raise Refusal(429, "too-many", f"more than {settings.requests_per_s:g} requests/s", retry_after_s=pause_s)
        board.counters["requests"] += 1
        return identity

    def need(role: Role) -> Any:
        # One dependency, not a chain of them: FastAPI's work for each is most of what a request costs.
        async def check(request: Request) -> Identity:
            identity = await identify(request)
            if _RANK[identity.role] < _RANK[role]:
                if request.method != "GET":
                    await note(identity, request, allowed=False)
                raise Refusal(403, "not-allowed", f"this is for role {role} and above; you are {identity.role}")
            return identity

        return Depends(check)

    AnyOne = Annotated[Identity, need("job")]
    User = Annotated[Identity, need("user")]
    Operator = Annotated[Identity, need("operator")]
    Admin = Annotated[Identity, need("admin")]

    async def note(identity: Identity, request: Request, *, allowed: bool, text: str = "") -> None:
        await asyncio.to_thread(
            store.note,
            identity.user,
            identity.role,
            f"{request.method} {request.scope['route'].path}",
            request.url.path.removeprefix("/v1/"),
            allowed=allowed,
            text=text,
        )

    async def find(job: str, identity: Identity, request: Request) -> JobView:
        """The job, if the one who asks may see it. Raises Refusal 404."""
        view = await known(job)
        mine = view is not None and (view.user == identity.user or identity.role in _SEES_ALL)
        if view is None or not mine:
            if view is not None and request.method != "GET":
                await note(identity, request, allowed=False, text="a job of another user")
            refusal = board.refusal(job) if view is None else None
            if refusal is not None and (refusal.user == identity.user or identity.role in _SEES_ALL):
                raise Refusal(404, "not-managed", f"Penstock does not manage job {job}: {refusal.text}")
            raise no_such_job(job[:50])
        return view

    async def known(job: str) -> JobView | None:
        """A job; what is live is in memory."""
        if (view := board.now(job)) is not None or not _sane(job):
            return view
        return await asyncio.to_thread(store.job, job)

    # --- health

    def health() -> Health:
        problems = []
        age_s = None if board.observed_s is None else max(time.time() - board.observed_s, 0.0)
        if age_s is None or age_s > STALE_S:
            problems.append("the cluster was not seen lately; see the daemon's log")
        try:
            store.ping()
        except StoreError as error:
            problems.append(str(error))
        return Health(
            status="not-ready" if problems else "ok",
            version=__version__,
            round=board.record.snapshot.round if board.record else None,
            observed_age_s=age_s,
            problems=problems,
            counters=dict(board.counters),
        )

    @app.get("/v1/health")
    async def get_health() -> Health:
        """200 while the process lives."""
        return Health(status="ok", version=__version__)

    @app.get("/v1/ready", responses={503: {"model": Health}})
    def get_ready(response: Response) -> Health:
        """Whether the daemon can do its work."""
        found = health()
        response.status_code = 200 if found.status == "ok" else 503
        return found

    @app.get("/v1/me")
    async def get_me(identity: User) -> Identity:
        """Who you are."""
        return identity

    # --- jobs

    @app.post("/v1/jobs", status_code=201, responses={200: {"model": JobView}})
    async def submit(order: Submission, identity: User, request: Request, response: Response) -> JobView:
        """Submit a job as yourself."""
        submitter = _submitter(board)
        if identity.uid is None:
            raise Refusal(403, "not-allowed", f"no user {identity.user} is on the daemon's host to run jobs as")
        check_spec(order.spec)
        digest = hashlib.sha256(order.model_dump_json().encode()).hexdigest()
        if order.key is None:
            throttle(identity)
            job = await ask_cluster(submitter.submit, order, identity.user, identity.uid)
            await note(identity, request, allowed=True, text=job)
            return await first_view(job, order, identity)
        lock = submitting.setdefault((identity.user, order.key), asyncio.Lock())
        async with lock:
            noted, known = await asyncio.to_thread(store.begin_submission, identity.user, order.key, digest)
            if noted != digest:
                raise Refusal(409, "key-used", f"key {order.key} has been used for another submission; take a new key")
            if known is None:
                # Nobody has had an answer: a daemon before us may have submitted it all the same.
                known = await asyncio.to_thread(submitter.find, identity.user, order.key)
                if known is not None:
                    await note(identity, request, allowed=True, text=f"{known}, submitted before")
                    await asyncio.to_thread(store.end_submission, identity.user, order.key, known)
            if known is not None:
                response.status_code = 200
                return await first_view(known, order, identity)
            try:
                throttle(identity)
                job = await ask_cluster(submitter.submit, order, identity.user, identity.uid)
            except (BadJobSpec, Refusal):
                await asyncio.to_thread(store.end_submission, identity.user, order.key, None)
                raise
            await asyncio.to_thread(store.end_submission, identity.user, order.key, job)
        submitting.pop((identity.user, order.key), None)
        await note(identity, request, allowed=True, text=job)
        return await first_view(job, order, identity)

    def throttle(identity: Identity) -> None:
        if (pause_s := submissions.take(identity.user)) > 0:
            raise Refusal(
                429,
                "too-many",
                f"more than {settings.submissions_per_hour} submissions in an hour",
                retry_after_s=pause_s,
            )

    async def ask_cluster(call: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return await asyncio.to_thread(call, *arguments)
        except BadJobSpec as error:
            raise Refusal(422, "refused", str(error)) from None

    async def first_view(job: str, order: Submission, identity: Identity) -> JobView:
        """The job as the board or the store knows it; before a round has seen it, as it was submitted."""
        view = await asyncio.to_thread(board.job, job)
        if view is None or (view.key is None and order.key is not None):
            view = view or JobView(
                id=job,
                version=0,
                name=order.name or "",
                user=identity.user,
                account=order.account or "",
                state="queued",
                submit_s=time.time(),
                spec=order.spec,
            )
            view = view.model_copy(update={"key": order.key})
            await asyncio.to_thread(board.adopt, view)
        return view

    @app.post("/v1/jobs/plan")
    async def plan(order: Submission, identity: User) -> Forecast:
        """What a submission would get if it were submitted now; nothing is submitted."""
        check_spec(order.spec)
        record = board.record
        if record is None:
            raise Refusal(503, "not-ready", "no round has been decided yet; try again", retry_after_s=5)
        async with forecasting:
            partitions = controls.rules.limits.partitions
            return await asyncio.to_thread(forecast, record, order, identity.user, models, partitions)

    @app.get("/v1/jobs")
    def list_jobs(
        identity: User,
        user: Annotated[str | None, Query(max_length=255)] = None,
        state: Annotated[list[Literal["queued", "starting", "running", "stopping", "ended"]], Query()] = [],  # noqa: B006
        name: Annotated[str | None, Query(max_length=1000)] = None,
        key: Annotated[str | None, Query(max_length=200)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    ) -> JobPage:
        """Jobs, newest first; a user's are the user's own."""
        if identity.role not in _SEES_ALL:
            if user not in (None, identity.user):
                return JobPage(jobs=[])
            user = identity.user
        if not all(_sane(text) for text in (user, name, key)):
            return JobPage(jobs=[])
        found = store.jobs(user=user, states=state, name=name, key=key, after=after, limit=limit)
        return JobPage(jobs=[view for _, view in found], next=str(found[-1][0]) if len(found) == limit else None)

    @app.get("/v1/jobs/{job}")
    async def get_job(
        job: str,
        identity: User,
        request: Request,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
        since: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    ) -> JobView:
        """A job; with `wait` and `since`, once its version is above that."""
        view = await find(job, identity, request)
        if wait and since is not None and view.state != "ended" and view.version <= since:
            async with place_to_wait():
                await board.changed(job, since, wait)
            view = await find(job, identity, request)
        return view

    class place_to_wait:  # noqa: N801
        async def __aenter__(self) -> None:
            nonlocal waiting
            if waiting >= settings.max_waiting:
                raise Refusal(503, "busy", f"{waiting} requests wait already; ask without wait", retry_after_s=5)
            waiting += 1

        async def __aexit__(self, *what: object) -> None:
            nonlocal waiting
            waiting -= 1

    @app.post("/v1/jobs/{job}/cancel")
    async def cancel(job: str, identity: User, request: Request) -> JobView:
        """End a job; one that has ended stays as it is."""
        view = await find(job, identity, request)
        if view.state != "ended":
            await note(identity, request, allowed=True)
            await ask_cluster(_submitter(board).cancel, job)
        return view

    @app.get("/v1/jobs/{job}/explain")
    async def get_explanation(job: str, identity: User, request: Request) -> ExplanationView:
        """Why a job has what it has."""
        view = await find(job, identity, request)
        async with forecasting:  # it decides the round again with other job specs
            return await asyncio.to_thread(explain_job, view, board.record)

    @app.get("/v1/jobs/{job}/history")
    async def history(job: str, identity: User, request: Request) -> History:
        """What happened to a job."""
        await find(job, identity, request)

        def read() -> History:
            lines = list(store.outcomes(job))
            seen = store.observations(job, OBSERVATIONS)
            results = store.newest_reports(job, ("result",), RESULTS)
            return History(
                job=job,
                outcomes=[
                    OutcomeView(
                        time_s=line.time_s,
                        round=line.action.round,
                        job=job,
                        action=line.action.kind,
                        progress=line.progress.value,
                        text=line.text,
                        allocation=allocation_view(where)
                        if (where := getattr(line.action, "placement", None))
                        else None,
                    )
                    for line in lines[-MAX_PAGE:]
                ],
                observations=[report.model_dump(mode="json") for report in seen],
                results=[report.model_dump(mode="json") for report in results],
            )

        return await asyncio.to_thread(read)

    @app.get("/v1/jobs/{job}/page", response_class=HTMLResponse)
    async def get_page(job: str, identity: User, request: Request) -> HTMLResponse:
        """A job's page, for people."""
        view = await find(job, identity, request)
        async with forecasting:
            said = await asyncio.to_thread(explain_job, view, board.record)
        past = await history(job, identity, request)
        part = None
        if (submitter := board.submitter) is not None:
            with contextlib.suppress(Refusal):  # an output that may not be read is as if it were not there
                part = await asyncio.to_thread(
                    read_log, submitter, job, -page.TAIL_BYTES, page.TAIL_BYTES, ended=view.state == "ended"
                )
        text = page.render(view, said, past.outcomes, part, now_s=time.time())
        return HTMLResponse(text, headers={"Content-Security-Policy": page.POLICY, "Cache-Control": "no-store"})

    @app.get("/v1/jobs/{job}/log")
    async def get_log(
        job: str,
        identity: User,
        request: Request,
        offset: Annotated[int, Query(ge=-(2**62), le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = MAX_LOG_BYTES,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
    ) -> LogPart:
        """A part of a job's output, read as its owner's file."""
        view = await find(job, identity, request)
        submitter = _submitter(board)
        until_s = time.monotonic() + wait
        while True:
            part = await asyncio.to_thread(read_log, submitter, job, offset, limit, ended=view.state == "ended")
            if part.text or part.ended or time.monotonic() >= until_s:
                return part
            await asyncio.sleep(min(1.0, max(until_s - time.monotonic(), 0.01)))
            view = await find(job, identity, request)

    @app.post("/v1/jobs/{job}/reports")
    async def report(job: str, batch: ReportBatch, identity: AnyOne, request: Request) -> ReportReceipt:
        """Reports of a job, from its owner alone."""
        owner = identity.job == job if identity.role == "job" else True
        view = await known(job)
        if view is None or not owner or view.user != identity.user:
            if view is not None:
                board.counters["reports of others refused"] += len(batch.reports)
                await note(identity, request, allowed=False, text="reports for a job of another")
            raise no_such_job(job[:50])
        if view.state == "ended":
            raise Refusal(409, "job-ended", f"job {job} has ended; its reports are closed")
        present = epochs.get(job) if board.submitter is None else None
        if present is None:
            present = await asyncio.to_thread(present_epoch, job)
        good: list[Report] = []
        bad: list[RefusedReport] = []
        for index, given in enumerate(batch.reports):
            try:
                checked = check_report(given, job, time.time())
                if checked.epoch < present:
                    raise ValueError(f"it is of epoch {checked.epoch}; the job's present one is {present}")
                good.append(checked)
            except ValueError as error:
                bad.append(RefusedReport(index=index, message=str(error).encode(errors="replace").decode()))
        board.counters["reports refused"] += len(bad)
        news = await writer.add(good) if good else []
        fresh = [each for each, new in zip(good, news, strict=True) if new]
        board.counters["reports accepted"] += len(fresh)
        if fresh:
            epochs[job] = present = max(present, *(each.epoch for each in fresh))
            board.heard(fresh)
            learn(fresh)
        return ReportReceipt(accepted=len(fresh), duplicates=len(good) - len(fresh), refused=bad, epoch=present)

    def present_epoch(job: str) -> int:
        if len(epochs) > 100_000:
            epochs.clear()
        if job not in epochs:
            epochs[job] = store.newest_epoch(job) or 0
        given = board.submitter.epoch(job) if board.submitter else None
        return max(epochs[job], given or 0)

    # --- rounds, the cluster

    @app.get("/v1/rounds")
    def list_rounds(
        identity: User,
        before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    ) -> RoundPage:
        """Rounds, newest first."""
        found = store.summaries(before, limit)
        return RoundPage(rounds=found, next=found[-1].round if len(found) == limit else None)

    @app.get("/v1/rounds/{number}")
    def get_round(number: RoundNumber, identity: User) -> RoundView:
        """A round and its decisions; a user sees those on own jobs."""
        record = store.round(number)
        sees = {job.id for job in record.snapshot.jobs if identity.role in _SEES_ALL or job.user == identity.user}
        decisions = [
            Decision(
                job=job,
                allocation=allocation_view(given.placement),
                code=given.reason.code.value,
                text=given.reason.text,
                goodput=given.goodput,
            )
            for job, given in record.plan.assignments.items()
        ]
        decisions += [Decision(job=job, code=why.code.value, text=why.text) for job, why in record.plan.waiting.items()]
        shown = [decision for decision in decisions if decision.job in sees]
        return RoundView(summary=summarise(record), decisions=shown)

    @app.get("/v1/rounds/{number}/record")
    def get_record(number: RoundNumber, identity: Operator) -> dict[str, Any]:
        """The round as `penstock replay` reads it."""
        found: dict[str, Any] = json.loads(store.round_json(number))
        return found

    @app.get("/v1/cluster")
    def get_cluster(identity: User) -> ClusterView:
        """The cluster in numbers."""
        nodes = node_views(board, controls.rules.drains)
        jobs: dict[str, int] = {}
        for view in board.live():
            jobs[view.state] = jobs.get(view.state, 0) + 1

        def total(count: Callable[[NodeView], int]) -> dict[str, int]:
            sums: dict[str, int] = {}
            for node in nodes:
                sums[node.gpu_type] = sums.get(node.gpu_type, 0) + count(node)
            return sums

        record = board.record
        return ClusterView(
            observed_s=board.observed_s,
            round=record.snapshot.round if record else None,
            policy=controls.policy()[0],
            paused=controls.paused(),
            gpus=total(lambda node: node.gpus),
            given=total(lambda node: node.given),
            others=total(lambda node: node.others),
            unusable=total(lambda node: 0 if node.usable else node.gpus),
            jobs=jobs,
            prices=record.plan.prices if record else {},
        )

    @app.get("/v1/metrics", response_class=Response)
    def get_metrics(identity: User) -> Response:
        """The cluster and the daemon in numbers, for Prometheus."""
        spent_usd = sum(store.ledger_totals("usd").values())
        body = metrics.metrics(
            get_cluster(identity), board.live(), board.record, board.counters, spent_usd, time.time()
        )
        return Response(body, media_type=metrics.CONTENT_TYPE)

    @app.get("/v1/nodes")
    def get_nodes(identity: User) -> list[NodeView]:
        """The nodes."""
        return node_views(board, controls.rules.drains)

    @app.get("/v1/prices")
    def get_prices(identity: User) -> dict[str, float]:
        """GPU type -> its price in the newest round."""
        return board.record.plan.prices if board.record else {}

    @app.get("/v1/policies")
    def get_policies(identity: User) -> list[PolicyView]:
        """The policies, and which one decides."""
        active, chosen = controls.policy()
        return [
            PolicyView(name=name, active=name == active, settings=chosen if name == active else make_policy(name)[1])
            for name in sorted({*policy_names(), active})
        ]

    @app.put("/v1/policy")
    async def put_policy(choice: PolicyChoice, identity: Admin, request: Request) -> PolicyChange:
        """Decide by another policy from the next round on; also after a restart."""
        full = await asyncio.to_thread(controls.set_policy, choice.name, choice.settings)
        await note(identity, request, allowed=True, text=choice.model_dump_json())
        return PolicyChange(name=choice.name, settings=full)

    @app.put("/v1/pause")
    async def put_pause(pause: Pause, identity: Admin, request: Request) -> Pause:
        """Decide no more rounds, or go on."""
        await asyncio.to_thread(controls.set_paused, pause.paused)
        await note(identity, request, allowed=True, text=pause.model_dump_json())
        return pause

    @app.get("/v1/drains")
    def get_drains(identity: User) -> list[Drain]:
        """What adaptive jobs get no more of."""
        return list(controls.rules.drains)

    @app.post("/v1/drains")
    async def post_drain(order: DrainOrder, identity: Operator, request: Request) -> Drain:
        """From the next round on adaptive jobs get no more of it; whether those there leave it depends on the policy."""
        there = _drainable(board)[order.kind]
        if order.name not in there:
            raise Refusal(422, "refused", f"there is no {order.kind} {order.name} here; there are {', '.join(there)}")
        drain = Drain(**order.model_dump(), by=identity.user, since_s=time.time())
        await asyncio.to_thread(controls.rules.drain, drain)
        await note(identity, request, allowed=True, text=order.model_dump_json())
        return drain

    @app.delete("/v1/drains/{kind}/{name}", status_code=204)
    async def delete_drain(kind: Drained, name: str, identity: Operator, request: Request) -> None:
        """Give it out again."""
        if not await asyncio.to_thread(controls.rules.end_drain, (kind, name)):
            raise Refusal(404, "no-such-drain", f"no {kind} of that name is drained; see GET /v1/drains")
        await note(identity, request, allowed=True)

    @app.get("/v1/settings")
    def get_settings(identity: Admin) -> dict[str, Any]:
        """The settings by section."""
        return controls.settings()

    @app.get("/v1/profiles")
    def get_profiles(identity: User) -> ProfileList:
        """Your stored profiles."""
        return ProfileList(profiles=[each.model_dump(mode="json") for each in store.profiles(identity.user)])

    @app.put("/v1/profiles", status_code=204)
    async def put_profile(profile: Profile, identity: User, request: Request) -> None:
        """Keep a profile for your jobs of that name."""
        await asyncio.to_thread(store.save_profile, identity.user, profile)
        await note(identity, request, allowed=True, text=f"{profile.job}@{profile.gpu_type}")

    @app.get("/v1/events", response_class=StreamingResponse)
    async def events(identity: User) -> StreamingResponse:
        """What happens, as server-sent events."""
        if len(board.listeners) >= MAX_LISTENERS:
            raise Refusal(503, "busy", f"{MAX_LISTENERS} listen already; try later", retry_after_s=60)
        queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue(LISTENER_QUEUE)

        def listen(kind: str, user: str, text: str) -> None:
            if not user or user == identity.user or identity.role in _SEES_ALL:
                try:
                    queue.put_nowait((kind, text))
                except asyncio.QueueFull:  # it does not read: it must not make us keep what happens for ever
                    board.listeners.discard(listen)

        board.listeners.add(listen)

        async def stream() -> AsyncIterator[str]:
            try:
                yield ": here\n\n"
                while listen in board.listeners:
                    try:
                        kind, text = await asyncio.wait_for(queue.get(), KEEP_ALIVE_S)
                        yield f"event: {kind}\ndata: {text}\n\n"
                    except TimeoutError:
                        yield ": still here\n\n"
            finally:
                board.listeners.discard(listen)

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    # --- ledger, audit, tokens

    @app.get("/v1/ledger")
    def get_ledger(
        identity: User,
        job: Annotated[str | None, Query(max_length=100)] = None,
        before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> LedgerPage:
        """The budget ledger, newest first; with `job`, what that job has cost."""
        if not _sane(job):
            return LedgerPage(lines=[])
        user = None if identity.role in _SEES_ALL else identity.user
        lines = store.ledger(user=user, job=job, before=before, limit=limit)
        return LedgerPage(lines=lines, next=lines[-1].id if len(lines) == limit else None)

    @app.get("/v1/budgets")
    def get_budgets(identity: User) -> list[BudgetView]:
        """Budgets as the newest round found them; a user sees the site's and those of accounts with own jobs."""
        found = controls.rules.budgets
        if identity.role in _SEES_ALL:
            return list(found)
        mine = {"", *(view.account for _, view in store.jobs(user=identity.user, limit=MAX_PAGE))}
        return [budget for budget in found if budget.account in mine]

    @app.get("/v1/audit")
    def get_audit(
        identity: Operator,
        before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> AuditPage:
        """The audit log, newest first."""
        lines = store.audit(before=before, limit=limit)
        return AuditPage(lines=lines, next=lines[-1].id if len(lines) == limit else None)

    @app.get("/v1/tokens")
    def get_tokens(identity: Admin) -> list[TokenView]:
        """All tokens, without their secrets."""
        return [view for view, _ in store.tokens()]

    @app.post("/v1/tokens", status_code=201)
    async def post_token(order: TokenOrder, identity: Admin, request: Request) -> NewToken:
        """Make a token; its secret is shown this once."""
        made = await asyncio.to_thread(gatekeeper.new_token, order)
        await note(identity, request, allowed=True, text=f"{made.view.id} for {order.user}, {order.role}")
        return made

    @app.delete("/v1/tokens/{token}")
    async def delete_token(token: str, identity: Admin, request: Request) -> TokenView:
        """Make a token worthless."""
        if not token.isalnum() or not token.isascii():
            raise Refusal(404, "no-such-token", "token ids are letters and digits; see GET /v1/tokens")
        revoked = await asyncio.to_thread(gatekeeper.revoke, token)
        await note(identity, request, allowed=True)
        return revoked

    return app


def _sane(text: str | None) -> bool:
    """Whether a text can be asked of a database: PostgreSQL takes no NUL, and neither takes half a surrogate pair."""
    return text is None or (text.isprintable() and len(text) <= 1000)


def _drainable(board: Board) -> dict[str, list[str]]:
    """What there is to drain, by kind."""
    nodes = board.state.nodes if board.state else ()
    return {
        "node": sorted(node.name for node in nodes),
        "gpu-type": sorted({node.gpu_type for node in nodes}),
        "partition": sorted({name for node in nodes for name in node.partitions}),
    }


def _submitter(board: Board) -> Submitter:
    if board.submitter is None:
        raise Refusal(503, "not-ready", "this cluster takes no submissions; [daemon] cluster = 'slurm' does")
    return board.submitter


def node_views(board: Board, drains: Sequence[Drain]) -> list[NodeView]:
    """The nodes as last observed, for adaptive jobs."""
    state = board.state
    if state is None:
        return []
    given: dict[str, int] = {}
    for job in state.jobs:
        if job.allocation is not None and job.phase is not Phase.QUEUED:
            for share in job.allocation.shares:
                given[share.node] = given.get(share.node, 0) + share.gpus
    return [
        NodeView(
            name=node.name,
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            given=given.get(node.name, 0),
            others=node.gpus_others,
            usable=node.usable,
            state=node.state,
            reservation=node.reservation,
        )
        for node in (drained(node, drains) for node in state.nodes)
    ]


def explain_job(view: JobView, record: RoundRecord | None) -> ExplanationView:
    """Why a job has what it has, by a round."""
    if view.state == "ended":
        why = f": it {view.ended_text}" if view.ended_text else ""
        return ExplanationView(job=view, code="ended", text=f"it has ended: {view.ended}{why}")
    said = explain(record, view.id) if record else None
    if record is None or said is None:
        refusal = next((each for each in record.snapshot.refused if each.job == view.id), None) if record else None
        if refusal is not None:
            return ExplanationView(job=view, code="refused", text=refusal.text)
        return ExplanationView(job=view, code="not-seen", text="no round has seen it yet; the next one will")
    # The round saw the job before it acted: people want to hear of it as it is.
    said = dataclasses.replace(said, job=dataclasses.replace(said.job, phase=Phase(view.state)))
    return ExplanationView(
        job=view,
        round=said.round,
        decided_s=said.decided_s,
        code=said.reason.code.value,
        text=said.reason.text,
        words=[*words(said, now_s=time.time()), *result_words(view)],
        needs=said.reason.needs,
        estimated_start_s=said.reason.estimated_start_s,
        goodput=said.assignment.goodput if said.assignment else None,
        prices=record.plan.prices,
        restart_cost_s=said.restart_cost_s,
        configurations=[
            ConfigurationView(
                gpu_type=option.configuration.gpu_type,
                nodes=option.configuration.nodes,
                gpus=option.configuration.gpus,
                goodput=option.goodput,
                price=option.price,
            )
            for option in said.options
        ],
        limits=list(said.limits),
        share=None if said.share is None else share_view(said.share),
    )


def result_words(view: JobView) -> list[str]:
    """What a trial has reached, in a sentence; of a job that reports no results, nothing."""
    if (result := view.result) is None:
        return []
    return [
        f"Its newest result is {result.metric:.6g} (the higher the better), after {duration(result.ran_s)} of running."
    ]


def share_view(use: ShareUse) -> ShareView:
    """CPU and memory of a job as clients see them."""
    return ShareView(
        cpus=use.amount.cpus,
        memory_mb=use.amount.memory_mb,
        part_cpus=use.part.cpus,
        part_memory_mb=use.part.memory_mb,
        profile=use.profile,
        speed=use.speed,
        sensitivity=[ShareOption.model_validate(option._asdict()) for option in use.options],
    )


def forecast(
    record: RoundRecord, order: Submission, user: str, models: ModelSource, rules: Mapping[str, PartitionRules]
) -> Forecast:
    """What the recorded policy would do with one more job in its last round."""
    before = record.snapshot
    partitions = tuple(sorted({name for node in before.nodes for name in node.partitions}))
    job = Job(
        FORECAST,
        order.name or "",
        user,
        order.spec,
        (order.partition,) if order.partition in partitions else partitions,
        Phase.QUEUED,
        before.time_s,
        account=order.account or "",
        qos=order.qos or "",
        time_limit_s=order.time_limit_s,
    )
    known = models.models([job], {node.gpu_type for node in before.nodes})
    (job,), costs_s = by_partition(rules, [job], known.restart_costs_s)
    known = dataclasses.replace(known, restart_costs_s=costs_s)
    policy, _ = make_policy(record.policy, record.settings)
    try:
        answer = ask(policy, with_job(before, job, known, ()), FORECAST, without=record.plan)
    except RoundFailed as error:
        raise Refusal(503, "not-ready", str(error), retry_after_s=5) from None
    given, why = answer.assignment, answer.reason
    never = why.code is ReasonCode.NEVER_FITS
    price = answer.plan.prices.get(given.placement.gpu_type) if given is not None else None
    return Forecast(
        would="start" if given is not None else "never" if never else "wait",
        code=why.code.value,
        text=why.text,
        needs=why.needs,
        allocation=None if given is None else allocation_view(given.placement),
        goodput=None if given is None else given.goodput,
        price=None if given is None or price is None else price * given.placement.gpus,
        estimated_start_s=None if never else answer.start_s,
        displaced=len(answer.others),
        words=told(answer, time.time()),
    )


def read_log(submitter: Submitter, job: str, offset: int, limit: int, *, ended: bool) -> LogPart:
    """A part of a job's output: of a regular file of the job's user alone, so that a link leads nowhere else."""
    output = submitter.output(job)
    nothing = LogPart(offset=max(offset, 0), next=max(offset, 0), size=0, text="", ended=ended)
    if output is None:
        return nothing
    try:
        opened = open_regular(output.file, output.uid)
    except NoRegularFile:
        raise Refusal(403, "not-allowed", f"{output.file} is no regular file of the job's user") from None
    except OSError:
        return nothing  # it has not been written yet
    with opened as file:
        status = os.fstat(file.fileno())
        begin = min(max(status.st_size + offset, 0) if offset < 0 else offset, status.st_size)
        file.seek(begin)
        part = file.read(limit)
    return LogPart(
        offset=begin,
        next=begin + len(part),
        size=status.st_size,
        text=part.decode("utf-8", errors="replace"),
        ended=ended and begin + len(part) >= status.st_size,
    )
