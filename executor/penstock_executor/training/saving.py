"""Writes a run's state as a checkpoint in the background, from a copy in memory."""

from __future__ import annotations

import copy
import io
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist

from penstock_executor.checkpoint import (
    Checkpoint,
    Checkpoints,
    NotSaved,
    Shards,
    Superseded,
    cannot_load,
    fingerprint,
    reason_of,
)
from penstock_executor.training.host_copies import HostCopies

log = logging.getLogger(__name__)


ARRAY = "penstock.numpy.ndarray"
"""Key of the dictionary that stands for an array of NumPy in a checkpoint, which holds only tensors and plain values."""


class CannotSave(TypeError):
    """A state holds something that could not be loaded again."""


def copied(value: Any, where: str = "state") -> Any:
    """`value` with each tensor in it copied to the host's memory, so that training may go on.

    Scalars of NumPy become Python's. `load` turns arrays of NumPy back into such.

    Args:
        value: tensors, NumPy's arrays, plain values, and dictionaries and lists of them.
        where: name of the value, for errors.

    Raises:
        CannotSave: something in it is neither; the message names it.
    """
    copies = HostCopies()
    found = _copied(value, where, copies)
    copies.finish()
    return found


def _copied(value: Any, where: str, copies: HostCopies) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.copy(value)
    if isinstance(value, np.ndarray):
        try:
            return {ARRAY: torch.from_numpy(value.copy())}
        except TypeError as error:
            raise _cannot_save(value, f"{where} (dtype {value.dtype})") from error
    if isinstance(value, np.generic):
        return _copied(value.item(), where, copies)
    if isinstance(value, Mapping):
        return {
            _copied(key, f"a key of {where}", copies): _copied(each, f"{where}[{key!r}]", copies)
            for key, each in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_copied(each, f"{where}[{number}]", copies) for number, each in enumerate(value))
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise _cannot_save(value, where) from error
    return copy.deepcopy(value)


def _cannot_save(value: object, where: str) -> CannotSave:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return CannotSave(
        f"{where} is a {kind}, which PyTorch would not load from a checkpoint again (weights_only=True); let state_dict"
        " return numbers, strings, tensors, NumPy arrays, and dictionaries and lists of them"
    )


def _uncopied(value: Any) -> Any:
    """`value` with the arrays that `copied` replaced."""
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return value[ARRAY].numpy()
        return {key: _uncopied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_uncopied(each) for each in value)
    return value


