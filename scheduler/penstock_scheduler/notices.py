"""Notices by mail and webhook: a job has ended, GPUs are idle or fail, a job is silent, a budget is reached, rounds fail.

A notice is sent by a thread of its own and never holds up a round. It is tried a few times and then given up, with a line in the
log; those that wait are lost when the daemon is killed. What must not be lost is in the store.
"""

from __future__ import annotations

import json
import logging
import queue
import smtplib
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

log = logging.getLogger(__name__)

Kind = Literal["job-ended", "gpu-idle", "job-silent", "job-contained", "gpu-error", "budget", "protected"]

MOST_WAITING = 10_000
PAUSES_S = (1.0, 5.0, 25.0)
"""Between two tries."""
TIMEOUT_S = 20.0
LAST_S = 5.0
"""How long a daemon that stops waits for what is still to be sent."""


class NoticeSettings(BaseModel):
    """Section `[notices]` of the settings file: who is told what. With neither `smtp` nor `webhooks` nobody is."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kinds: tuple[Kind, ...] = Field(
        default=get_args(Kind),
        description="What is told.",
    )
    webhooks: tuple[str, ...] = Field(default=(), description="URLs that get each notice as JSON, by POST.")
    smtp: str | None = Field(
        default=None, pattern=r"^[^:\s]+:[0-9]{1,5}$", description="HOST:PORT of the mail server; absent: no mail."
    )
    smtp_tls: bool = Field(default=False, description="Whether to begin TLS (STARTTLS) with the mail server.")
    smtp_user: str | None = Field(default=None, description="Login at the mail server; absent: none.")
    smtp_password_file: Path | None = Field(default=None, description="File that holds its password.")
    mail_from: str = Field(default="penstock@localhost", description="Sender.")
    mail_admins: tuple[str, ...] = Field(
        default=(), description="Addresses that get every notice but those of jobs' ends."
    )
    mail_domain: str | None = Field(
        default=None,
        description="Users get the notices of their own jobs at USER@mail_domain; absent: they get no mail.",
    )
    gpu_idle_s: PositiveFloat = Field(
        default=1800.0,
        description="Seconds for which a job's reports must say that its GPUs do nothing (NVML's utilisation below 2 %) before "
        "they are called idle.",
    )
    silent_s: PositiveFloat = Field(
        default=1800.0, description="Seconds for which a job that has reported must report nothing before that is told."
    )
    failing_s: PositiveFloat = Field(
        default=300.0, description="Seconds for which every look or round must fail before that is told."
    )

    @model_validator(mode="after")
    def _whole(self) -> NoticeSettings:
        if wrong := [url for url in self.webhooks if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"webhooks: {wrong[0]!r} is no http or https URL")
        if (self.smtp_user is None) != (self.smtp_password_file is None):
            raise ValueError("smtp_user and smtp_password_file go together")
        return self


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that people want to be told."""

    kind: Kind
    subject: str
    """One line."""
    text: str
    user: str = ""
    """Whose; empty: the admins'."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For programs."""
    time_s: float = field(default_factory=time.time)


class Notifier:
    """Sends notices until `stop`. Methods may be called from any thread."""

    def __init__(self, settings: NoticeSettings, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self.settings = settings
        self._pauses_s = tuple(pauses_s)
        self._waiting: queue.Queue[Notice | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Send it soon, if the site wants notices of this kind."""
        settings = self.settings
        if notice.kind not in settings.kinds or not (settings.webhooks or settings.smtp):
            return
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            log.warning("notice dropped", extra={"text": f"{MOST_WAITING} wait already: {notice.subject}"})

    def stop(self) -> None:
        """Send what waits, for a moment, and end."""
        self._pauses_s = ()
        try:
            self._waiting.put(None, timeout=LAST_S)
        except queue.Full:
            return
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while (notice := self._waiting.get()) is not None:
            settings = self.settings
            for url in settings.webhooks:
                self._try(f"webhook {url}", notice, partial(_post, url))
            if settings.smtp and (to := recipients(settings, notice)):
                self._try(f"mail to {', '.join(to)}", notice, partial(_mail, settings, to))

    def _try(self, way: str, notice: Notice, send: Callable[[Notice], None]) -> None:
        for number in range(len(PAUSES_S) + 1):
            try:
                send(notice)
            except Exception as error:  # whatever it is: the next notice is to be sent
                pauses_s = self._pauses_s
                if number >= len(pauses_s):
                    text = f"{way}: {error}; the notice was: {notice.subject}"
                    log.warning("notice not sent", extra={"text": text})
                    return
                time.sleep(pauses_s[number])
            else:
                return


def recipients(settings: NoticeSettings, notice: Notice) -> list[str]:
    """Addresses that a notice goes to."""
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
    assert settings.smtp is not None, "only a site with a mail server sends mail"
    message = EmailMessage()
    message["From"], message["To"] = settings.mail_from, ", ".join(to)
    message["Subject"] = f"[penstock] {_one_line(notice.subject)}"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(notice.text + "\n")
    host, _, port = settings.smtp.rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=TIMEOUT_S) as server:
        if settings.smtp_tls:
            server.starttls(context=ssl.create_default_context())
        if settings.smtp_user is not None and settings.smtp_password_file is not None:
            server.login(settings.smtp_user, settings.smtp_password_file.read_text().strip())
        server.send_message(message)


def _one_line(text: str) -> str:
    """A header has no line breaks: a job's name could add headers of its own."""
    return "".join(character if character.isprintable() else " " for character in text)[:200]
