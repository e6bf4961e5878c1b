"""Jobs share GPUs on a real Slurm with real agents: penstockd decides by gandiva, emulated trainers train."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.wire import Observation
from penstock_scheduler.api.agent_messages import CarriedGroup, NodeStatus, status_file
from penstock_scheduler.api.client import Client
from penstock_slurm.share.gpu_reservation import NAME
from tests.end_to_end.site import Site
from tests.executor.spool import ROOT

pytestmark = pytest.mark.slurm


FAST = {"t4": {"1": 50.0}}
"""Samples/s, and as many steps/s, so that a short slice has enough steps to be measured."""


@pytest.fixture
def sharing_site(make_loopback: MakeLoopback, make_site: Callable[..., Site]) -> Callable[..., Site]:
    """Makes a site with agents on its nodes. penstockd is not started yet."""

    def make(nodes: str, policy: str, **settings: object) -> Site:
        slurm = make_loopback(nodes, agents=True)
        files = [status_file(slurm.spool, node.name) for node in slurm.nodes]
        wait_for(lambda: all(file.exists() for file in files), 120, "the agents to report")
        site = make_site(slurm, policy=policy, **settings)
        site.spool = slurm.spool
        site.slurm_settings |= {"agents": True}
        return site

    return make


def progress(site: Site, job: str) -> float:
    bodies = (report.body for report in site.reports(job))
    return max((body.progress for body in bodies if isinstance(body, Observation)), default=0.0)


def reservations(site: Site) -> list[str]:
    return [job.id for job in site.gateway.jobs() if job.name == NAME]


def running(site: Site) -> list[str]:
    return [job.id for job in site.gateway.jobs() if job.state == "RUNNING" and job.name != NAME]


def status(site: Site, node: str = "t4-00") -> NodeStatus:
    """The last status of the node's agent."""
    return NodeStatus.model_validate_json(status_file(site.spool, node).read_bytes())


def group_of(site: Site, *jobs: str) -> CarriedGroup | None:
    """The group of these jobs, as the first node's agent carries it out."""
    return next((group for group in status(site).groups if set(group.shared.jobs) == set(jobs)), None)


def until(site: Site, done: Callable[[], object], what: str, timeout_s: float = 240) -> None:
    wait_for(
        done, timeout_s, what, poll_s=0.2, details=lambda: f"{site.slurm.command('squeue', '-a').stdout}\n{site.tail()}"
    )


def gains(site: Site, *jobs: str) -> None:
    """Wait until each of them has continued to train."""
    before = {job: progress(site, job) for job in jobs}
    until(site, lambda: all(progress(site, job) > before[job] for job in jobs), f"{jobs} to continue to train")


def plain(site: Site, node: str) -> str:
    """A plain job that has the only GPU of a node."""
    job = site.sbatch("--gres=gpu:1", f"--nodelist={node}", "--output=/dev/null", "--wrap=exec sleep 3600")
    site.wait_states("RUNNING", job, timeout_s=120)
    return job


def another_policy(site: Site, policy: str, extra: str) -> None:
    """End all jobs, and continue with another policy."""
    site.slurm.command("scancel", "--user=root")
    until(site, lambda: not site.gateway.jobs(), "all jobs to be gone")
    site.stop()
    site.policy, site.extra = {"name": policy}, extra
    site.start()


