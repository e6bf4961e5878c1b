"""Sends notices by mail and webhook: for example when a job has ended, GPUs are idle, or a budget is reached.

A thread of its own sends the notices, so that they never delay a round. It tries each notice four times, and then gives up with a
line in the log. Notices that have not been sent are lost when the daemon is killed; the store keeps what must not be lost.
"""

from __future__ import annotations

import json
import logging
import smtplib
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from penstock_scheduler.api.messages import JobView
from penstock_scheduler.people.safe_text import one_line
from penstock_scheduler.safety.open_files import Places

log = logging.getLogger(__name__)

Kind = Literal[
    "job-ended",
    "gpu-idle",
    "job-silent",
    "job-contained",
    "agent-silent",
    "gpu-error",
    "budget",
    "disk",
    "protected",
    "plan-refused",
    "cloud-stop",
    "cloud-trouble",
]

MOST_WAITING = 10_000
"""Notices that wait to be sent. A user gets at most half; further ones are dropped."""
PAUSES_S = (1.0, 5.0, 25.0)
"""Pauses between the attempts to send a notice."""
TIMEOUT_S = 20.0
LAST_S = 5.0
"""How long a daemon that stops goes on sending notices."""


class NoticeSettings(BaseModel):
    """Section `[notices]` of the settings file: which notices are sent, and where. Without `smtp` and `webhooks`, none are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kinds: tuple[Kind, ...] = Field(
        default=get_args(Kind),
        description="Kinds of notices to send.",
    )
    webhooks: tuple[str, ...] = Field(default=(), description="URLs to which each notice is sent as JSON, by POST.")
    smtp: str | None = Field(
        default=None, pattern=r"^[^:\s]+:[0-9]{1,5}$", description="HOST:PORT of the mail server; absent: no mail."
    )
    smtp_tls: bool = Field(default=False, description="Whether to use TLS (STARTTLS) with the mail server.")
    smtp_user: str | None = Field(default=None, description="User name at the mail server; absent: no login.")
    smtp_password_file: Path | None = Field(default=None, description="File with the password of `smtp_user`.")
    mail_from: str = Field(default="penstock@localhost", description="Address of the sender.")
    mail_admins: tuple[str, ...] = Field(default=(), description="Addresses that get all notices except `job-ended`.")
    mail_domain: str | None = Field(
        default=None,
        description="Users get the notices about their jobs at USER@mail_domain; absent: users get no mail.",
    )
    gpu_idle_s: PositiveFloat = Field(
        default=1800.0,
        description="Seconds after which a job's GPUs count as idle: all its reports in that time show a utilisation below "
        "2 % (NVML).",
    )

    silent_s: ClassVar[float] = 1800.0
    """Seconds after which a running job that has stopped reporting counts as silent. Evaluation and compilation rarely take
    half an hour."""

    failing_s: ClassVar[float] = 300.0
    """Seconds after which a notice is sent if every observation of the cluster, or every round, fails. A restart of slurmctld
    is over by then."""

    @model_validator(mode="after")
    def _whole(self) -> NoticeSettings:
        if wrong := [url for url in self.webhooks if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"webhooks: {wrong[0]!r} is not an http or https URL")
        if (self.smtp_user is None) != (self.smtp_password_file is None):
            raise ValueError("give both smtp_user and smtp_password_file, or neither")
        return self


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to users or admins about an event."""

    kind: Kind
    subject: str
    """One line."""
    text: str
    user: str = ""
    """The user that the notice is about; empty: only admins get it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For programs."""
    time_s: float = field(default_factory=time.time)


class NoticeQueue:
    """Notices that wait to be sent: those for admins first, then those about ended jobs, for one user after another.

    A mail that fails takes half a minute of attempts: without turns, the many ended jobs of a user with a full mailbox would keep
    an alarm waiting for hours. Methods may be called from any thread.
    """

    def __init__(self, most: int) -> None:
        self._places = Places(most)
        self._by_user: dict[str, deque[Notice]] = {}
        """Those whose turn was longest ago come first."""
        self._changed = threading.Condition()
        self._closed = False

    def add(self, notice: Notice) -> bool:
        """Add a notice. Returns whether there was a place for it."""
        user = _turn_of(notice)
        with self._changed:
            if not self._places.take(user):
                return False
            self._by_user.setdefault(user, deque()).append(notice)
            self._changed.notify()
        return True

    def next(self) -> Notice | None:
        """Take the next notice, after waiting for it; None: there is none, and `close` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_user or self._closed)
            if not self._by_user:
                return None
            user = _ADMINS if _ADMINS in self._by_user else next(iter(self._by_user))
            notices = self._by_user.pop(user)
            notice = notices.popleft()
            if notices:
                self._by_user[user] = notices
            self._places.give_back(user)
            return notice

    def held(self, notice: Notice) -> int:
        """How many notices wait in the same turn."""
        with self._changed:
            return self._places.held(_turn_of(notice))

    def close(self) -> None:
        """Let `next` return None once no notice waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()


