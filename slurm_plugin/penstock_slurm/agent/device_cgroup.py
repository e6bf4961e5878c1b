"""The device cgroups of co-located jobs, if Slurm constrains devices (`ConstrainDevices=yes`).

Such a job holds no GPUs in Slurm, so Slurm denies it all GPUs of the node: in the job's cgroup each time a step begins,
and in those of the step and of its tasks. This module opens the GPUs to which the job is bound in all of these cgroups.
Other GPUs stay denied.

- cgroup v1 has the hierarchy `devices`. A device that is denied to a cgroup is denied to all cgroups below it.
- cgroup v2 has programs of type BPF_PROG_TYPE_CGROUP_DEVICE. The nearest one above
  a process decides. Slurm's program denies the GPUs, so it is replaced in each cgroup that has one.

The agent is not told when a step begins. So it checks the job's own cgroup in each tick, and the cgroups below it for
some time after there is a new one, because Slurm makes a cgroup before it constrains it. Tasks wait in the SPANK plugin
until their GPUs are open.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock_slurm.agent.bpf import ENDED, Programs, Rule
from penstock_slurm.gateway.hostlist import expand

CGROUPS = Path("/sys/fs/cgroup")

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU, named by its PCI address. NVML, CUDA and Slurm count GPUs in this order."""

GPU_FILE, NVIDIA = "/dev/nvidia", 195
"""Device file of a GPU without its minor number, and the major number of all GPUs."""

CHANGES_S = 10.0
"""For how long all cgroups of a job are checked in each tick after a new step."""

SELDOM_S = 5.0
"""Time between two such checks afterwards."""

NULL: Rule = (1, 3)
"""/dev/null, which is never denied."""

LEVELS = {1: ("step_", "task_"), 2: ("step_", "user", "task_")}
"""Prefixes of the names of Slurm's cgroups inside a job's, by cgroup version. Users may make others there."""

MOST_CGROUPS = 4096
"""Most cgroups of a job that are checked."""


@dataclass(slots=True)
class _Check:
    """The last check of one job."""

    steps: frozenset[str]
    devices: tuple[int, ...]
    changed_s: float
    whole_s: float
    """When all of its cgroups were last checked without an error."""
    wrong: dict[str, str] = field(default_factory=dict)
    """The errors of the last check, by cgroup."""


