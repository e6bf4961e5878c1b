"""Freezes the processes of a job on this node at once, without Slurm, for a part of a second or for some seconds.

Slurm takes two seconds to suspend a job, and counts it as suspended. To hold a job to a share of the GPU's time, the
agent must be faster, and the job is running all the while. This module uses the cgroups that Slurm itself freezes, so
that Slurm's own SIGCONT and SIGKILL, which thaw them first, work on a job that the agent has frozen:

- cgroup v1: `freezer.state` of the job's steps.
- cgroup v2: `cgroup.freeze` of the cgroup `user` of each step. The slurmstepd beside it goes on.
- proctrack/linuxproc, where Slurm has made no cgroups: SIGSTOP and SIGCONT. The user of the job can undo that.
"""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Callable, Collection
from pathlib import Path

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
