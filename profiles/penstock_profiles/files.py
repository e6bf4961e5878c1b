"""Files that other processes read or write at the same time."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class NoRegularFile(OSError):
    """The path is not a regular file, or belongs to another user than expected."""


def open_regular(path: Path | str, owner: int | None = None, folder: int | None = None) -> BinaryIO:
    """Open a regular file for reading. Nothing else is ever opened: opening a device or a terminal has effects.

    A link in place of the file is not followed. Links in place of its folders are.

    Args:
        path: of the file.
        owner: user id that must own the file; None: any user may.
        folder: descriptor of the folder to which the path is relative; None: the working directory.

    Raises:
        NoRegularFile: the path is not a regular file, or another user owns it.
        OSError: the file cannot be opened, for example because it is a link.
    """
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        about = os.fstat(place)
        if stat.S_ISLNK(about.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not stat.S_ISREG(about.st_mode) or owner not in (None, about.st_uid):
            of = "" if owner is None else f" of user {owner}"
            raise NoRegularFile(f"{path} is not a regular file{of}")
        return os.fdopen(os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    finally:
        os.close(place)


def open_folder(name: str, parent: int, *, make: bool = False, follow: bool = False) -> int:
    """A descriptor of a folder, one step down. Whoever changes the tree meanwhile, it is a folder of the parent.

    Args:
        name: one name, without `/`, that is not `.` or `..`.
        parent: descriptor of the folder that it is in.
        make: make it if it does not exist.
        follow: follow a link in its place.

    Raises:
        OSError: it does not exist, or is no folder.
    """
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"{name!r} is not the name of a folder in another")
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return os.open(name, flags, dir_fd=parent)


def write_whole(
    path: Path, text: str, mode: int = 0o644, *, writer: str = "", ready: Callable[[], object] | None = None
) -> None:
    """Write a file so that no reader sees a part of it. It may not survive a crash of the machine.

    Args:
        path: of the file.
        text: what it has afterwards.
        mode: its permissions.
        writer: tells this writer from all others, also on other hosts; empty: its process id, for files of one host.
        ready: is called right before the file takes its place. If it raises, an older file is unchanged.

    Raises:
        OSError: it cannot be written; an older file is unchanged.
    """
    _write(path, text, mode, durable=False, writer=writer, ready=ready)


def save_whole(path: Path, text: str, *, writer: str = "", ready: Callable[[], object] | None = None) -> None:
    """As `write_whole`, but the file is on disk when this returns, and the folder is made if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, text, 0o666, durable=True, writer=writer, ready=ready)


def _write(path: Path, text: str, mode: int, *, durable: bool, writer: str, ready: Callable[[], object] | None) -> None:
    beside = path.with_name(f".{path.name}.{writer or os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(descriptor)
        if ready is not None:
            ready()
        beside.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
