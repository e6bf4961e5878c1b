"""Detached runs with a real Slurm. In Slurm and its tools, the job runs on a gateway and ends with its script's exit status."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from penstock_cloud.settings import CloudSettings
from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.gateway import CliGateway
from penstock_slurm.install.units import build_plugin
from penstock_slurm.settings import SlurmSettings
from tests.cloud.faults import KEYS, Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.test_slurm import RATES, toml
from tests.end_to_end.site import UNFORESEEN, Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]

BUCKET = "penstock-runs"
SPEC = json.dumps({"penstock": {"max_gpus": 1, "goodput_table": RATES, "burst": "only", "runtime_s": 60.0}})


@pytest.fixture
def gateway_site(
    request: pytest.FixtureRequest,
    make_loopback: MakeLoopback,
    cloud_settings: Callable[..., CloudSettings],
    ec2: Ec2,
    tmp_path: Path,
) -> Iterator[tuple[Site, Hypervisor]]:
    """One T4 on site, a gateway for an A10G or as many as the parameter says, penstockd, and a hypervisor that boots moto's
    instances."""
    gateways = getattr(request, "param", 1)
    settings = cloud_settings(bucket=BUCKET, detached_user="")
    boto3.client("s3", region_name="us-east-1", endpoint_url=ec2.s3_url, **KEYS).create_bucket(Bucket=BUCKET)
    cloud_runner = tmp_path / "cloud_runner"
    cloud_runner.write_text(f'#!/bin/bash\nexec {sys.executable} -m penstock_cloud.cloud_runner "$@"\n')
    cloud_runner.chmod(0o755)
    (tmp_path / "cloud_runner.so").write_bytes(build_plugin(name="cloud_runner.so"))
    line = f"required {tmp_path}/cloud_runner.so partition=a10g cloud_runner={cloud_runner} share={settings.share}\n"
    site = Site(make_loopback(f"t4:1x1,a10g:{gateways}x1:4c:8g", files={"plugstack.conf": line}), tmp_path, cloud="ec2")
    site.partitions = ["t4"]
    site.slurm_settings |= {"cloud_partition": "a10g"}
    site.extra = toml(settings)
    ec2.on_demand = {"g5.xlarge": 1.006, "g4dn.xlarge": 0.526}  # those that penstockd comes with are too old
    with Hypervisor(ec2, tmp_path / "hypervisor") as hypervisor:
        try:
            site.start()
            yield site, hypervisor
        finally:
            site.stop()


def test_to_slurm_a_detached_job_is_like_any_other(
    gateway_site: tuple[Site, Hypervisor], ec2: Ec2, tmp_path: Path
) -> None:
    site, hypervisor = gateway_site

    def told() -> str:
        return f"{site.tail()}\n{hypervisor.console()}"

    def send(script: str, *flags: str) -> str:
        (tmp_path / "job.sh").write_text("#!/bin/bash\n" + script)
        held = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={SPEC}", f"--output={tmp_path}/%A_%a.out")
        return site.sbatch("-p", "t4", *held, *flags, str(tmp_path / "job.sh"))

    (tmp_path / "numbers").write_text("1 2 3\n")
    array = send(
        "#PENSTOCK input numbers\n#PENSTOCK output sum\n"
        'echo "element $SLURM_ARRAY_TASK_ID"; tr " " + <numbers >sum; sleep 5; exit 6\n',
        "--array=4",
    )
    job = f"{array}_4"
    wait_for(lambda: site.states(job).get(job) == "RUNNING", 120, "Slurm runs its cloud runner", details=told)
    assert site.job(job).nodes == ("a10g-00",)
    output = tmp_path / f"{array}_4.out"
    wait_for(
        lambda: output.exists() and "element 4" in output.read_text(), 120, "its output is in its file", details=told
    )
    wait_for(lambda: site.states(job)[job] == "FAILED", 120, "it ends", details=told)
    submitter = SlurmSubmitter(
        CliGateway(conf=site.slurm.slurm_conf, timeout_s=20), Spool(site.spool), SlurmSettings(partitions=("t4",))
    )
    fate = submitter.fates([job])[job]
    assert fate is not None
    assert (fate.state, fate.exit_code) == ("FAILED", 6)
    assert (tmp_path / "sum").read_text() == "1+2+3\n"
    wait_for(lambda: not ec2.running(), 120, "the instance is given back", details=told)

    # One that its user cancels, and another without an ordered instance.
    second = send("trap 'echo told to end; exit 0' TERM; echo begins; while :; do sleep 0.2; done\n")
    begins = tmp_path / f"{second}_4294967294.out"
    wait_for(lambda: begins.exists() and "begins" in begins.read_text(), 120, "it runs", details=told)
    site.slurm.command("scancel", second)
    wait_for(lambda: site.states(second)[second] == "CANCELLED", 120, "it is cancelled", details=told)
    wait_for(lambda: not ec2.running(), 120, "its instance is given back", details=told)
    (tmp_path / "job.sh").write_text("#!/bin/bash\ntouch ran-on-the-gateway\n")
    unasked = site.sbatch("-p", "a10g", "--gres=gpu:1", f"--output={tmp_path}/unasked", str(tmp_path / "job.sh"))
    wait_for(lambda: site.states(unasked)[unasked] == "FAILED", 120, "the unasked one ends", details=told)
    assert "no instance was ordered" in (tmp_path / "unasked").read_text()
    assert not (tmp_path / "ran-on-the-gateway").exists()

    def runs() -> list[object]:
        with contextlib.closing(open_store(site.state)) as opened:
            return [*opened.cloud_runs()]

    wait_for(lambda: not runs(), 120, "the runs are over", details=told)
    site.stop()
    assert UNFORESEEN not in site.log.read_text(), told()
    assert len(ec2.instances()) == 2
    store = open_store(site.state)
    try:
        assert [line.job for line in store.cloud_ledger() if line.kind == "usd"] == [job, second]
        assert not store.cloud_runs()
    finally:
        store.close()


@pytest.mark.parametrize("gateway_site", [2], indirect=True)
def test_to_slurm_a_detached_job_on_two_nodes_is_one_job(
    gateway_site: tuple[Site, Hypervisor], ec2: Ec2, tmp_path: Path
) -> None:
    """It holds both gateways, and ends with the exit status of the node that failed."""
    site, hypervisor = gateway_site

    def told() -> str:
        return f"{site.tail()}\n{hypervisor.console()}"

    rates = {"t4": {"1": 1.0}, "a10g": {"1": 1.0, "2": 2.0}}
    spec = {
        "min_gpus": 2,
        "max_gpus": 2,
        "adaptivity": "rigid",
        "goodput_table": rates,
        "burst": "only",
        "runtime_s": 60.0,
    }
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#PENSTOCK output here\nmkdir here; echo $SLURM_JOB_ID >here/$SLURM_NODEID\n"
        'echo "node $SLURM_NODEID of $SLURM_NNODES with $SLURM_GPUS_ON_NODE GPU"; sleep 5; exit $((SLURM_NODEID * 7))\n'
    )
    held = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={json.dumps({'penstock': spec})}")
    job = site.sbatch("-p", "t4", *held, f"--output={tmp_path}/out", str(tmp_path / "job.sh"))
    wait_for(lambda: site.states(job).get(job) == "RUNNING", 120, "Slurm runs its cloud runner", details=told)
    assert site.job(job).nodes == ("a10g-00", "a10g-01")
    wait_for(lambda: site.states(job)[job] == "FAILED", 120, "it ends", details=told)
    assert (
        "node 0 of 2 with 1 GPU\npenstock: output of node 1:\nnode 1 of 2 with 1 GPU\n"
        in (tmp_path / "out").read_text()
    )
    assert [(tmp_path / "here" / name).read_text() for name in "01"] == [f"{job}\n"] * 2
    submitter = SlurmSubmitter(
        CliGateway(conf=site.slurm.slurm_conf, timeout_s=20), Spool(site.spool), SlurmSettings(partitions=("t4",))
    )
    fate = submitter.fates([job])[job]
    assert fate is not None
    assert (fate.state, fate.exit_code) == ("FAILED", 7)
    wait_for(lambda: not ec2.running(), 120, "both instances are given back", details=told)
    site.stop()
    assert UNFORESEEN not in site.log.read_text(), told()
    assert len(ec2.instances()) == 2
