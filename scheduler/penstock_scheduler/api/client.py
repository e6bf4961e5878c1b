"""A typed client of penstockd's HTTP API, for the command line and for other programs:

    with Client.open() as penstock:
        job = penstock.submit(Submission(key="night-7", command=("python", "train.py"), spec=JobSpec(max_gpus=8)))
        penstock.wait(job.id)

When the daemon does not answer, the client repeats requests that are safe to repeat: reads, and submissions with a key. Any other
request fails at once.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from penstock_profiles.profiles import Profile
from penstock_profiles.wire import URL_VARIABLE, Report, api_urls, read
from penstock_scheduler.api.access_messages import Identity, TokenView
from penstock_scheduler.api.admin_client import AdminCalls
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.api.history_messages import (
    Allocations,
    AllocationSpan,
    JobSeries,
    Queue,
    QueueEntry,
    Series,
)
from penstock_scheduler.api.lease_messages import Renewal, Renewed
from penstock_scheduler.api.ledger_messages import BudgetView, LedgerPage, Usage, UsageBy
from penstock_scheduler.api.messages import (
    DEFAULT_SOCKET,
    ClusterView,
    Drain,
    ExplanationView,
    Forecast,
    History,
    JobPage,
    JobView,
    LogPart,
    NodeView,
    OwnerView,
    PolicyView,
    ProfileList,
    RefusedJob,
    ReportBatch,
    ReportReceipt,
    RoundPage,
    RoundView,
    Submission,
)
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.safety.munge import credential

TOKEN_VARIABLE = "PENSTOCK_TOKEN"  # noqa: S105
"""Environment variable: a bearer token. Over TCP without a token, the client uses MUNGE."""

MUNGE_SOCKET_VARIABLE = "PENSTOCK_MUNGE_SOCKET"
"""Environment variable: munged's socket, if it is not MUNGE's default."""
AUTHORITY_VARIABLE = "PENSTOCK_CA"
"""Environment variable: PEM file of certificates to trust for penstockd; without it, those that the system trusts."""

RETRY_PAUSES_S = (0.2, 1.0, 3.0)

FIND_S = 25.0
"""How long to look for the leader among several penstockd: longer than a takeover takes."""
FIND_PAUSE_S = 0.5
"""After all have been asked."""
LOOK_S = 2.0
"""How long the first look at all of several penstockd may take: a command names them within 5 s, its own start included. Each
further look takes twice as long, for a penstockd that is slow."""

Answer = TypeVar("Answer", bound=BaseModel)


class DaemonAway(PenstockError):
    """penstockd does not answer."""

    exit_status = 3


class ApiError(PenstockError):
    """penstockd refused a request. `status` is the HTTP status, `code` is for programs, `str(error)` is for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Client(AdminCalls):
    """A connection to penstockd. Methods raise ApiError if it refuses, and DaemonAway if it does not answer.

    Args:
        url: `https://host:port`, `http://host:port` or `unix:/path/of/the/socket`. With several, separated by commas, the client
            finds the penstockd that leads, and waits up to 25 s for one.
        token: a bearer token; None: the client identifies itself by the socket, or over TCP by MUNGE.
        authority: PEM file of certificates to trust for `https`; None: those that the system trusts.
        munge_socket: munged's socket; None: MUNGE's default.
        timeout_s: seconds to wait for an answer.

    Raises:
        ConfigError: a URL has another form, or the certificates cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        authority: Path | None = None,
        munge_socket: Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        try:
            self._urls = api_urls(url)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._authority = authority
        self._token = token
        self._munge_socket = munge_socket
        self._timeout_s = timeout_s
        self._several = len(self._urls) > 1
        self._look_s = LOOK_S / len(self._urls)
        self._connect_s = self._look_s if self._several else timeout_s
        self.last_event: str | None = None
        """The id of the newest event of `events`."""
        self.silent_since_s: float | None = None
        """By the newest answer: when the API last heard of penstockd, s since 1970; None: penstockd is there."""
        self.on_search: Callable[[str], None] | None = None
        """Called once with a sentence if none of several penstockd leads, while the client goes on looking."""
        self._tried: dict[str, str] = {}
        self._use(self._urls[0])

    def _use(self, url: str) -> None:
        """Ask this URL from now on. Raises ConfigError."""
        # Reading the system's certificates takes 45 ms, and without TLS they are not needed.
        plain = url.startswith(("unix:", "http:"))
        verify = _trusting(self._authority) if self._authority is not None else not plain
        transport = None
        if url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"), verify=verify)
        self.url = url
        self._answers = not self._several
        """Whether the requests may go to this penstockd: of several, only to one that has shown that it answers."""
        self._local = transport is not None
        self._http = httpx.Client(
            transport=transport,
            base_url="http://penstock" if self._local else url,
            verify=verify,
            timeout=self._timeout_s,
            trust_env=False,
        )

    def _use_next(self) -> None:
        """Ask the next one of several penstockd from now on."""
        self._http.close()
        self._use(self._urls[(self._urls.index(self.url) + 1) % len(self._urls)])

    @classmethod
    def open(cls, environ: Mapping[str, str] = os.environ, *, timeout_s: float = 30.0) -> Self:
        """A client as the environment variables say; by default over the socket of this machine."""
        url = environ.get(URL_VARIABLE) or f"unix:{DEFAULT_SOCKET}"
        authority, munge_socket = environ.get(AUTHORITY_VARIABLE), environ.get(MUNGE_SOCKET_VARIABLE)
        return cls(
            url,
            token=environ.get(TOKEN_VARIABLE) or None,
            authority=Path(authority) if authority else None,
            munge_socket=Path(munge_socket) if munge_socket else None,
            timeout_s=timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # --- jobs

    def submit(self, submission: Submission) -> JobView:
        """Submit a job, or return the job that was submitted with the same key."""
        return self._ask(JobView, "POST", "/v1/jobs", body=submission, again=submission.key is not None)

    def owner(self, name: str) -> OwnerView:
        """An owner of your own jobs, and its newest job."""
        return self._ask(OwnerView, "GET", "/v1/owner", query={"name": name}, again=True)

    def forecast(self, job: Submission) -> Forecast:
        """What a job would get if it were submitted now. Submits nothing. A `PlanOrder` may lack the program."""
        return self._ask(Forecast, "POST", "/v1/jobs/plan", body=job, again=True)

    def jobs(
        self,
        *,
        user: str | None = None,
        state: Sequence[str] = (),
        name: str | None = None,
        key: str | None = None,
    ) -> Iterator[JobView]:
        """The jobs that match and that the caller may see, newest first. Fetches page by page."""
        after = None
        while True:
            query = {"user": user, "state": list(state) or None, "name": name, "key": key, "after": after}
            page = self._ask(JobPage, "GET", "/v1/jobs", query=query, again=True)
            yield from page.jobs
            if (after := page.next) is None:
                return

    def job(self, job: str, *, wait_s: float = 0.0, since: int | None = None) -> JobView:
        """A job. With `wait_s`: returns when its version is above `since`, at the latest after `wait_s`."""
        query = {"wait": wait_s or None, "since": since}
        return self._ask(JobView, "GET", f"/v1/jobs/{_part(job)}", query=query, again=True, patience_s=wait_s)

    def wait(self, job: str, *, timeout_s: float | None = None) -> JobView:
        """Wait for a job's end. Returns the job as it is after `timeout_s` if it has not ended by then."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        seen = self.job(job)
        while seen.state != "ended" and (until is None or time.monotonic() < until):
            left_s = 30.0 if until is None else max(min(until - time.monotonic(), 30.0), 0.1)
            seen = self.job(job, wait_s=left_s, since=seen.version)
        return seen

    def renew(self, *jobs: str) -> list[str]:
        """Renew the leases of own jobs; the jobs that have one."""
        return self._ask(Renewed, "POST", "/v1/jobs/renew", body=Renewal(jobs=jobs), again=True).jobs

    def cancel(self, job: str, *, for_owner: bool = False) -> JobView:
        """Ask Slurm to end a job. A job that has ended stays as it is.

        Args:
            for_owner: whether the job's owner itself gives it up, so that its next try submits another one.
        """
        query = {"for_owner": "true"} if for_owner else None
        return self._ask(JobView, "POST", f"/v1/jobs/{_part(job)}/cancel", query=query, again=True)

    def hold(self, job: str) -> JobView:
        """Keep a job from being started until it is released. A running job continues."""
        return self._ask(JobView, "POST", f"/v1/jobs/{_part(job)}/hold", again=True)

    def release(self, job: str) -> JobView:
        """Let a held job start again."""
        return self._ask(JobView, "POST", f"/v1/jobs/{_part(job)}/release", again=True)

    def explain(self, job: str) -> ExplanationView:
        """Why a job has what it has."""
        return self._ask(ExplanationView, "GET", f"/v1/jobs/{_part(job)}/explain", again=True)

    def history(self, job: str) -> History:
        """What happened to a job."""
        return self._ask(History, "GET", f"/v1/jobs/{_part(job)}/history", again=True)

    def allocations(
        self, job: str | None = None, *, from_s: float | None = None, to_s: float | None = None
    ) -> Iterator[AllocationSpan]:
        """Which GPUs a job held when, oldest first; None: the spans of all jobs that overlap this time, s since 1970."""
        path = "/v1/allocations" if job is None else f"/v1/jobs/{_part(job)}/allocations"
        query: dict[str, Any] = {} if job is not None else {"from": from_s, "to": to_s}
        while True:
            page = self._ask(Allocations, "GET", path, query=query, again=True)
            yield from page.spans
            if page.next is None:
                return
            query["after"] = page.next

    def job_series(self, job: str, *, from_s: float | None = None, to_s: float | None = None) -> JobSeries:
        """How a job ran over time, in at most some hundred samples; by default from its start until now."""
        query = {"from": from_s, "to": to_s}
        return self._ask(JobSeries, "GET", f"/v1/jobs/{_part(job)}/series", query=query, again=True)

    def series(self, *names: str, from_s: float | None = None, to_s: float | None = None) -> Series:
        """Figures of the cluster over time; by default all of them, over the last day."""
        query = {"from": from_s, "to": to_s, "name": list(names) or None}
        return self._ask(Series, "GET", "/v1/series", query=query, again=True)

    def queue(
        self,
        *,
        user: str | None = None,
        account: str | None = None,
        partition: str | None = None,
        code: str | None = None,
    ) -> Iterator[QueueEntry]:
        """Jobs that hold no GPUs, and why, in the order of submission. Fetches page by page."""
        query: dict[str, Any] = {"user": user, "account": account, "partition": partition, "code": code, "after": None}
        while True:
            page = self._ask(Queue, "GET", "/v1/queue", query=query, again=True)
            yield from page.entries
            if page.next is None:
                return
            query["after"] = page.next

    def log(
        self, job: str, offset: int = 0, *, wait_s: float = 0.0, stream: Literal["stdout", "stderr"] = "stdout"
    ) -> LogPart:
        """A part of a job's output. With `wait_s`: waits until there is some.

        Args:
            offset: first byte; negative: bytes from the end.

        Raises:
            ApiError: the job has ended and its output cannot be read; the text names the file.
        """
        query = {"offset": offset, "wait": wait_s or None, "stream": stream if stream != "stdout" else None}
        return self._ask(LogPart, "GET", f"/v1/jobs/{_part(job)}/log", query=query, again=True, patience_s=wait_s)

    def report(self, job: str, reports: Sequence[Report]) -> ReportReceipt:
        """Send reports of a job. The reports that the receipt counts as accepted are on disk."""
        batch = ReportBatch(reports=[report.model_dump(mode="json") for report in reports])
        return self._ask(ReportReceipt, "POST", f"/v1/jobs/{_part(job)}/reports", body=batch, again=True)

    # --- the cluster

    def rounds(self, *, before: int | None = None, limit: int = 50) -> RoundPage:
        """A page of rounds, newest first."""
        return self._ask(RoundPage, "GET", "/v1/rounds", query={"before": before, "limit": limit}, again=True)

    def round(self, number: int) -> RoundView:
        """A round and its decisions."""
        return self._ask(RoundView, "GET", f"/v1/rounds/{number}", again=True)

    def cluster(self) -> ClusterView:
        """The cluster in numbers."""
        return self._ask(ClusterView, "GET", "/v1/cluster", again=True)

    def refused(self) -> list[RefusedJob]:
        """Jobs that ask for Penstock and cannot be managed, and why: for users their own, for operators all."""
        return self._list(RefusedJob, "/v1/refused")

    def nodes(self) -> list[NodeView]:
        """The nodes."""
        return self._list(NodeView, "/v1/nodes")

    def prices(self) -> dict[str, float]:
        """GPU type -> its price in the newest round; empty: the policy has no prices."""
        return dict(self._json("GET", "/v1/prices"))

    def policies(self) -> list[PolicyView]:
        """The policies, and which one decides."""
        return self._list(PolicyView, "/v1/policies")

    def drains(self) -> list[Drain]:
        """What is drained for adaptive jobs."""
        return self._list(Drain, "/v1/drains")

    def end_drain(self, kind: str, name: str) -> None:
        """End a drain. For operators."""
        self._send("DELETE", f"/v1/drains/{_part(kind)}/{_part(name)}")

    def budgets(self) -> list[BudgetView]:
        """Budgets as of the newest round: for users those of their accounts, for operators all."""
        return self._list(BudgetView, "/v1/budgets")

    def usage(self, by: UsageBy = "user", *, from_s: float | None = None, to_s: float | None = None) -> Usage:
        """What jobs used between two times, s since 1970: for users their own, for operators all. None: the beginning, now.

        `penstock_scheduler.accounts.usage.usage` returns it as a DataFrame.
        """
        return self._ask(Usage, "GET", "/v1/usage", query={"by": by, "from": from_s, "to": to_s}, again=True)

    def settings(self) -> dict[str, Any]:
        """The settings by section. For admins."""
        return dict(self._json("GET", "/v1/settings"))

    def profiles(self) -> ProfileList:
        """The caller's stored profiles."""
        return self._ask(ProfileList, "GET", "/v1/profiles", again=True)

    def store_profile(self, profile: Profile) -> None:
        """Store a profile for the caller's jobs of that name."""
        self._send("PUT", "/v1/profiles", body=profile, again=True)

    # --- access

    def me(self) -> Identity:
        """The caller, as the daemon sees it."""
        return self._ask(Identity, "GET", "/v1/me", again=True)

    def tokens(self) -> list[TokenView]:
        """All tokens, without their secrets. For admins."""
        return self._list(TokenView, "/v1/tokens")

    def revoke_token(self, token: str) -> TokenView:
        """Revoke the token with this id. For admins."""
        return self._ask(TokenView, "DELETE", f"/v1/tokens/{_part(token)}")

    def ledger(self, *, before: int | None = None) -> LedgerPage:
        """A page of the budget ledger, newest first. Users see their own entries."""
        return self._ask(LedgerPage, "GET", "/v1/ledger", query={"before": before}, again=True)

    def ready(self) -> Health:
        """Whether the daemon can do its work. Does not raise if it cannot. Of several, the leader answers if there is one."""
        for _ in self._urls:
            found = read(Health, self._send("GET", "/v1/ready", accept=(503,)).content)
            if found.leader is None or found.leader.here or len(self._urls) == 1:
                break
            self._use_next()
        return found

    def events(self, after: str | None = None) -> Iterator[tuple[str, str]]:
        """(kind, JSON) of each event, until the API ends.

        First all jobs that have not ended, as events `snapshot`; then `round` and `job`. `last_event` is the id of the newest.

        Args:
            after: the id of an event, to go on after it instead of with a snapshot.
        """
        headers = self._headers("GET", "/v1/events") | {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        kind = ""
        try:
            with self._http.stream("GET", "/v1/events", headers=headers, timeout=None) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _error(answer)
                for line in answer.iter_lines():
                    if line.startswith("id: "):
                        self.last_event = line[4:]
                    elif line.startswith("event: "):
                        kind = line[7:]
                    elif line.startswith("data: "):
                        yield kind, line[6:]
        except httpx.TransportError as error:
            raise self._away(error) from None

    # --- requests

    def _ask(
        self,
        model: type[Answer],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        query: Mapping[str, Any] | None = None,
        again: bool = False,
        patience_s: float = 0.0,
    ) -> Answer:
        answer = self._send(method, path, body=body, query=query, again=again, patience_s=patience_s)
        return read(model, answer.content)

    def _list(self, model: type[Answer], path: str) -> list[Answer]:
        return [model.model_validate(each, extra="ignore") for each in self._json("GET", path)]

    def _json(self, method: str, path: str) -> Any:
        return self._send(method, path, again=True).json()

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        query: Mapping[str, Any] | None = None,
        again: bool = False,
        patience_s: float = 0.0,
        accept: tuple[int, ...] = (),
    ) -> httpx.Response:
        content = None if body is None else body.model_dump_json(exclude_unset=True).encode()
        pauses = iter((*(RETRY_PAUSES_S if again else ()), None))
        timeout = httpx.Timeout(self._timeout_s + patience_s, connect=self._connect_s)
        find_until_s = self._find_until_s()
        while True:
            try:
                self._look(find_until_s)
                headers = self._headers(method, path) | ({"Content-Type": "application/json"} if content else {})
                answer = self._http.request(
                    method, path, content=content, params=_given(query), headers=headers, timeout=timeout
                )
            except httpx.TransportError as error:
                unsent = self._unsent(error)
                if unsent and self._finds(find_until_s, str(error)):
                    continue
                pause_s = None if unsent and self._several else next(pauses)
                if pause_s is None:
                    raise self._away(error) from None
                self._answers = not self._several
                find_until_s = self._find_until_s()  # it answered until now
                time.sleep(pause_s)
                continue
            if accept == () and _stands_by(answer) and self._finds(find_until_s, "stands by"):
                continue
            self.silent_since_s = _silent_since_s(answer)
            if answer.is_success or answer.status_code in accept:
                return answer
            if answer.status_code not in (429, 503, 504) or (pause_s := next(pauses)) is None:
                raise _error(answer)
            time.sleep(pause_s)

    def _unsent(self, error: httpx.TransportError) -> bool:
        """Whether the request never left: nobody can have carried it out."""
        return not self._answers or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)

    def _find_until_s(self) -> float:
        """Until when the leader may be looked for, from now."""
        return time.monotonic() + FIND_S if self._several else 0.0

    def _look(self, until_s: float) -> None:
        """Ask one of several penstockd for a sign of life. Raises httpx.TransportError if it gives none in time."""
        if not self._answers:
            left_s = max(until_s - time.monotonic(), 0.1)
            self._http.get("/v1/health", timeout=httpx.Timeout(min(self._look_s, left_s)))
            self._answers = True

    def _finds(self, until_s: float, why: str) -> bool:
        """Go on to the next penstockd, with a pause after the last one. Returns whether there is time for that."""
        self._tried[self.url] = why
        if time.monotonic() > until_s:
            return False
        if self.url == self._urls[-1]:
            if self.on_search is not None:
                self.on_search(f"no penstockd leads at {self._tries()}; looks for one for up to {FIND_S:g} s.")
                self.on_search = None
            self._look_s *= 2
            time.sleep(FIND_PAUSE_S)
        self._use_next()
        return True

    def _headers(self, method: str, path: str) -> dict[str, str]:
        if self._token is not None:
            return {"Authorization": f"Bearer {self._token}"}
        if self._local:
            return {}
        return {"Authorization": f"MUNGE {credential(method, path, self._munge_socket)}"}

    def _tries(self) -> str:
        return ", ".join(f"{url} ({why})" for url, why in self._tried.items())

    def _away(self, error: Exception) -> DaemonAway:
        where = self._tries() if len(self._tried) > 1 else f"{self.url} ({error})"
        return DaemonAway(f"penstockd does not answer at {where}. Running jobs keep running. Check that it is up.")


def _silent_since_s(answer: httpx.Response) -> float | None:
    """When the API last heard of penstockd, s since 1970. Returns None if penstockd is there."""
    since_s = answer.headers.get("Penstock-Daemon-Silent-Since")
    return None if since_s is None else float(since_s)


def _stands_by(answer: httpx.Response) -> bool:
    """Whether a penstockd that stands by has refused the request: nothing was done."""
    if answer.status_code != 503:
        return False
    try:
        return bool(answer.json()["error"]["code"] == "not-leader")
    except (ValueError, KeyError, TypeError):
        return False


def _given(query: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (query or {}).items() if value is not None}


def _part(name: str) -> str:
    """A name as one part of a path, whatever its characters are: an id that no job can have is unknown to the daemon."""
    return quote(name, safe="")


def _trusting(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{authority}: {error}; set {AUTHORITY_VARIABLE} to a PEM file of certificates") from None


def _error(answer: httpx.Response) -> ApiError:
    try:
        problem = answer.json()["error"]
        return ApiError(answer.status_code, str(problem["code"]), str(problem["message"]))
    except (ValueError, KeyError, TypeError):
        return ApiError(answer.status_code, "unreadable", f"the answer is not from penstockd: {answer.text[:200]!r}")
