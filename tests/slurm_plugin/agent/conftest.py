"""What tests of the agent and of the SPANK plugin share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cgroups import Slurm


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slurm]:
    """Its part in cgroups of both versions; skipped where this machine lacks them."""
    made = Slurm(request.param, tmp_path / "slurm")
    yield made
    made.close()