def random_states() -> dict[str, Any]:
    """The states of this process's random generators: PyTorch's, CUDA's, Python's and NumPy's."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(numbers), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_random_states(state: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def load(state: BinaryIO) -> Any:
    """The state as `torch.load` reads it, on the CPU. Only tensors and plain values, so that a checkpoint cannot run
    code."""
    return _uncopied(torch.load(state, map_location="cpu", weights_only=True))


PLAIN = {int, float, bool, str, type(None)}


def kinds(value: Any, where: str = "") -> Iterator[str]:
    """Each place in a state with the types of its values. Keys that are numbers, as of an optimiser's parameters, are one
    place, and so are the items of a list: a state that only grows has no new kinds."""
    yield f"{where}: {type(value)} {getattr(value, 'dtype', '')}"
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from kinds(each, f"{where}[{'' if isinstance(key, int) else repr(key)}]")
    elif isinstance(value, (list, tuple)):
        types = {*map(type, value)}
        if types <= PLAIN:  # perhaps the order of all samples: a step must not wait for a loop over it
            yield from (f"{where}[]: {each} " for each in types)
        else:
            for each in value:
                yield from kinds(each, f"{where}[]")


class Saver:
    """Writes one checkpoint at a time, in a background thread."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.group: dist.ProcessGroup | None = None
        """The processes that each write a piece of the model; only this thread uses the group. None: one process writes
        all."""
        self.parts = False
        """Whether a piece is a part of a split model. Else it is a share of each of the model's DTensors."""
        self._count = 0
        self._loaded: set[str] = set()
        """Kinds of the values that were in a checkpoint of this run when it was loaded again. One with another kind counts
        only once it has been loaded, too."""
        self.superseded = False
        """A later run of the job has begun, so this one must stop."""
        self.failure: NotSaved | None = None
        """Why the last checkpoint was not written; None if it was."""
        self.tell: Callable[[str], None] = lambda text: None
        """Called with that reason."""
        self._thread: threading.Thread | None = None

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        meta: Mapping[str, Any],
        saved: Callable[[float], None],
        sharded: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to write a checkpoint, after the one before is written. All processes of `group` call it.

        Args:
            state: what the first process writes. It must not change any more.
            step: optimiser steps so far.
            meta: as in `Checkpoints.save`.
            saved: called with the seconds that writing took, once the checkpoint is on disk.
            sharded: this process's piece of a divided model; None if the model is whole.
        """
        self.wait()
        self._count += 1
        arguments = (state, step, meta, saved, sharded, self._count)
        self._thread = threading.Thread(target=self._save, args=arguments, name="penstock-saver")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the present checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def fail(self, error: CannotSave) -> None:
        """Note that there is no checkpoint because of this error. Training goes on, and earlier checkpoints are whole."""
        log.error("no checkpoint written: %s", error)
        self._failed(NotSaved(f"no checkpoint written: {error}"))

    def _failed(self, failure: NotSaved) -> None:
        self.failure = failure
        self.tell(str(failure))

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _save(
        self,
        state: Mapping[str, Any],
        step: int,
        meta: Mapping[str, Any],
        saved: Callable[[float], None],
        sharded: Mapping[str, Any] | None,
        number: int,
    ) -> None:
        began = time.monotonic()
        try:
            found = set(kinds({name: each for name, each in state.items() if name != "random"} | {"piece": sharded}))
            try_to_load = None if found <= self._loaded else self._load
            shards = None if sharded is None else self._write_shards(sharded, step, number, try_to_load is not None)
            if self.group is None or self.group.rank() == 0:
                self.checkpoints.save(partial(torch.save, dict(state)), step, meta, shards, try_to_load)
            self._loaded |= found
            if self.group is not None and self.group.rank() != 0:
                return
        except Superseded as error:
            log.warning("step=%d %s", step, error)
            self.superseded = True
        except NotSaved as error:
            log.error("step=%d %s", step, error)
            self._failed(error)
        except Exception as error:  # else the run would end with the claim that it has saved
            self._failed(NotSaved(f"no checkpoint written: {type(error).__name__}: {error}"))
            log.error("step=%d %s", step, self.failure, exc_info=error)
        else:
            self.failure = None
            saved(time.monotonic() - began)

    def _load(self, found: Checkpoint) -> None:
        """Read what was written as the next run will."""
        if found.shards is not None and not self.parts:
            from torch.distributed.checkpoint import FileSystemReader

            FileSystemReader(found.shards.folder).read_metadata()
        with found.open() as file:
            torch.load(file, map_location="meta", weights_only=True)

    def _write_shards(self, sharded: Mapping[str, Any], step: int, number: int, loads: bool) -> Shards:
        """Write this process's piece. All processes call it; if one cannot write, NotSaved is raised in all of them.

        `loads`: whether a part of a split model is also loaded again.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        folder = self.checkpoints.shards_folder(step, number)
        rank, processes = (self.group.rank(), self.group.size()) if self.group is not None else (0, 1)
        failure: str | None = None
        mine: dict[str, tuple[int, str]] = {}
        try:
            written = (
                write_part(folder, rank, sharded) if self.parts else write_share(folder, rank, sharded, self.group)
            )
            # Each process reads back its own files.
            mine = {path.name: fingerprint(path) for path in written}
            if loads and self.parts:
                failure = _failure_to_load(_part_file(folder, rank))
        except (Exception, CheckpointException) as error:  # no error may stop the training
            reason = reason_of(error)
            failure = str(reason) or repr(reason)
            if isinstance(reason, OSError):
                failure += "; free some space or fix the folder's permissions"
        everyones: list[Any] = [(failure, mine)] * processes
        if self.group is not None:
            try:
                dist.all_gather_object(everyones, everyones[rank], group=self.group)
            except Exception as error:  # another process has died, or took too long
                raise NotSaved(
                    f"no checkpoint written to {folder}: the connection between the job's processes failed: {error}"
                ) from error
        reasons = [reason for reason, _ in everyones if reason]
        if reasons:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # else it would keep a full disk full
            raise NotSaved(f"no checkpoint written to {folder}: {reasons[0]}; earlier checkpoints are whole")
        return Shards(folder, {name: found for _, files in everyones for name, found in files.items()})


def write_share(folder: Path, rank: int, sharded: Mapping[str, Any], group: dist.ProcessGroup | None) -> Iterable[Path]:
    """Write this process's shards of the DTensors in `sharded`. Returns its files; rank 0's include the metadata."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    save(dict(sharded), storage_writer=FileSystemWriter(folder), process_group=group)
    return [*folder.glob(f"__{rank}_*.distcp"), *(folder.glob(".metadata") if rank == 0 else ())]


def write_part(folder: Path, place: int, part: Mapping[str, Any]) -> Iterable[Path]:
    """Write one process's part of a split model. Returns its files."""
    folder.mkdir(exist_ok=True)
    with _part_file(folder, place).open("wb") as file:
        torch.save(dict(part), file)
        file.flush()
        os.fsync(file.fileno())
    return [_part_file(folder, place)]


def read_part(folder: Path, place: int) -> Any:
    """Read what `write_part` wrote."""
    return _uncopied(torch.load(_part_file(folder, place), map_location="cpu", weights_only=True))


def _failure_to_load(file: Path) -> str | None:
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:
        return cannot_load(error)
    return None


def _part_file(folder: Path, place: int) -> Path:
    return folder / f"part-{place}.pt"


def read_shards(folder: Path, into: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Fill the DTensors of `into`, which any number of processes may have written. All processes of `group` call it."""
    from torch.distributed.checkpoint import FileSystemReader, load

    load(into, storage_reader=FileSystemReader(folder), process_group=group)
