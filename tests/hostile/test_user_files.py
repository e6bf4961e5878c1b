"""Output files that attack whoever reads them: `-o` of a job may name anything, and the daemon may be root.

The daemon lets a process with the job's user's own rights read them. It opens nothing but regular files, answers in bounded time
whatever a file system does, and no user takes what others need.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock_profiles.files import NoRegularFile, open_regular
from penstock_scheduler.daemon.service import user_files
from penstock_scheduler.daemon.service.user_files import NotReadable, Part, UserFiles
from penstock_scheduler.safety.children import Busy
from tests.folders import public_folder

ME = os.geteuid()
AS_ROOT = pytest.mark.skipif(ME != 0, reason="only root can become another user")
NOBODY = pwd.getpwnam("nobody")

Answer = TypeVar("Answer")


def run(work: Callable[[UserFiles], Coroutine[Any, Any, Answer]]) -> Answer:
    """Run this with processes that are gone afterwards."""

    async def whole() -> Answer:
        files = UserFiles()
        try:
            return await work(files)
        finally:
            left = [each._process.pid for each in files._readers.values() if each._process is not None]
            files.close()
            assert await asyncio.to_thread(gone, left), "a process is left"

    return asyncio.run(whole())


def process_of(files: UserFiles, uid: int = ME) -> int:
    found = files._readers[uid]._process
    assert found is not None
    return found.pid


def gone(processes: list[int]) -> bool:
    """Whether these processes have ended."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        if all(not Path(f"/proc/{each}/exe").exists() for each in processes):
            return True
        time.sleep(0.02)
    return False


def read(uid: int, path: Path | str, offset: int = 0, limit: int = 100) -> Part:
    return run(lambda files: files.read(uid, str(path), offset, limit))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    with public_folder() as found:
        yield found


@pytest.fixture
def opened() -> Iterator[Callable[[], list[str]]]:
    """The paths that this process has opened, without those that it only looked at."""
    found: list[str] = []
    active = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event == "open" and not (arguments[2] or 0) & os.O_PATH:
            found.append(str(arguments[0]))

    sys.addaudithook(note)
    yield lambda: found
    active = False


