"""The jobs of the playground, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_loopback.playground import arrivals


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


def test_a_long_log_loses_its_older_half_and_its_daemon_writes_on(tmp_path: Path) -> None:
    path = tmp_path / "slurmctld.log"
    with path.open("ab", buffering=0) as daemon:
        for number in range(200):
            daemon.write(b"line %06d\n" % number)  # 12 bytes each
        arrivals.shorten(path, most=2400)
        assert path.stat().st_size == 2400
        arrivals.shorten(path, most=1200)
        daemon.write(b"line 000200\n")
    lines = path.read_text().splitlines()
    assert lines == [f"line {number:06d}" for number in range(151, 201)]  # 50 lines, of which the first was cut
