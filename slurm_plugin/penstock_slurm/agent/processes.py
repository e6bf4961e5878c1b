"""The processes of jobs on this node, from /proc: whether a job lives or is frozen, and how much it computes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IN_CGROUP = re.compile(r"/(?:slurm[^/\n]*/uid_\d+|[^/\n]*slurmstepd\.scope)/job_(\d{1,10})(?:/|$)", re.MULTILINE)
OF_USERS = re.compile(r"/(?:user\.slice|user@\d+\.service)/")
"""In the path of a cgroup in which a user can make more of them, with any names."""

FREEZER = re.compile(r"^\d+:(?:[^:\n]*,)?freezer(?:,[^:\n]*)?:(/.*)$", re.MULTILINE)
UNIFIED = re.compile(r"^0::(/.*)$", re.MULTILINE)
"""A process's cgroup in the hierarchy of version 1 that freezes, and in that of version 2."""

REAL_USER = re.compile(rb"^Uid:\t(\d+)", re.MULTILINE)
ATTEMPTS = 3
"""A new process has its parent's environment until it executes another program, so its job is read this often."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Claim:
    """The Slurm job to which a process belongs by its cgroup, or claims to belong by its environment."""

    job: int
    by_slurm: bool
    """Whether Slurm has put it there, and no user can have done that."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process at one moment."""

    letter: str
    """`T`: stopped by a signal. `Z`: ended."""
    began: int
    """Start time, which tells it from a later process with the same number."""
    cpu_s: float
    """Processor time of all its threads since it began, s."""
    program: str
    """Name of its program, which may change while it runs."""


class Processes:
    """Finds the processes of jobs.

    Args:
        node: Slurm's name of the node. A test cluster has several nodes on one host; other nodes' processes do not
        count.
        proc: the folder /proc.
        cgroups: where cgroups are mounted.
        conf: `SLURM_CONF` of this node's Slurm, if it is set. Processes of another Slurm on this host do not count.
    """

    def __init__(
        self,
        node: str,
        proc: Path = Path("/proc"),
        conf: str | None = None,
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._node, self._proc, self._conf, self._cgroups = node, proc, conf, cgroups
        self._known: dict[int, tuple[int, str, Claim | None, int]] = {}
        """Process -> (when it began, its program, its Slurm job, how often that was read)."""
        self._found: dict[int, int] = {}

    def scan(self, users: Mapping[int, int]) -> dict[int, list[int]]:
        """Find the processes that live, by SLURM_JOB_ID.

        A process can claim to belong to any job. It counts only if it runs as the job's user. One that Slurm has put into
        the job's cgroup counts as any user but root: containers without privileges have users of their own, and root's
        are Slurm's.

        Args:
            users: SLURM_JOB_ID -> user. Other jobs are ignored.
        """
        known: dict[int, tuple[int, str, Claim | None, int]] = {}
        jobs: dict[int, list[int]] = {}
        for pid in (int(name) for name in os.listdir(self._proc) if name.isdigit()):
            state = self.state(pid)
            if state is None:
                continue
            if state.letter in "ZX":
                known[pid] = state.began, state.program, None, ATTEMPTS
                continue
            began, program, claim, attempts = self._known.get(pid, (state.began, state.program, None, 0))
            if began != state.began:
                claim, attempts = None, 0
            elif program != state.program:
                attempts = 0  # with an environment of its own
            if claim is None and attempts < ATTEMPTS:
                claim, attempts = self._claim(pid), attempts + 1
            known[pid] = state.began, state.program, claim, attempts
            if claim is not None and self._counts(pid, claim, users):
                jobs.setdefault(claim.job, []).append(pid)
        self._known, self._found = known, {pid: job for job, pids in jobs.items() for pid in pids}
        return jobs

    def glance(self, users: Mapping[int, int]) -> dict[int, list[int]]:
        """As `scan`, but only processes that are new since the last scan are read, which takes a tenth of the time.

        A process that has ended and whose number is another's now counts as before until the next scan.
        """
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        for pid in there - self._known.keys():
            state = self.state(pid)
            if state is None:
                continue
            claim = self._claim(pid) if state.letter not in "ZX" else None
            self._known[pid] = state.began, state.program, claim, 1
            if claim is not None and self._counts(pid, claim, users):
                self._found[pid] = claim.job
        self._found = {pid: job for pid, job in self._found.items() if pid in there and job in users}
        jobs: dict[int, list[int]] = {}
        for pid, job in self._found.items():
            jobs.setdefault(job, []).append(pid)
        return jobs

    def job_of(self, pid: int) -> int | None:
        """The job of a process that the last scan found."""
        return self._found.get(pid)

    def state(self, pid: int) -> ProcessState | None:
        """State of a process; None: there is no such process."""
        try:
            text = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        return ProcessState(fields[0], int(fields[19]), cpu_s, text.partition("(")[2].rpartition(")")[0])

    def is_frozen(self, pid: int, state: ProcessState) -> bool:
        """Whether a process is stopped by a signal, as by proctrack/linuxproc, or by the freezer of its cgroup.

        proctrack/cgroup uses the freezer, which the letter of the process's state does not show.
        """
        if state.letter in "Tt":
            return True
        try:
            text = (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        if (v1 := FREEZER.search(text)) is not None and _has_line(
            self._cgroups / f"freezer{v1[1]}" / "freezer.state", "FROZEN"
        ):
            return True
        v2 = UNIFIED.search(text)
        mounts = (self._cgroups, self._cgroups / "unified")
        return v2 is not None and any(_has_line(Path(f"{each}{v2[1]}/cgroup.events"), "frozen 1") for each in mounts)

    def _counts(self, pid: int, claim: Claim, users: Mapping[int, int]) -> bool:
        if claim.job not in users:
            return False
        user = self._user(pid)
        return user == users[claim.job] or (claim.by_slurm and bool(user))

    def _claim(self, pid: int) -> Claim | None:
        try:
            text = (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
            claims = [
                Claim(int(found[1]), OF_USERS.search(line, 0, found.start() + 1) is None)
                for line in text.splitlines()
                if (found := IN_CGROUP.search(line)) is not None
            ]
            if claims:
                return max(claims, key=lambda claim: claim.by_slurm)
            environ = (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            return None
        said = dict(pair.partition(b"=")[::2] for pair in environ)
        number = said.get(b"SLURM_JOB_ID", b"")
        if said.get(b"SLURMD_NODENAME", self._node.encode()) != self._node.encode():
            return None
        if self._conf is not None and said.get(b"SLURM_CONF", self._conf.encode()) != self._conf.encode():
            return None
        return Claim(int(number), by_slurm=False) if number.isdigit() and len(number) <= 10 else None

    def _user(self, pid: int) -> int | None:
        """Its real user: a process can make /proc/PID belong to root."""
        try:
            found = REAL_USER.search((self._proc / str(pid) / "status").read_bytes())
        except OSError:
            return None
        return int(found[1]) if found is not None else None


def _has_line(path: Path, line: str) -> bool:
    """Whether a file of a cgroup has this line. The root has no such file, and neither has a cgroup that is gone."""
    try:
        return line in path.read_text(encoding="ascii").splitlines()
    except OSError:
        return False


def memory_of_host_mb(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The node's memory, MB."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) // 1024 if found is not None else 0
