"""Wait for a condition, with a helpful message if it never becomes true."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    predicate: Callable[[], T],
    timeout_s: float,
    what: str,
    *,
    poll_s: float = 0.1,
    details: Callable[[], object] | None = None,
) -> T:
    """The first true value of `predicate`, which is called every `poll_s` seconds.

    `what` names the condition ("job 3 runs"). `details` is called once, after the time-out, for the message.

    Raises:
        TimeoutError: not true within `timeout_s` seconds; the message has `what`, the last value and the details.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline_s:
            more = "" if details is None else f"\n{details()}"
            raise TimeoutError(f"waited {timeout_s:g} s in vain until {what}; last value: {value!r}{more}")
        time.sleep(poll_s)
