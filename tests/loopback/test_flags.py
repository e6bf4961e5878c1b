"""sbatch's adaptive flags on a loopback cluster have both halves: the SPANK plugin and job_submit.lua."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.cli import make_app
from penstock_slurm.gateway import CliGateway

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("cc") and Path("/usr/include/slurm/spank.h").exists()),
        reason="the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)",
    ),
]


@pytest.mark.parametrize("parts", [{"flags": True}, {"agents": True}], ids=["flags", "agents"])
def test_sbatch_refuses_wrong_flags_and_holds_good_jobs_for_penstockd(
    make_loopback: MakeLoopback, parts: dict[str, bool]
) -> None:
    cluster = make_loopback("t4:2x4", **parts)
    wrong = cluster.command(
        *("sbatch", "--adaptive", "--min-gpus=4", "--max-gpus=2", "--wrap=true", "--output=/dev/null"), check=False
    )
    assert wrong.returncode == 1, wrong
    assert "--min-gpus=4 is more than --max-gpus=2" in wrong.stderr

    job = cluster.command(
        *("sbatch", "--parsable", "--adaptive", "--max-gpus=2", "--wrap=true", "--output=/dev/null")
    ).stdout.strip()
    (seen,) = CliGateway(conf=cluster.slurm_conf, timeout_s=60).jobs()
    assert (seen.id, seen.held) == (job, True)
    assert json.loads(seen.admin_comment)["penstock"]["max_gpus"] == 2

    plain = cluster.command("sbatch", "--parsable", "--wrap=true", "--output=/dev/null").stdout.strip()
    wait_for(
        lambda: "COMPLETED" in (cluster.log_folder / "jobcomp.txt").read_text(),
        120,
        f"the plain job {plain} to run as without Penstock",
    )


def test_a_cluster_without_the_flags_does_not_know_them(make_loopback: MakeLoopback) -> None:
    """A flag without effect would be worse."""
    refused = make_loopback().command("sbatch", "--adaptive", "--max-gpus=2", "--wrap=true", check=False)
    assert refused.returncode != 0
    assert "unrecognized option '--adaptive'" in refused.stderr


def test_the_shell_and_the_settings_of_a_cluster_lead_to_its_penstockd(
    make_loopback: MakeLoopback, tmp_path: Path
) -> None:
    cluster: LoopbackCluster = make_loopback("t4:2x4", flags=True)
    shell = dict(os.environ) | cluster.user_environment()
    log = tmp_path / "log"
    with log.open("wb") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", str(cluster.settings_file)],
            stdout=out,
            stderr=out,
        )
    try:
        wait_for(lambda: "event=started" in log.read_text(), 120, "penstockd to start", details=log.read_text)
        job = cluster.command(
            *("sbatch", "--parsable", "--adaptive", "--max-gpus=2", "--wrap=sleep 600", "--output=/dev/null")
        ).stdout.strip()

        def listed() -> str:
            return CliRunner().invoke(make_app(), ["list"], env=shell).output

        wait_for(lambda: f"{job} " in listed() and "running" in listed(), 120, "the job to run", details=listed)
    finally:
        daemon.terminate()
        assert daemon.wait(120) == 0, log.read_text()
