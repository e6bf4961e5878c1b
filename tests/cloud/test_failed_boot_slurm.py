"""A job of a real Slurm whose cloud node does not boot: it ends on site, and no GPU of the site is lost to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_cloud.doctor import HOLDS
from penstock_cloud.settings import CloudSettings
from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.test_slurm import RATES, toml, with_cloud_nodes
from tests.end_to_end.site import UNFORESEEN, Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]

BOOT_S = 30


@pytest.mark.parametrize(
    "lines",
    [
        {},
        {"PrologSlurmctld": "/bin/true"},
        {"SlurmctldParameters": "idle_on_node_suspend,cloud_reg_addrs,cloud_dns"},
    ],
    ids=["plain", "prolog", "cloud_dns"],
)
def test_a_job_whose_node_does_not_boot_ends_on_site(
    make_loopback: MakeLoopback,
    cloud_settings: Callable[..., CloudSettings],
    ec2: Ec2,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: dict[str, str],
) -> None:
    """Slurm before 23.02 holds the job unless a line of slurm.conf prevents that. The T4 is not lost in either case."""
    slurm = with_cloud_nodes(make_loopback, tmp_path, **{"ResumeTimeout": str(2 * BOOT_S)} | lines)
    site = Site(slurm, tmp_path, cloud="ec2")
    site.partitions = ["t4"]
    site.slurm_settings |= {"cloud_partition": "burst"}
    site.extra = toml(cloud_settings(boot_timeout_s=float(BOOT_S)))
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    ec2.on_demand = {"g5.xlarge": 1.006, "g4dn.xlarge": 0.526}

    def told() -> str:
        return f"{site.tail()}\n{slurm.command('scontrol', 'show', 'job').stdout}"

    with Hypervisor(ec2, tmp_path / "hypervisor") as hypervisor:
        hypervisor.boots = False
        try:
            site.start()
            first = site.submit(60.0, "-p", "t4", rates=RATES, runtime_s=60.0)
            wait_for(lambda: site.states(first)[first] == "RUNNING", 60, "the T4 is taken", details=told)
            job = site.submit(4.0, "-p", "t4", rates=RATES, burst="allowed", runtime_s=60.0)
            wait_for(ec2.running, 120, "an instance is launched", details=told)
            wait_for(lambda: not ec2.running(), 180, "it has not booted, and has ended", details=told)
            if not lines and slurm.command("scontrol", "--version").stdout.split()[-1].startswith(HOLDS):
                wait_for(lambda: site.job(job).reason.startswith("launch"), 180, "Slurm holds the job", details=told)
                slurm.command("scancel", job)
                job = site.submit(4.0, "-p", "t4", rates=RATES, runtime_s=60.0)
            site.wait_completed(first, job)
        finally:
            site.stop()
    log = site.log.read_text()
    assert UNFORESEEN not in log, told()
    assert "without its GPUs" not in log, told()
    assert "GresUsed=gpu:t4:0" in slurm.command("scontrol", "show", "node", "-d", "t4-00").stdout
