"""The jobs of the playground, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_slurm.playground import arrivals


def test_the_oldest_outputs_and_checkpoints_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "KEPT", 2)
    for name in ("newer", "oldest", "newest", "old"):
        path = tmp_path / name
        if name == "oldest":
            (path / "parts").mkdir(parents=True)
        else:
            path.touch()
        os.utime(path, (0, {"oldest": 1, "old": 2, "newer": 3, "newest": 4}[name]))
    arrivals.forget_old(tmp_path.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"newer", "newest"}
