"""A client of penstockd's HTTP API, configured by an Airflow connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from airflow.providers.common.compat.sdk import BaseHook

from airflow_provider_penstock.exceptions import UNAUTHENTICATED, PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.address import addresses, seconds, yes_or_no
from airflow_provider_penstock.news import of_part
from airflow_provider_penstock.silence import Silence

log = logging.getLogger(__name__)

RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 12.0)
"""Pauses between the tries of a request: together 39.5 s, in which penstockd restarts, or another one takes over (15 s)."""
PATIENT_PAUSE_S = 15.0
"""Pause between further tries of a request of a task that waits for a job."""
TEST_PAUSES_S = (0.5, 2.0)
"""The same for `test_connection`, for which a person waits, and for a sensor, which asks again by itself."""
BILL_PAUSES_S = (2.0, 3.0, 5.0, 10.0, 20.0, 20.0)
LEDGER_LINES = 500
MAX_LOG_BYTES = 1 << 20
MAX_WAIT_S = 30.0
"""Longest wait of one long poll. The API's limit is 60 s."""

OPEN = ("queued", "starting", "running", "stopping")
"""States of jobs that have not ended."""

Job = dict[str, Any]
"""A `JobView` of the API."""


class PenstockHook(BaseHook):
    """A client of penstockd. Methods raise PenstockRefused if it refuses, and PenstockAway if it does not answer."""

    conn_name_attr = "penstock_conn_id"
    default_conn_name = "penstock_default"
    conn_type = "penstock"
    hook_name = "Penstock"

    def __init__(
        self,
        penstock_conn_id: str = default_conn_name,
        *,
        client_options: dict[str, Any] | None = None,
        silence: Silence | None = None,
    ) -> None:
        """A client for a connection.

        Args:
            penstock_conn_id: The connection.
            client_options: Those of a connection that was read before.
            silence: That of a task that waits for a job. Requests are then repeated until penstockd answers.
        """
        super().__init__()
        self.penstock_conn_id = penstock_conn_id
        self.silence = silence
        self._client_options = client_options

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """For Airflow before 3.2. Later versions read `ui-field-behaviour` of the provider's information."""
        return {
            "hidden_fields": ["schema", "login", "extra"],
            "relabeling": {"password": "Token"},
            "placeholders": {"host": "penstock.example.org", "port": "7373"},
        }

    def get_conn(self) -> httpx.Client:
        """An HTTP client with the connection's address, token, certificates and timeout."""
        if self._client_options is None:
            try:
                _read_options[self.penstock_conn_id] = client_options(self.get_connection(self.penstock_conn_id))
            except Exception:  # of any kind: a task that waits goes on with the connection that it has read last
                if self.silence is None or self.penstock_conn_id not in _read_options:
                    raise
        return httpx.Client(**(self._client_options or _read_options[self.penstock_conn_id]))

    def cancel_at_once(self, job_id: str, key: str | None = None) -> None:
        """Cancel a job that its own task gives up, without reading the connection again. `key` is as in `own`.

        Airflow calls `on_kill` in a signal handler. If the signal came while the task asked Airflow for something, such as this
        connection, asking again would wait for ever, and 5 s later Airflow would kill the task before it had cancelled the job.
        """
        known = _read_options.get(self.penstock_conn_id)
        try:
            PenstockHook(self.penstock_conn_id, client_options=known).cancel(job_id, for_owner=True, key=key)
        except PenstockRefused as refused:
            if refused.code != UNAUTHENTICATED or known is None:
                raise
            self.cancel(job_id, for_owner=True, key=key)  # the token has been replaced since

    @classmethod
    def get_connection_form_widgets(cls) -> dict[str, Any]:
        """For Airflow before 3.2. Later versions read `conn-fields` of the provider's information."""
        from flask_babel import lazy_gettext
        from wtforms import BooleanField, IntegerField, StringField
        from wtforms.validators import Optional

        return {
            "tls": BooleanField(lazy_gettext("TLS"), default=True),
            "ca_file": StringField(lazy_gettext("Certificates to trust (PEM file)")),
            "deployment": StringField(lazy_gettext("Name of this Airflow")),
            "public_url": StringField(lazy_gettext("Address for browsers")),
            # Airflow 2 has no field for numbers with a fraction: it would drop the connection type.
            "timeout_s": IntegerField(lazy_gettext("Timeout, s"), default=30, validators=[Optional()]),
        }

    @property
    def base_url(self) -> str:
        """penstockd's address, without a slash at the end."""
        return str(client_options(self.get_connection(self.penstock_conn_id))["base_url"])

    @property
    def deployment(self) -> str:
        """The name of this Airflow in the names of its jobs' owners.

        The connection has to give it. What every Airflow has, such as `[api] base_url`, is often the default or a copy, and
        of two Airflows with one name, each ends jobs of the other.

        Raises:
            PenstockRefused: the connection has none.
        """
        given = str(self.get_connection(self.penstock_conn_id).extra_dejson.get("deployment") or "").strip()
        if not given:
            raise PenstockRefused(
                f"connection {self.penstock_conn_id} does not name this Airflow; set `deployment` in its extra to a name that no "
                'other Airflow uses, such as {"deployment": "airflow-production"}'
            )
        return given

    @property
    def public_url(self) -> str:
        """penstockd's address for browsers, without a slash at the end: the connection's `public_url`, else its own address."""
        connection = self.get_connection(self.penstock_conn_id)
        return str(connection.extra_dejson.get("public_url") or client_options(connection)["base_url"]).rstrip("/")

    def job_url(self, job_id: str) -> str:
        """A job's URL for browsers."""
        return f"{self.public_url}/v1/jobs/{job_id}"

    def test_connection(self) -> tuple[bool, str]:
        """Whether penstockd accepts the token and the connection names this Airflow, in a sentence too."""
        try:
            identity, deployment = self.ask("GET", "/v1/me", pauses_s=TEST_PAUSES_S), self.deployment
        except (PenstockAway, PenstockRefused, ValueError, httpx.InvalidURL) as error:
            return False, str(error)
        return (
            True,
            f"penstockd accepts the token as {identity['user']} ({identity['role']}); this Airflow is {deployment}",
        )

    def ask(
        self,
        method: str,
        path: str,
        *,
        patience_s: float = 0.0,
        pauses_s: Sequence[float] | None = None,
        **request: Any,
    ) -> Any:
        """The answer's JSON. Repeats a request that is not answered: all requests of this class are safe to repeat.

        If penstockd does not know the token, the connection is read once more: the token may have been replaced a moment ago.

        Args:
            patience_s: how much longer than other requests this one may take.
            pauses_s: between the tries; by default `RETRY_PAUSES_S`.
        """
        knows_token = True
        further: Iterable[float | None] = (None,) if self.silence is None else itertools.repeat(PATIENT_PAUSE_S)
        for pause_s in itertools.chain(RETRY_PAUSES_S if pauses_s is None else pauses_s, further):
            with self.get_conn() as client:
                timeout_s = client.timeout.read
                request["timeout"] = None if timeout_s is None else timeout_s + patience_s
                try:
                    answer = read(client.request(method, path, **request))
                except (httpx.TransportError, PenstockAway) as error:
                    did_not_answer(client)
                    if pause_s is None:
                        raise PenstockAway(f"penstockd at {client.base_url}: {error}") from None
                    if self.silence is not None:
                        self.silence.goes_on(error)
                except PenstockRefused as refused:
                    if refused.code != UNAUTHENTICATED or not knows_token or pause_s is None:
                        raise
                    knows_token = False
                else:
                    if self.silence is not None:
                        self.silence.ends()
                    return answer
            time.sleep(pause_s or 0.0)
        raise AssertionError("the last try returns or raises")

    def submit(self, submission: dict[str, Any]) -> Job:
        """Submit a job. Repeating a submission with the same `key` returns the same job."""
        if not submission.get("key"):
            raise ValueError("a submission without a key could run twice; add a key")
        return dict(self.ask("POST", "/v1/jobs", json=submission))

    def owner(self, name: str) -> dict[str, Any] | None:
        """The owner of this name, with its `generation` and newest `job`; None if no job was submitted for it."""
        try:
            return dict(self.ask("GET", "/v1/owner", params={"name": name}))
        except PenstockRefused as refused:
            if refused.code != "no-such-owner":
                raise
            return None

    def find(self, key: str) -> Job | None:
        """The job with a key; None if there is none."""
        jobs = self.ask("GET", "/v1/jobs", params={"key": key})["jobs"]
        return jobs[0] if jobs else None

    def job(self, job_id: str) -> Job:
        """A job."""
        return dict(self.ask("GET", f"/v1/jobs/{job_id}"))

    def own(self, job_id: str, key: str | None) -> Job:
        """The job of a submission with this key, which had this id; without a key, the job that has the id.

        A slurmctld that was killed gives the ids of jobs that it has lost to the next ones. penstockd keeps the lost job, as
        ended and under another id.
        """
        if key is None:
            return self.job(job_id)
        if (found := self.find(key)) is None:
            raise PenstockRefused(
                f"penstockd has no job with the key {key} any more; its id was {job_id}", "no-such-job"
            )
        return found

    def cancel(self, job_id: str, *, for_owner: bool = False, key: str | None = None) -> Job:
        """Cancel a job. May be repeated.

        Args:
            job_id: The job.
            for_owner: whether the job's own task gives it up, so that its next try may submit another job.
            key: As in `own`.
        """
        if key is not None:
            job_id = self.own(job_id, key)["id"]
        return dict(self.ask("POST", f"/v1/jobs/{job_id}/cancel", params={"for_owner": for_owner}))

    def renew(self, job_id: str) -> None:
        """Renew the lease of a job, if it has one."""
        self.ask("POST", "/v1/jobs/renew", json={"jobs": [job_id]})

    def forecast(self, submission: dict[str, Any]) -> dict[str, Any]:
        """What a job would get if it were submitted now. Submits nothing."""
        return dict(self.ask("POST", "/v1/jobs/plan", json=submission))

    def is_whole(self) -> bool:
        """Whether no GPU of the cluster is down or drained."""
        return not any(self.ask("GET", "/v1/cluster")["unusable"].values())

    def explain(self, job_id: str) -> str:
        """Why a job has its present GPUs or waits, in a sentence."""
        return str(self.ask("GET", f"/v1/jobs/{job_id}/explain")["text"])

    def wait(self, job_id: str) -> Iterator[Job]:
        """The job, after each change or 30 s, until it has ended."""
        job = self.job(job_id)
        while job["state"] != "ended":
            yield job
            query = {"wait": MAX_WAIT_S, "since": job["version"]}
            job = self.ask("GET", f"/v1/jobs/{job_id}", params=query, patience_s=MAX_WAIT_S)
        yield job

    def log_lines(self, job_id: str) -> Sequence[str]:
        """The last lines of a job's output; none if penstockd can read no file."""
        return self.log_since(job_id, -MAX_LOG_BYTES)[0]

    def log_since(self, job_id: str, offset: int, *, whole: bool = False) -> tuple[Sequence[str], int]:
        """The lines of a job's output from a byte on, and the byte after them. A negative offset counts from the end.

        Returns at most the last 1 MiB. The first line then says how many bytes were left out. With `whole`, a line that is not
        complete yet is left to the next call.
        """
        lines: list[str] = []
        left_out = 0
        with contextlib.suppress(PenstockRefused):
            while True:
                part = self.ask("GET", f"/v1/jobs/{job_id}/log", params={"offset": offset})
                if part["size"] - part["offset"] > MAX_LOG_BYTES and not left_out:
                    left_out, offset = part["size"] - MAX_LOG_BYTES - part["offset"], part["size"] - MAX_LOG_BYTES
                    continue
                found, begun, offset = of_part(part)
                lines += found
                if part["next"] >= part["size"] or not part["text"]:
                    break
            if not whole:
                offset = part["next"]
                lines += filter(None, [begun.rstrip("\r")])
        return [f"({left_out} bytes left out)", *lines] if left_out else lines, max(offset, 0)

    def used(self, job_id: str) -> dict[str, Any]:
        """What a job used: `cost_usd` and `cloud_gpu_seconds` by GPU type from the budget ledger, and its latest `batch_sizes`.

        The bill of a run in the cloud is complete once its instances have ended. This waits for it, at most for a minute.
        """
        for pause_s in (*BILL_PAUSES_S, None):
            ledger = self.ask("GET", "/v1/ledger", params={"job": job_id, "limit": LEDGER_LINES})["lines"]
            if pause_s is None or has_whole_bill(ledger):
                break
            time.sleep(pause_s)
        return used(job_id, ledger, self.ask("GET", f"/v1/jobs/{job_id}/history")["observations"])


