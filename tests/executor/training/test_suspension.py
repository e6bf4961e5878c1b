"""Suspending a process, and when it resumes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.training import suspension
from penstock_executor.training.suspension import Suspension

SIGNALS = (signal.SIGTSTP, signal.SIGCONT)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Suspension]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for name, seconds in (("POLL_S", 0.01), ("GRACE_S", 0.05), ("PATIENCE_S", 0.2)):
        monkeypatch.setattr(suspension, name, seconds)
    yield Suspension()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_resumes_even_if_python_handles_sigcont_first(mine: Suspension):
    """Both signals come during one call into C. Python calls the handlers by number, SIGCONT's first."""
    mine.on_continue(signal.SIGCONT, None)
    mine.on_stop(signal.SIGTSTP, None)
    mine.wait(None)
    assert not mine.requested


def test_a_sigcont_of_an_earlier_suspension_does_not_end_this_one(mine: Suspension):
    os.kill(os.getpid(), signal.SIGCONT)
    polls: list[None] = []

    def wanted() -> bool:
        polls.append(None)
        return len(polls) < 3

    mine.wait(wanted)
    assert len(polls) == 3
