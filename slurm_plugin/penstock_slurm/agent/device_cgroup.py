"""The device cgroups of jobs that share GPUs, where the site has Slurm constrain devices (`ConstrainDevices=yes`).

Slurm knows no GPU of such a job, so it denies it all of the node: in the cgroup of the job each time that a step begins, and in
those of the step and of its tasks. Here the GPUs that a job is bound to are opened again in all of them; the others stay denied.

- cgroup v1 has the hierarchy `devices`. What is denied above is denied below, and what is not allowed above cannot be below.
- cgroup v2 has programs of type BPF_PROG_TYPE_CGROUP_DEVICE. The nearest one above a process decides. Slurm's denies the GPUs, so
  it is replaced by ours in each cgroup in which there is one.

Nobody tells when a step begins. So the job's own cgroup is looked at in each turn, and those below it for some time after there
is a new one, since Slurm makes a cgroup before it constrains it. Tasks wait in the SPANK plugin until their GPUs are open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")

DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, named by its PCI address: in that order NVML and CUDA count, and so does Slurm by them."""

GPU_FILE = "/dev/nvidia%d"
"""As NVIDIA's driver names it, by minor number."""

CHANGES_S = 10.0
"""For so long all cgroups of a job are looked at in each turn once there is a new step."""

SELDOM_S = 5.0
"""Between two such looks afterwards."""

Rule = tuple[int, int]
"""A character device: major and minor number."""

NULL: Rule = (1, 3)
"""/dev/null, which nobody denies."""

BPF_PROG_LOAD, BPF_PROG_ATTACH, BPF_OBJ_GET_INFO_BY_FD, BPF_PROG_QUERY = 5, 8, 15, 16
BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE, BPF_DEVCG_DEV_CHAR, BPF_F_ALLOW_MULTI = 15, 6, 2, 2
SYSCALL_BPF = {"x86_64": 321, "aarch64": 280}
"""Another machine has none that we know: as where the kernel has none, the system says ENOSYS."""

LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Look:
    """At one job."""

    steps: frozenset[str]
    devices: tuple[int, ...]
    changed_s: float
    whole_s: float
    """When all of its cgroups were looked at last."""


