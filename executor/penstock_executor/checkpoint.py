"""Checkpoints of a job. Each is either whole or absent, and none comes from a superseded run.

The job has one folder, in it each run has a folder, and in that are the run's checkpoints::

    FOLDER/epoch-0007/step-000000001200.ckpt

A checkpoint is one file: a line of JSON (its format, size and checksum), then the state. It is written to a temporary
file (the line last), forced to disk and renamed, so that a crash at any instant, or a full disk, leaves earlier
checkpoints whole. What several processes write together, such as the shards of a model, they write first, into a
separate folder. The checkpoint's file names each of these files with size and checksum, and they are valid only once it
exists.

A superseded run on a node that does not answer can go on writing, but only into the folder of its own epoch. The newest
checkpoint of the highest epoch counts, so the superseded run never wins. Usually it does not even write: it sees the
folder of the later epoch first and is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # importing numpy takes half of the start of a small job: only jobs with arrays need it
    import numpy as np
    from numpy.typing import NDArray

    State = bytes | Mapping[str, NDArray[np.generic]] | Callable[[BinaryIO], object]

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file format. A reader skips other versions, with a warning."""

READ_BYTES = 8 * 1024 * 1024

MOST_BYTES = 2**63
"""More than any state has: a header has room for it."""

MAX_HEADER_BYTES = 16 * 1024 * 1024

_ARRAY = "state/"
"""Prefix of each array's name in the file: `savez` would take an array named `file` for its own argument."""

_EPOCH = re.compile(r"epoch-(\d{4,})")
_STEP = re.compile(r"step-(\d{12,})\.ckpt")
_SHARDS = re.compile(r"step-\d{12,}\.(\d+)\.shards")


class Superseded(RuntimeError):
    """A later run of the job has begun. This run must stop and write nothing more."""


class NotSaved(OSError):
    """The checkpoint could not be written. Earlier checkpoints are whole."""


class Unreadable(OSError):
    """There are checkpoints, and none can be used, or one cannot be read for now. A run without them would lose them."""


