"""Files that others write or read at the same time."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NoRegularFile(OSError):
    """What is there is no file, or not of the user whose it has to be."""


def open_regular(path: Path | str, owner: int | None = None) -> BinaryIO:
    """Open a regular file to be read, and nothing else: no link is followed, and no pipe is waited for.

    Args:
        path: where.
        owner: user id whose file it must be; None: anybody's.

    Raises:
        NoRegularFile: it is something else, or another user's.
        OSError: it cannot be opened; a link is told so, too.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or owner not in (None, about.st_uid):
        os.close(descriptor)
        raise NoRegularFile(f"{path} is no regular file of user {owner}" if owner is not None else f"{path} is no file")
    return os.fdopen(descriptor, "rb")


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that no reader ever sees a part of it. What a crash of the machine leaves is not sure. Raises
    OSError."""
    _write(path, text, mode, durable=False)


def save_whole(path: Path, text: str) -> None:
    """Put `text` where an older file may be, in a folder that is made if need be: on disk, and whole, when this
    returns.

    Raises:
        OSError: it cannot be written; an older file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, text, 0o666, durable=True)


def _write(path: Path, text: str, mode: int, *, durable: bool) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(descriptor)
        beside.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