def has_whole_bill(ledger: list[dict[str, Any]]) -> bool:
    """Whether the instances of all of a job's runs in the cloud have ended and are paid for, by its lines of the ledger."""
    runs: dict[str, set[str]] = {"committed": set(), "usd": set()}
    for line in ledger:
        if line["kind"] in runs:
            runs[line["kind"]].add(line["key"].rpartition(":")[0])
    return runs["committed"] <= runs["usd"]


def used(job_id: str, ledger: list[dict[str, Any]], observations: list[dict[str, Any]]) -> dict[str, Any]:
    """What a job used, by its lines of the ledger and its newest observations; see `PenstockHook.used`."""
    if not has_whole_bill(ledger):
        log.warning("penstockd does not have the whole bill of job %s yet: cost_usd is too low", job_id)
    cost_usd = sum(line["amount"] for line in ledger if line["kind"] == "usd")
    cloud: Counter[str] = Counter()
    for line in ledger:
        if line["kind"] == "cloud-gpu-seconds":
            cloud[line["text"]] += line["amount"]
    seen = [report["body"] for report in observations]
    sizes = {each["atomic_batch"] * each["gpus"] * (each["accumulation_steps"] + 1) for each in seen}
    return {"cost_usd": cost_usd, "cloud_gpu_seconds": dict(cloud), "batch_sizes": sorted(sizes)}