class _NotValidError(ValueError):
    """A file that is not a whole checkpoint."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Files that belong to a checkpoint, in a folder beside it."""

    folder: Path
    files: dict[str, tuple[int, str]]
    """Name in `folder` -> size in bytes, SHA-256; see `fingerprint`."""

    def damage(self, reader: int = 0, readers: int = 1) -> str | None:
        """What is wrong with this reader's share of the files; None if they are whole.

        All files together may be as large as a model of many GPUs. So each process calls this and reads only a share.

        Raises:
            Unreadable: a file is there and cannot be read.
        """
        for name in sorted(self.files)[reader::readers]:
            try:
                if fingerprint(self.folder / name) != self.files[name]:
                    return f"{name} in {self.folder.name} is truncated or altered"
            except FileNotFoundError as error:
                return str(error)
            except OSError as error:
                raise unreadable(self.folder / name, error) from error
        return None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state."""

    epoch: int
    """Epoch of the run that saved it."""
    step: int
    state: bytes | dict[str, NDArray[Any]] | BinaryIO
    """The argument of `Checkpoints.save`; a file to read it from if it was left in its file."""
    meta: dict[str, Any] = field(default_factory=dict)
    shards: Shards | None = None

    def open(self) -> BinaryIO:
        """The state as a file, for one reader. Raises TypeError if it is arrays."""
        if isinstance(self.state, dict):
            raise TypeError(f"the checkpoint of step {self.step} holds arrays: read its state")
        return io.BytesIO(self.state) if isinstance(self.state, bytes) else self.state


class Checkpoints:
    """The checkpoints of a job, as the run of one epoch reads and writes them.

    Args:
        folder: for the job's checkpoints, on a file system that all its nodes share. It is made if it does not exist.
        epoch: of this run, from `connect(folder)`. Making its folder claims the epoch.
        keep: number of the newest checkpoints to keep, at least 1.

    Raises:
        Superseded: a later epoch is already claimed in `folder`.
        NotSaved: the folder cannot be made.
        Unreadable: it cannot be listed.
    """

    def __init__(self, folder: Path, epoch: int, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; keep at least 1, preferably 2")
        self.folder = folder
        self.epoch = epoch
        self._keep = keep
        self._own = epoch_folder(folder, epoch)
        try:
            self._own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_saved(self._own, error) from error
        self._refuse_if_superseded()
        # Before the first save: on a full disk, they may be what it is full of.
        self._remove_left_over(self._belonging(_list(folder)))

    @property
    def superseded(self) -> bool:
        """Whether a later run has claimed its folder."""
        return newest_epoch(self.folder) > self.epoch

    def shards_folder(self, step: int, number: int) -> Path:
        """Folder for the shards of a checkpoint. Use a higher `number` for each `save`, so that none is overwritten."""
        with contextlib.suppress(OSError):  # the write fails then, and says why
            self._own.mkdir(parents=True, exist_ok=True)
        return self._own / f"step-{step:012d}.{number}.shards"

    def save(
        self,
        state: State,
        step: int,
        meta: Mapping[str, Any] | None = None,
        shards: Shards | None = None,
        try_to_load: Callable[[Checkpoint], object] | None = None,
    ) -> Path:
        """Save a checkpoint. It is on disk when this returns.

        Args:
            state: bytes, arrays by name, or a function that writes bytes to a file.
            step: optimiser steps so far, >= 0. It orders this run's checkpoints. Saving a step again replaces it.
            meta: further values, as JSON can hold them.
            shards: files that belong to the checkpoint and are already on disk.
            try_to_load: called with what was written, before it counts as a checkpoint.

        Raises:
            Superseded: a later run has begun; nothing was written.
            NotSaved: `try_to_load` raised an error, the disk is full, permission is denied, or the like; earlier
                checkpoints are unchanged.
        """
        self._refuse_if_superseded()
        path = self._own / _file_name(step)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._own.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with beside.open("w+b") as file:
                _write(file, state, dict(meta or {}), shards)
                file.flush()
                os.fsync(file.fileno())
            if try_to_load is not None:
                self._try_to_load(beside, step, try_to_load)
            self._refuse_if_superseded()
            beside.rename(path)
            _sync_folder(self._own)
        except Exception as error:
            if self.superseded:  # the later run has removed this run's folder
                raise self._superseded_error() from error
            reason = reason_of(error)
            if isinstance(reason, OSError) and not isinstance(error, NotSaved):
                raise _not_saved(path, reason) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        self._prune(shards)
        return path

    def _try_to_load(self, beside: Path, step: int, load: Callable[[Checkpoint], object]) -> None:
        try:
            meta, state, shards = _decode(beside, in_file=True)
            load(Checkpoint(self.epoch, step, state, meta, shards))
        except Exception as error:
            raise NotSaved(
                f"no checkpoint written to {self.folder}: {cannot_load(error)}; earlier checkpoints are whole"
            ) from error

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint of the highest epoch that has one; None if there is none.

        A checkpoint that is truncated or altered is skipped, with a warning in the log.

        Raises:
            Unreadable: there are checkpoints, and none is whole, or one cannot be read.
        """
        for found in self.candidates():
            damage = found.shards.damage() if found.shards is not None else None
            if damage is None:
                return found
            self.skip(found, damage)
        self.refuse_to_begin_anew()
        return None

    def refuse_to_begin_anew(self) -> None:
        """None of the checkpoints is whole: raise Unreadable if there are any."""
        if paths := [str(path.relative_to(self.folder)) for _, _, path in _list(self.folder)]:
            raise Unreadable(
                f"{self.folder}: none of the checkpoints is whole ({', '.join(paths)}; the log says what is wrong with"
                " each); to begin anew, move the folder away"
            )

    def candidates(self, *, in_file: bool = False) -> Iterator[Checkpoint]:
        """All checkpoints whose file is whole, newest first. Their shards have not been read: see `Shards.damage`.

        Args:
            in_file: leave states of bytes in their files, since they may be as large as a model; see `Checkpoint.open`.

        Raises:
            Unreadable: one cannot be read. The error may pass, so the one before it is not used in its place.
        """
        for epoch, step, path in _list(self.folder):
            try:
                meta, state, shards = _decode(path, in_file=in_file)
            except FileNotFoundError:
                continue  # the run that this one supersedes has removed it meanwhile
            except OSError as error:
                raise unreadable(path, error) from error
            except _NotValidError as error:
                _skip(path, str(error))
            else:
                yield Checkpoint(epoch, step, state, meta, shards)

    def skip(self, found: Checkpoint, damage: str) -> None:
        """Log that a checkpoint is not used."""
        _skip(epoch_folder(self.folder, found.epoch) / _file_name(found.step), damage)

    def find(self, epoch: int, step: int) -> Checkpoint | None:
        """The checkpoint of one epoch and step, if its file is whole; None if it is not there. Shards are not read.

        Raises:
            Unreadable: it cannot be read.
        """
        path = epoch_folder(self.folder, epoch) / _file_name(step)
        try:
            meta, state, shards = _decode(path)
        except (FileNotFoundError, _NotValidError):
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        return Checkpoint(epoch, step, state, meta, shards)

    def _refuse_if_superseded(self) -> None:
        if self.superseded:
            raise self._superseded_error()

    def _superseded_error(self) -> Superseded:
        return Superseded(
            f"{self.folder}: the run of epoch {newest_epoch(self.folder)} has begun, so the run of epoch {self.epoch}"
            " must stop"
        )

    def _prune(self, saved: Shards | None) -> None:
        """Remove all but the newest checkpoints, and what runs left half written when they died."""
        try:
            listed = _list(self.folder)
        except Unreadable:
            return  # until the next save
        for _, _, path in listed[self._keep :]:
            with contextlib.suppress(OSError):
                path.unlink()
        self._remove_left_over(
            self._belonging(listed[: self._keep]), saved=_number(saved.folder) if saved is not None else 0
        )

    def _belonging(self, listed: list[tuple[int, int, Path]]) -> set[Path] | None:
        """Folders of the shards of these checkpoints; None if a file cannot be read for a moment: it may be whole."""
        try:
            return {shards for _, _, path in listed if (shards := _shards_of(path)) is not None}
        except OSError:
            return None

    def _remove_left_over(self, belongs: set[Path] | None, saved: int | None = None) -> None:
        """Remove what earlier runs left half written, and empty folders of earlier runs.

        Args:
            belongs: folders of shards that belong to a checkpoint. None: unknown, so nothing is removed.
            saved: also what this run has left of saves up to this number. Of later ones, other processes may already be
                writing shards. None: nothing of this run.
        """
        if belongs is None:
            return
        for folder in self.folder.glob("epoch-*"):
            match = _EPOCH.fullmatch(folder.name)
            if match is None or int(match[1]) > self.epoch or (folder == self._own and saved is None):
                continue
            with contextlib.suppress(OSError):
                for left in folder.glob("step-*.tmp"):
                    left.unlink()
                for shards in set(folder.glob("step-*.shards")) - belongs:
                    if folder != self._own or (saved is not None and _number(shards) <= saved):
                        shutil.rmtree(shards, ignore_errors=True)
                if folder != self._own:
                    folder.rmdir()


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Folder for the checkpoints of the run of one epoch. Making it, with `exist_ok=False`, claims the epoch."""
    return folder / f"epoch-{epoch:04d}"


def newest_epoch(folder: Path) -> int:
    """The highest epoch claimed in a job's checkpoint folder; 0 if none is."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return max((int(match[1]) for name in names if (match := _EPOCH.fullmatch(name))), default=0)


