"""The callbacks of Lightning and Hugging Face without these packages: stand-ins take the place of their base classes."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

PACKAGES = {
    "transformers": {"Trainer": object, "TrainerCallback": object, "__version__": "5.0.0"},
    "transformers.trainer_utils": {"PREFIX_CHECKPOINT_DIR": "checkpoint"},
    "lightning": {},
    "lightning.pytorch": {},
    "lightning.pytorch.callbacks": {"Callback": object},
}


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of `penstock_executor.integrations` by its name, with the stand-ins."""

    def load(name: str) -> Any:
        for package, content in PACKAGES.items():
            made = ModuleType(package)
            vars(made).update(content)
            monkeypatch.setitem(sys.modules, package, made)
        whole = f"penstock_executor.integrations.{name}"
        monkeypatch.delitem(sys.modules, whole, raising=False)
        found = importlib.import_module(whole)
        monkeypatch.setitem(sys.modules, whole, found)
        return found

    return load


def hugging_face(folder: Path, step: int, state: str | None) -> Path:
    """A checkpoint of the Trainer, with this content of the file that it writes last; None: it was killed before."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    if state is not None:
        (made / "trainer_state.json").write_text(state)
    return made


def test_the_newest_whole_checkpoint_of_hugging_face_is_found(tmp_path: Path, integration):
    latest = integration("huggingface").latest_checkpoint
    assert latest(tmp_path / "absent") is None
    hugging_face(tmp_path, 30, None)
    hugging_face(tmp_path, 20, "")
    assert latest(tmp_path) is None, "kills during the first saves: nothing else is lost"
    whole = hugging_face(tmp_path, 9, "{}")
    hugging_face(tmp_path, 10, '{"trunc')
    assert latest(tmp_path) == str(whole)


def test_hugging_face_does_not_begin_anew_beside_checkpoints_that_cannot_be_used(tmp_path: Path, integration):
    latest = integration("huggingface").latest_checkpoint
    for step in (10, 20):
        hugging_face(tmp_path, step, '{"trunc')
    with pytest.raises(OSError, match=r"none .* is whole \(checkpoint-20, checkpoint-10.*move"):
        latest(tmp_path)
    whole = hugging_face(tmp_path, 9, "{}")
    assert latest(tmp_path) == str(whole)
    cannot_be_read = whole / "trainer_state.json"
    cannot_be_read.unlink()
    cannot_be_read.symlink_to(cannot_be_read)
    with pytest.raises(OSError, match="Too many levels"):
        latest(tmp_path)


def test_lightning_does_not_begin_anew_if_it_cannot_look_for_the_checkpoint(tmp_path: Path, integration):
    callback = integration("lightning").PenstockCallback(tmp_path, 8)
    assert callback.latest() is None
    path = tmp_path / "penstock.ckpt"
    path.touch()
    assert callback.latest() == str(path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(OSError, match="Too many levels"):
        callback.latest()
