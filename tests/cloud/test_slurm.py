"""Jobs of a real Slurm that burst: penstockd orders, moto launches, the user data starts a real slurmd, and everything ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_loopback.machine import free_ports
from penstock_scheduler.store.cloud_runs import CloudRunRow
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway import SlurmJob
from tests.cloud.conftest import SITE
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.test_providers import FileCloud
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


def with_cloud_nodes(
    make_loopback: MakeLoopback, tmp_path: Path, nodes: int = 2, suspend_timeout_s: int = 3, **settings: str
) -> LoopbackCluster:
    """A Slurm with one T4 on site and cloud nodes with an A10G each. `settings`: further lines of slurm.conf, or other ones."""
    host, first, config = socket.gethostname().split(".")[0], free_ports(nodes), tmp_path / "penstock.toml"
    last = nodes - 1
    programs = {}
    for kind in ("resume", "suspend"):
        programs[kind] = tmp_path / f"penstock-{kind}"
        programs[kind].write_text(
            f"#!/bin/bash\nexport PENSTOCK_CONFIG={config} PATH=$PATH:/usr/bin:/bin\n"
            f"export PYTHONPATH={':'.join(filter(None, sys.path))}\n"
            f'exec {sys.executable} -m penstock_cloud.programs {kind} "$1" >>{tmp_path}/{kind}.log 2>&1\n'
        )
        programs[kind].chmod(0o755)
    return make_loopback(
        "t4:1x1",
        settings={
            "NodeName": f"cloud-[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{first + last}] CPUs=4 Boards=1 "
            "SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:a10g:1 State=CLOUD",
            "PartitionName": f"burst Nodes=cloud-[0-{last}] MaxTime=INFINITE State=UP",
            "ResumeProgram": str(programs["resume"]),
            "SuspendProgram": str(programs["suspend"]),
            "ResumeTimeout": "120",
            "SuspendTimeout": str(suspend_timeout_s),
            "SuspendTime": "600",
            "SuspendExcParts": "t4",
            "SlurmctldParameters": "idle_on_node_suspend,cloud_reg_addrs",
            "PrivateData": "cloud",
            "TreeWidth": "65533",
        }
        | settings,
        files={
            "gres.conf": "AutoDetect=off\nNodeName=t4-[00-00] Name=gpu Type=t4 File=/dev/null\n"
            f"NodeName=cloud-[0-{last}] Name=gpu Type=a10g File=/dev/null\n"
        },
    )


@pytest.fixture
def cloud_site(
    make_loopback: MakeLoopback,
    cloud_settings: Callable[..., CloudSettings],
    ec2: Ec2,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Site, Hypervisor]]:
    """Such a Slurm, penstockd, and a hypervisor that boots moto's instances."""
    slurm = with_cloud_nodes(make_loopback, tmp_path)
    site = Site(slurm, tmp_path, cloud="ec2")
    site.partitions = ["t4"]
    site.slurm_settings |= {"cloud_partition": "burst"}
    site.extra = toml(cloud_settings(boot_timeout_s=120.0))
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))  # of the instances
    ec2.on_demand = {"g5.xlarge": 1.006, "g4dn.xlarge": 0.526}  # those that penstockd comes with are too old
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

    def running(job: str) -> SlurmJob | None:
        return next((each for each in site.gateway.jobs() if (each.id, each.state) == (job, "RUNNING")), None)

    job = site.submit(40.0, "-p", "t4", rates=RATES, burst="only", runtime_s=60.0)
    wait_for(lambda: len(ec2.running()) == 1, 120, "an instance is launched", details=told)
    mine = wait_for(lambda: running(job), 120, "the job runs in the cloud", details=told)
    assert mine is not None
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


class Machines:
    """Boots the instances of a `FileCloud`: a slurmd for each one that has not ended. Use as a context manager."""

    def __init__(self, cloud: FileCloud, slurm: LoopbackCluster) -> None:
        self._cloud, self._slurm = cloud, slurm
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Machines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for each in tuple(self._slurmds):
            self._off(each)

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            alive = {each["id"]: each["tags"]["node"] for each in self._cloud.instances() if not each["gone"]}
            for gone in set(self._slurmds) - set(alive):
                self._off(gone)
            for id_, node in alive.items():
                # As in data/node.sh: slurmctld ignores a node that registers or has booted before it wakes it.
                shown = self._slurm.command("scontrol", "show", "node", node).stdout
                held = any(each in shown for each in ("POWERING_UP", "ALLOCATED", "MIXED"))
                if id_ not in self._slurmds and held and "POWERED_DOWN" not in shown:
                    environment = dict(os.environ) | self._slurm.environment()
                    command = ["bash", "-c", f"sleep 2; exec slurmd -D -N {node} -b"]
                    self._slurmds[id_] = subprocess.Popen(command, env=environment)

    def _off(self, id_: str) -> None:
        slurmd = self._slurmds.pop(id_)
        slurmd.kill()
        slurmd.wait()


def test_a_job_leaves_for_another_cloud_by_the_admins_own_command_and_penstockd_is_killed_meanwhile(
    make_loopback: MakeLoopback, tmp_path: Path
) -> None:
    """A whole penstockd with `[daemon] cloud = "command"`, as docs/admin/bursting.md sets it up."""
    slurm, files = with_cloud_nodes(make_loopback, tmp_path), FileCloud(tmp_path)
    site = Site(slurm, tmp_path, cloud="command")
    site.partitions = ["t4"]
    site.slurm_settings |= {"cloud_partition": "burst"}
    site.extra = f"""
[cloud]
site = "{SITE}"
name = "lab"
share = "{tmp_path / "share"}"
wait = "no-wait"
boot_timeout_s = 120.0
[cloud.budget.site]
usd_total = 100.0
[cloud.commands.files]
command = ["{files.script}", "{files.file}"]
"""

    def told() -> str:
        return f"{site.tail()}\n{files.instances()}\n{slurm.command('scontrol', 'show', 'node').stdout}"

    def alive() -> list[str]:
        return [each["id"] for each in files.instances() if not each["gone"]]

    def runs() -> list[CloudRunRow]:
        with contextlib.closing(open_store(site.state)) as store:
            return store.cloud_runs()

    with Machines(files, slurm):
        try:
            site.start()
            job = site.submit(8.0, "-p", "t4", rates=RATES, burst="only", runtime_s=60.0)
            wait_for(alive, 120, "the command launches", details=told)
            site.kill()
            site.start()
            wait_for(lambda: site.states(job)[job] == "RUNNING", 120, "the job runs there", details=told)
            assert site.job(job).nodes == ("cloud-0",)
            wait_for(lambda: site.states(job)[job] == "COMPLETED", 120, "the job ends", details=told)
            wait_for(lambda: not alive(), 120, "the command has ended the instance", details=told)
            wait_for(lambda: not runs(), 120, "the run is over", details=told)
        finally:
            site.stop()
    assert UNFORESEEN not in site.log.read_text(), told()
    (instance,) = files.instances()
    store = open_store(site.state)
    try:
        (line,) = [line for line in store.cloud_ledger() if line.kind == "usd"]
        assert (line.job, store.cloud_runs()) == (job, [])
        lived_s = max(instance["ended_s"] - instance["launched_s"], 60.0)
        assert line.amount == pytest.approx(lived_s / 3600 * 1.0, abs=1e-9), "a dollar an hour"
    finally:
        store.close()
