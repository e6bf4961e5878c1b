"""A process that reads files of one user, with that user's rights. `user_files` starts it as::

    python -I -S reader.py FOLDER_OF_PENSTOCK_PROFILES [UID GID GROUP...]

With an account, it drops root's rights for good before it reads anything. It may then neither start processes nor write files.

A request is a line with an offset, a limit, the uid of the file's owner and the length of the path in bytes, then the path. The
answer is a line: `part BEGIN SIZE LENGTH`, then so many bytes; `irregular`; or `error ERRNO`. It ends after `IDLE_S` without a
request, and when nobody is left to ask.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import BinaryIO

IDLE_S = 120
"""The process that asks ends it sooner, if it is there."""

READ_S = 10
"""How long one read may take. The process that asks waits less long."""

MOST_MEMORY = 2**29
PR_SET_NO_NEW_PRIVS = 38


def drop_rights(uid: int, gid: int, groups: list[int]) -> None:
    """Become this user for good. Raises OSError."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def forbid() -> None:
    """Give up what reading does not need. Raises OSError."""
    for limit, most in (
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, MOST_MEMORY),
    ):
        resource.setrlimit(limit, (most, most))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")


def answer(line: bytes, requests: BinaryIO) -> bytes:
    """The answer to a request, of which this is the first line."""
    offset, limit, owner, length = map(int, line.split())
    path = os.fsdecode(requests.read(length))
    try:
        with open_regular(path, owner) as file:
            size = os.fstat(file.fileno()).st_size
            begin = min(max(size + offset, 0) if offset < 0 else offset, size)
            file.seek(begin)
            part = file.read(limit)
    except NoRegularFile:
        return b"irregular\n"
    except OSError as error:
        return b"error %d\n" % (error.errno or 0)
    return b"part %d %d %d\n" % (begin, size, len(part)) + part


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    from penstock_profiles.files import NoRegularFile, open_regular

    if sys.argv[2:]:
        user, group, *others = map(int, sys.argv[2:])
        drop_rights(user, group, others)
    forbid()
    os.chdir("/")
    while True:
        signal.alarm(IDLE_S)
        if not (line := sys.stdin.buffer.readline()):
            break
        signal.alarm(READ_S)
        sys.stdout.buffer.write(answer(line, sys.stdin.buffer))
        sys.stdout.buffer.flush()
