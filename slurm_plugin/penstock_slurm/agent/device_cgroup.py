"""The device cgroups of jobs that share GPUs, where the site has Slurm constrain devices (`ConstrainDevices=yes`).

Slurm knows no GPU of such a job, so it denies it all of the node: in the cgroup of the job each time that a step
begins, and in those of the step and of its tasks. Here the GPUs that a job is bound to are opened again in all of them;
the others stay denied.

- cgroup v1 has the hierarchy `devices`. What is denied above is denied below, and what is not allowed above cannot be
  below.
- cgroup v2 has programs of type BPF_PROG_TYPE_CGROUP_DEVICE. The nearest one above a process decides. Slurm's denies
  the GPUs, so it is replaced by ours in each cgroup in which there is one.

Nobody tells when a step begins. So the job's own cgroup is looked at in each turn, and those below it for some time
after there is a new one, since Slurm makes a cgroup before it constrains it. Tasks wait in the SPANK plugin until their
GPUs are open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import os
import platform
import stat
import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from penstock_slurm.gateway.hostlist import expand

CGROUPS = Path("/sys/fs/cgroup")

DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, named by its PCI address: in that order NVML and CUDA count, and so does Slurm by them."""

GPU_FILE, NVIDIA = "/dev/nvidia", 195
"""As NVIDIA's driver names it, before the minor number; and the major one, which is always the same."""

CHANGES_S = 10.0
"""For so long all cgroups of a job are looked at in each turn once there is a new step."""

SELDOM_S = 5.0
"""Between two such looks afterwards."""

Rule = tuple[int, int]
"""A character device: major and minor number."""

NULL: Rule = (1, 3)
"""/dev/null, which nobody denies."""

LEVELS = {1: ("step_", "task_"), 2: ("step_", "user", "task_")}
"""So the names of Slurm's cgroups in that of a job begin, by version. Users can make others where Slurm gives them the
job's."""

MOST_CGROUPS = 4096
"""Of a job. No more are looked at."""

MOST_PROGRAMS = 64
"""So many are kept open. One that is attached lives without that."""

MOST_WRITTEN = 128
"""Bytes. No call writes so far into its attribute, whose size it need not heed: BPF_PROG_QUERY in Linux 6.17 does
not."""

BPF_PROG_LOAD, BPF_PROG_ATTACH, BPF_OBJ_GET_INFO_BY_FD, BPF_PROG_QUERY = 5, 8, 15, 16
BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE, BPF_DEVCG_DEV_CHAR, BPF_F_ALLOW_MULTI = 15, 6, 2, 2
SYSCALL_BPF = {"x86_64": 321, "aarch64": 280}
"""Another machine has none that we know: as where the kernel has none, the system says ENOSYS."""

ENDED = (errno.ENOENT, errno.ENODEV)
"""What is said of a cgroup that has just ended."""

LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Look:
    """At one job."""

    steps: frozenset[str]
    devices: tuple[int, ...]
    changed_s: float
    whole_s: float
    """When all of its cgroups were looked at last, and nothing went wrong."""
    wrong: dict[str, str] = field(default_factory=dict)
    """What did last time, by cgroup."""