class DeviceCgroups:
    """The device cgroups of the jobs on a node.

    Args:
        node: Slurm's name of the node. On a host with several nodes, it is part of the names of their cgroups.
        constrains: returns whether Slurm constrains devices; None: not known yet.
        gpu_file: the GPUs' device files by index, in the form that `expand` reads; None: those of NVIDIA's driver.
        mount: the mount point of cgroups.
        driver: see `DRIVER`.
    """

    def __init__(
        self,
        node: str,
        constrains: Callable[[], bool],
        gpu_file: str | None = None,
        mount: Path = CGROUPS,
        driver: Path = DRIVER,
    ) -> None:
        self._constrains, self._driver = constrains, driver
        self._named = tuple(map(Path, expand(gpu_file or "")))
        self._v1 = tuple(mount / "devices" / name for name in (f"slurm_{node}", "slurm"))
        self._mount, self._scopes = mount, (f"{node}_slurmstepd.scope", "slurmstepd.scope")
        self._top: Path | None = None
        self._checks: dict[int, _Check] = {}
        self._troubles: dict[int, str] = {}
        self._programs = Programs()

    def gpus(self) -> tuple[Path, ...]:
        """Device files of the node's GPUs by index. Some may not exist yet. (): unknown."""
        with contextlib.suppress(OSError):
            return self._files()
        return ()

    def cgroup(self, number: int, uid: int) -> int | None:
        """Identifies the cgroup of a job's run. None if Slurm has made none, or constrains no devices."""
        with contextlib.suppress(OSError):
            return Path(self._job(number, uid)).stat().st_ino
        return None

    def give(self, number: int, uid: int, devices: Collection[int], now_s: float, cgroup: int | None) -> str:
        """Open exactly these GPUs to the processes of a job. Returns why that failed; "": it did not.

        Call it in each tick. If Slurm constrains no devices, it does nothing.

        Args:
            number: SLURM_JOB_ID.
            uid: of its user.
            devices: by index.
            now_s: by any clock, which may be set back.
            cgroup: identifies the run. The cgroup of another run is left alone.
        """
        self._troubles.pop(number, None)
        if cgroup is None or cgroup != self.cgroup(number, uid):
            self._checks.pop(number, None)
            return ""
        try:
            self._give(number, uid, tuple(devices), now_s)
        except OSError as error:
            self._checks.pop(number, None)
            self._troubles[number] = str(error)
        return self._troubles.get(number, "")

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """Forget all other jobs."""
        for known in (self._checks, self._troubles):
            for number in [number for number in known if number not in numbers]:
                del known[number]

    def trouble(self, *, living: bool = False) -> str:
        """Why GPUs cannot be opened on this node; "": they can, or need not be opened. Works without a job, too.

        `living`: whether there are processes of jobs to which GPUs are opened.
        """
        if not self._constrains():
            return ""
        try:
            top, files = self._find_top(), self._files()
            if top is None and living:
                return f"there are no cgroups of Slurm in {self._mount}"
            if files and not self._existing(files):
                _rule(files[0])
            if files and top is not None:
                self._try(top)
        except OSError as error:
            return str(error)
        return next(iter(self._troubles.values()), "")

    def _try(self, top: Path) -> None:
        """Try to open GPUs on Slurm's cgroup above those of all jobs. Raises OSError."""
        if top in self._v1:
            write_rules(f"{top}/devices.allow", [NULL])
        else:
            self._programs.load(frozenset())
            self._programs.attached(str(top))

    def _give(self, number: int, uid: int, devices: tuple[int, ...], now_s: float) -> None:
        job, by_v1 = self._job(number, uid), self._find_top() in self._v1
        check = self._due(number, job, devices, now_s)
        if check is None:
            return
        below = slurm_cgroups(job, LEVELS[1 if by_v1 else 2])
        folders = [each for each in (job, *below) if by_v1 or self._programs.attached(each) is not None]
        if not folders:  # cgroup v2, and nothing is denied
            return
        files = self._files()
        if missing := [index for index in devices if index >= len(files)]:
            raise FileNotFoundError(
                errno.ENOENT, f"no device file of GPU {missing[0]}", str(files[0]) if files else GPU_FILE
            )
        mine = {_rule(files[index]) for index in devices}
        others = frozenset(self._existing(files) - mine)
        wrong = self._restrict(job, folders, mine, others, by_v1=by_v1)
        # Slurm may be changing a cgroup above right now. Only lasting errors are reported.
        if lasting := [text for folder, text in wrong.items() if folder in check.wrong]:
            self._troubles[number] = lasting[0]
        check.wrong = wrong
        if wrong:
            check.whole_s = -math.inf

    def _restrict(
        self, job: str, folders: Sequence[str], mine: set[Rule], others: frozenset[Rule], *, by_v1: bool
    ) -> dict[str, str]:
        """Restrict a job's cgroup and those below it. Returns the errors of those below it, by folder."""
        wrong = {}
        for folder in folders:
            try:
                if not by_v1:
                    self._programs.replace(folder, others)
                    continue
                if folder == job:
                    write_rules(f"{folder}/devices.deny", others)
                write_rules(f"{folder}/devices.allow", mine)
            except OSError as error:
                if error.errno in ENDED:
                    continue
                if folder == job:
                    raise
                wrong[folder] = str(error)
        return wrong

    def _job(self, number: int, uid: int) -> str:
        """The cgroup of a job. Raises FileNotFoundError if Slurm has made none above it, or constrains no devices."""
        top = self._find_top() if self._constrains() else None
        if top is None:
            raise FileNotFoundError
        return f"{top}/uid_{uid}/job_{number}" if top in self._v1 else f"{top}/job_{number}"

    def _find_top(self) -> Path | None:
        """Slurm's cgroup above those of all jobs of the node; None: it does not exist yet."""
        if self._top is None:
            v2 = (path for scope in self._scopes for path in sorted(self._mount.glob(f"*.slice/{scope}")))
            self._top = next((path for path in (*self._v1, *v2) if path.is_dir()), None)
        return self._top

    def _due(self, number: int, job: str, devices: tuple[int, ...], now_s: float) -> _Check | None:
        """The check of all cgroups of a job that is due; None: none is due."""
        steps = frozenset(_inside(job, LEVELS[1][0]))
        check = self._checks.get(number)
        if check is None or (check.steps, check.devices) != (steps, devices):
            check = self._checks[number] = _Check(steps, devices, now_s, -math.inf)
        if abs(now_s - check.changed_s) >= CHANGES_S and abs(now_s - check.whole_s) < SELDOM_S:
            return None
        check.whole_s = now_s
        return check

    def _files(self) -> tuple[Path, ...]:
        """See `gpus`. It is never cached, since a driver creates its files one after another. Raises OSError."""
        if self._named:
            return self._named
        minors = self._minors()
        return tuple(Path(GPU_FILE + minor) for minor in minors) if minors else tuple(_numbered([Path(GPU_FILE)]))

    def _minors(self) -> list[str]:
        """Minor numbers of the GPUs of NVIDIA's driver, in bus order. Raises OSError."""
        minors = []
        for folder in sorted(self._driver.iterdir()) if self._driver.is_dir() else []:
            said = dict(line.partition(":")[::2] for line in (folder / "information").read_text().splitlines())
            minors.append(said.get("Device Minor", "").strip())
        return minors

    def _existing(self, files: Collection[Path]) -> set[Rule]:
        """All GPUs of the node, including those that Slurm does not know and those whose device files do not exist yet."""
        found = {(NVIDIA, int(minor)) for minor in self._minors() if minor.isdecimal()}
        for path in {*files, *_numbered(files)}:
            with contextlib.suppress(OSError):
                found.add(_rule(path))
        return found


