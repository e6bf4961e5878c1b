from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from penstock_loopback import LoopbackCluster
from penstock_loopback.fixtures import MakeLoopback
from penstock_slurm.install.sitefile import NAME, site_lua
from penstock_slurm.install.units import build_plugin, source
from penstock_slurm.settings import SlurmSettings
from tests.end_to_end.site import UNFORESEEN, Site


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(slurm: LoopbackCluster, **settings: object) -> Site:
        sites.append(Site(slurm, tmp_path, **settings))
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


@pytest.fixture
def make_flag_site(tmp_path: Path, make_loopback: MakeLoopback, make_site: Callable[..., Site]) -> Callable[..., Site]:
    """Makes sites with sbatch's flags, on t4:1x4,a100:1x8 unless told otherwise; penstockd is not started yet."""
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    (tmp_path / "penstock.so").write_bytes(build_plugin())
    files = {name: (source("lua") / name).read_text() for name in ("job_submit.lua", "penstock.lua")}
    files["plugstack.conf"] = f"optional {tmp_path}/penstock.so\n"

    def make(
        nodes: str = "t4:1x4,a100:1x8", settings: Mapping[str, str] = MappingProxyType({}), **slurm: object
    ) -> Site:
        cluster = make_loopback(
            nodes,
            settings={"JobSubmitPlugins": "lua"} | dict(settings),
            files=files,
            accounting=slurm.pop("accounting", False),
        )
        site = make_site(cluster)
        site.slurm_settings |= slurm
        section = SlurmSettings.model_validate({"partitions": site.partitions, "spool_dir": site.spool} | slurm)
        lua = site_lua(
            section, site.gateway.partitions(), site.gateway.nodes(), {"gone"}, {0}, cloud=False, memory=False
        )
        (cluster.slurm_conf.parent / NAME).write_text(lua)
        return site

    return make


@pytest.fixture
def flag_site(make_flag_site: Callable[..., Site]) -> Site:
    """penstockd on t4:1x4,a100:1x8 with sbatch's flags; the list for job_submit.lua has a family that the daemon's lacks."""
    site = make_flag_site()
    site.start()
    return site
