"""The example in `examples/numpy_mlp`, with real processes."""

import random
import time
from pathlib import Path

import numpy as np
import pytest

from .spool import ROOT, bodies, job_environment, process, tell, wait_for

STEPS = 1500


def train(folder: Path, spool: Path | None = None, steps: int = STEPS):
    return process(
        *(ROOT / "examples" / "numpy_mlp" / "train.py", "--checkpoint-dir", folder / "ckpt", "--steps", str(steps)),
        *("--checkpoint-every", "400", "--weights", folder / "weights.npz"),
        environment=job_environment(spool),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and standard error of an uninterrupted training."""
    folder = tmp_path_factory.mktemp("whole")
    with train(folder) as child:
        said = child.communicate(timeout=240)[1]
    assert child.returncode == 0, said
    return folder, said


def test_interrupted_or_not_the_weights_are_the_same_to_the_bit(tmp_path: Path, whole: tuple[Path, str]):
    chance = random.Random()
    endings: list[int] = []
    folder = tmp_path / "0"
    while endings[-1:] != [0]:
        folder.mkdir(exist_ok=True)
        with train(folder) as child:
            epoch = folder / "ckpt" / f"epoch-{len(endings) + 1:04d}"
            wait_for(epoch.exists, "start")
            time.sleep(chance.uniform(0.05, 0.6))
            if len(endings) < 3:
                child.kill() if chance.random() < 0.25 else child.terminate()
            endings.append(child.wait(timeout=240))
        if endings == [0]:  # it was done before it was interrupted: once more
            endings, folder = [], tmp_path / str(int(folder.name) + 1)
    assert 143 in endings or -9 in endings
    with np.load(whole[0] / "weights.npz") as expected, np.load(folder / "weights.npz") as got:
        assert got.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])


def test_it_takes_part(tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    with train(tmp_path, spool, steps=1_000_000) as child:
        seen = wait_for(lambda: bodies(spool, 1, "observation"), "observation")[0]
        assert (seen.gpu_type, seen.atomic_batch, seen.progress % 128) == ("cpu", 128, 0)
        assert 1e-5 < seen.step_time_s < 10
        tell(spool, 1, "save")
        wait_for(lambda: [b for b in bodies(spool, 1, "checkpointed") if b.request == "save"], "answer")
        child.terminate()
        assert child.wait(timeout=240) == 143
    (ended,) = bodies(spool, 1, "ended")
    assert ended.outcome == "stopped"
    with train(tmp_path, spool, steps=1_000_000):
        (started,) = wait_for(lambda: bodies(spool, 2, "started"), "second start")
        assert started.progress == ended.progress > 0
        tell(spool, 3)
        wait_for(lambda: bodies(spool, 2, "ended"), "end")
        assert bodies(spool, 2, "ended")[0].outcome == "superseded"


def test_it_learns(whole: tuple[Path, str]):
    assert float(whole[1].rsplit("accuracy ", 1)[1]) > 0.9
