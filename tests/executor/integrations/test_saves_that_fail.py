"""A checkpoint that only Penstock wants and that cannot be written ends no training of Lightning or Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..spool import bodies, tell, wait_for

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from .test_callbacks import monitor_at
from .test_callbacks_alone import integration as integration

NO_SPACE = OSError(28, "No space left on device")


class Monitor:
    """A training monitor that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.wishes: tuple[bool, bool] = (True, False)
        self.others_failed = False

    def step_done(self, steps: int) -> tuple[bool, bool]:
        return self.wishes

    def saved(self) -> None:
        self.told.append("saved")

    def not_saved(self, reason: object) -> None:
        self.told.append(str(reason))

    def any_process(self, flag: bool) -> bool:
        self.told.append("all")
        return flag or self.others_failed

    def leave(self) -> None:
        self.told.append("left")


def test_a_save_that_failed_is_tried_again_a_minute_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """It answers the request then. A failed first save is tried again as well."""
    clock = SimpleNamespace(now=0.0)
    run, _ = monitor_at(clock, tmp_path, monkeypatch)

    def save_at(now: float, step: int) -> bool:
        clock.now = now
        save, stop = run.step_done(step)
        assert not stop
        return save

    assert [save_at(4.0, 1), save_at(5.1, 2)] == [False, True], "the first report"
    run.not_saved(NO_SPACE)
    assert "step=2 no checkpoint written: [Errno 28] No space left on device; trying again in 60 s" in caplog.text
    assert [save_at(now, step) for step, now in enumerate((6.0, 40.0, 65.0, 65.2, 65.3), 3)] == [False] * 3 + [
        True,
        False,
    ]
    run.saved()
    tell(tmp_path, 1, "now")
    wait_for(lambda: run._reporter.request, "request")
    assert save_at(70.0, 8)
    run.not_saved(NO_SPACE)
    assert [save_at(129.0, 9), save_at(131.0, 10)] == [False, True]
    run.saved()
    assert not save_at(300.0, 11)
    run.end()
    assert [(each.request, each.progress) for each in bodies(tmp_path, 1, "checkpointed")] == [(None, 56), ("now", 80)]


class Lightning:
    """A Trainer of Lightning whose disk is full after the first bytes of a checkpoint."""

    is_global_zero, global_step = True, 0

    def __init__(self) -> None:
        self.full = True
        self.barriers: list[str] = []
        self.strategy = SimpleNamespace(barrier=self.barriers.append)

    def save_checkpoint(self, path: Path) -> None:
        path.write_text(f"step {self.global_step}")
        if self.full:
            raise NO_SPACE
        self.strategy.barrier("Trainer.save_checkpoint")


@pytest.fixture
def lightning(tmp_path: Path, integration: Callable[[str], Any]) -> tuple[Any, Lightning, Monitor]:
    callback = integration("lightning").PenstockCallback(tmp_path, 8)
    monitor = callback._monitor = Monitor()
    return callback, Lightning(), monitor


def test_lightning_trains_on_after_a_save_of_penstocks_that_failed(lightning, tmp_path: Path):
    callback, trainer, monitor = lightning
    for step, full in enumerate((False, True, False), 1):
        trainer.global_step, trainer.full = step, full
        callback.on_train_batch_end(trainer, None)
        assert (tmp_path / "penstock.ckpt").read_text() == f"step {1 if full else step}"
    assert monitor.told == ["saved", str(NO_SPACE), "saved"]
    assert trainer.barriers == ["Trainer.save_checkpoint"] * 3, "the other processes wait there"
    assert [path.name for path in tmp_path.iterdir()] == ["penstock.ckpt"]


def test_lightning_trains_on_if_the_file_cannot_be_renamed(lightning, tmp_path: Path):
    callback, trainer, monitor = lightning
    (tmp_path / "penstock.ckpt").mkdir()
    trainer.global_step, trainer.full = 1, False
    callback.on_train_batch_end(trainer, None)
    assert "Is a directory" in monitor.told[0]
    assert trainer.barriers == ["Trainer.save_checkpoint"]
    assert [path.name for path in tmp_path.iterdir()] == ["penstock.ckpt"]


