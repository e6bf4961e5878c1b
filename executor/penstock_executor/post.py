"""Reports over HTTP, for jobs on nodes without the spool, such as in the cloud (docs/user/api.md, Reports).

A thread posts the reports. `put` never waits: if more than `WAITING` reports wait, the oldest are dropped. While the
daemon does not answer, the thread retries after growing pauses. Only the standard library is used, to keep training
jobs light.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from penstock_executor.environment import Service
from penstock_profiles.wire import Report

log = logging.getLogger(__name__)

WAITING = 256
"""The most reports that wait to be posted."""

BATCH = 100
"""The most reports in one request; the service accepts 500."""

EVERY_S = 1.0
"""Seconds between two requests, at least."""

LONGEST_PAUSE_S = 60.0
TIMEOUT_S = 10.0
ANSWER_BYTES = 1 << 20


class _Refused(OSError):
    """The service answered with an error."""

    def __init__(self, status: int, text: str, pause_s: float | None) -> None:
        super().__init__(f"status {status}: {text}")
        self.status, self.pause_s = status, pause_s


class Post:
    """Posts one run's reports to penstockd.

    Args:
        service: the API's address, and the proof of identity.
        job_id: the job's id in Penstock.
        epoch: of the run, by its checkpoints. If the daemon has assigned a higher epoch, its first answer says so.
        first_pause_s: seconds before the first retry if the daemon does not answer. Each further pause is twice as
            long.
    """

    def __init__(self, service: Service, job_id: str, epoch: int, first_pause_s: float = 1.0) -> None:
        self.service, self._path = service, f"/v1/jobs/{job_id}/reports"
        self._at = 0
        """Which of the service's addresses is asked now."""
        self._first_pause_s = first_pause_s
        self.epoch = epoch
        self.superseded = False
        """Whether a later run of the job reports."""
        self.dropped = 0
        """Number of reports that were lost."""
        self._accepted = False
        """Whether the daemon has accepted a report under `epoch`."""
        self._waiting: deque[Report] = deque()
        self._lock = threading.Lock()
        self._wake, self._done = threading.Event(), threading.Event()
        self._closing = False
        threading.Thread(target=self._run, name="penstock-post", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of reports that are not posted yet."""
        return len(self._waiting)

    @property
    def _url(self) -> str:
        return self.service.urls[self._at % len(self.service.urls)]

    def put(self, report: Report) -> None:
        """Queue a report. Never waits, never raises."""
        with self._lock:
            if len(self._waiting) == WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(report)
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Wait until all reports are posted, or the time is over. Nothing is posted after that."""
        self._closing = True
        self._wake.set()
        self._done.wait(timeout_s)

    def _run(self) -> None:
        failures = 0
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                try:
                    self._post()
                    if failures:
                        log.info("url=%s the daemon answers again dropped=%d", self._url, self.dropped)
                    failures, pause_s = 0, EVERY_S
                except Exception as error:  # no error may stop the training
                    if not failures:
                        log.warning("url=%s reports wait: %s", self._url, error)
                    failures, self._at = failures + 1, self._at + 1
                    if failures < len(self.service.urls):
                        continue  # another penstockd may lead
                    asked_s = error.pause_s if isinstance(error, _Refused) else None
                    pause_s = min(
                        max(self._first_pause_s * 2 ** min(failures - 1, 10), asked_s or 0.0), LONGEST_PAUSE_S
                    )
                if self._closing and failures:
                    break
                if self._waiting and not self._closing:
                    self._sleep(pause_s)
            if self._closing:
                self._done.set()
                return

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closing and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()

    def _post(self) -> None:
        with self._lock:
            batch = list(self._waiting)[:BATCH]
        try:
            receipt = self._ask([report.model_copy(update={"epoch": self.epoch}) for report in batch])
        except _Refused as error:
            if error.status in (400, 413, 422):  # the service will never accept these
                log.warning("url=%s %d reports are dropped: %s", self._url, len(batch), error)
                self._drop(batch, lost=True)
                return
            raise
        present = int(receipt.get("epoch") or 0)
        if present > self.epoch:
            # The daemon numbers runs in the spool, which this node does not see. If it has accepted no report of this
            # run yet, this is the number of this run. Else a later run has begun.
            if self._accepted:
                self.superseded = True
            else:
                self.epoch = present
                return
        self._accepted = True
        for refused in receipt.get("refused", ()):
            log.warning("url=%s report refused: %s", self._url, str(refused.get("message"))[:200])
        self._drop(batch, lost=False)

    def _drop(self, batch: list[Report], *, lost: bool) -> None:
        with self._lock:
            for report in batch:  # `put` may have dropped some meanwhile
                if self._waiting and self._waiting[0] is report:
                    self._waiting.popleft()
                    self.dropped += lost

    def _ask(self, reports: list[Report]) -> dict[str, Any]:
        body = json.dumps({"reports": [report.model_dump(mode="json") for report in reports]}).encode()
        url = self._url
        headers = {"Content-Type": "application/json"} | authorization(self.service, url, "POST", self._path)
        connection = _connection(self.service, url)
        try:
            connection.request("POST", self._path, body, headers)
            answer = connection.getresponse()
            content = answer.read(ANSWER_BYTES)
            if answer.status != 200:
                text = content[:300].decode(errors="replace")
                again = answer.getheader("Retry-After") or ""
                raise _Refused(answer.status, text, float(again) if again.isdigit() else None)
        finally:
            connection.close()
        receipt = json.loads(content)
        return receipt if isinstance(receipt, dict) else {}


def authorization(service: Service, url: str, method: str, path: str) -> dict[str, str]:
    """The header that proves the job's identity: a token, or else MUNGE. A unix socket needs none: the kernel knows.

    Raises:
        OSError: there is no token, and MUNGE fails.
    """
    if service.token is not None:
        return {"Authorization": f"Bearer {service.token}"}
    if url.startswith("unix:"):
        return {}
    at = [f"--socket={service.munge_socket}"] if service.munge_socket else []
    command = ["munge", *at, "-s", f"penstock {method} {path}"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError("munge does not answer; give the job a token in PENSTOCK_TOKEN") from None
    if made.returncode != 0:
        raise OSError(f"there is no token in PENSTOCK_TOKEN, and munge failed: {made.stderr.strip()}")
    return {"Authorization": f"MUNGE {made.stdout.strip()}"}


def _connection(service: Service, url: str) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"))
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=str(service.authority) if service.authority else None)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("penstock", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)