def odd_files(folder: Path) -> dict[str, Path]:
    """What an output path may be, besides a file."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "dangling").symlink_to(folder / "nothing")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "s"))
    return {each.name: each for each in folder.iterdir()} | {
        name: Path(name)
        for name in ("/dev/ptmx", "/dev/null", "/dev/zero", "/dev/tty", "/dev/watchdog", "/proc/self/fd")
    }


def test_nothing_but_a_regular_file_is_ever_opened(tmp_path: Path, opened: Callable[[], list[str]]) -> None:
    """To open /dev/ptmx makes a terminal, to open /dev/watchdog may restart the machine."""
    for path in odd_files(tmp_path).values():
        with pytest.raises(OSError, match=r"regular file|No such|symbolic links"):
            open_regular(path)
    assert opened() == []
    with open_regular(Path("/etc/passwd")) as file:
        assert file.read(4) == b"root"
    assert opened() != []


def test_the_api_shows_nothing_but_files(tmp_path: Path) -> None:
    found = odd_files(tmp_path)

    async def ask(files: UserFiles) -> None:
        (tmp_path / "file").write_text("mine")
        await files.read(ME, str(tmp_path / "file"), 0, 100)
        first = process_of(files)
        for path in found.values():
            with pytest.raises((NoRegularFile, NotReadable)):
                await files.read(ME, str(path), 0, 100)
        assert (await files.read(ME, str(tmp_path / "file"), 0, 100)).content == b"mine"
        assert process_of(files) == first, "one process serves all requests of a user"

    run(ask)


@AS_ROOT
def test_a_file_is_read_with_the_rights_of_its_user(open_folder: Path) -> None:
    secret, theirs = open_folder / "secret", open_folder / "theirs"
    secret.write_text("of root")
    secret.chmod(0o600)
    theirs.write_text("of nobody")
    os.chown(theirs, NOBODY.pw_uid, NOBODY.pw_gid)
    theirs.chmod(0o600)
    (open_folder / "way").mkdir(0o700)
    hidden = open_folder / "way" / "theirs"
    hidden.write_text("of nobody, in a folder of root's")
    os.chown(hidden, NOBODY.pw_uid, -1)
    assert read(NOBODY.pw_uid, theirs).content == b"of nobody"
    for path in (secret, hidden, "/etc/shadow"):
        with pytest.raises((NoRegularFile, NotReadable)):
            read(NOBODY.pw_uid, path)
    with pytest.raises(NoRegularFile):
        read(0, theirs)


@AS_ROOT
def test_the_process_has_none_of_roots_rights(open_folder: Path) -> None:
    theirs = open_folder / "theirs"
    theirs.write_text("x")
    os.chown(theirs, NOBODY.pw_uid, -1)

    async def look(files: UserFiles) -> str:
        await files.read(NOBODY.pw_uid, str(theirs), 0, 1)
        process = process_of(files, NOBODY.pw_uid)
        opened = {each.name: str(each.readlink()) for each in Path(f"/proc/{process}/fd").iterdir()}
        del opened["2"]
        harmless = ("socket:", "pipe:", "/dev/null")
        strange = [each for each in opened.values() if not each.startswith(harmless)]
        assert all("/libffi.so." in each for each in strange), strange  # libffi 3.5 keeps its own file open
        assert Path(f"/proc/{process}/environ").read_bytes() == b""
        return Path(f"/proc/{process}/status").read_text()

    told = dict(line.split(":\t", 1) for line in run(look).splitlines() if ":\t" in line)
    assert told["Uid"].split() == [str(NOBODY.pw_uid)] * 4
    assert told["Gid"].split() == [str(NOBODY.pw_gid)] * 4
    assert set(told["Groups"].split()) == {str(each) for each in os.getgrouplist("nobody", NOBODY.pw_gid)}
    assert told["NoNewPrivs"] == "1"
    assert {told[each] for each in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}


def test_a_user_whom_this_host_does_not_know_has_no_files(tmp_path: Path) -> None:
    unknown = max(each.pw_uid for each in pwd.getpwall() if each.pw_uid < 60_000) + 1
    with pytest.raises((NotReadable, NoRegularFile)):
        read(unknown, tmp_path / "file")


def test_paths_are_bytes_and_offsets_are_any_number(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\n1 2 3 4\n\xff")
    path.write_bytes(b"0123456789")

    async def ask(files: UserFiles) -> list[tuple[int, bytes]]:
        found = [await files.read(ME, str(path), offset, 4) for offset in (0, 8, 10, 99, 2**62, -3, -99, -(2**62))]
        with pytest.raises(NotReadable):
            await files.read(ME, f"{path}\0", 0, 4)
        with pytest.raises(NotReadable):
            await files.read(ME, "/" + "x/" * 5000, 0, 4)
        return [(each.begin, each.content) for each in found]

    assert run(ask) == [
        (0, b"0123"), (8, b"89"), (10, b""), (10, b""), (10, b""), (7, b"789"), (0, b"0123"), (0, b"0123"),
    ]  # fmt: skip


def stopped(process: int) -> None:
    """Stop a process, as a read of a mount that hangs does."""
    os.kill(process, signal.SIGSTOP)


def test_a_file_system_that_hangs_holds_one_process_and_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process answers as little as one on a hung mount. Here it can be killed."""
    monkeypatch.setattr(user_files, "ANSWER_S", 2.0)
    (tmp_path / "file").write_text("mine")

    async def ask(files: UserFiles) -> None:
        await files.read(ME, str(tmp_path / "file"), 0, 9)
        hung = process_of(files)
        stopped(hung)
        threads = len(os.listdir("/proc/self/task"))
        waiting = [asyncio.ensure_future(files.read(ME, str(tmp_path / "file"), 0, 9)) for _ in range(150)]
        done, _ = await asyncio.wait(waiting)
        found = [each.exception() for each in done]
        assert sum(isinstance(each, Busy) for each in found) == 150 - user_files.WAITING
        assert sum(isinstance(each, NotReadable) for each in found) == 1, "the others are answered by a new process"
        assert len(os.listdir("/proc/self/task")) <= threads + 1
        assert await asyncio.to_thread(gone, [hung])
        assert (await files.read(ME, str(tmp_path / "file"), 0, 9)).content == b"mine"

    run(ask)


