from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, LoopbackError
from penstock_loopback.fixtures import skip_without_slurm
from tests.folders import public_folder
from tests.slurm_plugin.flags.site import FlagSite


@pytest.fixture(scope="session")
def _flag_site() -> Iterator[FlagSite]:
    skip_without_slurm(accounting=False)
    if shutil.which("make") is None or shutil.which("cc") is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    # Other users must reach the plugin and slurm.conf.
    with public_folder() as folder, LoopbackCluster(folder / "slurm", "t4:2x4,rtx:2x8,a100:2x8") as cluster:
        site = FlagSite(folder, cluster)
        site.install()
        yield site


@pytest.fixture
def flags(_flag_site: FlagSite) -> Iterator[FlagSite]:
    """A site with sbatch's flags, where adaptive jobs are held. It is reset after each test."""
    yield _flag_site
    try:
        _flag_site.slurm.reset()
    except LoopbackError:
        _flag_site.slurm.down()
        raise