def summary(job: Job, usage: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a task returns about its job. `usage` comes from `used`."""
    usage = dict(usage or {})
    seconds: Counter[str] = Counter(job["gpu_seconds"])
    seconds.update(usage.pop("cloud_gpu_seconds", {}))
    return {
        "job_id": job["id"],
        "state": job["ended"] or job["state"],
        "exit_code": job["exit_code"],
        "gpu_hours": {gpu_type: amount / 3600 for gpu_type, amount in seconds.items() if amount > 0},
        "restarts": job["restarts"],
        "progress": job["progress"],
        "result": job["result"],
        **usage,
    }


async def final_summary(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """An ended job's `summary`, once its bill is complete; for triggers.

    A thread would be taken from other triggers: a triggerer has few.
    """
    for pause_s in (*BILL_PAUSES_S, None):
        ledger = read(await client.get("/v1/ledger", params={"job": job_id, "limit": LEDGER_LINES}))["lines"]
        if pause_s is None or has_whole_bill(ledger):
            break
        await asyncio.sleep(pause_s)
    history = read(await client.get(f"/v1/jobs/{job_id}/history"))
    return summary(read(await client.get(f"/v1/jobs/{job_id}")), used(job_id, ledger, history["observations"]))


_read_options: dict[str, dict[str, Any]] = {}
"""Connection -> its `client_options`, as this process has read them last."""

_unanswered_s: dict[str, float] = {}
"""URL of a penstockd -> when it last did not answer, or stood by; on a monotonic clock."""


def did_not_answer(client: httpx.Client | httpx.AsyncClient) -> None:
    """Note that this client's penstockd does not answer or does not lead: the next client asks another one, if there is one."""
    _unanswered_s[str(client.base_url).rstrip("/")] = time.monotonic()


def client_options(connection: Any) -> dict[str, Any]:
    """Arguments for an HTTP client, sync or async, from an Airflow connection. Raises ValueError without a host."""
    if not (connection.host or "").strip(", "):
        raise ValueError(f"connection {connection.conn_id} has no host; give penstockd's host, port and a token")
    extra = connection.extra_dejson
    try:
        urls = addresses(connection.host, connection.port, yes_or_no("tls", extra.get("tls")))
        timeout_s = seconds("timeout_s", extra.get("timeout_s") or 30)
    except ValueError as error:
        raise ValueError(f"connection {connection.conn_id}: {error}") from None
    # Of several penstockd only one leads: the one that has not failed to answer, or did so longest ago.
    base_url = min(urls, key=lambda url: _unanswered_s.get(url, 0.0))
    return {
        "base_url": base_url,
        "headers": {"Authorization": f"Bearer {connection.password}"} if connection.password else {},
        # Without TLS False: the clients would read the system's certificates.
        "verify": _trust(extra.get("ca_file") or None) if base_url.startswith("https:") else False,
        "timeout": timeout_s,
        "trust_env": False,
    }


def _trust(ca_file: str | None) -> ssl.SSLContext:
    """The certificates to trust: those of a file, or the system's. They are read again only when they have changed.

    Reading them takes some 30 ms of processor time, and 300 tasks that end at once would each read them.
    """
    system = ssl.get_default_verify_paths()
    given = (ca_file,) if ca_file else (system.cafile, system.capath)
    return _read_trust(ca_file, tuple(Path(path).stat().st_mtime_ns for path in given if path))


@functools.lru_cache(maxsize=16)
def _read_trust(ca_file: str | None, changed_ns: tuple[int, ...]) -> ssl.SSLContext:
    del changed_ns  # only part of the cache's key
    return ssl.create_default_context(cafile=ca_file)


def read(answer: httpx.Response) -> Any:
    """The answer's JSON. Raises PenstockRefused or PenstockAway with the API's own sentence."""
    if answer.is_success:
        return answer.json()
    try:
        error = answer.json()["error"]
        sentence, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        sentence, code = f"an answer that is not penstockd's: {answer.text[:200]!r}", ""
    sentence += f" (HTTP {answer.status_code})"
    if answer.status_code == 429 or answer.status_code >= 500:
        raise PenstockAway(sentence)
    raise PenstockRefused(sentence, code)
