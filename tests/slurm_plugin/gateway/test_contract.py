"""What every back end must do on a real Slurm."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock_slurm.gateway import (
    BackendMissing,
    ControllerAway,
    Gateway,
    JobGone,
    JobPlacement,
    Refused,
    SlurmJob,
    TimedOut,
    open_gateway,
)
from penstock_slurm.loopback import LoopbackCluster, wait_for

pytestmark = pytest.mark.slurm

CREDENTIAL_PAUSE_S = 1.2
"""From a job's stop to its next release; sooner, Slurm 22.05 may kill it ("Job credential revoked")."""


@pytest.fixture(params=["cli", "pyslurm"])
def gateway(request: pytest.FixtureRequest, loopback: LoopbackCluster) -> Gateway:
    try:
        return open_gateway(request.param, conf=loopback.slurm_conf, timeout_s=30.0)
    except BackendMissing as error:
        pytest.skip(f"no {request.param} here: {error}")


@pytest.fixture(autouse=True)
def _environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyslurm needs variables set for the whole process: put them back."""
    for name in ("SLURM_CONF", "SLURM_BITSTR_LEN"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)


def submit(cluster: LoopbackCluster, *options: str, script: str = "exec sleep 600") -> str:
    """A batch job; its id."""
    return cluster.command("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script).stdout.strip()


def job(gateway: Gateway, job_id: str, *, finished: bool = False) -> SlurmJob:
    (found,) = [each for each in gateway.jobs(finished=finished) if each.id == job_id]
    return found


def wait_state(gateway: Gateway, job_id: str, state: str) -> SlurmJob:
    def there() -> SlurmJob | None:
        now = job(gateway, job_id, finished=True)
        return now if now.state == state else None

    return wait_for(there, 60, f"job {job_id} {state}", details=lambda: job(gateway, job_id, finished=True))


def run(gateway: Gateway, job_id: str, placement: JobPlacement) -> SlurmJob:
    gateway.place(job_id, placement)
    gateway.release(job_id)
    return wait_state(gateway, job_id, "RUNNING")


def stop(gateway: Gateway, job_id: str) -> SlurmJob:
    gateway.requeue_hold(job_id)
    stopped = wait_state(gateway, job_id, "PENDING")
    time.sleep(CREDENTIAL_PAUSE_S)
    return stopped


def place(*nodes: str, gpus: int, cpus: int | None = None) -> JobPlacement:
    return JobPlacement(nodes[0].split("-")[0], nodes, gpus, tasks=len(nodes), cpus=cpus or len(nodes))


def used(gateway: Gateway) -> dict[str, int]:
    return {node.name: sum(node.gpus_used.values()) for node in gateway.nodes() if sum(node.gpus_used.values())}


def test_a_held_job_runs_on_each_type_grows_and_shrinks(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--hold", "--gres=gpu:1", "-N1", "--requeue")
    assert job(gateway, job_id).held
    steps = [
        place("t4-00", gpus=2),
        place("rtx-00", "rtx-01", gpus=8),
        place("a100-01", gpus=3),
        place("t4-00", "t4-01", gpus=4),
        place("t4-01", gpus=1),
    ]
    for count, wanted in enumerate(steps):
        now = run(gateway, job_id, wanted)
        assert (now.nodes, now.partition, now.restarts) == (wanted.nodes, (wanted.partition,), count)
        assert (now.gpus_per_node, now.gpu_type, now.cpus) == (wanted.gpus_per_node, None, wanted.cpus)
        assert now.start_s is not None
        assert abs(now.start_s - time.time()) < 60
        assert used(gateway) == dict.fromkeys(wanted.nodes, wanted.gpus_per_node)
        stopped = stop(gateway, job_id)
        assert stopped.held
        assert stopped.start_s is None
        assert stopped.nodes == ()
    assert used(gateway) == {}


def test_cpus_per_task_are_kept_when_a_job_grows(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--hold", "--gres=gpu:1", "--cpus-per-task=3", "--requeue")
    assert (job(gateway, job_id).cpus_per_task, job(gateway, job_id).cpus) == (3, 3)
    assert run(gateway, job_id, place("rtx-00", "rtx-01", gpus=2, cpus=6)).cpus == 6
    stop(gateway, job_id)
    assert run(gateway, job_id, place("a100-00", gpus=2, cpus=3)).cpus == 3


def test_a_placement_replaces_the_one_before_it(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--hold", "--gres=gpu:1", "-N1")
    gateway.place(job_id, place("rtx-00", "rtx-01", gpus=8))
    gateway.place(job_id, place("t4-01", gpus=2))
    gateway.place(job_id, place("t4-01", gpus=2))
    now = job(gateway, job_id)
    assert (now.required_nodes, now.node_count, now.partition) == (("t4-01",), 1, ("t4",))
    assert now.held


def test_a_refused_placement_changes_nothing(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--hold", "--gres=gpu:1")
    before = job(gateway, job_id)
    with pytest.raises(Refused, match="Invalid partition name"):
        gateway.place(job_id, JobPlacement("nowhere", ("t4-00",), 2, 1, 1))
    with pytest.raises(Refused, match="Invalid node name"):
        gateway.place(job_id, JobPlacement("t4", ("t4-77",), 2, 1, 1))
    assert job(gateway, job_id) == before


def test_a_running_job_is_not_placed(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--gres=gpu:1", "-p", "t4")
    wait_state(gateway, job_id, "RUNNING")
    with pytest.raises(Refused, match="no longer pending"):
        gateway.place(job_id, place("rtx-00", gpus=2))


def test_hold_and_release_can_be_repeated(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--gres=gpu:1", "--begin=now+1hour")
    for _ in range(2):
        gateway.hold(job_id)
        assert job(gateway, job_id).held
    for _ in range(2):
        gateway.release(job_id)
        assert not job(gateway, job_id).held


def test_requeue_hold_leaves_alone_what_does_not_run(gateway: Gateway, loopback: LoopbackCluster) -> None:
    pending = submit(loopback, "--begin=now+1hour")
    gateway.requeue_hold(pending)
    assert not job(gateway, pending).held

    cancelled = submit(loopback, "-p", "t4")
    wait_state(gateway, cancelled, "RUNNING")
    loopback.command("scancel", cancelled)
    gateway.requeue_hold(cancelled)  # the user was faster
    assert wait_state(gateway, cancelled, "CANCELLED").restarts == 0


def test_cancel_ends_running_and_pending_jobs(gateway: Gateway, loopback: LoopbackCluster) -> None:
    running, pending = submit(loopback, "-p", "t4"), submit(loopback, "--hold")
    wait_state(gateway, running, "RUNNING")
    for job_id in (running, pending):
        gateway.cancel(job_id)
        wait_state(gateway, job_id, "CANCELLED")
        assert job_id not in {each.id for each in gateway.jobs()}


def writes(job_id: str) -> list[Callable[[Gateway], Any]]:
    return [
        lambda gateway: gateway.hold(job_id),
        lambda gateway: gateway.release(job_id),
        lambda gateway: gateway.cancel(job_id),
        lambda gateway: gateway.requeue_hold(job_id),
        lambda gateway: gateway.place(job_id, place("t4-00", gpus=1)),
        lambda gateway: gateway.set_admin_comment(job_id, "x"),
    ]


def test_a_job_that_never_was_is_gone(gateway: Gateway) -> None:
    for write in writes("999999"):
        with pytest.raises(JobGone) as caught:
            write(gateway)
        assert caught.value.job_id == "999999"


def test_a_job_that_has_ended_is_gone(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "-p", "t4", script="true")
    wait_state(gateway, job_id, "COMPLETED")
    for write in (gateway.hold, gateway.release, gateway.cancel):
        with pytest.raises(JobGone):
            write(job_id)
    assert wait_state(gateway, job_id, "COMPLETED").end_s is not None


def test_without_the_controller_everything_says_so(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--hold")
    loopback.kill_slurmctld()
    try:
        for call in (
            gateway.jobs,
            gateway.nodes,
            gateway.partitions,
            *(lambda w=w: w(gateway) for w in writes(job_id)),
        ):
            with pytest.raises(ControllerAway, match="scontrol ping"):
                call()
    finally:
        loopback.start_slurmctld()
    assert len(gateway.nodes()) == len(loopback.nodes)


def test_without_munged_everything_says_so(gateway: Gateway, loopback: LoopbackCluster) -> None:
    job_id = submit(loopback, "--hold")
    loopback.stop_munged()
    try:
        for call in (gateway.jobs, gateway.nodes, lambda: gateway.hold(job_id), lambda: gateway.cancel(job_id)):
            with pytest.raises(ControllerAway):
                call()
    finally:
        loopback.start_munged()
    wait_for(lambda: [each.id for each in gateway.jobs()] == [job_id], 30, "the job listed again")


def test_patience_has_an_end(gateway: Gateway, loopback: LoopbackCluster) -> None:
    impatient = open_gateway("cli", conf=loopback.slurm_conf, timeout_s=0.5)
    loopback.kill_slurmctld()
    try:
        with pytest.raises(TimedOut, match=r"no answer in 0\.5 s"):
            impatient.jobs()
        with pytest.raises(TimedOut):
            impatient.hold("1")
    finally:
        loopback.start_slurmctld()


def test_reads_nodes_and_partitions(gateway: Gateway, loopback: LoopbackCluster) -> None:
    nodes = {node.name: node for node in gateway.nodes()}
    assert {name: node.gpus for name, node in nodes.items()} == {
        spec.name: {spec.gpu_type: spec.gpus} for spec in loopback.nodes
    }
    assert all(node.usable and not sum(node.gpus_used.values()) for node in nodes.values())
    assert set(nodes["t4-00"].partitions) == {"t4", "all"}
    assert nodes["t4-00"].cpus == 64
    assert nodes["t4-00"].cpus_used == 0
    partitions = {partition.name: partition for partition in gateway.partitions()}
    assert set(partitions) == {"t4", "rtx", "a100", "all"}
    assert partitions["rtx"].nodes == ("rtx-00", "rtx-01")
    assert set(partitions["all"].nodes) == set(nodes)
    assert [name for name, partition in partitions.items() if partition.default] == ["all"]
    assert all(partition.up and partition.max_time_s is None for partition in partitions.values())


def test_reads_what_an_admin_took_away(gateway: Gateway, loopback: LoopbackCluster) -> None:
    try:
        loopback.command("scontrol", "update", "NodeName=t4-01", "State=DRAIN", "Reason=bad fan State=IDLE")
        loopback.command("scontrol", "update", "PartitionName=rtx", "State=DOWN", "MaxTime=2:00:00")
        (node,) = [each for each in gateway.nodes() if each.name == "t4-01"]
        assert "DRAIN" in node.state
        assert not node.usable
        assert node.reason == "bad fan State=IDLE"
        (partition,) = [each for each in gateway.partitions() if each.name == "rtx"]
        assert (partition.up, partition.max_time_s) == (False, 7200.0)
    finally:
        loopback.command("scontrol", "update", "NodeName=t4-01", "State=RESUME")
        loopback.command("scontrol", "update", "PartitionName=rtx", "State=UP", "MaxTime=UNLIMITED")


def test_reads_jobs(gateway: Gateway, loopback: LoopbackCluster) -> None:
    before = time.time()
    job_id = submit(
        loopback, "--hold", "-p", "t4,all", "-w", "t4-01", "--gpus-per-node=t4:2", "-n4", "-c3", "-t", "1-02:03", "--no-requeue"
    )  # fmt: skip
    now = job(gateway, job_id)
    assert (now.number, now.user, now.uid, now.state, now.held) == (int(job_id), "root", 0, "PENDING", True)
    assert (now.partition, now.required_nodes, now.nodes) == (("t4", "all"), ("t4-01",), ())
    assert (now.gpus_per_node, now.gpu_type, now.tasks, now.cpus_per_task, now.cpus) == (2, "t4", 4, 3, 12)
    assert (now.time_limit_s, now.requeue, now.restarts) == (93780.0, False, 0)
    assert before - 2 <= now.submit_s <= time.time() + 2
    assert (now.eligible_s, now.start_s, now.comment, now.admin_comment, now.account) == (None, None, "", "", "")
    without = job(gateway, submit(loopback, "--hold", "--gpus=6", "--requeue"))
    assert (without.gpus_per_node, without.requeue) == (None, True)
    assert (job(gateway, submit(loopback, "--hold", "--gres=gpu"))).gpus_per_node == 1


NASTY = [
    "a b UserId=root(0) AdminComment={}",
    "x\n99|RUNNING\n7~1 \"quoted\" 'single'",
    '{"penstock": {"max_gpus": 4}, "x y": " AdminComment=foo"}',
    "Ünïcödé 調度 ~ % :0 , ; $(id) `id` \\n",
    '"starts with a quote',
    "l" * 3000,
]


@pytest.mark.parametrize("text", NASTY)
def test_what_users_write_forges_nothing(gateway: Gateway, loopback: LoopbackCluster, text: str) -> None:
    ids = {submit(loopback, "--hold", f"--job-name={text[:200]}", f"--comment={text}") for _ in range(2)}
    jobs = gateway.jobs()
    assert {each.id for each in jobs} == ids
    assert {(each.uid, each.state, each.name, each.comment) for each in jobs} == {(0, "PENDING", text[:200], text)}
    assert {each.admin_comment for each in jobs} == {""}


@pytest.mark.parametrize("text", NASTY)
def test_admin_comments_come_back_as_written(gateway: Gateway, loopback: LoopbackCluster, text: str) -> None:
    job_id = submit(loopback, "--hold", "--gres=gpu:1")
    before = job(gateway, job_id)
    gateway.set_admin_comment(job_id, text)
    now = job(gateway, job_id)
    assert now.admin_comment == text
    assert (now.partition, now.comment, now.name) == (before.partition, before.comment, before.name)
    gateway.set_admin_comment(job_id, "")
    assert job(gateway, job_id).admin_comment == ""


def test_elements_of_an_array_are_jobs_of_their_own(gateway: Gateway, loopback: LoopbackCluster) -> None:
    array = submit(loopback, "--hold", "--gres=gpu:1", "--array=0-2,9", "--requeue")
    ids = {f"{array}_{element}" for element in (0, 1, 2, 9)}
    assert {each.id for each in gateway.jobs()} == ids
    gateway.set_admin_comment(f"{array}_2", "mine")
    for element, node in ((0, "t4-00"), (9, "rtx-01")):
        now = run(gateway, f"{array}_{element}", place(node, gpus=2))
        assert (now.nodes, now.array_job_id, now.array_task_id) == ((node,), int(array), element)
    states = {each.id: each.state for each in gateway.jobs()}
    assert states == {each: "RUNNING" if each[-1] in "09" else "PENDING" for each in ids}
    assert {each.admin_comment for each in gateway.jobs() if each.id != f"{array}_2"} == {""}
    stop(gateway, f"{array}_9")
    assert {each.id for each in gateway.jobs()} == ids
    gateway.cancel(f"{array}_1")
    assert {each.id for each in gateway.jobs()} == ids - {f"{array}_1"}


def test_parts_of_a_heterogeneous_job_are_told(gateway: Gateway, loopback: LoopbackCluster) -> None:
    leader = loopback.command(
        "sbatch", "--parsable", "--hold", "-N1", "--output=/dev/null", "--wrap", "true", ":", "-N1"
    ).stdout.strip()
    jobs = gateway.jobs()
    assert len(jobs) == 2
    assert {each.het_job_id for each in jobs} == {int(leader)}


def test_version(gateway: Gateway) -> None:
    assert gateway.version() >= (22, 5)
