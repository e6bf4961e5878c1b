"""Jobs of a real Slurm that burst: penstockd orders, moto launches, the user data starts a real slurmd, and everything ends."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.store import open_store
from penstock_slurm.loopback import wait_for
from penstock_slurm.loopback.fixtures import MakeLoopback
from penstock_slurm.loopback.machine import free_ports
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.end_to_end.site import UNFORESEEN, Site

# slurmctld checks only every half minute whether a booted node has joined, so one job takes more than a minute.
pytestmark = [pytest.mark.slurm, pytest.mark.long]

RATES = {"t4": {"1": 1.0}, "a10g": {"1": 2.0}}


def toml(settings: CloudSettings) -> str:
    fields = settings.model_dump(mode="json", exclude_none=True, exclude={"budget", "tags"})
    text = "\n[cloud]\n"
    for key, value in fields.items():
        shown = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        text += f"{key} = {shown}\n"
    return text + "[cloud.budget.site]\nusd_total = 100.0\n"


@pytest.fixture
def cloud_site(
    make_loopback: MakeLoopback, cloud_settings: Callable[..., CloudSettings], ec2: Ec2, tmp_path: Path
) -> Iterator[tuple[Site, Hypervisor]]:
    """One T4 on site, two cloud nodes with an A10G each, penstockd, and a hypervisor that boots moto's instances."""
    host, first, config = socket.gethostname().split(".")[0], free_ports(2), tmp_path / "penstock.toml"
    programs = {}
    for kind in ("resume", "suspend"):
        programs[kind] = tmp_path / f"penstock-{kind}"
        programs[kind].write_text(
            f"#!/bin/bash\nexport PENSTOCK_CONFIG={config} PATH=$PATH:/usr/bin:/bin\n"
            f"export PYTHONPATH={':'.join(filter(None, sys.path))}\n"
            f'exec {sys.executable} -m penstock_cloud.programs {kind} "$1" >>{tmp_path}/{kind}.log 2>&1\n'
        )
        programs[kind].chmod(0o755)
    slurm = make_loopback(
        "t4:1x1",
        settings={
            "NodeName": f"cloud-[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{first + 1}] CPUs=4 Boards=1 "
            "SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:a10g:1 State=CLOUD",
            "PartitionName": "burst Nodes=cloud-[0-1] MaxTime=INFINITE State=UP",
            "ResumeProgram": str(programs["resume"]),
            "SuspendProgram": str(programs["suspend"]),
            "ResumeTimeout": "120",
            "SuspendTimeout": "3",
            "SuspendTime": "600",
            "SuspendExcParts": "t4",
            "SlurmctldParameters": "idle_on_node_suspend,cloud_reg_addrs",
            "PrivateData": "cloud",
            "TreeWidth": "65533",
        },
        files={
            "gres.conf": "AutoDetect=off\nNodeName=t4-[00-00] Name=gpu Type=t4 File=/dev/null\n"
            "NodeName=cloud-[0-1] Name=gpu Type=a10g File=/dev/null\n"
        },
    )
    site = Site(slurm, tmp_path, cloud="ec2")
    site.partitions = ["t4"]
    site.slurm_settings |= {"cloud_partition": "burst"}
    site.extra = toml(cloud_settings(slurm_conf=str(slurm.slurm_conf), boot_timeout_s=120.0))
    with Hypervisor(ec2, tmp_path / "hypervisor") as hypervisor:
        try:
            site.start()
            yield site, hypervisor
        finally:
            site.stop()


def test_jobs_leave_boot_run_and_end_also_when_the_daemon_is_killed_meanwhile(
    cloud_site: tuple[Site, Hypervisor], ec2: Ec2
) -> None:
    site, hypervisor = cloud_site

    def told() -> str:
        return f"{site.tail()}\n{hypervisor.console()}\n{site.slurm.command('scontrol', 'show', 'node').stdout}"

    def state(job: str) -> str:
        return next((each.state for each in site.gateway.jobs(finished=True) if each.id == job), "")

    job = site.submit(8.0, "-p", "t4", rates=RATES, burst="only", runtime_s=60.0)
    wait_for(lambda: len(ec2.running()) == 1, 120, "an instance is launched", details=told)
    wait_for(lambda: state(job) == "RUNNING", 120, "the job runs in the cloud", details=told)
    (mine,) = [each for each in site.gateway.jobs() if each.id == job]
    assert mine.nodes == ("cloud-0",)
    wait_for(lambda: state(job) == "COMPLETED", 120, "the job ends", details=told)
    wait_for(lambda: not ec2.running(), 120, "the instance is given back", details=told)

    # Another, and this time penstockd is killed while its instance boots.
    hypervisor.boots = False
    second = site.submit(4.0, "-p", "t4", rates=RATES, burst="only", runtime_s=60.0)
    wait_for(lambda: len(ec2.running()) == 1, 120, "an instance is launched", details=told)
    site.kill()
    hypervisor.boots = True
    site.start()
    # And a job that was submitted to the cloud nodes directly, without an order.
    unasked = site.sbatch("-p", "burst", "--gres=gpu:1", "--wrap=true")
    wait_for(lambda: state(second) == "COMPLETED", 150, "the second job ends", details=told)
    wait_for(lambda: not ec2.running(), 120, "its instance is given back", details=told)
    wait_for(
        lambda: state(unasked) == "PENDING", 120, "the job that nobody ordered nodes for is sent back", details=told
    )
    # One that may not be queued again is cancelled, and the site goes on.
    stubborn = site.sbatch("-p", "burst", "--no-requeue", "--gres=gpu:1", "--wrap=true")
    wait_for(lambda: state(stubborn) == "CANCELLED", 120, "the job that cannot be sent back ends", details=told)
    assert len(ec2.instances()) == 2

    site.stop()
    assert UNFORESEEN not in site.log.read_text(), told()
    store = open_store(site.state)
    try:
        spent = [line for line in store.cloud_ledger() if line.kind == "usd"]
        assert [line.job for line in spent] == [job, second]
        for line, instance in zip(spent, sorted(ec2.instances(), key=lambda each: each["LaunchTime"]), strict=True):
            assert instance["InstanceId"] in line.text
        used = {line.job: line for line in store.ledger() if line.kind == "cloud-gpu-seconds"}
        assert {line.text for line in used.values()} == {"a10g"}
        assert used.keys() == {job, second}
        assert all(line.amount > 0 for line in used.values())
        assert not [line for line in store.ledger() if line.kind == "gpu-seconds" and line.text == "a10g"], (
            "it is no node here"
        )
        assert not store.cloud_runs()
    finally:
        store.close()
