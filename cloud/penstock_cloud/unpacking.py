"""Unpacks the output files of a cloud run. Whoever wrote the archive, nothing outside the declared outputs changes.

Paths are never compared as text with what the file system would make of them. Each step of a member's path is opened from the
descriptor of the step before, without following links, so a name can only lead down. Only the folders that the script itself
declares may be links, made by its user.

A symbolic link comes back if it is relative, has `..` only at its beginning, and points into a declared output. From a folder
that was reached without links, such a link cannot lead out, even through other links of this kind. A hard link must be to a
regular file of the same archive.

`tarfile` only reads headers. It reads them from `_Stream`, which bounds what one header may take, and never goes back.

Only the standard library is used; see `cloud_runner`.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from penstock_profiles.files import open_folder, open_regular

MOST_FILES = 1_000_000
"""Files, folders and links that an archive of output may have."""

MOST_BYTES = 500 * 10**9
"""Bytes of its files, unpacked: a hundred times the largest archive."""

MOST_STEPS = 64
"""Longest path of a member: how many names."""

MOST_OF_A_HEADER = 2**20
"""Bytes of one member's headers, with those that lengthen its names."""

BLOCK = 2**20

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS))
"""Errors that concern all members, not one."""


class DamagedArchive(Exception):
    """The archive cannot be read. Nothing has changed."""


class _Stream:
    """An unpacked archive, from which `tarfile` reads headers. It only goes forwards, up to `until`."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._file = gzip.GzipFile(fileobj=packed)
        self.at, self.until = 0, MOST_OF_A_HEADER
        self._last = b""

    def tell(self) -> int:
        return self.at

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.until - self.at:
            raise tarfile.ReadError(f"a header at byte {self.at:,} is longer than {MOST_OF_A_HEADER:,} bytes")
        try:
            found = self._file.read(size)
        except (EOFError, zlib.error, OSError) as error:
            raise tarfile.ReadError(str(error)) from error
        self.at += len(found)
        if len(found) < size:
            raise tarfile.ReadError("it ends early")
        self._last = found
        return found

    def seek(self, to: int) -> None:
        if to < self.at:
            raise tarfile.ReadError("it leads backwards")
        while self.at < to:
            self.read(min(to - self.at, BLOCK))

    def end(self) -> None:
        """See that it ends where `tarfile` finds its end, which may be a header that it cannot read, and check its sum."""
        if self._last.strip(b"\0"):
            raise tarfile.ReadError(f"the header before byte {self.at:,} cannot be read")
        try:
            rest = self._file.read(MOST_OF_A_HEADER)
        except (EOFError, zlib.error, OSError) as error:
            raise tarfile.ReadError(str(error)) from error
        if rest.strip(b"\0") or len(rest) == MOST_OF_A_HEADER:
            raise tarfile.ReadError(f"it goes on after its end at byte {self.at:,}")


class Unpacking:
    """One archive. `amiss` counts what was left out, and `first` says why the first of these was.

    Args:
        directory: the job's.
        declared: its output paths, relative to it.
    """

    def __init__(self, directory: Path, declared: Sequence[str]) -> None:
        self._directory = directory
        self._declared = [Path(path).parts for path in declared]
        self.amiss, self.first = 0, ""

    def unpack(self, packed: IO[bytes]) -> None:
        """Unpack the archive. Each file is replaced as a whole or not at all. Raises Damaged, OSError."""
        with (
            tempfile.TemporaryDirectory(prefix=".penstock-", dir=self._directory) as folder,
            _closing(_open(folder, os.O_NOFOLLOW)) as staged,
            _closing(_open(self._directory)) as there,
        ):
            try:
                self._stage(packed, staged)
            except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
                raise DamagedArchive(str(error)) from error
            self._put(staged, there, ())

    def _leave_out(self, what: str, why: object) -> None:
        self.amiss += 1
        self.first = self.first or f"{_shown(what)}: {why}"

    def _stage(self, packed: IO[bytes], staged: int) -> None:
        """Write all members that may come back below a new folder."""
        stream, number, size = _Stream(packed), 0, 0
        with tarfile.TarFile(fileobj=cast(IO[bytes], stream)) as archive:
            while (member := archive.next()) is not None:
                number, size = number + 1, size + (0 if member.issparse() else member.size)
                if number > MOST_FILES or size > MOST_BYTES:
                    limits = f"only {MOST_FILES:,} files and {MOST_BYTES:,} bytes come back"
                    self._leave_out(f"{member.name} and what follows", limits)
                    return
                stream.until = max(archive.offset, stream.at)
                try:
                    why = self._member(member, stream, staged)
                except (OSError, ValueError) as error:
                    if getattr(error, "errno", None) in FULL:
                        raise
                    why = str(getattr(error, "strerror", error))
                if why:
                    self._leave_out(member.name, why)
                stream.until = max(archive.offset, stream.at) + MOST_OF_A_HEADER
                archive.members.clear()  # type: ignore[attr-defined]  # a million of them take a gibibyte
                archive.pax_headers = {}
        stream.end()

    def _member(self, member: tarfile.TarInfo, stream: _Stream, staged: int) -> str:
        """Write one member. Returns why it is left out; empty: it is not. Raises OSError."""
        steps = _steps(member.name)
        if steps is None:
            return "it would be unpacked outside the job's folder"
        if why := self._unfit(member, steps):
            return why
        if member.isdir():
            with _below(staged, steps, make=True):
                return ""
        *folders, name = steps
        with _below(staged, folders, make=True) as parent:
            with contextlib.suppress(FileNotFoundError):  # of two members with one name, the last one counts
                os.unlink(name, dir_fd=parent)
            if member.issym():
                os.symlink(member.linkname, name, dir_fd=parent)
            elif member.islnk():
                return _link(staged, member.linkname, name, parent)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
                    for begin in range(0, member.size, BLOCK):
                        file.write(stream.read(min(member.size - begin, BLOCK)))
                    os.fchmod(file.fileno(), member.mode & 0o755 | stat.S_IRUSR | stat.S_IWUSR)
            with contextlib.suppress(OSError, OverflowError, ValueError):  # a time that no file can have
                os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
        return ""

    def _unfit(self, member: tarfile.TarInfo, steps: tuple[str, ...]) -> str:
        """Why a member of this path is left out; empty: it is not."""
        if len(steps) > MOST_STEPS:
            return f"it is more than {MOST_STEPS} folders deep"
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()) or member.issparse():
            return "it is neither a file, a folder nor a link"
        within = [path for path in self._declared if steps[: len(path)] == path]
        if not within and not (member.isdir() and any(path[: len(steps)] == steps for path in self._declared)):
            return "the script declares no such #PENSTOCK output"
        if member.issym() and not self._stays_inside(steps, member.linkname):
            return (
                f"it is a link to {_shown(member.linkname)}, which is outside the job's folder and its declared outputs"
            )
        return "" if steps or member.isdir() else "it is no folder"

    def _stays_inside(self, steps: tuple[str, ...], target: str) -> bool:
        """Whether a symbolic link at this path points into a declared output."""
        parts = [each for each in target.split("/") if each not in ("", ".")]
        up = next((number for number, each in enumerate(parts) if each != ".."), len(parts))
        if target[:1] in ("", "/") or len(target) > 4095 or up > len(steps) - 1 or ".." in parts[up:]:
            return False
        to = (*steps[: len(steps) - 1 - up], *parts[up:])
        return any(to[: len(path)] == path for path in self._declared)

    def _put(self, staged: int, there: int, steps: tuple[str, ...]) -> None:
        """Move what is in a staged folder to its place. Links come last, so that no link is there without its target."""
        with os.scandir(staged) as entries:
            found = sorted((entry.is_symlink(), entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for _, name, folder in found:
            try:
                if folder:
                    # Only what the script itself names may be a link, made by its user.
                    mine = any(path[: len(steps) + 1] == (*steps, name) for path in self._declared)
                    with (
                        _closing(open_folder(name, staged)) as below,
                        _closing(open_folder(name, there, make=True, follow=mine)) as target,
                    ):
                        self._put(below, target, (*steps, name))
                else:
                    _replace(name, staged, there)
            except OSError as error:
                if error.errno in FULL:
                    raise
                linked = folder and error.errno in (errno.ENOTDIR, errno.ELOOP)
                why = "a file or a link is in its place, and only what the script declares may be a link"
                self._leave_out("/".join((*steps, name)), why if linked else error.strerror)


def _steps(name: str) -> tuple[str, ...] | None:
    """The names in a member's path; None: it leads elsewhere, or cannot be a path."""
    parts = tuple(each for each in name.split("/") if each not in ("", "."))
    return None if name.startswith("/") or ".." in parts or "\0" in name else parts