def _numbered(files: Iterable[Path]) -> list[Path]:
    """All files whose names differ from one of these only in the number at the end, ordered by that number."""
    found = []
    for folder, stem in {(path.parent, path.name.rstrip("0123456789")) for path in files}:
        with contextlib.suppress(OSError):
            numbers = [name.removeprefix(stem) for name in os.listdir(folder) if name.startswith(stem)]
            found += [(int(number), folder / (stem + number)) for number in numbers if number.isdecimal()]
    return [path for _, path in sorted(found)]


def _rule(path: Path) -> Rule:
    """The device of a file. Raises OSError if the file is not a character device, or does not exist."""
    about = path.stat()
    if not stat.S_ISCHR(about.st_mode):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(path))
    return os.major(about.st_rdev), os.minor(about.st_rdev)


def slurm_cgroups(job: str, levels: Iterable[str]) -> list[str]:
    """The cgroups that Slurm has made in a job's cgroup, parents first."""
    found: list[str] = []
    above = [job]
    for name in levels:
        each = (path for folder in above for path in _inside(folder, name))
        above = list(itertools.islice(each, MOST_CGROUPS - len(found)))
        found += above
    return found


def _inside(folder: str, name: str) -> list[str]:
    """Child cgroups with this prefix in their names. A cgroup that has ended has none."""
    try:
        with os.scandir(folder) as entries:
            some = itertools.islice(entries, MOST_CGROUPS)
            return [entry.path for entry in some if entry.name.startswith(name) and entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if error.errno not in ENDED:
            raise
        return []


def write_rules(path: str, rules: Collection[Rule]) -> None:
    """Write the rules one by one, as cgroup v1 takes them. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for major, minor in rules:
            os.write(file, b"c %d:%d rwm" % (major, minor))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(file)
