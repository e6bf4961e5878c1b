"""Which samples each process takes when. The order of the data set does not depend on the number of processes.

The samples of an epoch have one order, drawn from (seed, epoch) alone. An optimiser step takes the next M of them, M
being the total batch, and divides them among K replicas and s + 1 micro-steps. So one number, the *position*, says how
far an epoch has got, and a run with another K continues from there: no sample is left out or taken twice, however often
the job moves.

If M is no multiple of K (s + 1), parts differ by one sample, and the last step of an epoch takes the rest. The gradient
is still the mean over the step's samples, by `Part.weight`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Number of samples in an optimiser step. Raises ValueError unless both fields are at least 1."""

    total: int
    """M, over all replicas and micro-steps."""
    atomic: int
    """m, the most samples that one replica takes in one micro-step."""

    def __post_init__(self) -> None:
        if not (self.total >= 1 and self.atomic >= 1):
            raise ValueError(f"total={self.total}, atomic={self.atomic}: a batch has at least 1 sample")

    def accumulation_steps(self, replicas: int) -> int:
        """s, number of micro-steps before the one that synchronises."""
        return -(-self.total // (replicas * self.atomic)) - 1


@dataclass(frozen=True, slots=True)
class Part:
    """What one process computes in one micro-step."""

    samples: int
    """Samples of this part. 0: the process computes on some sample with weight 0, since all processes must
    synchronise."""
    step_samples: int
    """Samples of the optimiser step, over all replicas and micro-steps."""
    replicas: int
    micro_steps: int
    """s + 1, the micro-steps of this step."""
    last: bool
    """Whether the step ends with this part."""

    @property
    def weight(self) -> float:
        """Factor on the part's mean loss. With it, gradients that are summed over micro-steps and averaged over
        replicas are the mean over the step's samples."""
        return self.samples * self.replicas / self.step_samples

    @property
    def even(self) -> bool:
        """Whether all parts of the step have the same size within a tenth. Only such steps measure the gradients'
        noise."""
        parts = self.replicas * self.micro_steps
        return self.step_samples >= parts and (self.step_samples % parts == 0 or self.step_samples >= 10 * parts)


def deal(samples: int, replicas: int, atomic: int) -> list[list[range]]:
    """Divide the samples 0 … `samples` - 1 of one step into equal parts of at most `atomic`: micro-steps x replicas."""
    micro_steps = -(-samples // (replicas * atomic))
    base, extra = divmod(samples, replicas * micro_steps)
    starts = [part * base + min(part, extra) for part in range(replicas * micro_steps + 1)]
    ranges = [range(a, b) for a, b in pairwise(starts)]
    return [ranges[i : i + replicas] for i in range(0, len(ranges), replicas)]


def epoch_order(size: int, epoch: int, seed: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """The order of the data set's samples in one epoch, shape (size,). It is the same on every machine."""
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


class Batches:
    """One process's parts, in order. `parts` holds those that were yielded and not yet computed.

    A change of `size` takes effect with the next step. All processes must change it at the same step. With `drop_last`,
    an epoch ends before a step that would be smaller.
    """

    def __init__(self, size: BatchSize, rank: int, replicas: int, *, drop_last: bool = False) -> None:
        self.size = size
        self.rank, self._replicas, self._drop_last = rank, replicas, drop_last
        self.parts: deque[Part] = deque()

    def indices(self, order: NDArray[np.int64], position: int) -> Iterator[list[int]]:
        """Indices of this process's samples, one list per part, from `position` to the end of the epoch."""
        self.parts.clear()
        while position + self._fewest <= len(order):
            step = order[position : position + self.size.total]
            position += len(step)
            for mine in self._deal(len(step)):
                yield step[mine.start : mine.stop].tolist() or [int(step[0])]

    def items(self, stream: Iterator[Any]) -> Iterator[list[Any]]:
        """As `indices`, but of a stream that begins at the position: the items themselves, one step at a time."""
        self.parts.clear()
        while len(step := list(islice(stream, self.size.total))) >= self._fewest:
            for mine in self._deal(len(step)):
                yield step[mine.start : mine.stop] or step[:1]

    def count(self, samples: int) -> int:
        """Number of parts of this process in an epoch of `samples` samples, at the present size."""
        steps, rest = divmod(samples, self.size.total)
        parts = steps * (self.size.accumulation_steps(self._replicas) + 1)
        if rest and not self._drop_last:
            parts += BatchSize(rest, self.size.atomic).accumulation_steps(self._replicas) + 1
        return parts

    @property
    def _fewest(self) -> int:
        return self.size.total if self._drop_last else 1

    def _deal(self, samples: int) -> Iterator[range]:
        dealt = deal(samples, self._replicas, self.size.atomic)
        for micro_step, ranges in enumerate(dealt, 1):
            mine = ranges[self.rank]
            last = micro_step == len(dealt)
            self.parts.append(Part(len(mine), samples, self._replicas, len(dealt), last))
            yield mine


class Stream(Protocol):
    """An iterable data set that can be resumed. `prepare` takes it in place of one with `__len__` and `__getitem__`."""

    def stream(self, epoch: int, start: int) -> Iterator[Any]:
        """The samples of one epoch, from number `start` on, in an order that depends on `epoch` alone.

        Each process, and each worker of its `DataLoader`, reads the whole stream and keeps its own samples. So items
        should be cheap, such as raw bytes or a file name, and an optional method `decode` should do the work: only the
        worker that keeps a sample calls it.
        """


def decoder(dataset: object) -> Callable[[Any], Any]:
    """A stream's `decode`, or a function that returns items unchanged."""
    found = getattr(dataset, "decode", None)
    return found if callable(found) else lambda item: item
