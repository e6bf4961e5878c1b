"""Many jobs of a real Slurm that share a few cloud nodes, at several SuspendTimeouts: each runs once, and all is paid once.

A node's name serves one run after another. Slurm suspends a node after its run, and a late suspend reaches the next run of that
name. With SuspendTimeout 3 that is common, and with 120 a name is not usable for two minutes. To be run by hand:
`pytest tests/cloud/test_many_slurm.py -m long -s -k 40-20`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.store.sql import open_store
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.test_slurm import RATES, toml, with_cloud_nodes
from tests.end_to_end.site import UNFORESEEN, Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]

EVERY_S = 4.0
"""Seconds between two submissions."""


@pytest.mark.parametrize(("jobs", "suspend_timeout_s"), [(6, 3), (40, 3), (40, 20), (40, 120)])
def test_each_of_many_jobs_runs_once(
    make_loopback: MakeLoopback,
    cloud_settings: Callable[..., CloudSettings],
    ec2: Ec2,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: int,
    suspend_timeout_s: int,
) -> None:
    slurm = with_cloud_nodes(make_loopback, tmp_path, nodes=4, suspend_timeout_s=suspend_timeout_s)
    site = Site(slurm, tmp_path, cloud="ec2")
    site.partitions = ["t4"]
    site.slurm_settings |= {"cloud_partition": "burst"}
    site.extra = toml(cloud_settings(boot_timeout_s=300.0))
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    ec2.on_demand = {"g5.xlarge": 1.006, "g4dn.xlarge": 0.526}

    def told() -> str:
        return f"{site.tail()}\n{slurm.command('scontrol', 'show', 'node').stdout}"

    with Hypervisor(ec2, tmp_path / "hypervisor"):
        try:
            site.start()
            began_s, submitted = time.monotonic(), []
            for number in range(jobs):
                burst = "only" if number % 2 else "allowed"
                work_s = 8.0 + 4 * (number % 5)
                submitted.append(site.submit(work_s, "-p", "t4", rates=RATES, burst=burst, runtime_s=60.0))
                time.sleep(EVERY_S)
            site.wait_completed(*submitted, timeout_s=jobs * 90 + suspend_timeout_s * jobs / 4)
            makespan_s = time.monotonic() - began_s
            wait_for(lambda: not ec2.running(), 300, "all instances are given back", details=told)
            with contextlib.closing(open_store(site.state)) as store:
                wait_for(lambda: not store.cloud_runs(), 120, "all runs are over", details=told)
        finally:
            site.stop()
    log = site.log.read_text()
    assert UNFORESEEN not in log, told()
    instances = ec2.instances()
    with contextlib.closing(open_store(site.state)) as store:
        spent = [line for line in store.cloud_ledger() if line.kind == "usd"]
        gpu_s = sum(store.ledger_totals("cloud-gpu-seconds").values())
    away, usd = len({line.job for line in spent}), sum(line.amount for line in spent)
    twice, recalled = len(spent) - away, len(re.findall(r'event="run is over".*why="it was recalled"', log))
    print(f"\n{jobs} jobs, SuspendTimeout {suspend_timeout_s}: {away} away, {len(instances)} instances, {twice} again")
    print(f"{makespan_s:.0f} s from the first submission to the last end, {usd:.4f} dollars, {gpu_s:.0f} GPU-seconds")
    assert twice <= recalled, "no run was ended for another one's node"
    assert away >= jobs // 2
    assert len(instances) == len(spent)
    assert all(sum(each["InstanceId"] in line.text for line in spent) == 1 for each in instances), "each is paid once"
    site.assert_no_run_twice(*submitted)
    assert "DRAIN" not in slurm.command("scontrol", "show", "node").stdout, told()
