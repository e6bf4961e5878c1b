"""The elastic order of samples, without processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_executor.training.batches import Batches, BatchSize, deal, epoch_order


def test_ten_samples_for_three_replicas_of_at_most_two():
    """ceil(10 / 6) = 2 micro-steps of 3 parts; 10 = 4 x 2 + 2 x 1."""
    assert deal(10, 3, 2) == [[range(0, 2), range(2, 4), range(4, 6)], [range(6, 8), range(8, 9), range(9, 10)]]
    assert BatchSize(10, 2).accumulation_steps(3) == 1
    assert BatchSize(12, 2).accumulation_steps(3) == 1
    assert BatchSize(13, 2).accumulation_steps(3) == 2


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_parts_are_disjoint_whole_even_and_fit(samples: int, replicas: int, atomic: int):
    dealt = deal(samples, replicas, atomic)
    flat = [part for micro_step in dealt for part in micro_step]
    assert [i for part in flat for i in part] == list(range(samples))
    assert max(map(len, flat)) <= atomic
    assert max(map(len, flat)) - min(map(len, flat)) <= 1
    assert all(len(micro_step) == replicas for micro_step in dealt)


@given(st.data())
def test_whatever_the_resizes_each_sample_of_an_epoch_is_computed_once(data: st.DataObject):
    """Runs of 1 to 5 processes, each ended after some steps, with changing batches."""
    size = data.draw(st.integers(1, 120))
    order, position, seen = epoch_order(size, 3, 7), 0, []
    while position < size:
        replicas = data.draw(st.integers(1, 5))
        batch = BatchSize(data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9)))
        runs = [Batches(batch, rank, replicas) for rank in range(replicas)]
        generators = [run.indices(order, position) for run in runs]
        for _ in range(data.draw(st.integers(1, 4))):
            parts, taken, ended = [], [], False
            while not ended and position < size:
                for run, generator in zip(runs, generators, strict=True):
                    indices = next(generator)
                    part = run.parts.popleft()
                    assert indices
                    taken += indices[: part.samples]
                    parts.append(part)
                    ended = part.last
            for part in parts:  # its share of the mean over the step's samples
                assert part.weight / replicas == pytest.approx(part.samples / len(taken))
            position += len(taken)
            seen += taken
    assert sorted(seen) == list(range(size))
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_a_fixed_batch_takes_the_same_samples_a_step_on_any_number_of_processes():
    order = epoch_order(50, 0, 1)

    def steps(replicas: int) -> list[list[int]]:
        lists = [list(Batches(BatchSize(16, 4), rank, replicas).indices(order, 0)) for rank in range(replicas)]
        taken = [i for micro in zip(*lists, strict=True) for indices in micro for i in indices]
        return [sorted(taken[i : i + 16]) for i in range(0, 48, 16)]

    assert steps(1) == steps(2) == steps(4)


def test_the_order_is_of_seed_and_epoch():
    """Fixed numbers: another machine or version must not change the order in the middle of an epoch."""
    assert epoch_order(8, 0, 0).tolist() == epoch_order(8, 0, 0).tolist()
    assert epoch_order(8, 1, 0).tolist() != epoch_order(8, 0, 0).tolist() != epoch_order(8, 0, 1).tolist()
    assert epoch_order(4, 5, 5, shuffle=False).tolist() == [0, 1, 2, 3]
    assert epoch_order(8, 2, 3).tolist() == [7, 6, 4, 5, 1, 0, 3, 2]


def test_a_change_of_size_counts_from_the_next_step():
    run = Batches(BatchSize(4, 2), 0, 1)
    lists = run.indices(np.arange(10), 0)
    assert next(lists) == [0, 1]
    run.size = BatchSize(6, 6)
    assert list(lists) == [[2, 3], [4, 5, 6, 7, 8, 9]]


def test_a_stream_is_dealt_out_alike():
    order = np.arange(23)
    for rank in range(3):
        by_index, by_item = (Batches(BatchSize(7, 2), rank, 3) for _ in range(2))
        assert list(by_index.indices(order, 5)) == list(by_item.items(iter(range(5, 23))))
        assert by_index.parts == by_item.parts


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_no_batch_of_nothing(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="at least 1 sample"):
        BatchSize(*sizes)


def test_with_drop_last_an_epoch_ends_before_a_smaller_step():
    """10 samples in steps of 4, each of two replicas 2 at a time: 8 are taken; from position 4 on, 4."""
    order = np.arange(10)
    first, second = (Batches(BatchSize(4, 2), rank, 2, drop_last=True) for rank in range(2))
    assert list(first.indices(order, 0)) == [[0, 1], [4, 5]]
    assert list(second.indices(order, 4)) == [[6, 7]]
    assert list(first.items(iter("abcdefghij"))) == [["a", "b"], ["e", "f"]]
    assert list(first.indices(order, 8)) == []


@given(st.integers(1, 120), st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_the_number_of_batches_is_known_before(samples: int, replicas: int, total: int, atomic: int, drop_last: bool):
    batches = Batches(BatchSize(total, atomic), 0, replicas, drop_last=drop_last)
    assert batches.count(samples) == len(list(batches.indices(epoch_order(samples, 0, 7), 0)))
