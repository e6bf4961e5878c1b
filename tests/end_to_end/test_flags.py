"""A job that was submitted with sbatch's flags runs under a real penstockd."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_scheduler.model import parse_wish
from penstock_slurm.install.sources import build_plugin, source
from penstock_slurm.loopback import wait_for
from penstock_slurm.loopback.fixtures import MakeLoopback
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm


@pytest.fixture
def flag_site(tmp_path: Path, make_loopback: MakeLoopback, make_site: Callable[..., Site]) -> Site:
    """penstockd on t4:1x4,a100:1x8 with sbatch's flags; the partitions' list is written by hand."""
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    (tmp_path / "penstock.so").write_bytes(build_plugin())
    nodes = '{t4 = {["t4-00"] = 4}, a100 = {["a100-00"] = 8}}'
    listing = (
        f'return {{families = {{gone = true}}, admins = {{}}, partitions = {{{{name = "all", types = {nodes}}}}}}}'
    )
    files = {name: (source("lua") / name).read_text() for name in ("job_submit.lua", "penstock.lua")}
    slurm = make_loopback(
        "t4:1x4,a100:1x8",
        settings={"JobSubmitPlugins": "lua"},
        files=files | {"penstock_site.lua": listing, "plugstack.conf": f"optional {tmp_path}/penstock.so\n"},
    )
    site = make_site(slurm)
    site.start()
    return site


def test_a_job_with_flags_is_placed_within_its_wish_and_completes(flag_site: Site) -> None:
    trainer = [
        f"exec {shlex.quote(sys.executable)} -m penstock_executor.emulated --rates {shlex.quote(json.dumps(RATES))}",
        f"--work 60 --time-scale 1 --checkpoint-dir {shlex.quote(str(flag_site.folder))}/checkpoints/$SLURM_JOB_ID",
        "--start-seconds 0.1 --save-seconds 0.1 --report-every 0.3",
    ]
    flags = ("--adaptive", "--min-gpus=2", "--max-gpus=4", "--gpu-types=^t4", f"--output={flag_site.folder}/%j.out")
    job = flag_site.sbatch(*flags, f"--wrap={' '.join(trainer)}")
    flag_site.wait_states("COMPLETED", job)
    starts = flag_site.starts(job)
    assert starts
    assert {(gpu_type, gpus) for gpu_type, gpus, _ in starts} <= {("a100", 2), ("a100", 4)}


def test_what_the_daemon_says_stands_beside_the_wish(flag_site: Site) -> None:
    """The list for job_submit.lua is older than the daemon's catalogue, and has a family that is gone."""
    job = flag_site.sbatch("--adaptive", "--max-gpus=4", "--model-family=gone", "--wrap=true")
    before = parse_wish(flag_site.job(job).admin_comment)

    def told() -> bool:
        return "penstock_says" in flag_site.job(job).admin_comment

    wait_for(told, 30, "the daemon's word", details=flag_site.tail)
    after = flag_site.job(job).admin_comment
    assert "'gone'" in json.loads(after)["penstock_says"]
    assert parse_wish(after) == before
    number = flag_site.wait_round()
    flag_site.wait_round(number)
    assert flag_site.job(job).admin_comment == after  # and is not said again and again
    assert flag_site.states(job) == {job: "PENDING"}