_ADMINS = ""


def _turn_of(notice: Notice) -> str:
    return notice.user if notice.kind == "job-ended" else _ADMINS


class Notifier:
    """Sends notices until `stop`. Methods may be called from any thread."""

    def __init__(self, settings: NoticeSettings, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self.settings = settings
        self._pauses_s = tuple(pauses_s)
        self._waiting = NoticeQueue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Send a notice soon, if the settings ask for its kind."""
        settings = self.settings
        if notice.kind not in settings.kinds or not (settings.webhooks or settings.smtp):
            return
        if not self._waiting.add(notice):
            text = f"{self._waiting.held(notice)} notices are waiting already: {notice.subject}"
            log.warning("notice dropped", extra={"text": text})

    def job_ended(self, view: JobView) -> None:
        """Tell that a job has ended."""
        used = ", ".join(f"{s / 3600:.2f} GPU-hours of {t}" for t, s in sorted(view.gpu_seconds.items())) or "no GPUs"
        how = view.ended + (f", exit status {view.exit_code}" if view.exit_code else "")
        text = f"Job {view.id} ({view.name}) has ended: {how}. It used {used} and was moved {view.restarts} times."
        facts = {"job": view.id, "ended": view.ended, "exit_code": view.exit_code, "gpu_seconds": view.gpu_seconds}
        self.tell(Notice("job-ended", f"job {view.id} {view.name}: {view.ended}", text, view.user, facts))

    def stop(self) -> None:
        """Send waiting notices for at most a few seconds, and end."""
        self._pauses_s = ()
        self._waiting.close()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while (notice := self._waiting.next()) is not None:
            settings = self.settings
            for url in settings.webhooks:
                self._try(f"webhook {url}", notice, partial(_post, url))
            if settings.smtp and (to := recipients(settings, notice)):
                self._try(f"mail to {', '.join(to)}", notice, partial(_mail, settings, to))

    def _try(self, channel: str, notice: Notice, send: Callable[[Notice], None]) -> None:
        for number in range(len(PAUSES_S) + 1):
            try:
                send(notice)
            except Exception as error:  # one notice that fails must not stop the others
                pauses_s = self._pauses_s
                if number >= len(pauses_s):
                    text = f"{channel}: {error}; the notice was: {notice.subject}"
                    log.warning("notice not sent", extra={"text": text})
                    return
                time.sleep(pauses_s[number])
            else:
                return


def recipients(settings: NoticeSettings, notice: Notice) -> list[str]:
    """Mail addresses that get a notice."""
    to = [] if notice.kind == "job-ended" else list(settings.mail_admins)
    if notice.user and settings.mail_domain:
        to.append(f"{notice.user}@{settings.mail_domain}")
    return to


def _post(url: str, notice: Notice) -> None:
    body = json.dumps(asdict(notice)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked: http(s)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310
        pass


def _mail(settings: NoticeSettings, to: Sequence[str], notice: Notice) -> None:
    assert settings.smtp is not None, "mail needs a mail server"
    message = EmailMessage()
    message["From"], message["To"] = settings.mail_from, ", ".join(to)
    message["Subject"] = f"[penstock] {one_line(notice.subject, 200)}"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(one_line(notice.text) + "\n")
    with mail_server(settings, TIMEOUT_S) as server:
        server.send_message(message)


@contextmanager
def mail_server(settings: NoticeSettings, timeout_s: float) -> Iterator[smtplib.SMTP]:
    """The mail server, after the log-in. Raises OSError; `smtplib.SMTPException` is one."""
    host, _, port = (settings.smtp or "").rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=timeout_s) as server:
        if settings.smtp_tls:
            server.starttls(context=ssl.create_default_context())
        if settings.smtp_user is not None and settings.smtp_password_file is not None:
            server.login(settings.smtp_user, settings.smtp_password_file.read_text().strip())
        yield server