class Unkillable:
    """A process in an uninterruptible read."""

    def __init__(self) -> None:
        self.dead = False

    def poll(self) -> int | None:
        return -9 if self.dead else None


def test_while_a_process_cannot_die_its_users_requests_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    async def ask(files: UserFiles) -> None:
        await files.read(ME, str(tmp_path / "file"), 0, 9)
        theirs: Any = files._readers[ME]
        hung = [Unkillable() for _ in range(user_files.MOST_KILLED)]
        theirs._killed += hung
        with pytest.raises(NotReadable, match="does not answer"):
            await files.read(ME, str(tmp_path / "file"), 0, 9)
        hung[0].dead = True
        assert (await files.read(ME, str(tmp_path / "file"), 0, 9)).content == b"mine"
        hung[1].dead = True

    run(ask)


def test_a_process_that_was_idle_or_killed_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    async def ask(files: UserFiles) -> None:
        for _ in range(3):
            assert (await files.read(ME, str(tmp_path / "file"), 0, 9)).content == b"mine"
            process = process_of(files)
            os.kill(process, signal.SIGALRM)
            assert await asyncio.to_thread(gone, [process])

    run(ask)


def test_a_process_that_nobody_asks_ends_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(user_files, "IDLE_S", 0.01)
    monkeypatch.setattr(user_files, "DEAD_S", 0.01)

    async def ask(files: UserFiles) -> None:
        await files.read(ME, str(tmp_path / "file"), 0, 9)
        process = files._readers[ME]._process
        assert process is not None
        async with asyncio.timeout(60):
            while Path(f"/proc/{process.pid}").exists():  # a zombie is there, too
                await asyncio.sleep(0.01)

    run(ask)


@pytest.mark.parametrize(
    "told",
    [
        b"part 0 10 -1\n", b"part 0 10 101\n", b"part 0 10\n", b"part x 1 1\n", b"\n", b"other 1\n", b"error\n",
        b"x" * 10_000, b"part 0 10 10\n123", b"irregular 1 2 3\n",
    ],
)  # fmt: skip
def test_a_process_that_its_user_has_taken_over_can_only_lie_about_that_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bytes
) -> None:
    """The answer is bounded and checked, and the next process starts afresh."""
    (tmp_path / "file").write_text("mine")
    liar = tmp_path / "liar.py"
    liar.write_text(f"import os, sys\nsys.stdin.buffer.readline()\nos.write(1, {told!r})\n")

    async def ask(files: UserFiles) -> None:
        with monkeypatch.context() as context:
            context.setattr(user_files.reader, "__file__", str(liar))
            with pytest.raises(NotReadable, match="gave no answer"):
                await files.read(ME, str(tmp_path / "file"), 0, 100)
        assert (await files.read(ME, str(tmp_path / "file"), 0, 100)).content == b"mine"

    run(ask)


def test_many_users_have_no_more_processes_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits keeps the process; one that is idle makes room."""
    monkeypatch.setattr(user_files, "MOST_USERS", 2)
    monkeypatch.setattr(user_files, "ANSWER_S", 60.0)
    monkeypatch.setattr(user_files, "account_of", lambda uid: pwd_account())
    (tmp_path / "file").write_text("mine")

    async def ask(files: UserFiles) -> None:
        for uid in (ME, ME + 1001, ME + 1002, ME + 1003):
            with contextlib.suppress(NoRegularFile, NotReadable):
                await files.read(uid, str(tmp_path / "file"), 0, 9)
            assert len(files._readers) <= 2
        files._readers[ME + 1002].waiting = files._readers[ME + 1003].waiting = 1
        with pytest.raises(Busy, match="of 2 users"):
            await files.read(ME, str(tmp_path / "file"), 0, 9)

    run(ask)


def pwd_account() -> Any:
    from penstock_scheduler.safety.children import account_of

    return account_of("nobody")
