"""Reads files of users as these users, each in a process of its own (`reader`), so that what the daemon may do does not matter.

A user has at most one process, and the site at most `MOST_USERS`. Requests of a user wait for each other, at most `WAITING` of
them. A process that takes longer than `ANSWER_S`, for example on a mount that hangs, is killed. As long as it cannot die, its
user's requests are refused at once, and nobody else notices. No request holds a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles import files
from penstock_profiles.files import NoRegularFile
from penstock_scheduler.daemon.service import reader
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.safety.children import Busy, account_of

ANSWER_S = 5.0
"""How long a read may take, with the start of the process. A busy file server takes a tenth of it."""

MOST_USERS = 64
"""Processes at the same time, 10 MB each. Of those that nobody waits for, the one that was idle for longest makes room."""

WAITING = 100
"""Requests of one user that wait at the same time. One takes about 0.1 ms, so that many can follow logs."""

MOST_KILLED = 2
"""Processes of a user that were killed and cannot die. With so many, the user's files are not read until one has died."""

IDLE_S = 60.0
"""How long a process waits for its user's next request."""

DEAD_S = 1.0
"""How long a killed process takes to be gone, unless it hangs."""

MOST_OF_A_LINE = 200

READ_AT_ONCE = 2**18

NUMBERS = {b"part": 3, b"error": 1, b"irregular": 0}
"""How many numbers each kind of answer has."""


class NotReadable(PenstockError):
    """The file cannot be read now. The message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file: its first byte, the file's size, and the bytes."""

    begin: int
    size: int
    content: bytes


class _Reader:
    """One user's process, which starts with the first request."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._rest: asyncio.TimerHandle | None = None
        """Ends the process when nobody has asked for a while."""
        self._killed: list[subprocess.Popen[bytes]] = []
        """Processes that may not be dead yet."""
        self.waiting = 0

    @property
    def idle(self) -> bool:
        """Whether nobody waits for it, and it can end."""
        return not self.waiting and not self._alive()

    async def read(self, path: str, offset: int, limit: int) -> Part:
        """See `UserFiles.read`."""
        if self.waiting >= WAITING:
            raise Busy(f"{self.waiting} requests read files of this user already; try again in some seconds")
        self.waiting += 1
        if self._rest is not None:
            self._rest.cancel()
        try:
            async with self._turn:
                if len(self._alive()) >= MOST_KILLED:
                    raise NotReadable("its file system does not answer")
                return await self._ask(b"%d %d %d" % (offset, limit, self._uid), os.fsencode(path), limit)
        finally:
            self.waiting -= 1
            if not self.waiting:
                self._rest = asyncio.get_running_loop().call_later(IDLE_S, self.end)

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        """Processes that were killed and are not dead yet. The dead are gone for good."""
        self._killed = [each for each in self._killed if each.poll() is None]
        return self._killed

    async def _ask(self, numbers: bytes, name: bytes, limit: int) -> Part:
        in_step = False
        try:
            async with asyncio.timeout(ANSWER_S):
                for fresh in (False, True):
                    if self._line is None:
                        fresh, self._line = True, await self._start()
                    try:
                        kind, told, rest = await self._exchange(
                            self._line, numbers + b" %d\n" % len(name) + name, limit
                        )
                        break
                    except (EOFError, ConnectionError):
                        if fresh:
                            raise
                        self.end()  # it was idle for too long
            in_step = True
        except TimeoutError:
            raise NotReadable(f"its file system has not answered within {ANSWER_S:.0f} s") from None
        except (EOFError, ConnectionError, ValueError):
            text = "the process that reads it for this user ended, or gave no answer"
            raise NotReadable(f"{text}; penstockd's log says why, unless the user ended it") from None
        finally:
            if not in_step:
                self.end()
        if kind == b"irregular":
            raise NoRegularFile(os.fsdecode(name))
        if kind == b"error":
            raise NotReadable(os.strerror(told[0]))
        return Part(told[0], told[1], rest)

    async def _start(self) -> socket.socket:
        account: tuple[int, ...] = ()
        if os.geteuid() == 0 and self._uid != 0:
            try:
                found = await asyncio.to_thread(account_of, self._uid)
            except KeyError:
                raise NotReadable(f"this host does not know user {self._uid}") from None
            account = (found.uid, found.gid, *found.groups)
        argv = [sys.executable, "-I", "-S", "-B", reader.__file__, str(Path(files.__file__).parents[1])]
        ours, theirs = socket.socketpair()
        with theirs:
            pipe = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [*argv, *map(str, account)], env={}, cwd="/", stdin=pipe, stdout=pipe, start_new_session=True
                )
            except OSError as error:
                ours.close()
                raise NotReadable(f"no process can be started that reads it: {error.strerror}") from None
        ours.setblocking(False)
        return ours

    async def _exchange(self, line: socket.socket, request: bytes, limit: int) -> tuple[bytes, list[int], bytes]:
        """Ask. Returns the kind of the answer, its numbers, and what was read. Raises EOFError, ConnectionError, ValueError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(line, request)
        found, kind, told, length = bytearray(), b"", list[int](), -1
        while length < 0 or len(found) < length:
            if not (read := await loop.sock_recv(line, READ_AT_ONCE)):
                raise EOFError
            found += read
            if length < 0 and b"\n" in found:
                head, _, found = found.partition(b"\n")
                kind, *numbers = bytes(head).split() or [b""]
                told = [*map(int, numbers)]
                if len(told) != NUMBERS.get(kind):
                    raise ValueError(bytes(head[:100]))
                length = told[2] if kind == b"part" else 0
                if not 0 <= length <= limit:
                    raise ValueError(length)
            elif length < 0 and len(found) > MOST_OF_A_LINE:
                raise ValueError(found[:100])
        return kind, told, bytes(found[:length])

    def end(self, *, for_good: bool = False) -> None:
        """Kill the process."""
        if for_good and self._rest is not None:
            self._rest.cancel()
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._killed.append(self._process)
            self._process = None
            with contextlib.suppress(RuntimeError):  # the loop is over
                asyncio.get_running_loop().call_later(DEAD_S, self._alive)


class UserFiles:
    """The processes of all users. One object belongs to one event loop."""

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}
        """Those that were asked last come last."""

    async def read(self, uid: int, path: str, offset: int, limit: int) -> Part:
        """A part of a regular file of this user.

        Args:
            uid: the user, who must own the file.
            path: absolute.
            offset: first byte; negative: bytes from the end.
            limit: most bytes to read.

        Raises:
            NoRegularFile: it is no regular file of this user. It was not opened.
            NotReadable: it cannot be read, or not in time.
            Busy: too many requests for files of this user, or of different users, wait.
        """
        if uid in self._readers:
            self._readers[uid] = self._readers.pop(uid)
        else:
            self._make_room()
            self._readers[uid] = _Reader(uid)
        return await self._readers[uid].read(path, offset, limit)

    def _make_room(self) -> None:
        if len(self._readers) < MOST_USERS:
            return
        idle = next((uid for uid, each in self._readers.items() if each.idle), None)
        if idle is None:
            raise Busy(f"files of {MOST_USERS} users are being read; try again in some seconds")
        self._readers.pop(idle).end(for_good=True)

    def close(self) -> None:
        """End all processes. They end by themselves, too, when nobody is left to ask."""
        for each in self._readers.values():
            each.end(for_good=True)
