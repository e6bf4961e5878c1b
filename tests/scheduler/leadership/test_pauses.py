"""A leader that is frozen at a write, and wakes up when another one leads, writes nothing.

For each kind of write one process leads on a database of its own and stops itself (SIGSTOP) right before the check, or between
the check and the write. Another one takes over; then the first one goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock_profiles.wire import ControlMessage, read
from penstock_scheduler.api.agent_messages import NodeOrder, NodeStatus, order_file
from penstock_scheduler.burst.manager.worker import Yielding
from penstock_scheduler.daemon.candidate import Candidate, StandingBy
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.store.leadership.lease import Lease, boot_s
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway.commands import SlurmCommandRunner
from penstock_slurm.share.agent_files import Orders
from tests.forking import FORKING

LEASE_S = 4.0
KINDS = ("slurm", "store", "spool", "order", "cloud")


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class FreezesInside:
    """A lease whose holder is frozen between the check and the write."""

    def __init__(self, lease: Lease) -> None:
        self._lease, self.on = lease, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._lease, name)

    @contextmanager
    def write(self, to: str, what: str):
        with self._lease.write(to, what) as until_s:
            if self.on:
                self.on = False
                freeze()
            yield until_s


class CloudThatCounts:
    def __init__(self, file: Path) -> None:
        self._file = file

    def terminate_instances(self) -> None:
        with self._file.open("a") as file:
            file.write("terminated\n")


def writes(kind: str, url: str, folder: Path, *, inside: bool) -> None:
    """Lead, write once, freeze, and write again; what was refused is in the file `refused`."""
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    lease = StandingBy(url, Candidate("first", "", LEASE_S)).wait(lambda: False)
    assert lease is not None
    leadership = FreezesInside(lease)
    store = open_store(url, writer=True, leadership=leadership)
    spool = Spool(folder / "spool", leadership=leadership)
    orders = Orders(folder / "spool", leadership)
    runner = SlurmCommandRunner(None, 15, leadership)
    lock = threading.Lock()
    lock.acquire()
    cloud = Yielding(CloudThatCounts(folder / "cloud"), lock, leadership)
    for attempt in (1, 2):
        if attempt == 2:
            leadership.on = inside
            if not inside:
                freeze()
        try:
            if kind == "slurm":
                runner.change_once("7", "scontrol", "uhold", "7")
            elif kind == "store":
                store.set_control("x", attempt)
            elif kind == "order":
                seen = NodeStatus(node="n1", order=10 * attempt, time_s=0.0, history="h")
                orders.write("n1", [], (), status=seen, gpu_type="t4", now_s=0.0)
            elif kind == "spool":
                spool.tell(ControlMessage(job_id="7", epoch=attempt, round=1))
            else:
                cloud.terminate_instances()
        except PenstockError as error:
            (folder / "refused").write_text(str(error))
        except Exception as error:
            (folder / "refused").write_text(f"UNFORESEEN {error!r}")
    (folder / "done").touch()


def take_over(url: str) -> int:
    """Lead in place of the first one; the fencing number."""
    second = StandingBy(url, Candidate("second", "", LEASE_S)).wait(lambda: False)
    assert second is not None
    second.lose("the test is over")
    return second.number


def written(kind: str, url: str, folder: Path) -> int:
    """How many of the two writes took effect."""
    if kind == "store":
        return int(open_store(url).control("x") or 0)
    if kind == "order":
        return read(NodeOrder, order_file(folder / "spool", "n1").read_bytes()).number // 10
    if kind == "spool":
        found = Spool(folder / "spool").control("7")
        return found.epoch if found else 0
    file = folder / kind
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(what, seconds: float = 60.0) -> None:
    until_s = boot_s() + seconds
    while not what():
        assert boot_s() < until_s, "it takes too long"
        time.sleep(0.05)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("inside", [False, True], ids=["before-the-check", "after-the-check"])
def test_a_leader_that_was_frozen_at_a_write_writes_nothing(make_database, tmp_path, inside):
    processes = {}
    kinds = KINDS[:-1] if inside else KINDS  # see the decision for what a call to a cloud may still do
    try:
        for kind in kinds:
            folder, url = tmp_path / kind, make_database()
            folder.mkdir()
            for command in ("scontrol", "squeue", "scancel"):
                (folder / command).write_text(f"#!/bin/sh\necho done >>{folder}/slurm\n")
                (folder / command).chmod(0o755)
            process = FORKING.Process(target=writes, args=(kind, url, folder), kwargs={"inside": inside})
            process.start()
            processes[kind] = (process, url, folder)
        for process, _, _ in processes.values():
            wait_for(lambda process=process: is_stopped(process.pid))
        for kind, (_, url, folder) in processes.items():
            assert written(kind, url, folder) == 1, "the first write, while it led"
        with ThreadPoolExecutor() as pool:
            assert {*pool.map(take_over, [url for _, url, _ in processes.values()])} == {2}
        for kind, (process, url, folder) in processes.items():
            os.kill(process.pid, signal.SIGCONT)
            wait_for((folder / "done").exists)
            assert written(kind, url, folder) == 1, f"{kind}: the second write came after the takeover"
            text = (folder / "refused").read_text()
            assert "UNFORESEEN" not in text
    finally:
        for process, _, _ in processes.values():
            process.kill()
            process.join()