class DeviceCgroups:
    """Those of the jobs on a node.

    Args:
        node: Slurm's name of it. On a host with several nodes it is in the names of their cgroups.
        constrains: whether Slurm constrains devices, as far as it has said.
        gpu_file: the GPUs' device files by index, as `expand` takes them; None: as NVIDIA's driver says.
        mount: where cgroups are.
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
        self._looks: dict[int, _Look] = {}
        self._troubles: dict[int, str] = {}
        self._programs = _Programs()

    def gpus(self) -> tuple[Path, ...]:
        """Device files of the node's GPUs, by index, of which some may not be there yet; () if they are not known."""
        with contextlib.suppress(OSError):
            return self._files()
        return ()

    def cgroup(self, number: int, uid: int) -> int | None:
        """Tells the cgroup of a job from that of a later run; None: Slurm has made none, or constrains nothing."""
        with contextlib.suppress(OSError):
            return Path(self._job(number, uid)).stat().st_ino
        return None

    def give(self, number: int, uid: int, devices: Collection[int], now_s: float, cgroup: int | None) -> str:
        """Open these GPUs, and no others, to the processes of a job; why that cannot be, in words, or "".

        To be called in each turn. Where Slurm constrains nothing, nothing is done.

        Args:
            number: SLURM_JOB_ID.
            uid: of its user.
            devices: by index.
            now_s: by any clock; one that is set back does no harm.
            cgroup: the job's. One of another run is left alone.
        """
        self._troubles.pop(number, None)
        if cgroup is None or cgroup != self.cgroup(number, uid):
            self._looks.pop(number, None)
            return ""
        try:
            self._give(number, uid, tuple(devices), now_s)
        except OSError as error:
            self._looks.pop(number, None)
            self._troubles[number] = str(error)
        return self._troubles.get(number, "")

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """Other jobs have gone."""
        for known in (self._looks, self._troubles):
            for number in [number for number in known if number not in numbers]:
                del known[number]

    def trouble(self, *, living: bool = False) -> str:
        """Why GPUs cannot be opened here, in words, found out without a job if there is none; "": they can, or need not
        be.

        `living`: there are processes of jobs to which GPUs are to be opened.
        """
        if not self._constrains():
            return ""
        try:
            top, files = self._find_top(), self._files()
            if top is None and living:
                return f"Slurm's cgroups are not found in {self._mount}"
            if files and not self._existing(files):
                _rule(files[0])
            if files and top is not None:
                self._try(top)
        except OSError as error:
            return str(error)
        return next(iter(self._troubles.values()), "")

    def _try(self, top: Path) -> None:
        """What giving takes, on Slurm's cgroup above all jobs'. Raises OSError."""
        if top in self._v1:
            _write(f"{top}/devices.allow", [NULL])
        else:
            self._programs.load(frozenset())
            self._programs.attached(str(top))

    def _give(self, number: int, uid: int, devices: tuple[int, ...], now_s: float) -> None:
        job, by_v1 = self._job(number, uid), self._find_top() in self._v1
        look = self._due(number, job, devices, now_s)
        if look is None:
            return
        below = _of_slurm(job, LEVELS[1 if by_v1 else 2])
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
        wrong = {}
        for folder in folders:
            try:
                if by_v1 and folder == job:
                    _write(f"{folder}/devices.deny", others)
                if by_v1:
                    _write(f"{folder}/devices.allow", mine)
                else:
                    self._programs.replace(folder, others)
            except OSError as error:
                if error.errno in ENDED:
                    continue
                if folder == job:
                    raise
                wrong[folder] = str(error)
        # Slurm may have denied something above just now. What lasts is told.
        if lasting := [text for folder, text in wrong.items() if folder in look.wrong]:
            self._troubles[number] = lasting[0]
        look.wrong = wrong
        if wrong:
            look.whole_s = -math.inf

    def _job(self, number: int, uid: int) -> str:
        """The cgroup of a job. Raises FileNotFoundError: Slurm has made none above it, or constrains nothing."""
        top = self._find_top() if self._constrains() else None
        if top is None:
            raise FileNotFoundError
        return f"{top}/uid_{uid}/job_{number}" if top in self._v1 else f"{top}/job_{number}"

    def _find_top(self) -> Path | None:
        """Slurm's cgroup above all jobs' of the node; None: it has made none yet."""
        if self._top is None:
            v2 = (path for scope in self._scopes for path in sorted(self._mount.glob(f"*.slice/{scope}")))
            self._top = next((path for path in (*self._v1, *v2) if path.is_dir()), None)
        return self._top

    def _due(self, number: int, job: str, devices: tuple[int, ...], now_s: float) -> _Look | None:
        """If all cgroups of a job are to be looked at."""
        steps = frozenset(_inside(job, LEVELS[1][0]))
        look = self._looks.get(number)
        if look is None or (look.steps, look.devices) != (steps, devices):
            look = self._looks[number] = _Look(steps, devices, now_s, -math.inf)
        if abs(now_s - look.changed_s) >= CHANGES_S and abs(now_s - look.whole_s) < SELDOM_S:
            return None
        look.whole_s = now_s
        return look

    def _files(self) -> tuple[Path, ...]:
        """See `gpus`. Never kept: a driver makes its files one after another. Raises OSError."""
        if self._named:
            return self._named
        minors = self._minors()
        return tuple(Path(GPU_FILE + minor) for minor in minors) if minors else tuple(_numbered([Path(GPU_FILE)]))

    def _minors(self) -> list[str]:
        """Minor numbers of the GPUs that NVIDIA's driver has, in the order of the bus. Raises OSError."""
        minors = []
        for folder in sorted(self._driver.iterdir()) if self._driver.is_dir() else []:
            said = dict(line.partition(":")[::2] for line in (folder / "information").read_text().splitlines())
            minors.append(said.get("Device Minor", "").strip())
        return minors

    def _existing(self, files: Collection[Path]) -> set[Rule]:
        """All GPUs that there are: also those that are not Slurm's, or of which the driver has yet to make files."""
        found = {(NVIDIA, int(minor)) for minor in self._minors() if minor.isdecimal()}
        for path in {*files, *_numbered(files)}:
            with contextlib.suppress(OSError):
                found.add(_rule(path))
        return found


