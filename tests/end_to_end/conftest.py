from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_slurm.loopback import LoopbackCluster
from tests.end_to_end.site import UNFORESEEN, Site


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(slurm: LoopbackCluster, **daemon: object) -> Site:
        sites.append(Site(slurm, tmp_path, **daemon))
        return sites[-1]

    yield make
    for site in sites:
        site.stop()
    for site in sites:
        assert not site.log.exists() or UNFORESEEN not in site.log.read_text(), site.tail()


@pytest.fixture
def site(loopback: LoopbackCluster, make_site: Callable[..., Site]) -> Site:
    """A site on the shared cluster t4:2x4,rtx:2x8,a100:2x8, with penstockd running."""
    made = make_site(loopback)
    made.start()
    return made
