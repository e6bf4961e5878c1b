"""Fixtures for tests of the agent and of the SPANK plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.profiles.fake_cuda import FakeCuda

from .cgroups import Slurm
from .node import Node


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slurm]:
    """Slurm's part in cgroups of both versions. Tests are skipped for a version that this machine lacks."""
    made = Slurm(request.param, tmp_path / "slurm")
    yield made
    made.close()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(**settings: object) -> Node:
        nodes.append(Node(tmp_path, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A stand-in for NVIDIA's driver."""
    made = FakeCuda(tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made
