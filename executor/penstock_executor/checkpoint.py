"""Checkpoints of a job: whole or not there, and of the right run.

One folder for the job, in it one for each run that has claimed one, in that the run's checkpoints::

    FOLDER/epoch-0007/step-000000001200.ckpt

A checkpoint is one file: a line of JSON (what it is, its size and checksum), then the state. It is written beside,
forced to disk and renamed, so that a crash at any instant, or a full disk, leaves the ones before it whole. What several
processes write together, such as the shards of a model, they write first, into a folder of its own beside it; the file names each
of these with size and checksum, and makes them count.

A run left behind on a silent node can write on, but only into its own epoch's folder, and what counts is the newest
checkpoint of the highest epoch that has one: however far the stale run gets, it never wins. Mostly it does not even
write: it sees the later epoch's folder first and is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy takes half of the start of a small job: only those with arrays pay for it
    import numpy as np
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[np.generic]]

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file. A reader skips a newer one and says so."""

READ_BYTES = 8 * 1024 * 1024

MAX_HEADER_BYTES = 16 * 1024 * 1024

_ARRAY = "state/"
"""Before each array's name in the file, which savez would take for its own argument if it were `file`."""

_EPOCH = re.compile(r"epoch-(\d{4,})")
_STEP = re.compile(r"step-(\d{12,})\.ckpt")
_SHARDS = re.compile(r"step-\d{12,}\.(\d+)\.shards")


class Superseded(RuntimeError):
    """A later run of the job has begun, so this one may not write any more: stop it."""


class NotSaved(OSError):
    """The checkpoint could not be written; those before it are whole."""


class _NotValidError(ValueError):
    """A file that is not a whole checkpoint."""


