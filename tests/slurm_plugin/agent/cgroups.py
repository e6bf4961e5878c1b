"""Cgroups as Slurm makes them for a job without GPUs from Slurm, with real devices in place of GPUs."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_slurm.agent import bpf
from penstock_slurm.agent.device_cgroup import DeviceCgroups, Rule
from penstock_slurm.install.units import AGENT, source

GPUS: list[Rule] = [(1, 5), (1, 7), (1, 8)]
"""/dev/zero, /dev/full and /dev/random."""

JOB = 1_000_000_000 + 10 * os.getpid()
"""Tests that run beside these have other jobs: the agent finds a job's processes by the number in its cgroup."""
NODE, UID = "n1", os.getuid()
BPF_F_ALLOW_OVERRIDE = 1
BOUNDS = "CapabilityBoundingSet="

INSIDE = """
import os, sys
for path in sys.stdin:
    try:
        os.close(os.open(path.rstrip(), os.O_RDONLY))
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def give(cgroups: DeviceCgroups, devices: tuple[int, ...], now_s: float, number: int = JOB) -> str:
    """To the present run."""
    return cgroups.give(number, UID, devices, now_s, cgroups.cgroup(number, UID))


class Inside:
    """A process of a job."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-Ic", INSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        (folder / "cgroup.procs").write_text(str(self._process.pid))

    def opens(self, path: Path) -> int:
        """0, or the error number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(path, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Slurm:
    """Slurm's part, in cgroups of one version. `close` removes them."""

    def __init__(self, version: int, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can make cgroups and devices")
        self.version = version
        self.pattern = f"{folder}/gpu[0-{len(GPUS) - 1}]"
        self.gpus = [folder / f"gpu{index}" for index in range(len(GPUS))]
        for path, (major, minor) in zip(self.gpus, GPUS, strict=True):
            path.parent.mkdir(exist_ok=True)
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        try:
            os.close(os.open(self.gpus[0], os.O_RDONLY))
        except OSError as error:
            pytest.skip(f"devices cannot be used in {folder}: {error.strerror}")
        hierarchy = hierarchy_of(version, "devices")
        self._own = hierarchy / f"penstock-test-{os.getpid()}"
        try:
            self._own.mkdir()
        except OSError as error:
            pytest.skip(f"cgroups cannot be made in {hierarchy}: {error.strerror}")
        self._inside: list[Inside] = []
        if version == 1:
            self.mount = folder / "cgroup"
            self.mount.mkdir()
            (self.mount / "devices").symlink_to(self._own)
            self.top = self._own / f"slurm_{NODE}"
            self.job = self.top / f"uid_{UID}" / f"job_{JOB}"
        else:
            self.mount = self._own
            self.top = self._own / "system.slice" / f"{NODE}_slurmstepd.scope"
            self.job = self.top / f"job_{JOB}"
        self.top.mkdir(parents=True)

    def step(self, name: str, tasks: int = 0, *, constrains: bool = True) -> list[Path]:
        """Begin a step. Returns the cgroups of its processes. For a batch script, the step's own cgroup is the constrained
        one."""
        user = self.job / f"step_{name}" / ("user" if self.version == 2 else "")
        user.mkdir(parents=True)
        if constrains:
            self._deny(self.job)
        if not tasks:
            (user / "task_special").mkdir()
            return [user / "task_special"]
        if constrains:
            self._deny(user)
        return [self.task(user, number, constrains=constrains) for number in range(tasks)]

    def task(self, user: Path, number: int, *, constrains: bool = True) -> Path:
        folder = user / f"task_{number}"
        folder.mkdir()
        if constrains:
            self._deny(folder, override=False)
        return folder

    def inside(self, folder: Path) -> Inside:
        self._inside.append(Inside(folder))
        return self._inside[-1]

    def sees(self, inside: Inside) -> set[int]:
        """Indexes of the GPUs that a process can open. The others are denied."""
        said = {index: inside.opens(path) for index, path in enumerate(self.gpus)}
        assert set(said.values()) <= {0, 1}
        assert inside.opens(Path("/dev/null")) == 0
        return {index for index, number in said.items() if number == 0}

    def cgroups(self, **options: object) -> DeviceCgroups:
        """Do the agent's part."""
        return DeviceCgroups(
            NODE,
            lambda: True,
            self.pattern,
            self.mount,
            **options,  # type: ignore[arg-type]
        )

    def end_job(self) -> None:
        """End its processes and their cgroups. The next step begins a new run."""
        self._end(self.job)

    def close(self) -> None:
        self._end(self._own)

    def _end(self, above: Path) -> None:
        for inside in self._inside:
            inside.close()
        self._inside = []
        for folder, _, _ in os.walk(above, topdown=False):
            Path(folder).rmdir()

    def _deny(self, folder: Path, *, override: bool = True) -> None:
        """Deny all GPUs. A second call replaces the program of cgroup v2, whichever is attached."""
        if self.version == 1:
            for major, minor in GPUS:
                (folder / "devices.deny").write_text(f"c {major}:{minor} rwm")
            return
        program, _ = bpf.Programs().load(frozenset(GPUS))
        flags = BPF_F_ALLOW_OVERRIDE if override else 0
        attach = struct.pack("=III", program, bpf.BPF_CGROUP_DEVICE, flags)
        bpf.call_on_cgroup(str(folder), bpf.BPF_PROG_ATTACH, attach)
        os.close(program)


def hierarchy_of(version: int, controller: str) -> Path:
    """Where the hierarchy of cgroup v1 with this controller, or that of v2, is mounted. Skips the test if it is not."""
    kind, option = ("cgroup", controller) if version == 1 else ("cgroup2", "rw")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, path, fstype, options, *_ = line.split()
        if fstype == kind and option in options.split(","):
            return Path(path)
    pytest.skip(f"no {f'{controller} hierarchy of cgroup v1' if version == 1 else 'cgroup v2'} is mounted here")


def capabilities() -> str:
    """The agent's capabilities by its unit, where Slurm constrains no devices."""
    (line,) = [each for each in (source("systemd") / AGENT).read_text().splitlines() if each.startswith(BOUNDS)]
    return line.removeprefix(BOUNDS)


def run_with(capabilities: str, program: str, *arguments: str) -> str:
    """What a Python program prints that root runs with these capabilities alone."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed (Debian: util-linux)")
    bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())])
    command = [
        "setpriv",
        f"--bounding-set={bounds}",
        "--inh-caps=-all",
        "--no-new-privs",
        sys.executable,
        "-c",
        program,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout
