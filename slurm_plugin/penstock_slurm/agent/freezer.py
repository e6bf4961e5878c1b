"""Freezes the processes of a job on this node at once, without Slurm, for a part of a second or for some seconds.

Slurm takes two seconds to suspend a job, and counts it as suspended. To hold a job to a share of the GPU's time, the
agent must be faster, and the job is running all the while. This module uses the cgroups that Slurm itself freezes, so
that Slurm's own SIGCONT and SIGKILL, which thaw them first, work on a job that the agent has frozen:

- cgroup v1: `freezer.state` of the job's steps.
- cgroup v2: `cgroup.freeze` of the cgroup `user` of each step. The slurmstepd beside it goes on.
- proctrack/linuxproc, where Slurm has made no cgroups: SIGSTOP and SIGCONT. The user of the job can undo that.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from penstock_slurm.agent import guard

PATIENCE_S = 15.0
"""An agent that has not ticked for this time hangs, and its frozen jobs are thawed."""

SURE_S = 12.0
"""After a pause of this length the agent takes everything as thawed, because its guard may have done that."""

STEP_V1 = re.compile(r"^\d+:(?:[^:\n]*,)?freezer(?:,[^:\n]*)?:(/\S*?/job_\d+/step_[^/\n]+)", re.MULTILINE)
STEP_V2 = re.compile(r"^0::(/\S*?/job_\d+/step_[^/\n]+/user)", re.MULTILINE)
"""The part of a process's cgroup that Slurm freezes when it suspends the step."""


class Freezer:
    """Freezes and thaws processes.

    Args:
        proc: the folder /proc.
        cgroups: where cgroups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups

    def freeze(self, pids: Collection[int]) -> None:
        """Freeze these processes, and all that are in the same steps.

        Raises:
            OSError: some of them cannot be frozen. The others are.
        """
        self._change(pids, "FROZEN", "1", signal.SIGSTOP)

    def thaw(self, pids: Collection[int]) -> None:
        """Undo `freeze`. Raises OSError as `freeze` does."""
        self._change(pids, "THAWED", "0", signal.SIGCONT)

    def beat(self) -> bool:
        """Say that the agent lives, in each tick. Returns whether what it has frozen may have been thawed without it."""
        return False

    def close(self) -> None:
        """End: what is still frozen is thawed, if there is a guard."""

    def by_cgroup(self, pid: int) -> bool:
        """Whether a process is frozen by its cgroup, which its user cannot undo."""
        return self._file(pid) is not None

    def trouble(self, pids: Collection[int]) -> str:
        """Why these processes cannot be frozen, as the end of a sentence; "": they can."""
        for pid in pids:
            file = self._file(pid)
            if file is not None and not os.access(file, os.W_OK) and file.exists():
                return f"the agent may not write to {file}"
            try:
                if file is None:
                    os.kill(pid, 0)
            except ProcessLookupError:
                continue  # it has ended
            except PermissionError:
                return f"the agent may not send signals to process {pid}"
        return ""

    def _change(self, pids: Collection[int], v1: str, v2: str, number: signal.Signals) -> None:
        changes: dict[Path | int, Callable[[], object]] = {}
        for pid in pids:
            file = self._file(pid)
            if file is not None:
                text = v1 if file.name == "freezer.state" else v2
                changes[file] = functools.partial(file.write_text, text, encoding="ascii")
            else:
                changes[pid] = functools.partial(os.kill, pid, number)
        failed: OSError | None = None
        for change in changes.values():
            try:
                change()
            except (FileNotFoundError, ProcessLookupError):
                pass  # the step, or the process, has ended
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _file(self, pid: int) -> Path | None:
        """The file that freezes a process; None: it has none, or has ended."""
        try:
            text = (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        if (found := STEP_V1.search(text)) is not None:
            file = self._cgroups / f"freezer{found[1]}" / "freezer.state"
            if file.exists():
                return file
        if (found := STEP_V2.search(text)) is not None:
            for mount in (self._cgroups, self._cgroups / "unified"):
                file = Path(f"{mount}{found[1]}/cgroup.freeze")
                if file.exists():
                    return file
        return None


class GuardedFreezer(Freezer):
    """A freezer for an agent that may be killed at any time. Processes that it has frozen are thawed by a process of its own,
    `penstock_slurm.agent.guard`, if the agent ends or hangs. That process is started when something is first frozen.

    Args:
        patience_s: how long the agent may hang.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._patience_s = patience_s
        self._frozen: dict[str, None] = {}
        """Cgroups and processes as the guard is told of them."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._beat_s = time.monotonic()

    def freeze(self, pids: Collection[int]) -> None:
        """See `Freezer`. Nothing is frozen without a guard: OSError."""
        self._frozen |= dict.fromkeys(self._targets(pids))
        self._tell()
        super().freeze(pids)

    def thaw(self, pids: Collection[int]) -> None:
        """See `Freezer`."""
        super().thaw(pids)
        gone = {*self._targets(pids), *(each for each in self._frozen if not _is_there(each))}
        self._frozen = {each: None for each in self._frozen if each not in gone}
        if self._guard is not None:
            with contextlib.suppress(OSError):  # the next tick tells it
                self._tell()

    def beat(self) -> bool:
        """See `Freezer`."""
        now_s = time.monotonic()
        late = now_s - self._beat_s > self._patience_s * SURE_S / PATIENCE_S
        self._beat_s = now_s
        if self._frozen:
            self._tell()
        return late

    def close(self) -> None:
        """See `Freezer`."""
        if self._guard is not None:
            os.close(self._pipe)
            self._guard.wait()
            self._guard = None

    def _targets(self, pids: Collection[int]) -> Iterable[str]:
        for pid in pids:
            if (file := self._file(pid)) is not None:
                yield str(file)
            elif began := guard.began(pid):
                yield f"{pid}:{began}"

    def _tell(self) -> None:
        """Tell the guard what is frozen. One that does not take it is replaced.

        Raises:
            OSError: there is no guard, and none can be started.
        """
        line = f"{' '.join(self._frozen)}\n".encode("ascii")
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                if os.write(self._pipe, line) == len(line):
                    return
            self._guard.kill()
            self.close()
        self._start()
        if os.write(self._pipe, line) != len(line):
            raise OSError(f"{len(self._frozen)} processes are more than the agent can guard")

    def _start(self) -> None:
        end, self._pipe = os.pipe()
        try:
            os.set_blocking(self._pipe, False)
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, guard.MOST)
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(self._patience_s)],
                stdin=end,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(end)


def _is_there(target: str) -> bool:
    """Whether a cgroup or process still exists."""
    pid, _, began = target.partition(":")
    return Path(target).exists() if target.startswith("/") else guard.began(int(pid)) == began
