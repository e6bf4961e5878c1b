"""Programs of type BPF_PROG_TYPE_CGROUP_DEVICE, which allow or deny devices to the processes of a cgroup (cgroup v2).

The program is assembled here because it has a dozen instructions, and a compiler or libbpf on each node would be much
more to install and to trust. Its listing, for denied devices 195:0 and 195:1 (`deny`):

::

    r2 = *(u32 *)(r1 + 0)           # access type: the device's type is in the lower 16 bits
    r2 &= 0xffff
    r3 = *(u32 *)(r1 + 4)           # major
    r4 = *(u32 *)(r1 + 8)           # minor
    if r2 != BPF_DEVCG_DEV_CHAR goto next1
    if r3 != 195 goto next1
    if r4 != 0 goto next1
    r0 = 0                          # denied
    exit
    next1: if r2 != BPF_DEVCG_DEV_CHAR goto next2
    if r3 != 195 goto next2
    if r4 != 1 goto next2
    r0 = 0
    exit
    next2: r0 = 1                   # allowed
    exit
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Collection

Rule = tuple[int, int]
"""A character device: major and minor number."""

MOST_PROGRAMS = 64
"""Most programs that are kept open. An attached program lives on when it is closed."""

MOST_WRITTEN = 128
"""Size of the buffer for an attribute, bytes. The kernel may write beyond the given size, as BPF_PROG_QUERY in Linux
6.17 does."""

BPF_PROG_LOAD, BPF_PROG_ATTACH, BPF_OBJ_GET_INFO_BY_FD, BPF_PROG_QUERY = 5, 8, 15, 16
BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE, BPF_DEVCG_DEV_CHAR, BPF_F_ALLOW_MULTI = 15, 6, 2, 2
SYSCALL_BPF = {"x86_64": 321, "aarch64": 280}
"""Number of the system call by machine. On another machine the call fails with ENOSYS, as in a kernel without it."""

ENDED = (errno.ENOENT, errno.ENODEV)
"""Errors of a cgroup that has just ended."""

LIBC = ctypes.CDLL(None, use_errno=True)


class Programs:
    """Penstock's programs for cgroup v2: one for each set of denied devices. A program allows all other devices."""

    def __init__(self) -> None:
        self._loaded: dict[frozenset[Rule], tuple[int, int]] = {}

    def attached(self, folder: str) -> tuple[int, int] | None:
        """(flags, id) of the program that Slurm or Penstock has attached to a cgroup; None: there is none. Raises
        OSError."""
        ids = (ctypes.c_uint32 * 64)()
        query = struct.pack("=IIIQIIQ", BPF_CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), len(ids), 0, 0)
        try:
            said = call_on_cgroup(folder, BPF_PROG_QUERY, query)
        except OSError as error:
            if error.errno not in ENDED:
                raise
            return None
        _, _, _, flags, _, count, _, _ = struct.unpack("=IIIIQIIQ", said)
        # Several programs are systemd's, not Slurm's. All of them and Penstock's must allow a device.
        return None if flags & BPF_F_ALLOW_MULTI or not count else (flags, ids[0])

    def replace(self, folder: str, denied: frozenset[Rule]) -> None:
        """Replace the program that is attached to a cgroup. Raises OSError."""
        there = self.attached(folder)
        program, number = self.load(denied)
        if there is not None and there[1] != number:
            call_on_cgroup(folder, BPF_PROG_ATTACH, struct.pack("=III", program, BPF_CGROUP_DEVICE, there[0]))

    def load(self, denied: frozenset[Rule]) -> tuple[int, int]:
        """Load the program that denies these devices. Returns (descriptor, id). Raises OSError."""
        if denied not in self._loaded:
            text, licence = deny(denied), b"Apache-2.0\0"
            code, terms = (
                ctypes.create_string_buffer(text, len(text)),
                ctypes.create_string_buffer(licence, len(licence)),
            )
            where = (ctypes.addressof(code), ctypes.addressof(terms))
            about = struct.pack("=IIQQ", BPF_PROG_TYPE_CGROUP_DEVICE, len(text) // 8, *where)
            program, _ = bpf(BPF_PROG_LOAD, about + struct.pack("=IIQII16s", 0, 0, 0, 0, 0, b"penstock"))
            info = (ctypes.c_uint32 * 2)()  # its type, and its id
            try:
                bpf(BPF_OBJ_GET_INFO_BY_FD, struct.pack("=IIQ", program, ctypes.sizeof(info), ctypes.addressof(info)))
            except OSError:
                os.close(program)
                raise
            if len(self._loaded) >= MOST_PROGRAMS:
                os.close(self._loaded.pop(next(iter(self._loaded)))[0])
            self._loaded[denied] = program, info[1]
        return self._loaded[denied]


def call_on_cgroup(folder: str, command: int, attribute: bytes) -> bytes:
    """Call bpf(2) with an attribute that begins with a cgroup's descriptor. Returns the attribute afterwards. Raises
    OSError."""
    cgroup = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bpf(command, struct.pack("=I", cgroup) + attribute, folder)[1]
    finally:
        os.close(cgroup)


def deny(devices: Collection[Rule]) -> bytes:
    """A program that returns 0 for these character devices and 1 for all others. Its argument is a `struct
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


def bpf(command: int, attribute: bytes, path: str = "bpf") -> tuple[int, bytes]:
    """Call bpf(2). Returns its result and the attribute afterwards. Raises OSError."""
    number = SYSCALL_BPF.get(platform.machine(), -1)
    buffer = ctypes.create_string_buffer(attribute, MOST_WRITTEN)
    result = LIBC.syscall(ctypes.c_long(number), ctypes.c_long(command), buffer, ctypes.c_long(len(attribute)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return result, buffer.raw[: len(attribute)]
