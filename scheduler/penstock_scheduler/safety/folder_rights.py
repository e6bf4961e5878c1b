"""Lets nobody but a job's user and the daemon into the job's folder of the spool.

The user must read the control message, and must not change it. So the folder stays the daemon's, and the user may pass: by an
access control list where the file system has these, and otherwise as a member of the user's own group. Users whose own group is
one that they share can then see each other's control messages, not each other's reports: the reports folder is the user's alone.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import struct
from pathlib import Path

from penstock_profiles.files import open_folder

ACL = "system.posix_acl_access"

_VERSION = 2
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF


def let_only(spool: Path, job_id: str, uid: int) -> None:
    """Give a job's folder these rights, and its user the folder of its reports. A running job keeps what it needs meanwhile.

    A daemon that is not root can only let its own user in, or, where there are access control lists, others.

    Raises OSError: one of the two is missing or no folder, or has a link in its place.
    """
    top = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        job = open_folder(job_id, top)
        try:
            reports = open_folder("reports", job)
            try:
                _give(job, reports, uid)
            finally:
                os.close(reports)
        finally:
            os.close(job)
    finally:
        os.close(top)


def _give(job: int, reports: int, uid: int) -> None:
    about = os.fstat(reports)
    if uid == os.geteuid():
        wanted = ((job, 0o700), (reports, 0o700))
        for folder, mode in wanted:
            if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
                os.fchmod(folder, mode)
    elif os.geteuid() == 0:
        if about.st_uid == uid and not about.st_mode & 0o077:
            return
        if not _list(job, uid, 0o5):
            with contextlib.suppress(KeyError):
                os.fchown(job, 0, pwd.getpwuid(uid).pw_gid)
                os.fchmod(job, 0o750)
        os.fchown(reports, uid, -1)
        os.fchmod(reports, 0o700)
    elif stat.S_IMODE(about.st_mode) != 0o770 and _list(reports, uid, 0o7):
        _list(job, uid, 0o5)


def _list(folder: int, uid: int, rights: int) -> bool:
    """Let the owner and this user into a folder, and nobody else. Returns whether the file system can."""
    entries = (
        (_OWNER, 0o7, _NO_ID),
        (_USER, rights, uid),
        (_GROUP, 0, _NO_ID),
        (_MASK, rights, _NO_ID),
        (_OTHERS, 0, _NO_ID),
    )
    try:
        os.setxattr(folder, ACL, struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *each) for each in entries))
    except OSError:
        return False
    return stat.S_IMODE(os.fstat(folder).st_mode) == 0o700 | rights << 3
