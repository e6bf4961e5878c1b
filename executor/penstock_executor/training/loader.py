"""The batches of one process, as the training loop sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

from penstock_executor.training.batches import Batches, BatchSize, Part, decoder, epoch_order


def samples_of(dataset: Any) -> int | None:
    """Number of samples in an epoch; None for a stream."""
    return None if hasattr(dataset, "stream") else len(dataset)


class Loader:
    """Yields the rest of the present epoch, one batch per micro-step; `TrainingRun.prepare` makes it.

    Args:
        dataset: with `__len__` and `__getitem__`, or a `Stream`.
        size: batch size to begin with.
        place: number of this replica, and of all replicas.
        seed: for the order of samples.
        shuffle: whether each epoch has another order.
        position: samples of the epoch that are done.
        drop_last: whether an epoch ends before a step that would be smaller than the others.
        before_part: called before each batch is yielded, with whether it is the last of an optimiser step.
        begin: called before the first sample of each pass is read.
        options: of `torch.utils.data.DataLoader`; for a stream, only `collate_fn`.
    """

    def __init__(
        self,
        dataset: Any,
        size: BatchSize,
        place: tuple[int, int],
        *,
        seed: int,
        shuffle: bool,
        position: int,
        drop_last: bool,
        before_part: Callable[[bool], None],
        begin: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self.epoch = 0
        self.position = position
        """Samples of the epoch that are done, by whole steps."""
        self.samples = samples_of(dataset)
        self._dataset, self._seed, self._shuffle, self._before_part, self._options = (
            dataset,
            seed,
            shuffle,
            before_part,
            options,
        )
        self._batches = Batches(size, *place, drop_last=drop_last)
        self._part: Part | None = None
        self._begin = begin
        taken = {"batch_size", "sampler", "batch_sampler"} & options.keys()
        if taken:
            raise ValueError(
                f"{', '.join(sorted(taken))}: Penstock chooses the samples; pass only batch_size, as an argument of"
                " prepare"
            )

    @property
    def part(self) -> Part:
        """The part that the last batch holds. Raises RuntimeError if there is none, or it was already trained on."""
        if self._part is None:
            raise RuntimeError(
                "run.step without a batch: call it once for each batch of the loader that prepare returned"
            )
        return self._part

    @property
    def size(self) -> BatchSize:
        """Batch size of the next step."""
        return self._batches.size

    @size.setter
    def size(self, size: BatchSize) -> None:
        self._batches.size = size

    def __len__(self) -> int:
        """Number of batches in a whole epoch at the present batch size. The rest of an epoch that the last run began has
        fewer.

        Raises:
            TypeError: the data set is a stream.
        """
        if self.samples is None:
            raise TypeError("a stream has no length: count the steps with run.steps")
        return self._batches.count(self.samples)

    def __iter__(self) -> Iterator[Any]:
        self._part = None
        self._begin()
        for batch in self._stream() if self.samples is None else self._map():
            if self._part is not None:
                raise RuntimeError("the last batch was not trained on: call run.step(loss) once for each batch")
            self._part = self._batches.parts.popleft()
            self._before_part(self._part.last)
            yield batch

    def take(self) -> Part:
        """Return `part`, and mark it as trained on."""
        part, self._part = self.part, None
        return part

    def _map(self) -> Iterator[Any]:
        assert self.samples is not None
        order = epoch_order(self.samples, self.epoch, self._seed, shuffle=self._shuffle)
        indices = self._batches.indices(order, self.position)
        # Else the DataLoader draws from PyTorch's global generator, and a pass in two parts draws twice.
        options = {"generator": self._generator()} | self._options
        yield from DataLoader(self._dataset, batch_sampler=indices, **options)  # type: ignore[arg-type,unused-ignore]

    def _generator(self) -> torch.Generator:
        """For the seeds of the workers."""
        seeds = np.random.SeedSequence([self._seed, self.epoch, self.position, self._batches.rank])
        return torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))

    def _stream(self) -> Iterator[Any]:
        collate, decode = self._options.get("collate_fn") or default_collate, decoder(self._dataset)
        for items in self._batches.items(self._dataset.stream(self.epoch, self.position)):
            yield collate([decode(item) for item in items])
