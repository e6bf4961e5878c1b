from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_slurm.loopback import LoopbackCluster, LoopbackError, ProgramsMissing, machine
from tests.slurm_plugin.flags.site import FlagSite


@pytest.fixture(scope="session")
def _flag_site() -> Iterator[FlagSite]:
    try:
        machine.check_programs(accounting=False)
    except ProgramsMissing as missing:
        pytest.skip(str(missing))
    if shutil.which("make") is None or shutil.which("cc") is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    # Not pytest's folder: other users must reach the plugin and slurm.conf.
    folder = Path(tempfile.mkdtemp(prefix="penstock-flags-", dir="/tmp"))
    folder.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = stack.enter_context(LoopbackCluster(folder / "slurm", "t4:2x4,rtx:2x8,a100:2x8"))
        site = FlagSite(folder, cluster)
        site.install()
        yield site


@pytest.fixture
def flags(_flag_site: FlagSite) -> Iterator[FlagSite]:
    """A site with sbatch's flags, whose jobs are held; each test finds it without jobs and with every node idle."""
    yield _flag_site
    try:
        _flag_site.slurm.reset()
    except LoopbackError:
        _flag_site.slurm.down()
        raise
