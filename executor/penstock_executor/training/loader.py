"""The batches of one process, as the training loop sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate

from penstock_executor.training import samplers
from penstock_executor.training.batches import Batches, BatchSize, Part, decoder, epoch_order
from penstock_executor.training.messages import warn_if_counted

log = logging.getLogger(__name__)


def samples_of(dataset: Any, sampler: Any = None) -> int | None:
    """Number of samples in an epoch; None for a stream."""
    return None if hasattr(dataset, "stream") else len(dataset if sampler is None else sampler)


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
        after_part: called when the next batch is asked for, or the pass is over: the last batch is done with.
        begin: called before the first sample of each pass is read.
        each: whether every batch is trained on by itself, with `take`; otherwise several may belong to a step of the
            script's own.
        options: of `torch.utils.data.DataLoader`.
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
        before_part: Callable[[bool], None] = lambda last: None,
        after_part: Callable[[], None] = lambda: None,
        begin: Callable[[], None] = lambda: None,
        each: bool = False,
        **options: Any,
    ) -> None:
        self.epoch = 0
        self.position = position
        """Samples of the epoch that are done, by whole steps."""
        self.dataset, self._seed, self._shuffle, self._before_part, self._options = (
            dataset,
            seed,
            shuffle,
            before_part,
            options,
        )
        self._place, self._drop_last = place, drop_last
        self._batches = Batches(size, *place, drop_last=drop_last)
        self._part: Part | None = None
        self._not_taken = 0
        """Samples of the batches since the last step."""
        self._begin, self._after_part, self._each = begin, after_part, each
        self._first_asked = False
        """Whether the script has read `first`."""
        self._first_epoch: int | None = None
        """Of this process."""
        taken = {"batch_size", "batch_sampler"} & options.keys()
        if taken:
            raise ValueError(
                f"{', '.join(sorted(taken))}: Penstock chooses the samples; pass only batch_size, as an argument of"
                " prepare, and perhaps a sampler"
            )
        self._sampler = options.pop("sampler", None)
        self.samples = samples_of(dataset, self._sampler)
        if self._sampler is not None:
            samplers.check(self._sampler, dataset, seed)

    @property
    def part(self) -> Part:
        """The part that the last batch holds. Raises RuntimeError if there is none, or it was already trained on."""
        if self._part is None:
            raise RuntimeError(
                "a step without a batch: call run.step once for each batch of the loader, or after run.loader"
                " run.step_done once for each optimiser step"
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
        if self._not_taken and self._place[0] == 0:
            log.warning(
                "epoch=%d samples=%d of the last pass belong to no step: call run.step_done for its last batches, too",
                self.epoch,
                self._not_taken,
            )
        if self._first_epoch is None:
            self._first_epoch = self.epoch
        if self._place[0] == 0 and self.epoch == self._first_epoch:  # it takes 0.03 s, and 1 s with millions of objects
            warn_if_counted(self._batches.count(self.position), begins_right=self._first_asked)
        self._part, self._not_taken = None, 0
        self._begin()
        for batch in self._stream() if self.samples is None else self._map():
            if self._each and self._part is not None:
                raise RuntimeError("the last batch was not trained on: call run.step(loss) once for each batch")
            self._part = self._batches.parts.popleft()
            self._not_taken += self._part.step_samples
            self._before_part(self._part.last)
            yield batch
            self._after_part()

    def take(self) -> Part:
        """Return `part`, and mark it as trained on."""
        part, self._part = self.part, None
        self._not_taken = 0
        return part

    def take_all(self) -> int:
        """Mark all batches since the last step as trained on, and return their samples, over all processes."""
        samples = self._not_taken
        self.take()
        return samples

    @property
    def between_steps(self) -> bool:
        """Whether each batch that was yielded belongs to a step that is over."""
        return self._part is None

    @property
    def first(self) -> int:
        """Number of batches of this epoch that are done, at the present batch size. 0 at the beginning of an epoch."""
        self._first_asked = True
        return self._batches.count(self.position)

    @property
    def epoch_samples(self) -> int | None:
        """Samples that are trained on in an epoch, or None for a stream."""
        return None if self.samples is None else self._whole_steps(self.samples)

    @property
    def samples_left(self) -> int | None:
        """Samples of this epoch that are not done, or None for a stream."""
        return None if self.samples is None else self._whole_steps(self.samples - self.position)

    def _whole_steps(self, samples: int) -> int:
        return samples - samples % self.size.total if self._drop_last else samples

    def _map(self) -> Iterator[Any]:
        assert self.samples is not None
        if self._sampler is None:
            order = epoch_order(self.samples, self.epoch, self._seed, shuffle=self._shuffle)
        else:
            order = samplers.order(self._sampler, self.epoch, self._seed)
        indices = self._batches.indices(order, self.position)
        # Else the DataLoader draws from PyTorch's global generator, and a pass in two parts draws twice.
        options = {"generator": self._generator()} | self._options
        yield from DataLoader(self.dataset, batch_sampler=indices, **options)  # type: ignore[arg-type,unused-ignore]

    def _generator(self) -> torch.Generator:
        """For the seeds of the workers."""
        seeds = np.random.SeedSequence([self._seed, self.epoch, self.position, self._batches.rank])
        return torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))

    def _stream(self) -> Iterator[Any]:
        """The workers divide a stream by themselves, so they begin anew from the present position when the batch size
        changes."""
        while True:
            size, ends = self.size, False
            batches = Batches(size, *self._place, drop_last=self._drop_last)
            own = _StreamOfOneProcess(self.dataset, self.epoch, self.position, batches, self._options)
            options = {"generator": self._generator()} | self._options | {"collate_fn": _unchanged}
            self._batches.parts.clear()
            for part, batch in DataLoader(own, batch_size=None, **options):
                self._batches.parts.append(Part(*part))
                ends = Part(*part).last
                yield batch
                if ends and self.size != size:
                    break
            else:
                return


class _StreamOfOneProcess(IterableDataset[Any]):  # type: ignore[misc,unused-ignore]
    """Each `Part` of a process as a tuple, with its batch. Of W workers, each makes every W-th: `DataLoader` takes from
    them in turn, so the order stays.

    Args:
        dataset: a `Stream`.
        epoch: the pass over it.
        position: samples of the epoch that are done.
        batches: divides the samples.
        options: of `DataLoader`; `collate_fn` is used here.
    """

    def __init__(self, dataset: Any, epoch: int, position: int, batches: Batches, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._dataset, self._epoch, self._position, self._batches = dataset, epoch, position, batches
        self._collate = options.get("collate_fn") or default_collate

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        decode = decoder(self._dataset)
        samples = self._dataset.stream(self._epoch, self._position)
        for number, items in enumerate(self._batches.items(samples)):
            part = self._batches.parts.popleft()
            if number % workers == worker:
                yield astuple(part), self._collate([decode(item) for item in items])


def _unchanged(batch: Any) -> Any:
    return batch
