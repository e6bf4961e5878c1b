from __future__ import annotations

import asyncio
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_scheduler.safety import children
from penstock_scheduler.safety.children import (
    Account,
    Busy,
    CannotBecome,
    CannotStart,
    Pool,
    TookTooLong,
    TooMuchOutput,
)

SHELL = "/bin/sh"
LONG_S = 60.0
"""A time limit that no child reaches, on however busy a machine."""


def sh(script: str, **more: object) -> children.Done:
    given = {"env": {"PATH": os.defpath}, "timeout_s": LONG_S} | more
    return children.run([SHELL, "-c", script], **given)  # type: ignore[arg-type]


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_gets_its_input_and_environment_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the daemon")
    done = sh('cat; echo "$GIVEN $SECRET"; pwd; echo no >&2; exit 3', env={"GIVEN": "this"}, input=b"text\n")
    assert done == children.Done(3, b"text\nthis \n/\n", b"no\n")


def test_input_and_output_larger_than_a_pipe_pass() -> None:
    text = os.urandom(2**21)
    assert sh("cat", input=text).stdout == text


def test_a_child_need_not_read_its_input() -> None:
    assert sh("exit 0", input=b"x" * 2**20) == children.Done(0, b"", b"")


def test_a_program_is_named_by_its_absolute_path() -> None:
    with pytest.raises(ValueError, match="sh is not an absolute path"):
        children.run(["sh"], env={}, timeout_s=1)


def test_program_takes_no_relative_folder_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "bin"):
        folder.mkdir(exist_ok=True)
        (folder / "sbatch").write_text("#!/bin/sh\n")
        (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", ".::bin")
    with pytest.raises(CannotStart, match="sbatch is not on PATH"):
        children.program("sbatch")
    monkeypatch.setenv("PATH", f".:{tmp_path}/bin")
    assert children.program("sbatch") == f"{tmp_path}/bin/sbatch"


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="missing cannot be started") as caught:
        children.run([str(tmp_path / "missing")], env={}, timeout_s=LONG_S)
    assert caught.value.program == "missing"


def test_a_child_that_takes_too_long_ends_with_its_group(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(TookTooLong, match=r"sh did not end in 2 s") as caught:
        sh(f"echo before >&2; sleep 1000 & echo $! > {pid}.new; mv {pid}.new {pid}; wait", timeout_s=2)
    assert caught.value.stderr in (b"before\n", b"")  # a busy machine may not have started it
    if pid.exists():
        wait_until(lambda: not is_there(int(pid.read_text())))


def test_a_child_that_prints_too_much_is_killed_at_once() -> None:
    with pytest.raises(TooMuchOutput, match="sh printed more than 1,000,000 bytes"):
        sh("exec cat /dev/zero", most_bytes=10**6)
    with pytest.raises(TooMuchOutput):
        sh("exec cat /dev/zero >&2", most_bytes=10**6)
    assert len(sh("head -c 1000000 /dev/zero", most_bytes=10**6).stdout) == 10**6


def test_a_child_that_closes_its_outputs_is_waited_for() -> None:
    assert sh("exec >&- 2>&-; sleep 0.3; exit 5").returncode == 5
    with pytest.raises(TookTooLong):
        sh("exec >&- 2>&-; sleep 1000", timeout_s=1)


def test_what_a_child_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    done = sh(f"setsid sleep 1000 & echo $! > {pid}; echo said")
    try:
        assert done.stdout == b"said\n"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_no_open_file_is_inherited_but_those_named() -> None:
    read, write = os.pipe()
    try:
        for end in (read, write):
            os.set_inheritable(end, True)
        os.write(write, b"told")
        listing = f"ls /proc/self/fd; head -c 4 /dev/fd/{read}"
        assert b"told" in sh(listing, pass_fds=[read]).stdout
        assert str(write).encode() not in sh("ls /proc/self/fd", pass_fds=[]).stdout.split()
    finally:
        os.close(read)
        os.close(write)


def test_only_root_becomes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(CannotBecome, match=r"cannot run as ann .uid 77., because this process runs as uid 4242"):
        sh("true", account=Account("ann", 77, 77, (), "/", SHELL))
    mine = Account("me", 4242, 4242, (), "/", SHELL)
    assert sh("exit 0", account=mine).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_a_child_of_another_account_has_nothing_of_roots() -> None:
    account = children.account_of("nobody")
    assert account == children.account_of(account.uid)
    shown = sh(
        "id -u; id -ru; id -g; id -G; grep -E '^Cap(Eff|Prm|Amb)' /proc/self/status", account=account
    ).out.split()
    told = subprocess.run(["id", "-G", "nobody"], capture_output=True, text=True, check=True).stdout.split()
    assert shown[:3] == [str(account.uid)] * 2 + [str(account.gid)]
    assert shown[3 : 3 + len(told)] == told
    assert shown[3 + len(told) + 1 :: 2] == ["0" * 16] * 3


def test_there_is_no_account_of_an_unknown_user() -> None:
    uid = max(each.pw_uid for each in pwd.getpwall() if each.pw_uid < 2**31) + 12345
    with pytest.raises(KeyError):
        children.account_of(uid)


class Work:
    """A call that lasts until it is let go."""

    def __init__(self) -> None:
        self.go, self.begun, self.running, self.most = threading.Event(), 0, 0, 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.begun, self.running = self.begun + 1, self.running + 1
            self.most = max(self.most, self.running)
        assert self.go.wait(LONG_S)
        with self._lock:
            self.running -= 1
        return threading.current_thread().name


def test_a_pool_bounds_what_runs_and_what_waits_for_each_user() -> None:
    async def main() -> None:
        pool, work = Pool("submissions", most=4, waiting=8), Work()
        anns = [asyncio.create_task(pool.call("ann", work)) for _ in range(7)]
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: work.begun == 2)  # half of 4
        refused = [task for task in anns if task.done()]
        assert len(refused) == 1, "of 12 calls a user has 6"
        with pytest.raises(Busy, match="6 of your submissions wait already"):
            await refused[0]
        bens = asyncio.create_task(pool.call("ben", work))
        await asyncio.to_thread(wait_until, lambda: work.begun == 3)
        assert not bens.done()
        work.go.set()
        assert {await task for task in (*anns, bens) if task not in refused} == {"submissions"}
        assert (work.begun, work.most) == (7, work.most)
        assert work.most <= 4
        assert await pool.call("ann", lambda: "again") == "again"

    asyncio.run(main())


