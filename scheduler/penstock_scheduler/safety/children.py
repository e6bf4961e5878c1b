"""The one way in which Penstock's daemons run other programs.

A child is named by its absolute path and gets an environment that its caller states whole, so that no variable of a user chooses
a program. Its output and its time are bounded. It can run as another account, with that account's groups and nothing of root's.
A `Pool` bounds how many children users keep waiting for, in threads that nothing else needs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import pwd
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.safety.open_files import Places

if TYPE_CHECKING:
    import asyncio

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

MOST_BYTES = 16 * 2**20
"""Most output of a child unless its caller says otherwise."""

LAST_S = 1.0
"""How long a killed child may take to be gone: one in an uninterruptible read of a hung mount takes for ever."""

_LOOK_S = 0.1
"""How often a child is looked for whose output stays open: what it left running in the background may hold it."""


class ChildError(PenstockError):
    """A child process gave no answer: `program` names it, `text` says why. `stderr` is what it had printed there by then."""

    def __init__(self, program: str, text: str, stderr: bytes = b"") -> None:
        self.program, self.text, self.stderr = PurePath(program).name, text, stderr
        super().__init__(f"{self.program} {text}")


class CannotStart(ChildError):
    """The program is not there, or cannot be started. Nothing was done."""


class CannotBecome(CannotStart):
    """This process may not run programs as that account. Nothing was done, and trying again does not help."""


class TookTooLong(ChildError):
    """The child exceeded its time limit and was killed. What it had to do may have been done."""


class TooMuchOutput(ChildError):
    """The child printed more than its caller reads and was killed. What it had to do may have been done."""


class Busy(PenstockError):
    """So many requests wait for children that this user may add none. Nothing was done; try again in some seconds."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this host, as children run: with the user's own groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def account_of(user: int | str) -> Account:
    """The account of a user by uid or name, by the host's user database. Raises KeyError: there is none."""
    found = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
    groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
    return Account(found.pw_name, found.pw_uid, found.pw_gid, groups, found.pw_dir, found.pw_shell or "/bin/sh")


@dataclass(frozen=True, slots=True)
class Done:
    """How a child ended, and what it printed."""

    returncode: int
    """As of `subprocess`: negative if a signal ended it."""
    stdout: bytes
    stderr: bytes

    @property
    def out(self) -> str:
        """The output as text, in UTF-8; other bytes become U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def err(self) -> str:
        """The errors as text, as `out`."""
        return self.stderr.decode(errors="replace")


def program(name: str) -> str:
    """The absolute path of a program on this process's PATH. Daemons look once, when they start. Raises CannotStart."""
    path = found(name)
    if path is None:
        raise CannotStart(name, f"is not on PATH ({os.environ.get('PATH', '')}); install it or add its folder to PATH")
    return path


def found(name: str) -> str | None:
    """As `program`; None: it is not there."""
    folders = [folder for folder in os.get_exec_path() if PurePath(folder).is_absolute()]
    return shutil.which(name, path=os.pathsep.join(folders))


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    input: bytes = b"",
    most_bytes: int = MOST_BYTES,
    account: Account | None = None,
    cwd: str = "/",
    pass_fds: Sequence[int] = (),
) -> Done:
    """Run a program until it ends.

    Args:
        argv: the program's absolute path, and its arguments.
        env: the child's whole environment.
        most_bytes: most output and errors together.
        account: whom it runs as; None: as this process.
        pass_fds: descriptors that it inherits besides its input and its outputs.

    Raises:
        CannotBecome: this process is neither root nor that account.
        CannotStart: there is no such program, or no resources for it.
        TookTooLong: it did not end in time. It is killed, with its process group.
        TooMuchOutput: it printed too much. It is killed, with its process group.
    """
    if not PurePath(argv[0]).is_absolute():
        raise ValueError(f"{argv[0]} is not an absolute path")
    try:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            **becoming(argv[0], account),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotStart(argv[0], f"cannot be started: {error}") from error
    with contextlib.ExitStack() as open_pipes:
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None, "each is a pipe"
            open_pipes.callback(_close, pipe)
        conversation = _Conversation(process, input, most_bytes, time.monotonic() + timeout_s)
        try:
            conversation.hold()
        except TimeoutError:
            raise TookTooLong(argv[0], f"did not end in {timeout_s:g} s", bytes(conversation.stderr)) from None
        except OverflowError:
            text = f"printed more than {most_bytes:,} bytes"
            raise TooMuchOutput(argv[0], text, bytes(conversation.stderr)) from None
        finally:
            if process.returncode is None:
                _end(process)
    return Done(process.returncode, bytes(conversation.stdout), bytes(conversation.stderr))


def becoming(path: str, account: Account | None) -> dict[str, Any]:
    """The arguments of Popen that make a child run as this account. Raises CannotBecome."""
    mine = os.geteuid()
    if account is None or account.uid == mine:
        return {}
    if mine != 0:
        text = (
            f"cannot run as {account.name} (uid {account.uid}), because this process runs as uid {mine}; run it as root"
        )
        raise CannotBecome(path, text)
    return {"user": account.uid, "group": account.gid, "extra_groups": account.groups}


