"""What an ordinary user of the host can do to others, found by reading the code with that user's eyes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from penstock_profiles.wire import ControlMessage, control_file, reports_folder
from penstock_scheduler.api.access_messages import Identity
from penstock_scheduler.daemon.service.forwarding import OverSocket, Published
from penstock_scheduler.daemon.service.guard import Turns
from penstock_scheduler.daemon.service.limits import LimitBodies
from penstock_scheduler.safety.children import Busy, Pool, account_of
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway.commands import SlurmCommandRunner
from penstock_slurm.install.units import source
from tests.folders import public_folder

LUAS = [found for name in ("lua5.1", "lua5.2", "lua5.3", "lua5.4", "lua") if (found := shutil.which(name))]

SUBMIT = """
slurm = {NO_VAL = 4294967294, NO_VAL16 = 65534, NO_VAL8 = 254, NO_VAL64 = 2 ^ 64 - 2, SUCCESS = 0, ERROR = -1}
slurm.log_user = function(form, text) end
slurm.log_error = slurm.log_user
local job = {
  spank_job_env = {"PENSTOCK_ADAPTIVE=adaptive", "PENSTOCK_MAX_GPUS=2", "PENSTOCK_" .. arg[2]}, script = "#!/bin/sh",
  begin_time = 0, environment = {}, req_nodes = arg[3] ~= "" and arg[3] or nil, exc_nodes = arg[4] ~= "" and arg[4] or nil,
  features = arg[5] ~= "" and arg[5] or nil, partition = arg[6],
}
dofile(arg[1]).job_submit(job, {}, 1000)
print(job.admin_comment or "refused")
"""

SITE = """
local nodes = {}
for i = 1, 2000 do nodes["n" .. i] = 4 end
return {partitions = {{name = "all", types = {t4 = nodes}}}, families = {}, features = {big = {n1 = true}}}
"""


@pytest.mark.skipif(not LUAS, reason="no Lua is installed (Debian: lua5.1)")
@pytest.mark.parametrize("lua", LUAS)
@pytest.mark.parametrize(
    ("accepted", "options"),
    [
        (False, {"exclude": "x[0-9999][0-9999][0-9999][1-0]"}),
        (False, {"exclude": "x[0-9999]" + "[1]" * 2000}),
        (False, {"exclude": "[" * 60_000 + "]"}),
        (False, {"exclude": "[," * 30_000 + "]"}),
        (False, {"nodelist": "n1,x[0-9999][0-9999][2-1]"}),
        (False, {"nodelist": 'n1,x[1-0]","penstock_begin_s":"y[1-0]'}),
        (False, {"exclude": 'x[1-0]"},"penstock_plain":{"a":"[1-0][","partition":"staff","nodes":1,"z":"]"}'}),
        (False, {"constraint": "|".join(["none"] * 13_000)}),
        (True, {"constraint": "|".join(["none"] * 13_000 + ["big"])}),
        (False, {"partition": ",".join(["all"] * 16_000), "flag": "MIN_GPUS=2", "exclude": "n[1-2000]"}),
        (False, {"flag": "BURST_BUDGET=" + "1" * 100_000 + "x"}),
        (True, {"nodelist": "n[1-1999],n2000", "exclude": "x[1-99]y[1-99],n[1,3,5-9],z[01-02]"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_no_text_of_a_user_keeps_slurmctld_busy_or_writes_a_note(
    tmp_path: Path, lua: str, accepted: bool, options: dict[str, str]
) -> None:
    """slurmctld serves nobody while penstock.lua reads a job's options, and its notes are what users cannot write."""
    shutil.copy(source("lua") / "penstock.lua", tmp_path)
    (tmp_path / "penstock_site.lua").write_text(SITE)
    (tmp_path / "submit.lua").write_text(SUBMIT)
    texts = [options.get(name, "") for name in ("flag", "nodelist", "exclude", "constraint")]
    argv = [lua, str(tmp_path / "submit.lua"), str(tmp_path / "penstock.lua"), *texts, options.get("partition", "all")]
    if options.get("flag", "") == "":
        argv[3] = "MIN_GPUS=1"
    done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=True)
    assert (done.stdout.strip() != "refused") == accepted, done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run a program as another user")