def test_a_pool_passes_errors_on_and_gives_the_turn_back() -> None:
    async def main() -> None:
        pool = Pool("calls", most=2, waiting=2)
        for _ in range(9):
            with pytest.raises(KeyError):
                await pool.call("ann", {}.__getitem__, "key")
        assert await pool.call("ann", lambda: 1) == 1

    asyncio.run(main())


def test_a_call_that_its_caller_gives_up_keeps_its_turn_until_it_ends() -> None:
    async def main() -> None:
        pool, work = Pool("calls", most=2, waiting=4), Work()
        first, second = (asyncio.create_task(pool.call("ann", work)) for _ in range(2))
        await asyncio.to_thread(wait_until, lambda: work.begun == 1)
        second.cancel()  # waits
        first.cancel()  # runs
        await asyncio.gather(first, second, return_exceptions=True)
        third = asyncio.create_task(pool.call("ann", lambda: "third"))
        await asyncio.sleep(0.05)
        assert not third.done()
        work.go.set()
        assert await third == "third"
        assert work.begun == 1

    asyncio.run(main())


def test_threads_wait_for_their_turn() -> None:
    pool, work = Pool("calls", most=2, waiting=6), Work()

    def one() -> None:
        with pool.turn("ann"):
            work()

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: work.begun == 1)
    work.go.set()
    for thread in threads:
        thread.join(LONG_S)
    assert (work.begun, work.most) == (4, 1)
    with pool.turn("ann"):
        pass


def test_a_child_that_cannot_be_killed_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL takes effect for a child on a hung mount only when the mount is back."""
    monkeypatch.setattr(children, "LAST_S", 0.1)
    kills: list[int] = []
    monkeypatch.setattr(children.os, "killpg", lambda pid, _: kills.append(pid))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    pool = Pool("calls", most=2, waiting=2)

    def hung() -> None:
        children.run([sys.executable, "-c", "import time; time.sleep(1000)"], env={}, timeout_s=0.2)

    async def main() -> None:
        with pytest.raises(TookTooLong):
            await pool.call("ann", hung)
        later = asyncio.create_task(pool.call("ann", lambda: "later"))
        await asyncio.sleep(0.2)
        assert not later.done()
        monkeypatch.undo()
        os.kill(kills[0], signal.SIGKILL)
        assert await later == "later"

    asyncio.run(main())
