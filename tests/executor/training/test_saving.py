"""What a checkpoint can hold."""

import collections
import io
import json
import pathlib
import resource
from functools import partial
from typing import BinaryIO

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor import Checkpoint, Checkpoints, checkpoint
from penstock_executor.environment import Ranks
from penstock_executor.training.processes import Group
from penstock_executor.training.saving import CannotSave, Saver, copied, kinds, load, random_states
from penstock_executor.training.state import TrainingState
from tests.forking import FORKING

FULL = pathlib.Path("/dev/full")


def to_bytes(state: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("buffer", [16, 64, 10**6])
def test_copies_through_buffers_are_whole(monkeypatch: pytest.MonkeyPatch, buffer: int):
    """Tensors of a GPU go through two small buffers. Here they are on the processor, which waits for nothing."""
    from penstock_executor.training import host_copies

    monkeypatch.setattr(host_copies, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(host_copies, "ARENA_BYTES", 256)
    tensors = [
        torch.randn(7, 5),
        torch.arange(3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(4, 6).T,
        torch.tensor([True, False]),
        torch.randn(9).bfloat16(),
        torch.randn(100),
    ]
    copies = host_copies.HostCopies()
    copied_ = [copies.copy_from_gpu(each) for each in tensors]
    before = [each.clone() for each in tensors]
    copies.finish()
    for each in tensors:
        each.zero_()
    for copy, was in zip(copied_, before, strict=True):
        assert (copy.dtype, copy.shape) == (was.dtype, was.shape)
        assert torch.equal(copy, was)


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
    found = load(io.BytesIO(to_bytes(copied(state))))
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


def test_a_first_checkpoint_counts_only_once_it_has_been_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    saver, told, texts = Saver(Checkpoints(tmp_path, 1)), [], []
    saver.tell = texts.append
    write = checkpoint._write
    for step, damages in ((1, True), (2, False), (3, True)):
        monkeypatch.setattr(checkpoint, "_write", _cut if damages else write)
        saver.save({"w": torch.ones(9)}, step, {}, lambda _, step=step: told.append(step))
        saver.wait()
    assert told == [2, 3], "later ones are not read again"
    assert "cannot be loaded" in texts[0]
    assert "it is truncated" in texts[0]
    assert not (tmp_path / "epoch-0001" / "step-000000000001.ckpt").exists()


def _cut(file: BinaryIO, *arguments: object, write=checkpoint._write) -> None:
    """As a file system does that answers before it writes."""
    write(file, *arguments)
    file.truncate(file.seek(0, 2) - 1)


class Packed(torch.Tensor):
    """As the states of some optimisers are: PyTorch saves it, and refuses to load it (weights_only=True)."""


def packed() -> torch.Tensor:
    return torch.ones(3).as_subclass(Packed)


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_a_state_of_a_new_kind_is_loaded_before_it_counts_and_costs_no_earlier_checkpoint(
    tmp_path: pathlib.Path, parts: bool
):
    saver, told, texts = Saver(Checkpoints(tmp_path, 1)), [], []
    saver.tell, saver.parts = texts.append, parts

    def save(step: int, **late: torch.Tensor) -> None:
        state = {"w": torch.ones(9), "optimizer": {0: late}}
        whole, piece = ({"random": []}, state) if parts else (state, None)
        saver.save(whole, step, {}, lambda _: told.append(step), piece)
        saver.wait()

    save(1)
    for step in (2, 3, 4):
        save(step, mean=packed())
    assert told == [1]
    assert len(texts) == 3
    assert "cannot be loaded" in texts[0]
    assert "Packed" in texts[0]
    assert saver.checkpoints.latest().step == 1
    save(5, mean=torch.ones(3))
    assert (told, saver.failure) == ([1, 5], None)


def test_only_a_state_of_a_new_kind_is_loaded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Another parameter with a state, a longer list and other sizes are of the same kind."""
    saver, read, load = Saver(Checkpoints(tmp_path, 1)), [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: read.append(step) or load(*a, **k))
    ones, twos = torch.ones(9), torch.ones(2, 2)
    mean = {"mean": ones}
    for step, state in enumerate(
        (
            {"optimizer": {0: mean}, "losses": [0.5]},
            {"optimizer": {0: {"mean": twos}, 1: mean}, "losses": [0.5, 0.4]},
            {"optimizer": {0: mean | {"square": twos}}, "losses": [0.5]},
            {"optimizer": {0: {"mean": ones.half()}}, "losses": [0.5]},
            {"optimizer": {0: mean}, "losses": [0.5], "average": {}},
            {"optimizer": {0: mean}, "losses": [0.5, "nan"]},
            {"optimizer": {0: mean}, "losses": []},
        )
    ):
        saver.save(state, step, {}, lambda _: None)
        saver.wait()
    assert read == [0, 2, 3, 4, 5]


def test_what_a_checkpoint_lacks_does_not_begin_anew_without_a_word(caplog: pytest.LogCaptureFixture):
    """Of a loop of the script's own, each object may be a model. With `prepare`, it is something beside the model."""
    group = Group(Ranks(rank=0, world=1, local_rank=0, local_world=1))
    cpu, maker, judge = torch.device("cpu"), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state, _ = TrainingState(group, {"maker": maker}).collect([random_states()])
    found = Checkpoint(1, 8, to_bytes(state))
    with pytest.raises(RuntimeError, match="step 8 lacks judge, which would begin anew"):
        TrainingState(group, {"maker": maker, "judge": judge}).restore(found, None, cpu)
    with torch.no_grad():
        before = maker.weight.item()
        maker.weight.fill_(7)
    TrainingState(group, {"maker": maker}).restore(found, None, cpu)
    assert maker.weight.item() == before
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    state, _ = TrainingState(group, {}, model=maker, optimizer=optimizer).collect([random_states()])
    found = Checkpoint(1, 8, to_bytes(state))
    TrainingState(group, {"average": judge}, model=maker, optimizer=optimizer).restore(found, None, cpu)
    assert "the checkpoint lacks average, which begins anew" in caplog.text


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


SMALL = 100_000
"""Bytes of a file in `with_small_files`."""


def with_small_files(folder: pathlib.Path, action) -> object:
    """What `action` returns in a process whose files are full at `SMALL` bytes. Unlike /dev/full, they take the first bytes."""
    child = FORKING.Process(target=_with_small_files, args=(folder / "answer", action))
    child.start()
    child.join(240)
    assert child.exitcode == 0
    return json.loads((folder / "answer").read_text())


def _with_small_files(answer: pathlib.Path, action) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))
    answer.write_text(json.dumps(action()))


def save_on_a_disk_that_fills_up(folder: pathlib.Path, *, parts: bool) -> list[object]:
    """The last good step, the failure, the steps that were reported as saved and the files that are left."""
    saver, told = Saver(Checkpoints(folder, 1)), []
    saver.parts = parts
    for step, size in ((1, 3), (2, SMALL)):
        piece = {"w": torch.ones(size)}
        whole, sharded = ({}, piece) if parts else (piece, None)
        saver.save(whole, step, {}, lambda _, step=step: told.append(step), sharded)
        saver.wait()
    left = sorted(path.name for path in folder.glob("epoch-0001/*"))
    return [saver.checkpoints.latest().step, str(saver.failure), told, left]


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_a_disk_that_fills_up_during_a_save_is_a_failure_with_the_disks_reason(tmp_path: pathlib.Path, parts: bool):
    """PyTorch then raises a RuntimeError about positions in its file."""
    action = partial(save_on_a_disk_that_fills_up, tmp_path / "job", parts=parts)
    step, failure, told, left = with_small_files(tmp_path, action)
    assert "File too large" in failure
    assert "earlier checkpoints are whole" in failure
    assert (step, told) == (1, [1])
    assert left == ["step-000000000001.1.shards", "step-000000000001.ckpt"][0 if parts else 1 :]


def test_any_error_of_a_save_is_a_failure_with_its_text(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    """The thread would end without a word, and the run with the claim that it has saved."""
    saver, told = Saver(Checkpoints(tmp_path, 1)), []
    saver.save({}, 1, {"not": object()}, told.append)
    saver.wait()
    assert "step=1 no checkpoint written: TypeError: Object of type object is not JSON serializable" in caplog.text
    assert "TypeError" in str(saver.failure)
    saver.save({}, 2, {}, told.append)
    saver.wait()
    assert (saver.failure, len(told)) == (None, 1)


def test_a_piece_whose_error_has_no_text_is_not_taken_for_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("penstock_executor.training.saving.write_part", run_out)
    saver, told = Saver(Checkpoints(tmp_path, 1)), []
    saver.parts = True
    saver.save({}, 1, {}, told.append, {"w": torch.ones(3)})
    saver.wait()
    assert "MemoryError" in str(saver.failure)
    assert not told


def test_a_list_of_numbers_is_looked_at_by_its_types_alone():
    """The order of a million samples cost 1.6 s of Python a save, in which steps wait for the interpreter."""
    assert len([*kinds({"order": list(range(1000))})]) == 3
    assert {*kinds([1, None])} == {": <class 'list'> ", "[]: <class 'int'> ", "[]: <class 'NoneType'> "}
    assert {*kinds([torch.ones(1), 2])} == {
        ": <class 'list'> ",
        "[]: <class 'torch.Tensor'> torch.float32",
        "[]: <class 'int'> ",
    }
