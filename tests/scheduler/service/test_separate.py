"""penstock-api in a process of its own: what it reads, what it hands over, and what happens while one of the two is away."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import ApiError, Client
from penstock_scheduler.api.messages import DrainOrder, Submission
from penstock_scheduler.api.ports import Fate, Unmanaged
from penstock_scheduler.daemon.service.forwarding import SILENT_HEADER
from penstock_scheduler.daemon.service.identity import IDENTITY
from penstock_scheduler.model import JobSpec, Phase, Refusal
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from tests.folders import public_folder
from tests.forking import FORKING
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ADAS, BOBS, ME, ApiProcess, penstock_api, serving
from tests.scheduler.service.flooded import HEAD_S
from tests.scheduler.service.test_limits import closed, many_files, send_until_closed


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path, separate=True) as api:
        yield api


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def observed(progress: float, sequence: int) -> Report:
    body = Observation(gpu_type="t4", nodes=1, gpus=2, atomic_batch=8, steps=5, step_time_s=0.5, progress=progress)
    return Report(job_id="1", epoch=1, sequence=sequence, time_s=time.time(), body=body)


def test_live_figures_are_those_of_the_newest_tick(api):
    """The daemon publishes an amount and a rate; what readers work out from them is what was counted."""
    with api.client("ada") as ada:
        for tick in range(1, 6):
            api.board.take_reports([observed(progress=7.0 * tick, sequence=tick)])
            api.look(ADAS, BOBS, gpu_seconds={"1": {"t4": 100.0 * tick}})
            expected, shown = api.board.live_job("1"), ada.job("1")
            assert shown.progress == expected.progress == 7.0 * tick
            assert shown.gpu_seconds["t4"] == pytest.approx(expected.gpu_seconds["t4"], abs=1.0)
            assert [each.gpu_seconds for each in ada.jobs()] == [shown.gpu_seconds]
    with Client(api.socket) as root:
        assert root.cluster().observed_s == pytest.approx(api.board.observed_s)


def test_a_steady_job_is_published_twice_and_no_more(api):
    before = api.board.store.figures_changed(0)
    begin_s = time.time()
    for _ in range(8):
        api.board.observed(api.board.state, now_s := time.time(), {"1": {"t4": 100.0 + 2.0 * (now_s - begin_s)}})
        api.publisher.publish()
        time.sleep(0.05)
    newest = [number for number, _, _ in api.board.store.figures_changed(0)]
    assert max(newest) <= max([number for number, _, _ in before], default=0) + 3


def test_clients_learn_of_changes_and_ends(api):
    with api.client("bob") as bob:
        version = bob.job("2").version
        api.look(ADAS, job("2", user="bob", phase=Phase.RUNNING, allocation=on("t4", t4_01=1)))
        changed = bob.job("2", wait_s=20, since=version)
        assert (changed.state, changed.allocation.nodes) == ("running", {"t4-01": 1})
        assert {node.name: node.allocated for node in bob.nodes()}["t4-01"] == 1
        api.look(ADAS, finished={"2": Fate("COMPLETED", 0, 5.0)}, gpu_seconds={"2": {"t4": 4.0}})
        ended = bob.job("2")
        assert (ended.state, ended.ended, ended.gpu_seconds) == ("ended", "COMPLETED", {"t4": 4.0})
    wait_for(lambda: "2" not in api.board.store.jobs_with_figures(), 120, "figures of the ended job to be deleted")


def test_a_client_waits_until_its_job_changes(api):
    with api.client("bob") as bob:
        version = bob.job("2").version
        waiting = subprocess.Popen(
            [sys.executable, "-c", f"import httpx; print(httpx.get('{api.url}/v1/jobs/2?wait=30&since={version}', "
             f"headers={{'Authorization': 'Bearer {api.tokens['bob']}'}}, timeout=60).json()['state'])"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(3)
        api.look(ADAS, job("2", user="bob", phase=Phase.RUNNING, allocation=on("t4", t4_01=1)))
        assert waiting.communicate(timeout=60)[0].strip() == "running"


def test_what_a_caller_changes_it_sees_in_the_next_answer(api):
    order = Submission(command=("true",), name="n", key="k", spec=JobSpec(max_gpus=1))
    with Client(api.socket) as root:
        made = root.submit(order)
        assert api.submitter.jobs[made.id] == (ME, order)
        assert root.submit(order).id == made.id, "one job for each key"
        assert root.job(made.id).key == "k"
        assert made.id in {each.id for each in root.jobs(user=ME)}
        root.pause(paused=True)
        assert root.cluster().paused
        root.set_policy(PolicyChoice(name="fifo"))
        assert [each.name for each in root.policies() if each.active] == ["fifo"]
        root.drain(DrainOrder(kind="node", name="t4-01"))
        assert [each.name for each in root.drains()] == ["t4-01"]
        assert not {node.name: node.may_start for node in root.nodes()}["t4-01"]
        root.end_drain("node", "t4-01")
        assert root.drains() == []
        root.cancel("2")
        assert api.submitter.cancelled == ["2"]


def test_a_revoked_token_is_refused_at_once(api):
    with Client(api.socket) as root:
        made = root.create_token(TokenOrder(user="zoe"))
        with Client(api.url, token=made.token) as zoe:
            assert zoe.me().user == "zoe"
            root.revoke_token(made.view.id)
            with pytest.raises(ApiError, match="revoked"):
                zoe.me()


def test_logs_and_unmanaged_jobs_are_asked_of_penstockd(api, tmp_path):
    (tmp_path / "1.out").write_text("one\ntwo\n")
    api.submitter.others["9"] = Unmanaged("ada", "is a plain job: Penstock never touches it")
    api.look(ADAS, BOBS)
    refused = Refusal("7", "train", "ada", "max_gpus must be at least min_gpus")
    state = api.board.state
    api.board.observed(type(state)(state.nodes, state.jobs, (refused,)), time.time())
    api.publisher.publish()
    api.catch_up()
    with api.client("ada") as ada, api.client("bob") as bob:
        assert (ada.log("1").text, ada.log("1", -4).text) == ("one\ntwo\n", "two\n")
        with pytest.raises(ApiError, match="is a plain job"):
            ada.job("9")
        with pytest.raises(ApiError, match="no job 9"):
            bob.job("9")
        with pytest.raises(ApiError, match="does not manage job 7"):
            ada.job("7")
        assert [each.id for each in ada.refused()] == ["7"]
        with pytest.raises(ApiError, match="no job 1"):
            bob.log("1")
        headers = {"Authorization": f"Bearer {api.tokens['ada']}"}
        assert "one" in httpx.get(f"{api.url}/v1/jobs/1/page", headers=headers, follow_redirects=True).text


def test_slow_and_silent_clients_of_penstock_api_are_ended(tmp_path, certificate):
    """Headers and bodies that drip, and a TLS connection that says nothing. No body is read before the caller is known."""
    with serving(tmp_path, separate=True) as api, ExitStack() as stack:
        api.process.stop()
        api.process.deadline_s = HEAD_S
        api.process.start()
        unix, (host, _, port) = api.socket[5:], api.url.removeprefix("http://").rpartition(":")
        slow = []
        for head in (
            b"GET /v1/me HTTP/1.1\r\n",
            b"POST /v1/jobs/plan HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n",
        ):
            slow.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            slow[-1].connect(unix)
            slow[-1].sendall(head)
        stranger = stack.enter_context(socket.create_connection((host, int(port))))
        stranger.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
        stranger.settimeout(20)
        assert b"401 Unauthorized" in stranger.recv(4096)
        for line in slow:
            send_until_closed(line, b"a")
            assert b"408 Request Timeout" in closed(line)
        api.process.stop()
        made, key = certificate
        api.process.settings |= {"tls_certificate": str(made), "tls_key": str(key)}
        api.process.start()
        silent = stack.enter_context(socket.create_connection((host, int(port))))
        assert closed(silent) == b""


def test_reports_are_on_disk_when_they_are_acknowledged(api):
    api.look(job("3", user=ME, phase=Phase.RUNNING, allocation=on("t4", t4_00=1)), ADAS, BOBS)
    with api.client("job 1") as run:
        assert run.report("1", [observed(5.0, 1), observed(6.0, 2)]).accepted == 2
    assert [each.sequence for each in api.board.store.reports("1")] == [1, 2]


def test_metrics_have_those_of_both_processes(api):
    def text() -> str:
        return httpx.get(f"{api.url}/v1/metrics", headers={"Authorization": f"Bearer {api.tokens['ada']}"}).text

    assert 'penstock_jobs{state="running"} 1.0' in text()
    assert "penstock_api_daemon_up 1.0" in text()
    assert 'penstock_api_events_total{kind="requests"}' in text()
    api.service.stop()
    api.publisher.stop()
    wait_for(lambda: "penstock_api_daemon_up 0.0" in text(), 120, "it to be missed")


def test_reading_goes_on_without_penstockd_and_says_so(api):
    with api.client("ada") as ada:
        assert ada.cluster().daemon_silent_since_s is None
        api.service.stop()
        api.publisher.stop()
        before_s = time.time()
        wait_for(lambda: ada.cluster().daemon_silent_since_s is not None, 120, "the silence to be noticed")
        assert ada.cluster().daemon_silent_since_s == pytest.approx(before_s, abs=5)
        answer = httpx.get(f"{api.url}/v1/jobs", headers={"Authorization": f"Bearer {api.tokens['ada']}"})
        assert float(answer.headers[SILENT_HEADER]) == pytest.approx(before_s, abs=5)
        assert answer.json()["daemon_silent_since_s"] == pytest.approx(before_s, abs=5)
        assert ada.job("1").state == "running"
        assert ada.explain("1").lines
        assert [each.id for each in ada.jobs()] == ["1"]
        assert ada.silent_since_s is not None
        for ask in (lambda: ada.cancel("1"), lambda: ada.log("1")):
            with pytest.raises(
                ApiError, match="penstockd does not run or does not answer; nothing was done"
            ) as refused:
                ask()
            assert (refused.value.status, refused.value.code) == (503, "daemon-away")
        with pytest.raises(ApiError, match="no job 77"):
            ada.job("77")
        health = ada.ready()
        assert health.status == "not-ready"
        assert "penstockd does not answer the API" in health.problems[0]
        # The API starts without penstockd, too.
        api.process.kill()
        api.process.start()
        assert ada.job("1").state == "running"
        assert ada.cluster().daemon_silent_since_s == pytest.approx(before_s, abs=5)


def test_nobody_else_speaks_for_others(api, tmp_path):
    """The header counts on the private socket alone, and there the kernel says who connects."""
    for url, transport in ((api.url, None), ("http://x", httpx.HTTPTransport(uds=api.socket[5:]))):
        with httpx.Client(base_url=url, transport=transport) as line:
            told = line.get("/v1/me", headers={IDENTITY: '{"user":"boss","uid":0,"role":"admin","by":"socket"}'})
            assert told.status_code == 401 if transport is None else told.json()["user"] == ME
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "d.sock"))) as line:
        assert line.get("http://x/v1/me").status_code == 401, "penstockd wants to know for whom the API asks"
    assert (tmp_path / "d.sock").stat().st_mode & 0o777 == 0o600


def knock(path: str, pipe: Connection) -> None:
    """Ask penstockd as nobody, and tell what it says."""
    account = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        try:
            line.connect(path)
            line.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
            pipe.send(line.recv(100))
        except OSError as error:
            pipe.send(type(error).__name__)


@needs_root
def test_the_private_socket_asks_the_kernel_who_connects():
    with public_folder() as folder, serving(folder, separate=True):
        said = []
        for mode in (0o600, 0o666):
            (folder / "d.sock").chmod(mode)
            ours, theirs = FORKING.Pipe()
            process = FORKING.Process(target=knock, args=(str(folder / "d.sock"), theirs))
            process.start()
            said.append(ours.recv())
            process.join()
        assert said[0] == "PermissionError"
        assert said[1] in (b"", "ConnectionResetError", "BrokenPipeError"), "also if somebody opened the socket"


def test_the_api_waits_for_a_penstockd_that_publishes(tmp_path):
    with serving(tmp_path):
        config = tmp_path / "api.toml"
        config.write_text(
            f'[daemon]\nstate_dir = "{tmp_path}/state"\n[api]\nembedded = false\nsocket = "{tmp_path}/b.sock"\n'
        )
        process = FORKING.Process(target=penstock_api, args=(config, None))
        process.start()
        process.join(60)
        assert process.exitcode == 1
        assert "penstockd has published nothing" in config.with_suffix(".log").read_text()
        config.write_text("")
        process = FORKING.Process(target=penstock_api, args=(config, None))
        process.start()
        process.join(60)
        assert process.exitcode == 2
        assert "embedded = false" in config.with_suffix(".log").read_text()


def test_two_processes_serve_the_same_and_one_may_die(api, tmp_path):
    second = ApiProcess(
        tmp_path, api.process.settings | {"socket": str(tmp_path / "second.sock")}, tmp_path / "state", "second"
    )
    second.settings.pop("listen")
    second.start()
    try:
        with Client(f"unix:{tmp_path / 'second.sock'}") as other, Client(api.socket) as root:
            order = Submission(command=("true",), name="n", key="k", spec=JobSpec(max_gpus=1))
            assert root.submit(order).id == other.submit(order).id, "one job, whichever process is asked"
            api.process.kill()
            assert other.job("1").state == "running"
    finally:
        second.stop()
    api.process.start()


@needs_root
def test_the_api_may_be_an_unprivileged_user(tmp_path):
    """It may read the store's file and connect to penstockd, and nothing else; also after penstockd has ended."""
    with public_folder() as folder:
        folder.chmod(0o777)  # it makes its socket there
        with serving(folder, separate=True, user="nobody") as api, api.client("ada") as ada:
            (folder / "1.out").write_text("one\n")
            (folder / "1.out").chmod(0o600)
            assert (ada.job("1").state, ada.log("1").text) == ("running", "one\n")
            account, store = pwd.getpwnam("nobody"), (folder / "state" / "penstock.db").stat()
            assert (store.st_mode & 0o777, store.st_uid, store.st_gid) == (0o640, 0, account.pw_gid)
            with Client(api.socket) as root:
                assert root.me().role == "admin", "penstockd's own user, not the API's"
            api.service.stop()
            api.publisher.stop()
            api.process.kill()
            api.process.start()
            assert ada.job("1").state == "running"