@dataclass(frozen=True, slots=True)
class Shards:
    """What was written beside a checkpoint."""

    folder: Path
    files: dict[str, tuple[int, str]]
    """Name in `folder` -> size in bytes, SHA-256; see `fingerprint`."""

    def damage(self, reader: int = 0, readers: int = 1) -> str | None:
        """What is wrong with the files that are this reader's share; None if they are whole.

        Together they may be as large as a model of many GPUs, so that processes share out the reading: each calls this.
        """
        for name in sorted(self.files)[reader::readers]:
            try:
                if fingerprint(self.folder / name) != self.files[name]:
                    return f"{name} in {self.folder.name} is truncated or altered"
            except OSError as error:
                return str(error)
        return None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that was saved."""

    epoch: int
    """Epoch of the run that saved it."""
    step: int
    state: bytes | dict[str, NDArray[Any]]
    """As given to `Checkpoints.save`."""
    meta: dict[str, Any] = field(default_factory=dict)
    shards: Shards | None = None


class Checkpoints:
    """The checkpoints of a job, seen by the run of one epoch.

    Args:
        folder: the job's checkpoints, on a file system that all its nodes share. Made if it is not there.
        epoch: this run's, from `connect(folder)`. Its folder is made, which claims it.
        keep: checkpoints to keep, the newest; at least 1.

    Raises:
        Superseded: a later epoch is claimed in `folder` already.
        NotSaved: the folder cannot be made.
    """

    def __init__(self, folder: Path, epoch: int, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; keep at least 1, better 2")
        self.folder = folder
        self.epoch = epoch
        self._keep = keep
        self._own = epoch_folder(folder, epoch)
        try:
            self._own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_saved(self._own, error) from error
        self._refuse_if_superseded()

    @property
    def superseded(self) -> bool:
        """Whether a later run has claimed its folder."""
        return newest_epoch(self.folder) > self.epoch

    def shards_folder(self, step: int, number: int) -> Path:
        """Where to write what `save` of that step shall name; a higher `number` for each, so that none is written over."""
        return self._own / f"step-{step:012d}.{number}.shards"

    def save(
        self, state: bytes | Arrays, step: int, meta: Mapping[str, Any] | None = None, shards: Shards | None = None
    ) -> Path:
        """Save `state` (bytes, or arrays by name), with `meta` (JSON) beside it. It is on disk when this returns.

        Args:
            step: optimiser steps so far, >= 0: which of this run's checkpoints is the newest. Saving one again replaces it.
            shards: belongs to it, and is on disk already.

        Raises:
            Superseded: a later run has begun; nothing was written.
            NotSaved: disk full, no permission, …; what was there is as it was.
        """
        self._refuse_if_superseded()
        path = self._own / _file_name(step)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with beside.open("wb") as file:
                file.writelines(_encode(state, dict(meta or {}), shards))
                file.flush()
                os.fsync(file.fileno())
            self._refuse_if_superseded()
            beside.rename(path)
            _sync_folder(self._own)
        except OSError as error:
            if self.superseded:  # the later run has cleared this run's folder away
                raise self._superseded_error() from error
            raise _not_saved(path, error) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        self._prune(shards)
        return path

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint of the highest epoch that has one; None if there is none.

        One that is truncated or altered is passed over, with a warning in the log.
        """
        for found in self.candidates():
            damage = found.shards.damage() if found.shards is not None else None
            if damage is None:
                return found
            self.skip(found, damage)
        return None

    def candidates(self) -> Iterator[Checkpoint]:
        """All whose file is whole, in the order of `latest`. Their shards have not been read: see `Shards.damage`."""
        for epoch, step, path in _list(self.folder):
            try:
                meta, state, shards = _decode(path)
                yield Checkpoint(epoch, step, state, meta, shards)
            except (OSError, _NotValidError) as error:
                _skip(path, str(error))

    def skip(self, found: Checkpoint, damage: str) -> None:
        """Say that it is not used."""
        _skip(epoch_folder(self.folder, found.epoch) / _file_name(found.step), damage)

    def find(self, epoch: int, step: int) -> Checkpoint | None:
        """That checkpoint, which another process found to be whole; None if it is not there. Shards are not read again."""
        for found_epoch, found_step, path in _list(self.folder):
            if (found_epoch, found_step) == (epoch, step):
                with contextlib.suppress(OSError, _NotValidError):
                    meta, state, shards = _decode(path)
                    return Checkpoint(epoch, step, state, meta, shards)
        return None

    def _refuse_if_superseded(self) -> None:
        if self.superseded:
            raise self._superseded_error()

    def _superseded_error(self) -> Superseded:
        return Superseded(
            f"{self.folder}: epoch {newest_epoch(self.folder)} has begun, so the run of epoch {self.epoch} must stop"
        )

    def _prune(self, saved: Shards | None) -> None:
        """Remove all but the newest whole-looking checkpoints, and what dead runs left half written.

        Shards of this run's saves after `saved` stay: other processes may have begun to write the next ones already.
        """
        newest = _number(saved.folder) if saved is not None else 0
        listed = _list(self.folder)
        for _, _, path in listed[self._keep :]:
            with contextlib.suppress(OSError):
                path.unlink()
        try:
            belongs = {shards for _, _, path in listed[: self._keep] if (shards := _shards_of(path)) is not None}
        except OSError:
            return  # what cannot be read for a moment may be whole
        for folder in self.folder.glob("epoch-*"):
            match = _EPOCH.fullmatch(folder.name)
            if match is None or int(match[1]) > self.epoch:
                continue
            with contextlib.suppress(OSError):
                for left in folder.glob("step-*.tmp"):
                    left.unlink()
                for shards in set(folder.glob("step-*.shards")) - belongs:
                    if folder != self._own or _number(shards) <= newest:
                        shutil.rmtree(shards, ignore_errors=True)
                if folder != self._own:
                    folder.rmdir()


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Where the run of one epoch leaves its checkpoints. Making it, with `exist_ok=False`, claims the epoch."""
    return folder / f"epoch-{epoch:04d}"


def newest_epoch(folder: Path) -> int:
    """The highest epoch claimed in a job's checkpoint folder; 0 if none is."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return max((int(match[1]) for name in names if (match := _EPOCH.fullmatch(name))), default=0)


