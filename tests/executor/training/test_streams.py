"""Streams through the workers of a `DataLoader`."""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor.training.batches import BatchSize
from penstock_executor.training.loader import Loader

SIZE = 61


class Numbers:
    """The numbers of an epoch, in its order; decoding one gives it with the id of the process that did it."""

    def stream(self, epoch: int, start: int) -> Iterator[int]:
        yield from ((number * 7 + epoch) % SIZE for number in range(start, SIZE))

    def decode(self, item: int) -> tuple[int, int]:
        return item, os.getpid()


def batches(
    workers: int, *, rank: int = 0, position: int = 0, grow_at: int | None = None
) -> list[tuple[list[int], int]]:
    """The samples of each batch of one of two processes, and the process that decoded them. The batch size grows after
    `grow_at` steps."""
    loader = Loader(
        Numbers(),
        BatchSize(total=8, atomic=2),
        (rank, 2),
        seed=0,
        shuffle=True,
        drop_last=False,
        position=position,
        num_workers=workers,
    )
    found, done = [], 0
    for numbers, processes in loader:
        part = loader.take()
        found.append((numbers.tolist()[: part.samples], int(processes[0])))
        if part.last:
            loader.position += part.step_samples
            done += 1
        if part.last and done == grow_at:
            loader.size = BatchSize(total=12, atomic=3)
    return found


@pytest.mark.parametrize("grow_at", [None, 3])
def test_batches_and_their_order_do_not_depend_on_the_number_of_workers(grow_at: int | None):
    alone = batches(0, grow_at=grow_at)
    shared = batches(2, grow_at=grow_at)
    assert [samples for samples, _ in shared] == [samples for samples, _ in alone]
    assert {process for _, process in alone} == {os.getpid()}
    others = {process for _, process in shared}
    assert os.getpid() not in others
    assert len(others) == (2 if grow_at is None else 4), "new workers where the batch size has changed"


def test_of_two_processes_with_workers_each_sample_is_seen_once_also_from_a_position_on():
    for position in (0, 24):
        seen = [
            number for rank in (0, 1) for samples, _ in batches(2, rank=rank, position=position) for number in samples
        ]
        assert sorted(seen) == sorted(Numbers().stream(0, position))


def only_numbers(items):
    """Not a lambda: from Python 3.14 on, workers are sent what they need."""
    return {"numbers": torch.tensor([number for number, _ in items])}


def test_what_the_script_collates_is_pinned_or_moved_as_it_is():
    """The loader's own `collate_fn` gets a list of decoded items."""
    loader = Loader(
        Numbers(),
        BatchSize(total=8, atomic=8),
        (0, 1),
        seed=0,
        shuffle=True,
        drop_last=False,
        position=56,
        num_workers=1,
        collate_fn=only_numbers,
    )
    for batch in loader:
        loader.position += loader.take().step_samples
        assert batch["numbers"].tolist() == [(number * 7) % SIZE for number in range(56, SIZE)]