def test_an_unknown_user_of_the_api_is_refused_at_the_start(tmp_path):
    with (
        pytest.raises(ConfigError, match="there is no such user"),
        serving(tmp_path, separate=True, user="no-such-user"),
    ):
        pass


def test_2000_clients_wait_and_1100_are_half_open(tmp_path):
    """The attack of an ordinary user on a penstock-api with 1,024 files: others are served, and the log is bounded."""
    with many_files(), serving(tmp_path, separate=True) as api, ExitStack() as stack:
        api.process.stop()
        api.process.files = (256, 1024)
        api.process.start()
        logged = len(api.process.log)
        ada = stack.enter_context(
            httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {api.tokens['ada']}"}, timeout=30)
        )
        for number in range(2000):
            attack = stack.enter_context(socket.socket(socket.AF_UNIX))
            attack.settimeout(10)
            attack.connect(api.socket[5:])
            whole = b"\r\n" if number % 2 else b""
            try:
                attack.sendall(b"GET /v1/jobs/2?wait=60&since=1000 HTTP/1.1\r\nHost: x\r\n" + whole)
            except (BrokenPipeError, ConnectionResetError):
                continue
        for _ in range(10):
            assert ada.get("/v1/me").status_code == 200
            assert ada.get("/v1/jobs/1").json()["state"] == "running"
        stranger = stack.enter_context(httpx.Client(base_url=api.url, timeout=30))
        guesses = [stranger.get("/v1/me", headers={"Authorization": f"Bearer penstock_{n}_x"}) for n in range(150)]
        assert {each.status_code for each in guesses} == {401, 429}
        assert ada.get("/v1/me").status_code == 200, "who has a token is let in from the same address"
        api.look(ADAS, BOBS)
        assert len(api.process.log) - logged < 500_000
        assert "Too many open files" not in api.process.log


def activated(config: Path, listening: socket.socket) -> None:
    """What systemd does for penstock-api.socket: the socket is file descriptor 3."""
    os.dup2(listening.fileno(), 3)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    penstock_api(config)


def test_systemd_keeps_the_clients_that_connect_during_a_restart(api, tmp_path):
    api.process.stop()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "api.sock"))
        listening.listen(100)
        for _ in range(2):
            waiting = subprocess.Popen(
                ["curl", "-sS", "--max-time", "60", "--unix-socket", str(tmp_path / "api.sock"), "http://x/v1/me"],
                stdout=subprocess.PIPE,
                text=True,
            )
            time.sleep(0.5)
            process = FORKING.Process(target=activated, args=(api.process.config, listening))
            process.start()
            assert f'"user":"{ME}"' in waiting.communicate(timeout=90)[0], api.process.log
            process.terminate()
            process.join(60)
            assert process.exitcode == 0
            assert (tmp_path / "api.sock").exists(), "it is systemd's"
