"""An ordinary user tries to bring the API down. Bystanders: the commands of the round loop, and other clients."""

from __future__ import annotations

import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.client import ApiError
from penstock_scheduler.daemon.service.limits import connections
from penstock_scheduler.safety.open_files import Places
from tests.scheduler.service.api import serving
from tests.scheduler.service.flooded import HEAD_S, flooded

LATE_S = 20.0
"""What is due after HEAD_S is given this long on a machine with other load."""


@contextmanager
def many_files() -> Iterator[None]:
    """This process has the attacker's and the bystanders' sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def closed(connection: socket.socket) -> bytes:
    """What came before the other side closed the connection. Raises TimeoutError if it does not."""
    connection.settimeout(LATE_S)
    parts = []
    try:
        while part := connection.recv(4096):
            parts.append(part)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return b"".join(parts)


def send_until_closed(connection: socket.socket, drip: bytes) -> None:
    """Send a little ten times a second, until the other side closes the connection."""
    until_s = time.monotonic() + LATE_S
    try:
        while time.monotonic() < until_s:
            connection.sendall(drip)
            time.sleep(0.1)
    except (BrokenPipeError, ConnectionResetError):
        return
    pytest.fail("the connection stays open")


def test_1100_half_open_requests_stop_neither_commands_nor_other_clients(tmp_path):
    """The attacker is a user on the socket; ada asks over TCP."""
    with many_files(), flooded(tmp_path) as service, ExitStack() as stack:
        headers = {"Authorization": f"Bearer {service.tokens['ada']}"}
        ada = stack.enter_context(httpx.Client(base_url=service.url, headers=headers, timeout=20))
        service.commands()
        for _ in range(1100):
            stack.callback(service.connect(b"GET /v1/me HTTP/1.1\r\nHost: x\r\n").close)
        until_s = time.monotonic() + 2 * HEAD_S
        while time.monotonic() < until_s:
            assert ada.get("/v1/me", headers={"Connection": "close"}).status_code == 200
            stack.callback(service.connect(b"GET /v1/me HTTP/1.1\r\n").close)  # the attack goes on
            time.sleep(0.2)  # ada keeps to the limit on requests
        said = service.commands()
        wait_for(lambda: said.extend(service.commands()) or len(said) > 10, 20, "commands to have run")
        assert set(said) == {"ok"}
        assert service.log_bytes < 50_000
        late = service.connect(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in closed(late), "the attacker is served again as the half-open requests expire"


def test_2000_clients_that_wait_stop_neither_commands_nor_other_clients(tmp_path):
    """One user's, each for a change that does not come."""
    ask = b"GET /v1/jobs/2?wait=60&since=1000 HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        many_files(),
        flooded(tmp_path, files=8192, requests_per_s=1e6, burst=10**6) as service,
        ExitStack() as stack,
    ):
        headers = {"Authorization": f"Bearer {service.tokens['ada']}"}
        ada = stack.enter_context(httpx.Client(base_url=service.url, headers=headers, timeout=20))
        waiting = select.poll()
        for _ in range(2000):
            line = service.connect(ask)
            stack.callback(line.close)
            waiting.register(line, select.POLLIN)
        service.commands()
        for _ in range(20):
            assert ada.get("/v1/jobs/1").json()["state"] == "running"
            time.sleep(0.1)
        said = service.commands()
        wait_for(lambda: said.extend(service.commands()) or len(said) > 5, 20, "commands to have run")
        assert set(said) == {"ok"}
        assert waiting.poll(0) == [], "they all wait"
        assert service.log_bytes < 50_000


def test_a_client_with_too_many_connections_is_told(tmp_path):
    """384 of the 768 places that 1,024 files leave."""
    with many_files(), flooded(tmp_path) as service, ExitStack() as stack:
        held = [service.connect() for _ in range(400)]
        for connection in held:
            stack.callback(connection.close)
        assert b"384 connections, and others need the rest; close some" in closed(held[-1])


@pytest.mark.parametrize("drip", [b"X-Long: yes\r\n", b"a"])
def test_slow_headers_are_ended(tmp_path, drip):
    with flooded(tmp_path) as service, service.connect(b"GET /v1/me HTTP/1.1\r\n") as slow:
        send_until_closed(slow, drip)
        assert b"408 Request Timeout" in closed(slow)


