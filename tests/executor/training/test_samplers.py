"""Orders of samples by a sampler of the script's own."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.training import samplers  # noqa: E402

Data = torch.utils.data


@pytest.mark.parametrize(
    "sampler",
    [
        Data.WeightedRandomSampler([1.0, 2.0, 3.0], 50),
        Data.RandomSampler(range(50)),
        Data.RandomSampler(range(50), generator=torch.Generator()),
        Data.SubsetRandomSampler(range(50)),
    ],
)
def test_the_order_follows_from_seed_and_epoch_and_disturbs_no_generator(sampler):
    before = torch.get_rng_state()
    samplers.check(sampler, range(50), 3)
    one, same, other = (samplers.order(sampler, epoch, 3).tolist() for epoch in (4, 4, 5))
    assert one == same != other
    assert len(one) == 50
    assert torch.equal(torch.get_rng_state(), before)


class Own:
    """Draws from a generator that nobody can seed."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 50

    def __iter__(self):
        return iter(self.random.permutation(50))


class Stream:
    stream = None


@pytest.mark.parametrize(
    ("sampler", "dataset", "words"),
    [
        (Own(), range(50), "sampler=Own draws another order when it is asked again"),
        (Data.distributed.DistributedSampler(range(50), 2, 0), range(50), "divides the samples among the processes"),
        (Data.SequentialSampler(range(50)), Stream(), "the data set is a stream"),
    ],
)
def test_a_sampler_that_does_not_suit_is_refused(sampler, dataset, words: str):
    with pytest.raises(ValueError, match=words):
        samplers.check(sampler, dataset, 0)
