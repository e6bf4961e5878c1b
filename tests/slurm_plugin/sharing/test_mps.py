"""The MPS variables of tasks, on a real Slurm with a real agent. Files stand in for those of a control daemon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import Pack, SharedGpus
from tests.slurm_plugin.sharing.rig import NODE, Rig, packs

pytestmark = pytest.mark.slurm


def test_packs_use_the_sites_mps_until_their_group_has_time_slices(make_loopback, tmp_path: Path) -> None:
    """A job that is alone on its GPU is no client. When time slices begin, both jobs restart without MPS."""
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    pipes = tmp_path / "mps"
    pipes.mkdir()
    os.mkfifo(pipes / "control")
    rig = Rig(make_loopback("t4:1x2", agents=True), tmp_path)
    with rig.slurm.settings_file.open("a") as settings:
        settings.write(f"mps_dir = '{pipes}'\n")
    rig.slurm.kill_agent(NODE)
    rig.slurm.start_agent(NODE)
    wait_for(lambda: (status := rig.status()) is not None and status.lacks == (), 120, "the agent to answer")

    alone, first, second = rig.submit(), rig.submit(), rig.submit()
    pack = Pack((first, second))
    rig.wants(dict.fromkeys((alone, first, second), 1), SharedGpus(NODE, 1, (pack,)))
    rig.until(lambda: all(rig.sees(job) is not None for job in (alone, first, second)), "all run")
    assert rig.sees(first) == rig.sees(second) != rig.sees(alone)
    assert [rig.mps(job) for job in (alone, first, second)] == ["", str(pipes), str(pipes)]

    third = rig.submit()
    rig.slurm.command("scancel", alone)
    group = SharedGpus(NODE, 1, (pack, *packs(third)), slice_s=2.0)
    rig.wants(dict.fromkeys((first, second, third), 1), group)
    runs = {job: len((rig.folder / f"mps-{job}").read_text().splitlines()) for job in (first, second)}
    rig.until(
        lambda: all(len((rig.folder / f"mps-{job}").read_text().splitlines()) > runs[job] for job in runs),
        "both restart",
    )
    rig.until(lambda: rig.sees(third) is not None, "the third has its time slice")
    assert {rig.mps(job) for job in (first, second, third)} == {""}