class DeviceCgroups:
    """Those of the jobs on a node.

    Args:
        node: Slurm's name of it. On a host with several nodes it is in the names of their cgroups.
        constrains: whether Slurm constrains devices, as far as it has said.
        gpu_file: the device file of a GPU, `%d` being its index; None: as NVIDIA's driver says.
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
        self._constrains, self._gpu_file, self._driver = constrains, gpu_file, driver
        self._v1 = tuple(mount / "devices" / name for name in (f"slurm_{node}", "slurm"))
        self._mount, self._scopes = mount, (f"{node}_slurmstepd.scope", "slurmstepd.scope")
        self._top: Path | None = None
        self._gpus: tuple[Path, ...] = ()
        self._looks: dict[int, _Look] = {}
        self._troubles: dict[int, str] = {}
        self._programs = _Programs()

    def gpus(self) -> tuple[Path, ...]:
        """Device files of the node's GPUs, by index; () if there is none yet."""
        if not self._gpus:
            with contextlib.suppress(OSError):
                self._gpus = tuple(_gpu_files(self._gpu_file, self._driver))
        return self._gpus

    def give(self, number: int, uid: int, devices: Collection[int], now_s: float) -> str:
        """Open these GPUs, and no others, to the processes of a job; why that cannot be, in words, or "".

        To be called in each turn. Where Slurm constrains nothing, nothing is done.

        Args:
            number: SLURM_JOB_ID.
            uid: of its user.
            devices: by index.
            now_s: by any clock; one that is set back does no harm.
        """
        self._troubles.pop(number, None)
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

    def trouble(self) -> str:
        """Why GPUs cannot be opened here, in words, found out without a job if there is none; "": they can, or need not be."""
        if not self._constrains():
            return ""
        try:
            rules = self._rules()
            top = self._find_top()
            if top in self._v1:
                _write(f"{top}/devices.allow", [NULL])
            elif top is not None:
                self._programs.load(frozenset(rules))
        except OSError as error:
            return str(error)
        return next(iter(self._troubles.values()), "")

    def _give(self, number: int, uid: int, devices: tuple[int, ...], now_s: float) -> None:
        top = self._find_top() if self._constrains() else None
        if top is None:
            return
        by_v1 = top in self._v1
        job = str(top / f"uid_{uid}" / f"job_{number}" if by_v1 else top / f"job_{number}")
        if not self._is_due(number, job, devices, now_s):
            return
        folders = [each for each in _below(job) if by_v1 or self._programs.attached(each) is not None]
        if not folders:  # cgroup v2, and nothing is denied
            return
        rules = self._rules()
        if missing := [index for index in devices if index >= len(rules)]:
            self._gpus = ()  # a driver may make its files one after another
            raise FileNotFoundError(errno.ENOENT, f"no device file of GPU {missing[0]}", self._gpu_file or GPU_FILE)
        mine = {rules[index] for index in devices}
        others = set(rules) - mine
        if by_v1:
            _write(f"{job}/devices.deny", others)
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                if by_v1:
                    _write(f"{folder}/devices.allow", mine)
                else:
                    self._programs.replace(folder, frozenset(others))

    def _find_top(self) -> Path | None:
        """Slurm's cgroup above all jobs' of the node; None: it has made none yet."""
        if self._top is None:
            v2 = (path for scope in self._scopes for path in sorted(self._mount.glob(f"*.slice/{scope}")))
            self._top = next((path for path in (*self._v1, *v2) if path.is_dir()), None)
        return self._top

    def _is_due(self, number: int, job: str, devices: tuple[int, ...], now_s: float) -> bool:
        """Whether all cgroups of a job are to be looked at. That of a job which has not begun, or has ended, is not there."""
        try:
            steps = frozenset(os.listdir(job))
        except FileNotFoundError:
            self._looks.pop(number, None)
            return False
        look = self._looks.get(number)
        if look is None or (look.steps, look.devices) != (steps, devices):
            look = self._looks[number] = _Look(steps, devices, now_s, -SELDOM_S)
        due = abs(now_s - look.changed_s) < CHANGES_S or abs(now_s - look.whole_s) >= SELDOM_S
        if due:
            look.whole_s = now_s
        return due

    def _rules(self) -> list[Rule]:
        """By index. Raises OSError."""
        rules = []
        for path in self.gpus():
            about = path.stat()
            if not stat.S_ISCHR(about.st_mode):
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(path))
            rules.append((os.major(about.st_rdev), os.minor(about.st_rdev)))
        if not rules:
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT), (self._gpu_file or GPU_FILE).replace("%d", "0")
            )
        return rules


def _gpu_files(pattern: str | None, driver: Path) -> Iterator[Path]:
    folders = sorted(driver.iterdir()) if pattern is None and driver.is_dir() else []
    for folder in folders:
        said = dict(line.partition(":")[::2] for line in (folder / "information").read_text().splitlines())
        yield Path(GPU_FILE.replace("%d", said.get("Device Minor", "").strip()))
    index = 0
    while not folders and (path := Path((pattern or GPU_FILE).replace("%d", str(index)))).exists():
        yield path
        index += 1


def _below(folder: str) -> list[str]:
    """The cgroup and all in it, parents first. Those that end meanwhile are no matter."""
    found = [folder]
    for each in found:
        with contextlib.suppress(FileNotFoundError), os.scandir(each) as entries:
            found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


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
        """(flags, id) of the program that Slurm, or we, have attached to a cgroup; None: there is none. Raises OSError."""
        ids = (ctypes.c_uint32 * 64)()
        query = struct.pack("=IIIQIIQ", BPF_CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), len(ids), 0, 0)
        try:
            said = _of_cgroup(folder, BPF_PROG_QUERY, query)
        except FileNotFoundError:
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
            _bpf(BPF_OBJ_GET_INFO_BY_FD, struct.pack("=IIQ", program, ctypes.sizeof(info), ctypes.addressof(info)))
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
    """A program that says 0 for these character devices, and 1 for all else. Its argument is a `struct bpf_cgroup_dev_ctx`."""

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
    buffer = ctypes.create_string_buffer(attribute, len(attribute))
    result = LIBC.syscall(ctypes.c_long(number), ctypes.c_long(command), buffer, ctypes.c_long(len(attribute)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return result, buffer.raw