def _numbered(files: Iterable[Path]) -> list[Path]:
    """All files that differ from one of these in the number at the end alone, by number."""
    found = []
    for folder, stem in {(path.parent, path.name.rstrip("0123456789")) for path in files}:
        with contextlib.suppress(OSError):
            numbers = [name.removeprefix(stem) for name in os.listdir(folder) if name.startswith(stem)]
            found += [(int(number), folder / (stem + number)) for number in numbers if number.isdecimal()]
    return [path for _, path in sorted(found)]


def _rule(path: Path) -> Rule:
    """Raises OSError: it is no device, or not there."""
    about = path.stat()
    if not stat.S_ISCHR(about.st_mode):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(path))
    return os.major(about.st_rdev), os.minor(about.st_rdev)


def _of_slurm(job: str, levels: Iterable[str]) -> list[str]:
    """The cgroups that Slurm makes in a job's, parents first."""
    found: list[str] = []
    above = [job]
    for name in levels:
        each = (path for folder in above for path in _inside(folder, name))
        above = list(itertools.islice(each, MOST_CGROUPS - len(found)))
        found += above
    return found


def _inside(folder: str, name: str) -> list[str]:
    """Cgroups whose names begin so. One that has ended has none."""
    try:
        with os.scandir(folder) as entries:
            some = itertools.islice(entries, MOST_CGROUPS)
            return [entry.path for entry in some if entry.name.startswith(name) and entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if error.errno not in ENDED:
            raise
        return []


def _write(path: str, rules: Collection[Rule]) -> None:
    """One rule at a time, as cgroup v1 takes them. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for major, minor in rules:
            os.write(file, b"c %d:%d rwm" % (major, minor))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(file)


class _Programs:
    """Ours of cgroup v2, one for each set of devices that it denies; all others it allows."""

    def __init__(self) -> None:
        self._loaded: dict[frozenset[Rule], tuple[int, int]] = {}

    def attached(self, folder: str) -> tuple[int, int] | None:
        """(flags, id) of the program that Slurm, or we, have attached to a cgroup; None: there is none. Raises
        OSError."""
        ids = (ctypes.c_uint32 * 64)()
        query = struct.pack("=IIIQIIQ", BPF_CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), len(ids), 0, 0)
        try:
            said = _of_cgroup(folder, BPF_PROG_QUERY, query)
        except OSError as error:
            if error.errno not in ENDED:
                raise
            return None
        _, _, _, flags, _, count, _, _ = struct.unpack("=IIIIQIIQ", said)
        # Several are systemd's, not Slurm's. They and ours have to allow a device.
        return None if flags & BPF_F_ALLOW_MULTI or not count else (flags, ids[0])

    def replace(self, folder: str, denied: frozenset[Rule]) -> None:
        """Have ours in the place of the one that is attached there. Raises OSError."""
        there = self.attached(folder)
        program, number = self.load(denied)
        if there is not None and there[1] != number:
            _of_cgroup(folder, BPF_PROG_ATTACH, struct.pack("=III", program, BPF_CGROUP_DEVICE, there[0]))

    def load(self, denied: frozenset[Rule]) -> tuple[int, int]:
        """(descriptor, id). Raises OSError."""
        if denied not in self._loaded:
            text, licence = deny(denied), b"Apache-2.0\0"
            code, terms = (
                ctypes.create_string_buffer(text, len(text)),
                ctypes.create_string_buffer(licence, len(licence)),
            )
            where = (ctypes.addressof(code), ctypes.addressof(terms))
            about = struct.pack("=IIQQ", BPF_PROG_TYPE_CGROUP_DEVICE, len(text) // 8, *where)
            program, _ = _bpf(BPF_PROG_LOAD, about + struct.pack("=IIQII16s", 0, 0, 0, 0, 0, b"penstock"))
            info = (ctypes.c_uint32 * 2)()  # its type, and its id
            try:
                _bpf(BPF_OBJ_GET_INFO_BY_FD, struct.pack("=IIQ", program, ctypes.sizeof(info), ctypes.addressof(info)))
            except OSError:
                os.close(program)
                raise
            if len(self._loaded) >= MOST_PROGRAMS:
                os.close(self._loaded.pop(next(iter(self._loaded)))[0])
            self._loaded[denied] = program, info[1]
        return self._loaded[denied]


def _of_cgroup(folder: str, command: int, attribute: bytes) -> bytes:
    """A call of bpf(2) whose attribute begins with a cgroup's descriptor; the attribute afterwards. Raises OSError."""
    cgroup = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _bpf(command, struct.pack("=I", cgroup) + attribute, folder)[1]
    finally:
        os.close(cgroup)


def deny(devices: Collection[Rule]) -> bytes:
    """A program that says 0 for these character devices, and 1 for all else. Its argument is a `struct
    bpf_cgroup_dev_ctx`."""

    def instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("=BBhi", code, target | source << 4, offset, value)

    def load_word(target: int, offset: int) -> bytes:
        return instruction(0x61, target, 1, offset)

    def skip_unless(register: int, value: int, count: int) -> bytes:
        return instruction(0x55, register, offset=count, value=value)

    def answer(value: int) -> bytes:
        return instruction(0xB7, 0, value=value) + instruction(0x95)

    text = load_word(2, 0) + instruction(0x54, 2, value=0xFFFF) + load_word(3, 4) + load_word(4, 8)
    for major, minor in sorted(devices):
        text += skip_unless(2, BPF_DEVCG_DEV_CHAR, 4) + skip_unless(3, major, 3) + skip_unless(4, minor, 2) + answer(0)
    return text + answer(1)


def _bpf(command: int, attribute: bytes, path: str = "bpf") -> tuple[int, bytes]:
    """What bpf(2) returns, and its attribute afterwards. Raises OSError."""
    number = SYSCALL_BPF.get(platform.machine(), -1)
    buffer = ctypes.create_string_buffer(attribute, MOST_WRITTEN)
    result = LIBC.syscall(ctypes.c_long(number), ctypes.c_long(command), buffer, ctypes.c_long(len(attribute)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return result, buffer.raw[: len(attribute)]