def _list(folder: Path) -> list[tuple[int, int, Path]]:
    """Epoch, step and path of all checkpoints, newest first. Raises Unreadable.

    `glob` would take a folder that cannot be read for an empty one.
    """
    found = []
    for name in _names(folder):
        if epoch := _EPOCH.fullmatch(name):
            for file in _names(folder / name):
                if step := _STEP.fullmatch(file):
                    found.append((int(epoch[1]), int(step[1]), folder / name / file))
    return sorted(found, reverse=True)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def reason_of(error: BaseException) -> BaseException:
    """The disk's error behind this one, or the error itself if there is none.

    `torch.save` raises a RuntimeError about positions in its file if the disk is full.
    """
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__cause__ or reason.__context__
    return error if reason is None else reason


def fingerprint(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _shards_of(path: Path) -> Path | None:
    """The folder of a checkpoint's shards; None if it has none or its header cannot be parsed. Raises OSError."""
    with path.open("rb") as file:
        header = file.readline(MAX_HEADER_BYTES)
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        if shards := json.loads(header).get("shards"):
            return path.parent / str(shards["folder"])
    return None


def _number(shards: Path) -> int:
    """The number in the name of a folder of shards; 0 if the name has another form."""
    match = _SHARDS.fullmatch(shards.name)
    return int(match[1]) if match else 0


def _file_name(step: int) -> str:
    return f"step-{step:012d}.ckpt"


def _skip(path: Path, reason: str) -> None:
    log.warning("path=%s checkpoint skipped: %s; the one before it is used, if there is one", path, reason)


def _write(file: BinaryIO, state: State, meta: dict[str, Any], shards: Shards | None) -> None:
    """Write the state, read it back for its checksum, and then write the line before it."""
    header: dict[str, Any] = {"format": FORMAT, "kind": "bytes", "size": MOST_BYTES, "meta": meta}
    if isinstance(state, Mapping):
        header["kind"] = "arrays"
    if shards is not None:
        header["shards"] = {"folder": shards.folder.name, "files": shards.files}
    begin = len(_line(header, "0" * 64))
    file.write(b" " * (begin - 1) + b"\n")
    if isinstance(state, bytes):
        file.write(state)
    elif isinstance(state, Mapping):
        import numpy as np

        arrays = io.BytesIO()  # NumPy would count a file's positions from its beginning
        np.savez(arrays, allow_pickle=False, **{_ARRAY + name: value for name, value in state.items()})
        file.write(arrays.getbuffer())
    else:
        state(file)
    header["size"] = file.tell() - begin
    file.seek(begin)
    line = _line(header, _checksum(header, file))
    file.seek(0)
    file.write(line.rstrip(b"\n").ljust(begin - 1))  # JSON may end with spaces


def _line(header: dict[str, Any], checksum: str) -> bytes:
    return json.dumps({**header, "sha256": checksum}, sort_keys=True).encode() + b"\n"


def _decode(
    path: Path, *, in_file: bool = False
) -> tuple[dict[str, Any], bytes | dict[str, NDArray[Any]] | BinaryIO, Shards | None]:
    """Meta, state and shards of a checkpoint. Raises _NotValidError."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        line = file.readline(MAX_HEADER_BYTES)
        try:
            header = json.loads(line)
            found_format, checksum = header["format"], header.pop("sha256")
            size, kind, meta, beside = header["size"], header["kind"], header["meta"], header.get("shards")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _NotValidError("its header is truncated, or not one of Penstock's") from None
        if found_format != FORMAT:
            raise _NotValidError(f"it has format {found_format}, and this version of Penstock reads {FORMAT}")
        found_size = os.fstat(file.fileno()).st_size - len(line)
        if size != found_size:
            raise _NotValidError(f"it is truncated: {found_size} bytes of {size}")
        if checksum != _checksum(header, file):
            raise _NotValidError("its checksum does not match its content")
        shards = None
        if beside:
            files = {name: (size, digest) for name, (size, digest) in beside["files"].items()}
            shards = Shards(path.parent / beside["folder"], files)
        file.seek(len(line))
        if kind == "bytes" and in_file:
            stack.pop_all()  # the reader closes it
            return meta, io.BufferedReader(_Rest(file, len(line))), shards
        payload = file.read()
    if kind == "bytes":
        return meta, payload, shards
    import numpy as np

    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return meta, {name.removeprefix(_ARRAY): value for name, value in arrays.items()}, shards


class _Rest(io.RawIOBase):
    """The rest of a file, from `begin` on, as a file."""

    def __init__(self, file: BinaryIO, begin: int) -> None:
        self._file, self._begin = file, begin

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._file.readinto(into)  # type: ignore[attr-defined, no-any-return]

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset + (self._begin if whence == os.SEEK_SET else 0), whence) - self._begin

    def close(self) -> None:
        self._file.close()
        super().close()


def _checksum(header: dict[str, Any], file: BinaryIO) -> str:
    """Of the header and the rest of the file."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    while part := file.read(READ_BYTES):
        digest.update(part)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Force a rename in the folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_saved(path: Path, error: OSError) -> NotSaved:
    return NotSaved(
        error.errno,
        f"no checkpoint written: {error.strerror or error}; earlier checkpoints are whole; free some space or fix the"
        " folder's permissions",
        str(path),
    )


def cannot_load(error: Exception) -> str:
    """Why what was written is no checkpoint, in words."""
    return f"what was written cannot be loaded again ({type(error).__name__}: {error})"


def unreadable(path: Path, error: OSError) -> Unreadable:
    """The error of a run that cannot read this checkpoint, or the folder of some."""
    return Unreadable(
        error.errno,
        f"{error.strerror or error}: the run does not begin without this checkpoint; start the run again when the file"
        " system answers, or move the file away to use the checkpoint before it",
        str(path),
    )
