"""What one user's ended jobs do to the notices of others: each mail that fails takes half a minute of attempts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from penstock_scheduler.api.messages import JobView
from penstock_scheduler.daemon import notices
from penstock_scheduler.daemon.notices import Notice, NoticeSettings, Notifier
from penstock_scheduler.model import JobSpec

ALARM = "no round is decided"


def ended(job: int, user: str) -> JobView:
    return JobView(
        id=str(job),
        version=1,
        name="",
        user=user,
        account="",
        state="ended",
        ended="FAILED",
        submit_s=0.0,
        spec=JobSpec(),
    )


@pytest.fixture
def notifier(monkeypatch: pytest.MonkeyPatch):
    """A notifier whose first mail hangs until `go`, and the subjects of all in the order in which they were tried."""
    tried, go, hangs = list[str](), threading.Event(), threading.Event()

    def mail(settings: NoticeSettings, to: Sequence[str], notice: Notice) -> None:
        hangs.set()
        go.wait(10)
        tried.append(f"{notice.user}: {notice.subject}")
        if "eve@site" in to:
            raise OSError("552 mailbox full")

    monkeypatch.setattr(notices, "_mail", mail)
    made = Notifier(NoticeSettings(smtp="localhost:25", mail_domain="site", mail_admins=("root@site",)), pauses_s=())
    made.job_ended(ended(0, "eve"))
    assert hangs.wait(5)
    yield made, tried, go
    go.set()
    made.stop()


def test_an_alarm_of_the_admins_goes_before_the_mails_of_users(notifier) -> None:
    sender, tried, go = notifier
    for number in range(1, 500):
        sender.job_ended(ended(number, "eve"))
    sender.tell(Notice("protected", ALARM, "Every observation fails."))
    go.set()
    sender.stop()
    assert tried.index(f": {ALARM}") == 1, "after the one that was under way"
    assert len(tried) == 501


def test_users_get_their_mails_in_turn(notifier) -> None:
    sender, tried, go = notifier
    for number in range(1, 500):
        sender.job_ended(ended(number, "eve"))
    sender.job_ended(ended(1000, "ada"))
    go.set()
    sender.stop()
    assert [subject.partition(":")[0] for subject in tried].index("ada") <= 2


def test_one_user_leaves_room_for_the_notices_of_others(notifier, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    sender, tried, go = notifier
    for number in range(1, notices.MOST_WAITING + 10):
        sender.job_ended(ended(number, "eve"))
    sender.job_ended(ended(1_000_000, "ada"))
    sender.tell(Notice("protected", ALARM, "Every observation fails."))
    go.set()
    sender.stop()
    assert f": {ALARM}" in tried
    assert "ada: job 1000000 : FAILED" in tried
    assert "notice dropped" in caplog.text
