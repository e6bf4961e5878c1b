"""What a user's many requests do to the commands that penstockd runs meanwhile, found on a busy site.

A round failed because `scontrol show partition` had printed nothing and had succeeded.
"""

from __future__ import annotations

import os
import selectors
import time

import pytest

from penstock_scheduler.safety import children


@pytest.mark.parametrize("given", [b"", b"read by nobody"])
def test_the_last_words_of_a_program_are_read_however_late_penstockd_looks(
    monkeypatch: pytest.MonkeyPatch, given: bytes
) -> None:
    """A busy thread wakes up late: after select() has seen nothing, the program prints its answer and ends."""
    select, late = selectors.DefaultSelector.select, [True]

    def wakes_up_late(self: selectors.DefaultSelector, timeout: float | None = None) -> list[object]:
        if late.pop() if late else False:
            time.sleep(0.5)
            return []
        return list(select(self, timeout))

    monkeypatch.setattr(selectors.DefaultSelector, "select", wakes_up_late)
    long = "x" * 60_000
    done = children.run(
        ["/bin/sh", "-c", f"echo {long}; echo error >&2; exit 3"], env=os.environ, timeout_s=10, input=given
    )
    assert (done.returncode, done.out, done.err) == (3, long + "\n", "error\n")


def test_a_program_that_leaves_another_in_the_background_is_not_waited_for() -> None:
    begin_s = time.monotonic()
    done = children.run(["/bin/sh", "-c", "echo first; sleep 8 & echo last"], env=os.environ, timeout_s=10)
    assert done.out == "first\nlast\n"
    assert time.monotonic() - begin_s < 5
