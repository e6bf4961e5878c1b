"""CPUs and memory beside the GPUs, on a real Slurm: where other jobs have them, GPUs are of no use."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

ONE = "--comment=" + json.dumps({"penstock": {"max_gpus": 1, "preemptible": False}})
OURS = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null", ONE)


def test_no_job_is_sent_to_a_node_whose_cpus_a_plain_job_has(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    site = make_site(make_loopback("t4:2x4"))
    plain = site.sbatch("--cpus-per-task=64", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 3600")
    site.wait_states("RUNNING", plain)
    (full,) = site.job(plain).nodes
    jobs = [site.sbatch(*OURS, "--wrap=sleep 3600") for _ in range(3)]
    too_large = site.sbatch(*OURS, "--cpus-per-task=62", "--wrap=sleep 3600")
    never = site.sbatch(*OURS, "--cpus-per-task=65", "--wrap=sleep 3600")
    site.start()
    site.wait_states("RUNNING", *jobs)
    assert {site.job(job).nodes for job in jobs}.isdisjoint({(full,)})
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        (node,) = (each for each in penstock.nodes() if each.name == full)
        assert (node.others, node.out_of_reach) == (1, 3)
        assert "no node that it may use has more than 64 CPUs" in str(penstock.explain(never))
        assert {job.state for job in penstock.jobs() if job.id == too_large} == {"queued"}
        site.slurm.command("scancel", plain)
        site.wait_states("RUNNING", too_large)
        wait_for(lambda: not any(each.out_of_reach for each in penstock.nodes()), 60, "the node to be free again")


def test_a_job_that_takes_all_memory_of_a_node_leaves_its_gpus_to_nobody(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """Where memory is allocated and DefMemPerNode is UNLIMITED, Slurm's default, a job without --mem has all of a node's."""
    site = make_site(make_loopback("t4:2x4:64c:256g"))
    site.start()
    first, second = (site.sbatch(*OURS, "--wrap=sleep 3600") for _ in range(2))
    site.wait_states("RUNNING", first, second)
    assert {site.job(job).nodes for job in (first, second)} == {("t4-00",), ("t4-01",)}
    small, third = site.sbatch(*OURS, "--mem=1G", "--wrap=sleep 3600"), site.sbatch(*OURS, "--wrap=sleep 3600")
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:

        def told() -> bool:
            return all("CPUs and memory" in str(penstock.explain(job)) for job in (small, third))

        wait_for(told, 60, "explain says why", details=lambda: str([penstock.explain(job) for job in (small, third)]))
    site.slurm.command("scancel", first)
    wait_for(
        lambda: site.states(small) == {small: "RUNNING"},
        120,
        "the small job to run",
        details=lambda: site.slurm.command("scontrol", "-o", "show", "node").stdout + site.tail(),
    )