def test_a_command_that_runs_as_a_user_shows_it_no_secret_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs as a user's process can be read by that user: its environment is in /proc."""
    with public_folder() as folder:
        told = folder / "told"
        told.touch()
        os.chown(told, account_of("nobody").uid, -1)
        for name in ("scontrol", "squeue", "scancel"):
            (folder / name).write_text(f"#!/bin/sh\n/usr/bin/env >{told}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        for name in ("SLURM_JWT", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "secret")
        SlurmCommandRunner(Path("/etc/a.conf"), 10).change("12", "scancel", "-v", "12", account=account_of("nobody"))
        assert "SLURM_CONF=/etc/a.conf" in told.read_text()
        assert "secret" not in told.read_text()


@contextlib.contextmanager
def mounted(folder: Path, uid: int) -> Iterator[None]:
    """A file system of a user's own (FUSE), as fusermount mounts it on any folder of that user. It lets nobody else in."""
    libc = ctypes.CDLL(None)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={uid},group_id={uid}"
    try:
        if libc.mount(b"evil", bytes(folder), b"fuse", 0, options.encode()) != 0:
            pytest.skip("nothing can be mounted here")
        try:
            yield
        finally:
            libc.umount2(bytes(folder), 2)
    finally:
        os.close(device)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", ["mount", "file", "link"])
def test_what_a_user_puts_in_place_of_its_reports_concerns_that_job(tmp_path: Path, kind: str, alone: bool) -> None:
    """A user whose requeued job could not be told anything kept penstockd from observing the cluster, for all."""
    spool, uid = Spool(tmp_path, alone=alone), os.geteuid()
    first = ControlMessage(job_id="1", epoch=1, round=1)
    spool.tell(first, uid)
    reports = reports_folder(tmp_path, "1")
    with contextlib.ExitStack() as there:
        if kind == "mount":
            if uid != 0 or not os.access("/dev/fuse", os.W_OK):
                pytest.skip("needs root and /dev/fuse")
            there.enter_context(mounted(reports, 65534))
        else:
            reports.rmdir()
            reports.touch() if kind == "file" else reports.symlink_to("/nowhere")
        assert spool.next_epoch("1") == 2
        spool.tell(first.model_copy(update={"epoch": 2}), uid)
        assert '"epoch":2' in control_file(tmp_path, "1").read_text()
        spool.tell(ControlMessage(job_id="2", epoch=1, round=1), uid)
        assert spool.read(["1", "2"], {"1": uid, "2": uid}) == []
        assert not spool.has_left("1", 0, ["n1"])
        spool.recent(0.0)


def test_the_bodies_of_one_user_do_not_fill_the_memory() -> None:
    """Each may be 2 MiB and take 30 s to arrive, and a user may have thousands of connections."""

    async def attack() -> tuple[list[int], list[int]]:
        go_on = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            await go_on.wait()

        limited = LimitBodies(app)

        async def send(message: Message) -> None: ...

        async def post(user: str) -> int:
            left = [2**18] * 8

            async def receive() -> Message:
                return {"type": "http.request", "body": b"x" * left.pop(), "more_body": bool(left)}

            identity = Identity(user=user, uid=1, role="user", by="socket")
            try:
                await limited({"type": "http", "state": {"identity": identity}}, receive, send)
            except HTTPException as error:
                return error.status_code
            return 200

        greedy = [asyncio.create_task(post("greedy")) for _ in range(500)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(post(f"user{n}")) for n in range(5)]
        await asyncio.sleep(0)
        go_on.set()
        found = await asyncio.gather(*greedy), await asyncio.gather(*others)
        assert [await post("greedy") for _ in range(100)] == [200] * 100
        return found

    greedy, others = asyncio.run(attack())
    assert greedy.count(200) * 2**21 <= 2**27
    assert {*greedy} == {200, 503}
    assert others == [200] * 5


def test_slow_requests_of_one_user_do_not_keep_others_from_penstockd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where penstock-api serves, a user's submissions took all its turns at penstockd: that user can stop sbatch (SIGSTOP)."""

    async def attack() -> float:
        daemon = OverSocket(tmp_path / "no.sock", cast("Published", SimpleNamespace(silent_since_s=None)))

        async def answer(method: str, target: bytes, body: bytes, headers: dict[str, str]) -> httpx.Response:
            if b"submit" in target:
                await asyncio.sleep(3600)
            return httpx.Response(200, json={})

        monkeypatch.setattr(daemon, "_request", answer)

        def ask(user: str, target: bytes) -> asyncio.Task[httpx.Response]:
            identity = Identity(user=user, uid=1, role="user", by="socket")
            return asyncio.create_task(daemon._ask(identity, "POST", target))

        greedy = [ask("greedy", b"submit") for _ in range(64)]
        await asyncio.sleep(0)
        done, _ = await asyncio.wait([ask(f"user{n}", b"log") for n in range(20)], timeout=2)
        for each in greedy:
            each.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        assert (await ask("greedy", b"log")).status_code == 200
        await daemon.close()
        return len(done)

    assert asyncio.run(attack()) == 20


def test_explanations_for_one_user_do_not_keep_others_from_theirs() -> None:
    """One is made at a time: with thousands asked for, each other user waited for all of them."""

    async def attack() -> list[str]:
        turns, served = Turns(1), list[str]()

        async def explain(user: str) -> None:
            async with turns.turn(user):
                await asyncio.sleep(0)
                served.append(user)

        greedy = [asyncio.create_task(explain("greedy")) for _ in range(100)]
        await asyncio.sleep(0)
        greedy[1].cancel()
        await asyncio.gather(*greedy, *[explain(user) for user in ("ann", "ben", "ann")], return_exceptions=True)
        return served

    served = asyncio.run(attack())
    assert sorted(served.index(user) for user in ("ann", "ben")) <= [3, 4]
    assert len(served) == 102


def test_a_turn_whose_thread_cannot_be_started_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who can fill the unit's tasks for a moment would have ended all calls to the cluster until a restart."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def attack() -> int:
        pool = Pool("calls", 4, 10)
        monkeypatch.setattr(threading.Thread, "start", fail)
        for number in range(4):
            with pytest.raises(Busy):
                await pool.call(f"user{number}", lambda: 1)
        monkeypatch.setattr(threading.Thread, "start", start)
        return await asyncio.wait_for(pool.call("honest", lambda: 7), 5)

    assert asyncio.run(attack()) == 7
