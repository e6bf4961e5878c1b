"""A client of several penstockd none of which answers: it says soon what it tried, and ends in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock_loopback.machine import free_ports
from penstock_scheduler.api import client as module
from penstock_scheduler.api.client import Client, DaemonAway
from tests.scheduler.service.api import serving

TOLD_S = 5.0
"""The promise of docs/admin/high-availability.md."""


@contextmanager
def refusing() -> Iterator[int]:
    yield free_ports(1)


@contextmanager
def silent() -> Iterator[int]:
    """Connections are established, because the kernel does that, and nobody ever answers: a penstockd that is frozen."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield listening.getsockname()[1]


@contextmanager
def off() -> Iterator[int]:
    """Not even the kernel answers, as if the machine were off: the queue of connections is full."""
    with socket.socket() as listening, ExitStack() as fill:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = fill.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        time.sleep(0.1)
        yield listening.getsockname()[1]


@contextmanager
def closing() -> Iterator[int]:
    """It ends each connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("scheme", "kinds"),
    [
        ("http", (refusing, silent)),
        ("http", (off, silent, closing)),
        ("https", (off, silent, closing)),
    ],
)
def test_the_tried_addresses_are_told_in_time_and_the_search_ends(
    scheme: str, kinds: tuple[Callable, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIND_S", 4.5)
    with ExitStack() as stack:
        urls = [f"{scheme}://127.0.0.1:{stack.enter_context(kind())}" for kind in kinds]
        told: list[tuple[float, str]] = []
        with Client(",".join(urls), token="t") as penstock:
            began_s = time.monotonic()
            penstock.on_search = lambda text: told.append((time.monotonic() - began_s, text))
            with pytest.raises(DaemonAway) as away:
                penstock.me()
            took_s = time.monotonic() - began_s
    [(after_s, text)] = told
    assert after_s < TOLD_S
    assert took_s < 4.5 + 2.0
    for url in urls:
        assert f"{url} (" in text
        assert f"{url} (" in str(away.value)


def test_a_request_that_is_not_safe_to_repeat_goes_to_one_that_answers(tmp_path: Path) -> None:
    """By a socket of this machine the caller is an admin, and of the others neither gets the request."""
    with serving(tmp_path) as api, silent() as frozen, off() as gone:
        urls = f"http://127.0.0.1:{frozen},http://127.0.0.1:{gone},{api.socket}"
        with Client(urls) as penstock:
            penstock.pause(paused=True)
            assert api.changes["paused"]
            assert penstock.url == api.socket


def test_a_leader_that_freezes_later_is_left_for_the_next(tmp_path: Path) -> None:
    with serving(tmp_path) as api, silent() as frozen:
        urls = f"{api.url},http://127.0.0.1:{frozen}"
        with Client(urls, token=api.tokens["ada"], timeout_s=1.0) as penstock:
            assert penstock.me().user == "ada"
            penstock._use(f"http://127.0.0.1:{frozen}")
            penstock._answers = True
            assert penstock.me().user == "ada"
            assert penstock.url == api.url


def test_a_slow_one_is_asked_longer_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penstockd that needs longer than the first look allows is found by a later one."""
    with serving(tmp_path) as api, refusing() as none:
        seen = []
        real = httpx.Client.get

        def slow(self: httpx.Client, path: str, *, timeout: httpx.Timeout) -> httpx.Response:
            if str(self.base_url).rstrip("/") == api.url.rstrip("/"):
                seen.append(timeout.read)
                if len(seen) < 3:
                    raise httpx.ReadTimeout("timed out")
            return real(self, path, timeout=timeout)

        monkeypatch.setattr(httpx.Client, "get", slow)
        with Client(f"http://127.0.0.1:{none},{api.url}", token=api.tokens["ada"]) as penstock:
            assert penstock.me().user == "ada"
        assert seen == sorted(set(seen))