class _Conversation:
    """The input and the outputs of a child, until it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], given: bytes, most_bytes: int, until_s: float) -> None:
        self._process, self._given, self._most_bytes, self._until_s = process, memoryview(given), most_bytes, until_s
        self.stdout, self.stderr = bytearray(), bytearray()

    def hold(self) -> None:
        """Return when the child has ended. Raises TimeoutError, and OverflowError for too much output."""
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        with selectors.DefaultSelector() as selector:
            for pipe, into in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
                assert pipe is not None, "it is a pipe"
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, into)
            if self._given:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            else:
                process.stdin.close()
            ended = False
            while selector.get_map():
                left_s = self._left_s()
                ready = selector.select(0 if ended else min(left_s, _LOOK_S))
                if ended and not ready:
                    break  # what it left running in the background holds its output open
                # It may have printed all that it had to say after select() and before poll(): read once more.
                ended = ended or (not ready and process.poll() is not None)
                for key, _ in ready:
                    if not (self._write() if key.data is None else self._read(key.fd, key.data)):
                        selector.unregister(key.fileobj)
                        if key.data is None:
                            _close(process.stdin)
        try:
            process.wait(self._left_s())
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _write(self) -> bool:
        """Write some of the input. Returns whether there is more to write."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._given = self._given[os.write(self._process.stdin.fileno(), self._given[: 2**16]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False  # it does not read it all; its exit status says whether that is an error
        return len(self._given) > 0

    def _read(self, fd: int, into: bytearray) -> bool:
        """Read some of the output. Returns whether there may be more."""
        try:
            read = os.read(fd, 2**16)
        except BlockingIOError:
            return True
        into += read
        if len(self.stdout) + len(self.stderr) > self._most_bytes:
            raise OverflowError
        return bool(read)


def _close(pipe: Any) -> None:
    with contextlib.suppress(OSError):
        pipe.close()


_in_turn = threading.local()
"""`left`: children of this thread that outlive their SIGKILL, while the thread has a turn of a pool."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        process.kill()
    try:
        process.wait(LAST_S)
    except subprocess.TimeoutExpired:
        getattr(_in_turn, "left", []).append(process)


class Pool:
    """Bounds how many calls that wait for children run at once, and how many wait for their turn.

    A user has at most as many turns as are free, and as many waiting calls as there is room for more: see `Places`. A child
    that cannot be killed, for example on a hung mount, keeps its turn until it is gone.

    Args:
        what: what the calls are, for messages, such as "submissions".
        most: calls that run at once.
        waiting: calls that wait.
    """

    def __init__(self, what: str, most: int, waiting: int) -> None:
        self._what = what
        self._turns, self._calls = Places(most), Places(most + waiting)
        self._queue: deque[tuple[str, Callable[[], None]]] = deque()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, user: str) -> Iterator[None]:
        """Hold a turn for this user, after waiting for it, while the thread runs children. Raises Busy."""
        mine = threading.Event()
        if not self._ask(user, mine.set):
            mine.wait()
        with self._held(user):
            yield

    async def call(
        self, user: str, function: Callable[Parameters, Answer], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Answer:
        """The answer of a function that runs children, in a thread of its own. Raises Busy, and what the function raises."""
        import asyncio  # the agent and the commands of users need no pool

        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        answer: asyncio.Future[Answer] = loop.create_future()

        def tell(done: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done)

        def wake() -> None:
            tell(lambda: None if mine.done() else mine.set_result(None))

        if not self._ask(user, wake):
            try:
                await mine
            except asyncio.CancelledError:
                self._withdraw(user, wake)
                raise
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)

        def work() -> None:
            with self._held(user):
                try:
                    found = call()
                except BaseException as error:
                    tell(functools.partial(_give_error, answer, error))
                else:
                    tell(functools.partial(_give, answer, found))

        try:
            threading.Thread(target=work, name=self._what, daemon=True).start()
        except RuntimeError:  # no thread can be started now; the turn must not be lost
            self._leave(user)
            raise Busy(f"no thread can be started for {self._what}; try again in some seconds") from None
        return await answer

    def _ask(self, user: str, wake: Callable[[], None]) -> bool:
        """Ask for a turn. Returns whether the user has it now; else `wake` is called when it has. Raises Busy."""
        with self._lock:
            if not self._calls.take(user):
                text = f"{self._calls.held(user)} of your {self._what} wait already, and others need the rest"
                raise Busy(f"{text}; try again in some seconds")
            if self._turns.take(user):
                return True
            self._queue.append((user, wake))
            return False

    def _withdraw(self, user: str, wake: Callable[[], None]) -> None:
        """Give up a call that may have its turn already."""
        with self._lock:
            if (user, wake) in self._queue:
                self._queue.remove((user, wake))
                self._calls.give_back(user)
                return
        self._leave(user)

    @contextlib.contextmanager
    def _held(self, user: str) -> Iterator[None]:
        """Surrounds a turn."""
        _in_turn.left = []
        try:
            yield
        finally:
            left = _in_turn.left
            del _in_turn.left
            if left:
                threading.Thread(target=self._leave, args=(user, left), name="unkillable", daemon=True).start()
            else:
                self._leave(user)

    def _leave(self, user: str, left: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        """Give a turn back, once these children are gone, and wake those who have one now."""
        for process in left:
            process.wait()
        woken = []
        with self._lock:
            self._turns.give_back(user)
            self._calls.give_back(user)
            for each in tuple(self._queue):
                if self._turns.taken == self._turns.total:
                    break
                if self._turns.take(each[0]):
                    self._queue.remove(each)
                    woken.append(each[1])
        for wake in woken:
            wake()


def _give(answer: asyncio.Future[Answer], found: Answer) -> None:
    if not answer.done():
        answer.set_result(found)


def _give_error(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
