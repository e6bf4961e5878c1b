"""What Slurm's commands say is written in answers-RELEASE.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_loopback.fixtures import MakeLoopback
from tests.reality.answers import NODES, table

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_slurm_answers_as_it_is_written(make_loopback: MakeLoopback) -> None:
    cluster = make_loopback(NODES)
    release = ".".join(cluster.command("scontrol", "-V").stdout.split()[1].split(".")[:2])
    written = Path(__file__).with_name(f"answers-{release}.md")
    if not written.exists():
        pytest.skip(f"{written.name} is not written: python -m tests.reality.answers does it")
    assert table(cluster).splitlines() == written.read_text().splitlines()
