"""What PyTorch's own parts do in a move between numbers of processes in mid-epoch, and with a harmed file.

docs/decisions/0046-the-standard-parts.md draws its conclusions from these.
"""

import collections
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor import Checkpoints  # noqa: E402
from penstock_executor.checkpoint import Unreadable  # noqa: E402
from penstock_executor.training.batches import BatchSize  # noqa: E402
from penstock_executor.training.loader import Loader  # noqa: E402
from penstock_executor.training.state import TrainingState  # noqa: E402

SAMPLES, BATCH, STEPS = 80, 8, 3


def seen_twice_and_never(seen: list[int]) -> tuple[int, int]:
    counts = collections.Counter(seen)
    return sum(count > 1 for count in counts.values()), SAMPLES - len(counts)


def of_torchdata(processes: int, rank: int):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(SAMPLES), processes, rank, shuffle=True)
    return StatefulDataLoader(range(SAMPLES), BATCH // processes, sampler=sampler)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("processes", "twice", "never"), [(2, 0, 0), (1, 12, 0), (4, 0, 24)])
def test_torchdatas_loader_is_exact_only_on_as_many_processes(processes: int, twice: int, never: int):
    """Three steps on two processes, then the rest of the epoch. The state counts the samples of one process: 12."""
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    seen, states = [], []
    for rank in range(2):
        loader = of_torchdata(2, rank)
        for _, batch in zip(range(STEPS), loader, strict=False):
            seen += batch.tolist()
        states.append(loader.state_dict())
    for rank in range(processes):
        loader = of_torchdata(processes, rank)
        loader.load_state_dict(states[min(rank, 1)])
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert seen_twice_and_never(seen) == (twice, never)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_ours_is_exact_on_any_number(processes: int):
    def ours(count: int, rank: int, position: int) -> Loader:
        size = BatchSize(BATCH, -(-BATCH // count))
        place = {"seed": 0, "shuffle": True, "position": position, "drop_last": False}
        return Loader(range(SAMPLES), size, (rank, count), **place)

    seen = []
    for rank in range(2):
        for _, batch in zip(range(STEPS), ours(2, rank, 0), strict=False):
            seen += batch.tolist()
    for rank in range(processes):
        seen += [sample for batch in ours(processes, rank, STEPS * BATCH) for sample in batch.tolist()]
    assert seen_twice_and_never(seen) == (0, 0)


class StatefulDataLoader:
    """torchdata's is known by its name, so that it need not be imported."""


def test_torchdatas_loader_is_refused_in_mid_epoch_on_another_number_of_processes():
    group = types.SimpleNamespace(rank=0, world=2, gpus_per_replica=1)
    state = TrainingState(group, {"loader": StatefulDataLoader(), "average": torch.nn.Linear(1, 1)})

    def found(processes: int, steps: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(shards=None, meta={"gpus": ["t4", 1, processes], "epoch_steps": steps})

    for processes, steps in ((2, 3), (1, 0)):
        state._check_division(found(processes, steps))
    with pytest.raises(RuntimeError, match=r"^loader is torchdata's .* \(1 before, 2 now\): samples would be lost"):
        state._check_division(found(1, 3))


def flip_a_bit_of(value: torch.Tensor, path: Path) -> None:
    """In a file that holds these weights."""
    content = bytearray(path.read_bytes())
    place = content.find(value.numpy().tobytes())
    assert place > 0
    content[place + 1] ^= 0x40
    path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_pytorchs_checkpoint_loads_a_harmed_tensor_and_ours_does_not(tmp_path: Path):
    import torch.distributed.checkpoint as theirs

    value, loaded = torch.linspace(0, 1, 4096), {"weight": torch.zeros(4096)}
    theirs.save({"weight": value}, checkpoint_id=tmp_path / "theirs")
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    flip_a_bit_of(value, file)
    theirs.load(loaded, checkpoint_id=tmp_path / "theirs")
    assert (loaded["weight"] != value).sum() == 1, "no error"

    ours = Checkpoints(tmp_path / "ours", 1)
    flip_a_bit_of(value, ours.save({"weight": value.numpy()}, 1))
    with pytest.raises(Unreadable, match=r"none .* is whole"):
        ours.latest()
