"""A run's whole state as one checkpoint, copied in a moment and written in the background."""

from __future__ import annotations

import io
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock_executor.checkpoint import Checkpoints, NotSaved, Shards, Superseded, fingerprint

log = logging.getLogger(__name__)


def copied(value: Any) -> Any:
    """`value` with each tensor in it copied to the host's memory, so that training may go on."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.clone() if value.device.type == "cpu" else value.cpu()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value


def random_states() -> dict[str, Any]:
    """Of this process: torch's, CUDA's, Python's and NumPy's generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(words), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_random_states(state: Mapping[str, Any]) -> None:
    """Undo what came after `random_states`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(state: bytes) -> Any:
    """As `torch.load` reads it, on the CPU. Only tensors and plain values: a checkpoint cannot run code."""
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)


class Saver:
    """Writes one checkpoint at a time, in a thread of its own."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.group: dist.ProcessGroup | None = None
        """The processes that each write shards of their own, a group that nobody else uses; None: one process writes all."""
        self.parts = False
        """Whether a shard is a process's own part of the model, and not its share of each of the model's DTensors."""
        self._count = 0
        self.superseded = False
        """A later run has begun: this one must stop."""
        self.failure: NotSaved | None = None
        """Why the last one was not written; None if it was."""
        self._thread: threading.Thread | None = None

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        meta: Mapping[str, Any],
        saved: Callable[[float], None],
        sharded: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `state`, which nobody changes any more, after the one before; `saved(seconds)` when it is on disk.

        With a group all its processes call this, `sharded` holds what each has of the model, and the first writes `state`.
        """
        self.wait()
        self._count += 1
        arguments = (state, step, meta, saved, sharded, self._count)
        self._thread = threading.Thread(target=self._save, args=arguments, name="penstock-saver")
        self._thread.start()

    def wait(self) -> None:
        """Until the one that is being written is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
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
            shards = None if sharded is None else self._write_shards(sharded, step, number)
            if self.group is not None and self.group.rank() != 0:
                return
            self.checkpoints.save(to_bytes(state), step, meta, shards)
        except Superseded as error:
            log.warning("step=%d %s", step, error)
            self.superseded = True
        except NotSaved as error:
            log.error("step=%d %s", step, error)
            self.failure = error
        else:
            self.failure = None
            saved(time.monotonic() - began)

    def _write_shards(self, sharded: Mapping[str, Any], step: int, number: int) -> Shards:
        """All processes together. Raises NotSaved in all of them if one cannot write."""
        from torch.distributed.checkpoint.api import CheckpointException

        folder = self.checkpoints.shards_folder(step, number)
        rank, processes = (self.group.rank(), self.group.size()) if self.group is not None else (0, 1)
        failure: BaseException | None = None
        mine: dict[str, tuple[int, str]] = {}
        try:
            written = (
                write_part(folder, rank, sharded) if self.parts else write_share(folder, rank, sharded, self.group)
            )
            # Each process reads back what it wrote itself.
            mine = {path.name: fingerprint(path) for path in written}
        except (Exception, CheckpointException) as error:  # whatever it is, training goes on
            failure = error
        everyones: list[Any] = [(str(failure) if failure else None, mine)] * processes
        if self.group is not None:
            try:
                dist.all_gather_object(everyones, everyones[rank], group=self.group)
            except Exception as error:  # another process is gone, or took too long
                raise NotSaved(
                    f"no checkpoint written to {folder}: the job's processes lost each other: {error}"
                ) from error
        reasons = [reason for reason, _ in everyones if reason]
        if reasons:
            raise NotSaved(
                f"no checkpoint written to {folder}: {reasons[0]}; those before it are whole, free some space or fix the"
                " folder's permissions"
            )
        return Shards(folder, {name: found for _, files in everyones for name, found in files.items()})


def write_share(folder: Path, rank: int, sharded: Mapping[str, Any], group: dist.ProcessGroup | None) -> Iterable[Path]:
    """This process's shards of the DTensors in `sharded`; what it wrote, and the first also what is about all of them."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    save(dict(sharded), storage_writer=FileSystemWriter(folder), process_group=group)
    return [*folder.glob(f"__{rank}_*.distcp"), *(folder.glob(".metadata") if rank == 0 else ())]


def write_part(folder: Path, place: int, part: Mapping[str, Any]) -> Iterable[Path]:
    """One process's part of a model that several hold together; what it wrote."""
    folder.mkdir(exist_ok=True)
    with _part_file(folder, place).open("wb") as file:
        torch.save(dict(part), file)
        file.flush()
        os.fsync(file.fileno())
    return [_part_file(folder, place)]


def read_part(folder: Path, place: int) -> Any:
    """What `write_part` wrote."""
    return torch.load(_part_file(folder, place), map_location="cpu", weights_only=True)


def _part_file(folder: Path, place: int) -> Path:
    return folder / f"part-{place}.pt"


def read_shards(folder: Path, into: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Fill the DTensors of `into`, whatever number of processes wrote them. All of `group` call it."""
    from torch.distributed.checkpoint import FileSystemReader, load

    load(into, storage_reader=FileSystemReader(folder), process_group=group)