def _shown(text: str) -> str:
    """The beginning of a name, as printable characters."""
    return ascii(text[:200])[1:-1]


def _link(staged: int, linkname: str, name: str, parent: int) -> str:
    """Make a hard link to a regular file below a folder. Returns why there is none. Raises OSError."""
    steps = _steps(linkname)
    if not steps:
        return f"it is a link to {_shown(linkname)}, which is outside the job's folder"
    *folders, old = steps
    with _below(staged, folders) as source:
        if not stat.S_ISREG(os.stat(old, dir_fd=source, follow_symlinks=False).st_mode):
            return f"it is a hard link to {_shown(linkname)}, which is no file"
        os.link(old, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
    return ""


def _replace(name: str, staged: int, there: int) -> None:
    """Rename a file or link, also onto another file system. Raises OSError."""
    try:
        os.replace(name, name, src_dir_fd=staged, dst_dir_fd=there)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = f".penstock-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=there)
        about = os.stat(name, dir_fd=staged, follow_symlinks=False)
        if stat.S_ISLNK(about.st_mode):
            os.symlink(os.readlink(name, dir_fd=staged), beside, dir_fd=there)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with (
                open_regular(name, folder=staged) as file,
                os.fdopen(os.open(beside, flags, stat.S_IMODE(about.st_mode), dir_fd=there), "wb") as copy,
            ):
                shutil.copyfileobj(file, copy, BLOCK)
        os.utime(beside, ns=(about.st_atime_ns, about.st_mtime_ns), dir_fd=there, follow_symlinks=False)
        os.replace(beside, name, src_dir_fd=there, dst_dir_fd=there)


def _open(folder: Path | str, flags: int = 0) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _below(folder: int, steps: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder further down, reached without links. Raises OSError."""
    at = os.dup(folder)
    try:
        for step in steps:
            below = open_folder(step, at, make=make)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)