@pytest.mark.long
def test_two_run_on_one_gpu_at_once_and_one_is_moved_off(sharing_site: Callable[..., Site]) -> None:
    """gandiva packs two jobs that suit each other and, when a GPU becomes free, moves one of them there. antman co-locates an
    opportunistic job with a guaranteed one, and gives it what is left."""
    site = sharing_site("t4:2x1", "gandiva", round_s=1.0)
    site.extra = "\n[policy.gandiva]\nslice_s = 2.0\n"
    site.constants["policy.gandiva"] = {"pack_interval_s": 0.0, "interval_s": 0.0}
    stranger = plain(site, "t4-01")
    site.start()
    pair = [site.submit(1e6, rates=FAST, options="--utilisation=0.3") for _ in range(2)]
    until(site, lambda: any(set(each.seen.jobs) == set(pair) for each in status(site).packs), "a slice of both")
    seen = next(each.seen for each in status(site).packs if set(each.seen.jobs) == set(pair))
    assert sum(seen.speeds) > 1.2, "these do not slow each other down"
    assert set(site.states(*pair).values()) == {"RUNNING"}
    gains(site, *pair)
    site.slurm.command("scancel", stranger)
    until(site, lambda: {site.job(job).nodes for job in pair} == {("t4-00",), ("t4-01",)}, "each to have a GPU")
    gains(site, *pair)
    for job in pair:
        site.assert_progress_kept(job, 50.0)

    another_policy(site, "antman", "\n[policy.antman]\ncontrol_s = 1.0\n")
    plain(site, "t4-01")
    low = site.submit(1e6, rates=FAST, gpu_class="opportunistic")
    until(site, lambda: progress(site, low) > 0, "the opportunistic job to train")
    high = site.submit(1e6, rates=FAST, gpu_class="guaranteed")
    until(site, lambda: progress(site, high) > 0, "the guaranteed job to train")
    assert site.states(low, high) == {low: "RUNNING", high: "RUNNING"}
    until(
        site,
        lambda: (group := group_of(site, low, high)) and group.share >= 0.2,
        "the opportunistic job's share to rise",
    )
    group = group_of(site, low, high)
    assert group is not None
    assert [pack.guaranteed for pack in group.shared.packs] == [high]
    gains(site, low, high)
    assert len(site.starts(low)) == 1, "it made room in place"


@pytest.mark.long
def test_six_jobs_on_four_gpus_all_train(sharing_site: Callable[..., Site]) -> None:
    """Each job gets time slices, waiting jobs are suspended, and no other job gets the GPUs meanwhile."""
    site = sharing_site("t4:1x4", "gandiva")
    site.extra = "\n[policy.gandiva]\nslice_s = 4.0\nmode = 'reactive'\n"
    site.start()
    jobs = [site.submit(10_000.0) for _ in range(6)]
    site.wait_states("RUNNING", *jobs[:1], timeout_s=240)
    until(site, lambda: site.slurm.status().nodes[0].gpus_used == 4, "all GPUs to be reserved")
    stranger = site.sbatch("--gres=gpu:1", "--output=/dev/null", "--wrap=true")
    suspended: set[str] = set()
    first: dict[str, float] = {}
    """Progress of the jobs that had been suspended, once there were three."""
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        states = site.states(*jobs)
        suspended |= {job for job, state in states.items() if state == "SUSPENDED"}
        first = first or {job: progress(site, job) for job in suspended} if len(suspended) >= 3 else {}
        if first and all(progress(site, job) > first.get(job, 0.0) for job in jobs):
            break
        time.sleep(1.0)
    assert len(suspended) >= 3
    assert all(progress(site, job) > first.get(job, 0.0) for job in jobs), (
        f"the suspended jobs continued, too {site.tail()}"
    )
    assert site.job(stranger).state == "PENDING"
    for job in jobs:
        site.gateway.cancel(job)
    site.wait_states("COMPLETED", stranger, timeout_s=120)
    deadline_s = time.monotonic() + 120
    while reservations(site):  # GPUs that an agent may still allocate stay reserved until it has read the empty order
        assert time.monotonic() < deadline_s, f"the GPU reservation still stands: {reservations(site)} {site.tail()}"
        time.sleep(1.0)