@pytest.mark.parametrize("why", ["stop", "epoch"])
def test_lightning_fails_if_it_cannot_save_when_it_stops_or_at_the_end_of_an_epoch(lightning, tmp_path: Path, why: str):
    callback, trainer, monitor = lightning
    trainer.global_step, monitor.wishes = 1, (True, True)
    with pytest.raises(OSError, match="No space left"):
        callback.on_train_batch_end(trainer, None) if why == "stop" else callback.on_train_epoch_end(trainer, None)
    assert monitor.told == []
    assert trainer.barriers == ["Trainer.save_checkpoint"]
    assert list(tmp_path.iterdir()) == []


class HuggingFace:
    """A Trainer whose disk is full at a certain file of a checkpoint; as much of its loop as a step has."""

    is_fsdp_enabled = is_deepspeed_enabled = False

    def __init__(self, folder: Path, callback: Any, full: str | None) -> None:
        self.args = SimpleNamespace(output_dir=str(folder), should_save=True, world_size=2)
        self.state = SimpleNamespace(global_step=0, max_steps=9, best_global_step=None, is_world_process_zero=True)
        self.control = SimpleNamespace(should_save=False, should_evaluate=False)
        self.callback_handler = SimpleNamespace(callbacks=[object(), callback])
        self.callback, self.full = callback, full

    def _save_checkpoint(self, model: object, trial: object) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir()
        for name, content in (("model", "w"), ("trainer_state.json", "{}"), ("rotation", "")):
            if name == self.full:
                raise NO_SPACE
            (folder / name).write_text(content)

    def step(self, *, own_save: bool = False) -> None:
        self.state.global_step += 1
        self.control.should_save = own_save
        self.callback.on_step_end(self.args, self.state, self.control)
        if self.control.should_save:
            self._save_checkpoint(None, None)
            self.callback.on_save(self.args, self.state, self.control)


@pytest.fixture
def hugging_face(tmp_path: Path, integration: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch):
    """Makes a Trainer with the callback, and its monitor."""

    def make(full: str | None) -> tuple[HuggingFace, Monitor]:
        trainer_class = type("Trainer", (HuggingFace,), {"_save_checkpoint": HuggingFace._save_checkpoint})
        module = integration("huggingface")
        monkeypatch.setattr(module, "Trainer", trainer_class)
        callback = module.PenstockCallback()
        monitor = callback._monitor = Monitor()
        return trainer_class(tmp_path, callback, full), monitor

    return make


def test_hugging_face_trains_on_after_a_save_of_penstocks_that_failed(hugging_face, tmp_path: Path):
    trainer, monitor = hugging_face("trainer_state.json")
    trainer.step()
    assert monitor.told == ["all", str(NO_SPACE)]
    assert list(tmp_path.iterdir()) == [], "the Trainer would count it among those that it keeps"
    trainer.full = None
    trainer.step()
    assert monitor.told[2:] == ["all", "saved"]
    monitor.others_failed = True
    trainer.step()
    assert monitor.told[4:] == ["all", "another process could not write its part"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"], "both are whole"


def test_hugging_face_keeps_a_whole_checkpoint_if_older_ones_cannot_be_removed(hugging_face, tmp_path: Path):
    trainer, monitor = hugging_face("rotation")
    trainer.step()
    assert monitor.told == ["all", str(NO_SPACE)]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("why", ["stop", "own", "fsdp", "best"])
def test_hugging_face_fails_as_before_if_its_own_save_does_or_processes_wait_for_each_other(hugging_face, why: str):
    trainer, monitor = hugging_face("model")
    monitor.wishes = (True, why == "stop")
    trainer.is_fsdp_enabled = why == "fsdp"
    trainer.state.best_global_step = 5 if why == "best" else None
    with pytest.raises(OSError, match="No space left"):
        trainer.step(own_save=why == "own")
    assert monitor.told == []


def test_hugging_face_trains_on_if_what_the_batch_has_learned_cannot_be_written(hugging_face, tmp_path: Path, caplog):
    trainer, monitor = hugging_face(None)
    trainer.callback.batch = SimpleNamespace(state_dict=dict)
    trainer.state.global_step = 3
    (tmp_path / "checkpoint-3" / "penstock.json").mkdir(parents=True)
    trainer.callback.on_save(trainer.args, trainer.state, trainer.control)
    assert monitor.told == ["saved"]
    assert "Is a directory" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoint-3").iterdir()] == ["penstock.json"]
    (tmp_path / "checkpoint-3" / "penstock.json").rmdir()
    trainer.callback.on_save(trainer.args, trainer.state, trainer.control)
    assert json.loads((tmp_path / "checkpoint-3" / "penstock.json").read_text()) == {}