def _list(folder: Path) -> list[tuple[int, int, Path]]:
    """(epoch, step, path) of all checkpoints, newest first."""
    found = []
    for path in folder.glob("epoch-*/step-*.ckpt"):
        epoch, step = _EPOCH.fullmatch(path.parent.name), _STEP.fullmatch(path.name)
        if epoch and step:
            found.append((int(epoch[1]), int(step[1]), path))
    return sorted(found, reverse=True)


def fingerprint(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _shards_of(path: Path) -> Path | None:
    """The folder of a checkpoint's shards, if it has any and its header can be understood. Raises OSError."""
    with path.open("rb") as file:
        header = file.readline(MAX_HEADER_BYTES)
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        if shards := json.loads(header).get("shards"):
            return path.parent / str(shards["folder"])
    return None


def _number(shards: Path) -> int:
    """Which of its run's saves a folder of shards is of; 0 if its name is not one of ours."""
    match = _SHARDS.fullmatch(shards.name)
    return int(match[1]) if match else 0


def _file_name(step: int) -> str:
    return f"step-{step:012d}.ckpt"


def _skip(path: Path, reason: str) -> None:
    log.warning("path=%s checkpoint passed over: %s; the one before it is used", path, reason)


def _encode(state: bytes | Arrays, meta: dict[str, Any], shards: Shards | None) -> tuple[bytes, bytes]:
    """Header and payload."""
    if isinstance(state, bytes):
        kind, payload = "bytes", state
    else:
        import io

        import numpy as np

        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **{_ARRAY + name: value for name, value in state.items()})
        kind, payload = "arrays", buffer.getvalue()
    header: dict[str, Any] = {"format": FORMAT, "kind": kind, "size": len(payload), "meta": meta}
    if shards is not None:
        header["shards"] = {"folder": shards.folder.name, "files": shards.files}
    line = json.dumps(header, sort_keys=True)
    return json.dumps({**header, "sha256": _checksum(line, payload)}, sort_keys=True).encode() + b"\n", payload


def _decode(path: Path) -> tuple[dict[str, Any], bytes | dict[str, NDArray[Any]], Shards | None]:
    """Meta, state, and what lies beside. Raises _NotValidError."""
    with path.open("rb") as file:
        line = file.readline(MAX_HEADER_BYTES)
        payload = file.read()
    try:
        header = json.loads(line)
        found_format, checksum = header["format"], header.pop("sha256")
        size, kind, meta, beside = header["size"], header["kind"], header["meta"], header.get("shards")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _NotValidError("its header is not one of ours, or truncated") from None
    if found_format != FORMAT:
        raise _NotValidError(f"format {found_format} where this version of Penstock reads {FORMAT}")
    if size != len(payload):
        raise _NotValidError(f"truncated: {len(payload)} bytes of {size}")
    if checksum != _checksum(json.dumps(header, sort_keys=True), payload):
        raise _NotValidError("its checksum does not match its content")
    shards = None
    if beside:
        files = {name: (size, digest) for name, (size, digest) in beside["files"].items()}
        shards = Shards(path.parent / beside["folder"], files)
    if kind == "bytes":
        return meta, payload, shards
    import io

    import numpy as np

    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return meta, {name.removeprefix(_ARRAY): value for name, value in arrays.items()}, shards


def _checksum(header: str, payload: bytes) -> str:
    digest = hashlib.sha256(header.encode())
    digest.update(payload)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Force the renaming itself to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_saved(path: Path, error: OSError) -> NotSaved:
    return NotSaved(
        error.errno,
        f"no checkpoint written: {error.strerror or error}; those before it are whole, free some space or fix the "
        "folder's permissions",
        str(path),
    )