@pytest.mark.parametrize("policy", [pytest.param("gandiva", marks=pytest.mark.long), "antman"])
def test_no_job_that_came_later_gets_gpus_before_a_plain_job(sharing_site: Callable[..., Site], policy: str) -> None:
    """The GPU that the first three jobs no longer need is the plain job's, long before room would be made for it. Two jobs that
    came later had it, because placeholder jobs kept it for them, and two more joined them in time slices."""
    site = sharing_site("t4:1x2", policy, round_s=1.0)
    site.extra = "\n[policy.gandiva]\nslice_s = 3.0\nmode = 'reactive'\n" if policy == "gandiva" else ""
    site.slurm_settings |= {"plain_patience_s": 3600}
    site.start()
    first = [site.submit(15.0) for _ in range(3)]
    until(site, lambda: len(running(site)) >= 2, "two to run")
    stranger = site.sbatch("--gres=gpu:1", "--output=/dev/null", "--wrap=exec sleep 3600")
    site.wait_states("PENDING", stranger)
    time.sleep(1.1)  # Slurm counts whole seconds
    late = [site.submit(1e6) for _ in range(2)]
    with Client(f"unix:{site.state}/api.sock") as penstock:
        until(site, lambda: "came before" in str(penstock.explain(late[0]).lines), "the reason")

    def started() -> bool:
        states = site.states(stranger, *late, *first)
        assert states[stranger] == "RUNNING" or {states[job] for job in late} == {"PENDING"}, (states, site.tail())
        return states[stranger] == "RUNNING"

    until(site, started, "the plain job to start")
    gains(site, *(late if policy == "gandiva" else late[:1]))
    site.wait_completed(*first)


@pytest.mark.long
def test_a_job_that_its_user_takes_away_goes_on_sharing(sharing_site: Callable[..., Site]) -> None:
    """As a plain job it kept its neighbour suspended, and once that had ended, Slurm gave the GPU to another job beside it."""
    site = sharing_site("t4:1x1", "gandiva", round_s=1.0)
    site.extra = "\n[policy.gandiva]\nslice_s = 3.0\nmode = 'reactive'\n"
    site.start()
    mine, other = [site.submit(1e6, rates=FAST) for _ in range(2)]
    gains(site, mine, other)
    site.slurm.command("scontrol", "update", f"JobId={mine}", "Comment=x")
    for _ in range(2):
        gains(site, mine, other)
    site.gateway.cancel(other)
    stranger = site.sbatch("--gres=gpu:1", "--output=/dev/null", "--wrap=true")
    until(site, lambda: other not in running(site), "the other to be gone")
    for _ in range(3):
        gains(site, mine)
    assert site.states(mine, stranger) == {mine: "RUNNING", stranger: "PENDING"}
    site.gateway.cancel(mine)
    site.wait_states("COMPLETED", stranger, timeout_s=120)


@pytest.mark.long
def test_a_job_grows_into_idle_gpus_and_gives_them_back_at_once(sharing_site: Callable[..., Site]) -> None:
    """Alone it takes all four GPUs. A new job gets one of them, and when the new job has ended, it grows again."""
    site = sharing_site("t4:1x4", "gandiva", round_s=1.0)
    site.constants["policy.gandiva"] = {"idle_s": 3.0, "interval_s": 3.0}
    site.start()
    rates = {"t4": {"1": 1.0, "2": 1.9, "4": 3.5}}
    grown = site.submit(1e6, rates=rates, min_gpus=1, max_gpus=4, grow_shrink=True)

    def gpus() -> int:
        """GPUs of its newest run."""
        runs = site.starts(grown)
        return runs[-1][1] if runs and site.job(grown).state == "RUNNING" else 0

    until(site, lambda: gpus() == 4, "it to grow")
    assert site.starts(grown)[0][1] == 1, "it began on what it needs"
    comer = site.submit(1e6, rates=rates)
    until(site, lambda: progress(site, comer) > 0, "the newcomer to train")
    until(site, lambda: gpus() in (1, 2), "it to train on what is left")
    gains(site, grown, comer)
    site.gateway.cancel(comer)
    until(site, lambda: gpus() == 4, "it to grow again")
    gains(site, grown)
    assert len(site.starts(comer)) == 1
    site.assert_progress_kept(grown, 20.0)
    site.assert_no_run_twice(grown, comer)


