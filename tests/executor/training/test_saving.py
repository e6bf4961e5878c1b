"""What a checkpoint can hold."""

import collections
import pathlib

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor import Checkpoints
from penstock_executor.environment import Ranks
from penstock_executor.training.processes import Group
from penstock_executor.training.saving import CannotSave, Saver, copied, from_bytes, to_bytes
from penstock_executor.training.state import TrainingState

FULL = pathlib.Path("/dev/full")


class Own:
    """An object of the script's own."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return {"of": [self.state]}

    def load_state_dict(self, state: dict) -> None:
        self.state = state["of"][0]


def test_values_of_numpy_are_saved_such_that_they_load():
    state = {"rate": np.float64(0.1), "steps": np.int64(3), "done": np.bool_(True), "mean": np.arange(3.0)}
    state |= {"name": np.str_("ema"), "nested": [(np.float32(0.5),), {np.int64(2): None}], "size": torch.Size([2])}
    found = from_bytes(to_bytes(copied(state)))
    assert found.pop("mean").tolist() == [0, 1, 2]
    assert found == {
        "rate": 0.1,
        "steps": 3,
        "done": True,
        "name": "ema",
        "nested": [(0.5,), {2: None}],
        "size": torch.Size([2]),
    }
    assert {type(found[name]) for name in ("rate", "steps", "done", "name")} == {float, int, bool, str}


@pytest.mark.parametrize(
    "value", [pathlib.Path("x"), collections.namedtuple("Pair", "a")(1), np.array(["a"]), lambda: None]
)
def test_what_would_not_load_is_refused_at_the_start_by_name(value: object):
    model = torch.nn.Linear(1, 1)
    group = Group(Ranks(rank=0, world=1, local_rank=0, local_world=1))
    own = {"ema": Own(value)}
    state = TrainingState(group, own, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CannotSave, match=r"ema\['of'\]\[0\].* is a .*let state_dict return numbers"):
        state.check()


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_piece_that_a_full_disk_refused_does_not_keep_it_full(tmp_path: pathlib.Path):
    checkpoints = Checkpoints(tmp_path, 1)
    saver = Saver(checkpoints)
    saver.parts = True
    folder = checkpoints.shards_folder(8, 1)
    folder.mkdir()
    (folder / "part-0.pt").symlink_to(FULL)
    told: list[float] = []
    saver.save({}, 8, {}, told.append, {"w": torch.ones(100_000)})
    saver.wait()
    assert "No space left" in str(saver.failure)
    assert not folder.exists()
    saver.save({}, 9, {}, told.append, {"w": torch.ones(3)})
    saver.wait()
    assert (saver.failure, len(told), checkpoints.latest().step) == (None, 1, 9)
