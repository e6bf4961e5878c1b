"""Jobs that share GPUs on a real Slurm: which jobs hold the GPUs before, during and after, and after crashes.

The node's agent is a stand-in that binds jobs to the devices of its order and reports it, since these tests are about Slurm.
test_random_operations.py and tests/end_to_end/test_sharing.py use the real agent.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import Pack, SharedGpus
from penstock_slurm.install.units import build_plugin
from tests.slurm_plugin.sharing.rig import NODE, Rig, packs
from tests.slurm_plugin.state import save_jobs

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def plugin() -> bytes:
    return build_plugin(werror=True) if Path("/usr/include/slurm/spank.h").exists() else b""


@pytest.fixture
def rig(make_loopback, tmp_path, plugin) -> Rig:
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    (tmp_path / "penstock.so").write_bytes(plugin)
    plugstack = f"optional {tmp_path}/penstock.so run_dir={tmp_path}/run/%n\n"
    return Rig(
        make_loopback("t4:1x4", files={"plugstack.conf": plugstack}, stand_in=True, slurmd_timeout_s=300), tmp_path
    )


def test_a_frozen_job_is_seen_as_that_and_plain_jobs_that_wait_are_shown(rig: Rig) -> None:
    """Slurm calls the job running. The accounts leave out `suspended_s`."""
    first, second = rig.submit(), rig.submit()
    rig.wants({first: 1, second: 1}, SharedGpus(NODE, 1, packs(first, second)))
    rig.until(lambda: rig.bound.keys() >= {first, second}, "both are bound")
    rig.frozen_s = {second: 40.0}
    jobs = {job.id: job for job in rig.tick().jobs}
    seen, other = jobs[second], jobs[first]
    assert (rig.state(second), seen.suspended_s) == ("RUNNING", 40.0)
    assert seen.suspension is not None
    assert seen.suspension.state == "frozen"
    assert (other.suspension, other.suspended_s) == (None, 0.0)

    stranger = rig.plain(4)
    rig.until(lambda: rig.jobs()[stranger].reason == "Resources", "Slurm has no room for a plain job")
    (plain,) = rig.tick().plain
    assert (plain.id, plain.needs) == (stranger, "4 GPUs"), "and no placeholder job"
    assert plain.text.startswith("Penstock makes room for it from ")


def test_shared_gpus_are_reserved_until_the_last_co_located_job_ends(rig: Rig) -> None:
    first = rig.submit()
    rig.wants({first: 1})
    rig.answers = False
    rig.until(lambda: rig.state(first) == "RUNNING", "the first job runs alone, with a GPU of its own")
    assert rig.placeholders() == []
    rig.answers = True
    second, third = rig.submit(), rig.submit()
    group = SharedGpus(NODE, 2, packs(first, second, third))
    rig.wants(dict.fromkeys((first, second, third), 1), group)
    rig.until(
        lambda: {rig.state(job) for job in (second, third)} == {"RUNNING"}, "the others run without GPUs from Slurm"
    )
    found = rig.jobs()
    assert (found[first].gpus_per_node, found[second].gpus_per_node) == (1, None)
    assert len(rig.placeholders("RUNNING")) == 1, "the first job holds one of the two itself"
    assert rig.placeholders("PENDING"), "standbys, should the first job end"
    (node,) = rig.cluster.observe().nodes
    assert node.gpus_others == 0, "Penstock may allocate the reserved GPUs"
    stranger = rig.plain(3)
    rig.until(lambda: rig.bound.keys() >= {second, third}, "all are bound")
    sees = {job: ",".join(map(str, rig.bound[job])) for job in (first, second, third)}
    rig.until(lambda: {job: rig.sees(job) for job in sees} == sees, "each knows its GPUs")

    rig.slurm.command("scancel", first)
    rig.until(lambda: first not in rig.jobs() and len(rig.placeholders("RUNNING")) == 2, "a standby has taken over")
    assert rig.state(stranger) == "PENDING"

    save_jobs(rig.slurm, stranger)
    rig.begin()
    rig.slurm.kill_slurmctld()
    rig.slurm.start_slurmctld()
    rig.tick()
    assert {rig.state(job) for job in (second, third)} == {"RUNNING"}
    assert rig.state(stranger) == "PENDING"
    assert len(rig.placeholders("RUNNING")) == 2, "the placeholder jobs are found again, and no new ones are made"

    rig.slurm.command("scancel", second)
    rig.until(lambda: second not in rig.jobs(), "the second has ended")
    assert rig.state(stranger) == "PENDING"
    rig.slurm.command("scancel", third)
    rig.begin()  # the daemon was down when the last co-located job ended
    rig.until(
        lambda: not rig.placeholders() and rig.state(stranger) == "RUNNING",
        "the GPU reservation ends with the last co-located job",
    )


@pytest.mark.long
def test_a_job_moves_between_gpus_of_its_own_and_shared_ones(rig: Rig) -> None:
    """The job with GPUs from Slurm may also depart: its GPUs are reserved before it leaves, whichever others are free."""
    blocker = rig.plain(1)
    wait_for(lambda: rig.state(blocker) == "RUNNING", 120, "another job has GPU 0")
    first, second = rig.submit(), rig.submit()
    rig.wants({first: 1})
    rig.answers = False
    rig.until(lambda: rig.state(first) == "RUNNING", "the first runs, on GPU 1")
    rig.answers = True
    rig.wants({first: 1, second: 1}, SharedGpus(NODE, 1, packs(first, second)))
    rig.until(lambda: rig.bound.get(second) == (1,), "the second is bound to the same GPU")
    rig.slurm.command("scancel", blocker)  # now Slurm would give GPU 0 first
    rig.until(lambda: rig.state(blocker) == "gone", "GPU 0 is free")
    rig.wants({second: 1})
    rig.until(lambda: rig.state(first) == "PENDING", "the first leaves")
    rig.until(lambda: [job.state for job in rig.placeholders()] == ["RUNNING"], "one placeholder job is left, on GPU 1")
    assert rig.commands.gpu_indexes(rig.placeholders()[0].id, rig.placeholders()[0].nodes[0]) == (1,)
    rig.answers = False
    rig.wants({first: 2})
    rig.until(lambda: rig.state(second) == "PENDING" and rig.state(first) == "RUNNING", "they change places")
    assert rig.jobs()[first].gpus_per_node == 2
    theirs = ",".join(map(str, rig.commands.gpu_indexes(first, rig.jobs()[first].nodes[0])))
    rig.until(lambda: rig.sees(first) == theirs, "it sees its GPUs from Slurm, whatever the agent set before")
    rig.wants({first: 2, second: 2})
    rig.until(lambda: rig.state(second) == "RUNNING", "the second runs with its own GPUs again")
    assert rig.jobs()[second].gpus_per_node == 2
    assert rig.placeholders() == []


def test_jobs_can_start_on_a_node_without_free_gpus(rig: Rig) -> None:
    """Slurm starts no job on a fully allocated node, so a placeholder job ends briefly. A waiting plain job does not get the
    GPU."""
    first = rig.submit()
    rig.wants({first: 4})
    rig.until(lambda: rig.sees(first) == "0,1,2,3", "the first has all four, without GPUs from Slurm")
    assert rig.jobs()[first].gpus_per_node is None
    assert len(rig.placeholders("RUNNING")) == 4
    strangers = [rig.plain(1) for _ in range(3)]
    second, third = rig.submit(), rig.submit()
    group = SharedGpus(NODE, 4, (Pack((first,), 4), *packs(second, third)))
    rig.wants({first: 4, second: 1, third: 1}, group)
    rig.until(lambda: {rig.state(second), rig.state(third)} == {"RUNNING"}, "the others have started")
    rig.until(
        lambda: len(rig.placeholders("RUNNING")) == 4 and len(rig.placeholders()) == 4, "the GPU reservation is whole"
    )
    assert {rig.state(job) for job in strangers} == {"PENDING"}


def test_nothing_is_reserved_on_a_node_that_a_new_controller_does_not_know_yet(rig: Rig) -> None:
    """Slurm 22.05.8 counts the GPUs of jobs that end and begin there meanwhile as used until it is reconfigured."""
    jobs = [rig.submit() for _ in range(3)]
    rig.wants(dict.fromkeys(jobs, 1), SharedGpus(NODE, 1, packs(*jobs)))
    rig.until(lambda: {rig.state(job) for job in jobs} == {"RUNNING"}, "all run")
    rig.until(lambda: rig.placeholders("RUNNING"), "a placeholder job")
    rig.slurm.kill_slurmd(NODE)
    rig.slurm.stop_slurmctld()
    rig.slurm.start_slurmctld()
    rig.wants(dict.fromkeys(jobs, 1), SharedGpus(NODE, 3, packs(*jobs)))
    before = {job.id for job in rig.placeholders()}
    for _ in range(4):
        rig.tick()
    assert {job.id for job in rig.placeholders()} == before
    rig.slurm.start_slurmd(NODE)
    rig.until(lambda: len(rig.placeholders("RUNNING")) == 3, "the GPU reservation to be whole")


def test_what_suspended_jobs_are(rig: Rig) -> None:
    """They run as planned, their time does not count as GPU-seconds, they leave on request and start again later, and the
    accounting lists co-located jobs."""
    first, second = rig.submit(), rig.submit()
    both = SharedGpus(NODE, 1, packs(first, second))
    rig.wants({first: 1, second: 1}, both)
    rig.until(lambda: {rig.state(first), rig.state(second)} == {"RUNNING"}, "both run")
    asked_s = time.time()
    rig.slurm.command("scontrol", "suspend", second)
    since_s = time.time()
    rig.until(lambda: time.time() - since_s > 4, "some time")
    jobs = {job.id: job for job in rig.tick().jobs}
    assert jobs[second].phase.value == "running"
    assert jobs[second].allocation == jobs[first].allocation
    assert 2 <= jobs[second].suspended_s <= time.time() - asked_s + 1
    assert jobs[first].suspended_s == 0
    note = json.loads(rig.jobs()[second].admin_comment)
    assert note["penstock_shares"] == {"node": NODE, "gpus": 1, "with": [first]}
    rig.wants({first: 1})
    rig.until(lambda: rig.state(second) == "PENDING", "the suspended one leaves")
    assert rig.state(first) == "RUNNING"
    rig.wants({first: 1, second: 1}, both)
    rig.until(lambda: rig.state(second) == "RUNNING", "it starts again: a suspended job is not held")
    rig.slurm.command("scancel", first, second)
    rig.until(lambda: not rig.placeholders(), "the GPU reservation goes")


def test_the_reservation_for_moves_does_not_keep_placeholder_jobs_away(rig: Rig) -> None:
    """While all GPUs of the node are given up, a plain job waits for them that came later than the job that is to share."""
    leaving = rig.submit(gpus=4, script="trap '' TERM; while sleep 1; do :; done")
    rig.wants({leaving: 4})
    rig.answers = False
    rig.until(lambda: rig.state(leaving) == "RUNNING", "the first job runs with GPUs of its own")
    rig.answers = True
    sharing = rig.submit()
    time.sleep(1.1)  # Slurm counts whole seconds
    stranger = rig.plain(4)
    rig.wants({sharing: 1}, SharedGpus(NODE, 1, packs(sharing)))
    rig.until(lambda: sharing in rig.bound, "the job shares")
    assert rig.state(stranger) == "PENDING"


def test_a_job_that_moves_to_and_from_shared_gpus_loses_them_to_no_plain_job(rig: Rig) -> None:
    """The reservation for moves keeps them until the placeholder jobs wait that take them."""
    moving = rig.submit(gpus=4)
    rig.wants({moving: 4})
    rig.answers = False
    rig.until(lambda: rig.state(moving) == "RUNNING", "the job runs with GPUs of its own")
    strangers = [rig.plain(4) for _ in range(3)]
    for move, (gpus, shares) in enumerate(((1, True), (4, True), (2, False), (3, True)), 1):
        rig.answers = shares
        rig.wants({moving: gpus})
        while (job := rig.jobs()[moving]).restarts < move or job.state != "RUNNING":
            time.sleep(1)  # a tick of penstockd; Slurm starts jobs meanwhile
            if move == 2 and job.restarts == 1 and job.state != "RUNNING":
                rig.begin()
            rig.tick()
            assert {rig.state(each) for each in strangers} == {"PENDING"}
        assert (job.gpus_per_node, len(rig.placeholders("RUNNING"))) == ((None, gpus) if shares else (gpus, 0))