@pytest.mark.long
def test_jobs_of_an_agent_that_is_killed_come_back(sharing_site: Callable[..., Site]) -> None:
    """Its suspended job is said to be suspended, with the reason. It is resumed once its GPU is free, or, if another job uses
    that, starts again from its checkpoint. The other job is left alone."""
    site = sharing_site("t4:1x1", "gandiva", round_s=1.0)
    site.extra = "\n[policy.gandiva]\nslice_s = 3.0\nmode = 'reactive'\n"
    site.constants["slurm"] = {"agent_patience_s": 40.0}
    site.start()

    def one_suspended(jobs: set[str]) -> tuple[str, str]:
        """Wait until one of two jobs is suspended and both have trained, kill the agent, and say which job is which."""
        until(site, lambda: all(progress(site, job) > 0 for job in jobs), "both to train")
        for _ in range(10):
            until(site, lambda: sorted(site.states(*jobs).values()) == ["RUNNING", "SUSPENDED"], "time slices")
            site.slurm.kill_agent("t4-00")
            time.sleep(5.0)  # what it asked Slurm for last is done
            frozen = [job for job, state in site.states(*jobs).items() if state == "SUSPENDED"]
            if len(frozen) == 1:
                return frozen[0], (jobs - {*frozen}).pop()
            site.slurm.start_agent("t4-00")  # it was killed between two time slices
        raise AssertionError("each time, the agent was killed between two time slices")

    frozen, other = one_suspended({site.submit(1e6, rates=FAST) for _ in range(2)})
    with Client(f"unix:{site.state}/api.sock") as penstock:
        until(site, lambda: "silent" in penstock.explain(frozen).lines[0], "the reason")
        headline = penstock.explain(frozen).lines[0]
        assert re.match(
            rf"Job {frozen} is suspended since .*: the agent of t4-00, which would resume it, has been", headline
        )
        view = penstock.job(frozen)
        assert view.suspended is not None
        assert f"job {other} runs on its GPUs meanwhile" in view.suspended.text
        assert penstock.job(other).suspended is None
        site.gateway.cancel(other)
        gains(site, frozen)
        assert len(site.starts(frozen)) == 1, "it was resumed where it was"
        until(site, lambda: penstock.job(frozen).suspended is None, "the end of that")
        site.slurm.start_agent("t4-00")
        until(site, lambda: time.time() - status(site).time_s < 5, "the agent to be back")

        moved, stays = one_suspended({frozen, site.submit(1e6, rates=FAST)})
        until(
            site,
            lambda: "it starts again from its last checkpoint" in site.log.read_text(),
            "the other one to be stopped",
        )
        assert site.states(stays) == {stays: "RUNNING"}
        site.gateway.cancel(stays)
        site.wait_states("RUNNING", moved, timeout_s=120)


@pytest.mark.long
def test_behind_sia_a_newcomer_gets_a_slice_at_once_and_then_shares(sharing_site: Callable[..., Site]) -> None:
    """By sia the second job waits. The stage gives it a time slice on the first job's GPU, and packs both once both are
    known."""
    site = sharing_site("t4:1x1", "sia", stages=["gandiva-share"])
    site.extra = "\n[policy.gandiva-share]\nslice_s = 12.0\n"
    site.constants["policy.gandiva-share"] = {"first_slices": 1.0}
    site.start()
    resident = site.submit(1e6, rates=FAST, options="--utilisation=0.3")
    until(site, lambda: progress(site, resident) > 0, "the first to train")
    joining = site.submit(1e6, rates=FAST, options="--utilisation=0.3")
    until(site, lambda: progress(site, joining) > 0, "the second to train")
    assert site.states(resident)[resident] == "SUSPENDED"
    both = {resident, joining}
    until(site, lambda: any(set(each.seen.jobs) == both for each in status(site).packs), "a slice of both")
    assert set(site.states(*both).values()) == {"RUNNING"}
    gains(site, resident, joining)
    assert len(site.starts(resident)) == 1, "it stayed where it was"
    site.gateway.cancel(resident)
    gains(site, joining)