def test_slow_bodies_are_ended(tmp_path):
    head = b"POST /v1/jobs/plan HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    with flooded(tmp_path) as service, service.connect(head) as slow:
        send_until_closed(slow, b" ")
        answer = closed(slow)
        assert b"408 Request Timeout" in answer
        assert b"the body was not complete" in answer


def test_a_body_that_nobody_reads_does_not_keep_a_connection(tmp_path):
    """The answer is there at once; the rest of the body keeps coming."""
    with flooded(tmp_path) as service, socket.create_connection(("127.0.0.1", service.port)) as slow:
        slow.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n")
        send_until_closed(slow, b" ")


def test_silent_tls_connections_are_ended(tmp_path, certificate):
    made, key = certificate
    with (
        flooded(tmp_path, tls_certificate=str(made), tls_key=str(key)) as service,
        socket.create_connection(("127.0.0.1", service.port)) as silent,
    ):
        assert closed(silent) == b""


def test_nothing_of_a_body_is_read_before_the_caller_is_known(tmp_path):
    """The body never comes: the answer does."""
    with serving(tmp_path) as api:
        broken = httpx.post(f"{api.url}/v1/jobs", content=b"{", headers={"Content-Type": "application/json"})
        assert broken.status_code == 401
        host, _, port = api.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
            line.settimeout(LATE_S)
            assert b"401 Unauthorized" in line.recv(4096)


def test_failed_logins_do_not_keep_a_valid_token_out(tmp_path):
    """Ada's token has never been used before, and an attacker fails from the same address."""
    with serving(tmp_path) as api:
        wrong = {"Authorization": "Bearer penstock_0123456789abcdef_x"}
        with httpx.Client(base_url=api.url) as attacker:
            tried = [attacker.get("/v1/me", headers=wrong).status_code for _ in range(50)]
            while tried[-1] == 401 and len(tried) < 1000:  # on a busy machine, more are allowed meanwhile
                tried.append(attacker.get("/v1/me", headers=wrong).status_code)
        assert set(tried[:50]) == {401}
        assert tried[-1] == 429
        with api.client("ada") as ada:
            assert ada.me().user == "ada"


def test_a_user_who_waits_often_leaves_places_for_others(tmp_path):
    with serving(tmp_path, max_waiting=8) as api, ExitStack() as stack:
        mine = f"/v1/jobs/1?wait=30&since={api.board.live_job('1').version}"
        ask = f"GET {mine} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.tokens['ada']}\r\n\r\n".encode()
        host, _, port = api.url.removeprefix("http://").rpartition(":")
        for _ in range(4):
            line = stack.enter_context(socket.create_connection((host, int(port))))
            line.sendall(ask)
        until_s = time.monotonic() + LATE_S
        while api.app.state.api.waiting.held("ada") < 4:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        with api.client("ada") as ada, pytest.raises(ApiError, match="4 of your requests wait already") as refused:
            ada.job("1", wait_s=30, since=api.board.live_job("1").version)
        assert (refused.value.status, refused.value.code) == (503, "busy")
        with api.client("bob") as bob:
            assert bob.job("2", wait_s=0.1, since=api.board.live_job("2").version).id == "2"


def test_places_are_shared():
    """Of 8: one client gets 4, the second 2 of the other 4, the third 1 of the last 2."""
    places = Places(8)
    got = {name: sum(places.take(name) for _ in range(8)) for name in ("ada", "bob", "cat")}
    assert got == {"ada": 4, "bob": 2, "cat": 1}
    for _ in range(4):
        places.give_back("ada")
    assert places.taken == 3
    assert places.take("dan")


@pytest.mark.parametrize(("files", "expected"), [(1024, 768), (65_536, 8192), (100, 16)])
def test_connections_leave_files_for_the_rest(files, expected):
    assert connections(8192, files) == expected


def test_a_command_can_have_the_limit_of_before(tmp_path):
    """sbatch passes its limits on to the job: one that penstockd raised must not get there."""
    with flooded(tmp_path, files=512) as service:
        assert set(service.commands()) <= {"ok"}
        assert (tmp_path / "found").read_text().split() == ["512", "256"]