@pytest.mark.long
def test_a_pack_whose_jobs_hinder_one_another_is_undone(sharing_site: Callable[..., Site]) -> None:
    """Each step needs the GPU for nine tenths of its time, and the GPU does one thing at a time. So both are hardly faster than
    one."""
    site = sharing_site("t4:1x1", "gandiva")
    site.extra = "\n[policy.gandiva]\nslice_s = 10.0\n"
    site.constants["policy.gandiva"] = {"pack_interval_s": 0.0, "least_total": 1.4}
    site.start()
    script = shlex.quote(str(ROOT / "tests" / "executor" / "stepping.py"))
    run_dir = "$(echo $PENSTOCK_RUN_DIR | sed s/%n/$SLURMD_NODENAME/)"
    options = f"--gpu={shlex.quote(str(site.folder))}/gpu --gpu-part=0.9 --step=0.1"
    steps = f"exec {shlex.quote(sys.executable)} {script} {run_dir} $SLURM_JOB_ID {options}"
    spec = json.dumps({"penstock": {"max_gpus": 1, "goodput_table": FAST, "checkpointable": True}})
    held = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={spec}", "--output=/dev/null")
    pair = {site.sbatch(*held, f"--wrap={steps}") for _ in range(2)}
    until(site, lambda: any(set(each.seen.jobs) == pair for each in status(site).packs), "a slice of both")
    seen = next(each.seen for each in status(site).packs if set(each.seen.jobs) == pair)
    assert sum(seen.speeds) < 1.4

    def slices_seen() -> bool:
        group = group_of(site, *pair)
        return group is not None and len(group.shared.packs) == 2

    until(site, slices_seen, "time slices instead")
    until(site, lambda: sorted(site.states(*pair).values()) == ["RUNNING", "SUSPENDED"], "one of them to be suspended")
    packs = [each.seen for each in status(site).packs]
    assert len(packs) == 1, f"the pack had only one window: {packs}"


@pytest.mark.long
def test_gloo_trainers_of_two_processes_take_turns(sharing_site: Callable[..., Site], tmp_path: Path) -> None:
    """PyTorch's process groups survive being frozen: both processes of a job stop after one step, and continue with the
    next."""
    elastic = pytest.importorskip("tests.executor.elastic")
    site = sharing_site("t4:1x2", "gandiva")
    site.extra = "\n[policy.gandiva]\nslice_s = 10.0\nmode = 'reactive'\n"
    site.start()
    spec = {"min_gpus": 2, "max_gpus": 2, "goodput_table": {"t4": {"2": 1.0}}}
    size, epochs = 2003, 3
    folders = {}
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        command = [
            elastic.PYTHON,
            str(elastic.SCRIPT),
            str(folder),
            f"--size={size}",
            f"--epochs={epochs}",
            "--sleep=0.5",
        ]
        tasks = "--ntasks=$((SLURM_NNODES * SLURM_GPUS_ON_NODE)) --ntasks-per-node=$SLURM_GPUS_ON_NODE"
        job = site.sbatch(
            *("--hold", "--requeue", "--gres=gpu:2", f"--comment={json.dumps({'penstock': spec})}"),
            *(f"--output={site.folder}/%j.out", f"--wrap=exec srun --overcommit {tasks} {shlex.join(command)}"),
        )
        folders[job] = folder
    suspended: list[str] = []
    """Jobs in the order in which they were suspended, with a new entry for each change."""

    def slices_seen() -> bool:
        for job, state in site.states(*folders).items():
            if state == "SUSPENDED" and suspended[-1:] != [job]:
                suspended.append(job)
        return len(suspended) >= 4

    def train() -> bool:
        return all(elastic.steps(folder) for folder in folders.values())

    until(site, train, "steps of both", timeout_s=400)
    suspended.clear()
    until(site, slices_seen, "two time slices of each", timeout_s=400)
    for folder in folders.values():
        (folder / "fast").touch()
    site.wait_states("COMPLETED", *folders, timeout_s=400)
    for folder in folders.values():
        assert {(record["attempt"], record["world"]) for record in elastic.steps(folder)} == {(0, 2)}, "one run"
        elastic.assert_each_sample_once(folder, epochs, size)
