"""A simulated site with a cloud: the burst manager that the daemon runs, by hand, against Starburst's replay and against life."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.replays.starburst import RigidJob, SiteSpec, replay
from benchmarks.replays.starburst_golden import golden_jobs

from penstock_scheduler.api.ports import ClusterParts
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.waiting import Averages, Wait, by_budget
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import OnEvent, Period
from penstock_scheduler.simulator.cloud import (
    BEGINS_EVERY_S,
    CloudSpec,
    CloudUse,
    MemoryRunStore,
    SimulatedCloud,
    cloud_settings,
)
from penstock_scheduler.simulator.cluster import SimulatedCluster, nodes_from_spec
from penstock_scheduler.simulator.jobs import SimulatedClock
from penstock_scheduler.simulator.learning import SimulatedModels
from penstock_scheduler.simulator.run import (
    RESTART_COST_S,
    Scenario,
    Simulation,
    driving_of,
    prepare,
    simulate_policy,
    simulated_job,
)
from penstock_scheduler.simulator.truth import Truth, TruthSettings
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec
from penstock_scheduler.store.sql import SqlStore, open_store

DATA = os.environ.get("PENSTOCK_TEST_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="PENSTOCK_TEST_DATA names no folder with Starburst's data (docs/developer/data.md)"
)
FOLDER = Path(DATA or ".") / "starburst"


def scenario(cluster: str, jobs: Sequence[RigidJob], **spec: Any) -> Scenario:
    """These jobs on this cluster. Starts take no time, as in the replay."""
    made = tuple(
        WorkloadJob(
            str(number),
            job.arrival_h * 3600,
            job.gpus,
            rigid_spec(job.gpus).model_copy(update=spec),
            duration_s=job.runtime_h * 3600,
        )
        for number, job in enumerate(jobs)
    )
    found = prepare(nodes_from_spec(cluster), Workload("w", made))
    truth = TruthSettings(None, node_gpus=found.node_gpus, restart_s=0.0)
    return dataclasses.replace(found, truth=Truth(tuple(found.node_gpus), None, found.families, truth, found.gpus))


def cloud(where: Scenario, **given: Any) -> CloudSpec:
    sizes = tuple(sorted({job.gpus for job in where.workload.jobs if job.gpus <= 8} | set(where.node_gpus.values())))
    constants = {"boot_s": 1.0} | {name: given.pop(name) for name in ("boot_s", "t_max_h", "patience") if name in given}
    return CloudSpec(
        cloud_settings(given, where.workload, **constants), "v100", 2.0, sizes, begins_every_s=1.0, ends_s=0.0
    )


def fifo(backfill: str) -> PolicyChoice:
    return PolicyChoice(name="fifo", settings={"fifo": {"backfill": backfill}})


def away(simulation: Simulation) -> CloudUse:
    assert simulation.cloud is not None
    return simulation.cloud


def starts_h(simulation: Simulation) -> list[float]:
    return [job.runs[-1].start_s / 3600 for job in simulation.jobs]


def test_one_node_of_four_by_hand():
    """As in the replay's own test. A holds all 4 GPUs for 2 h. B (1 h) may wait 1 h from 0.5 on, since P = 75 % of the mean of
    4 GPUs is an alpha of 0.25: it leaves at 1.5. C (4 h) may wait until 4.5, and begins at 2."""
    where = scenario("v100:1x4", [RigidJob(0, 2, 4), RigidJob(0.5, 1, 4), RigidJob(0.5, 4, 4)], preemptible=False)
    run = simulate_policy(where, fifo("out-of-order"), cloud=cloud(where, waiting_budget_percent=100.0))
    assert starts_h(run) == pytest.approx([0, 1.5, 2], abs=10 / 3600)
    assert away(run).away == {"1"}
    assert away(run).gpu_hours["1"] == pytest.approx(4.0, rel=0.01)
    assert away(run).usd["1"] == pytest.approx(8.0, rel=0.01)
    assert run.gpu_seconds == pytest.approx(4 * 6 * 3600, rel=1e-3), "what runs in the cloud holds nothing on site"


def test_the_newest_leaves_when_the_queue_is_full():
    where = scenario("v100:1x4", [RigidJob(0, 1, 4), RigidJob(0.1, 1, 4), RigidJob(0.2, 1, 4)], preemptible=False)
    run = simulate_policy(
        where, "fifo", cloud=cloud(where, wait="constant-wait", waiting_budget_percent=900.0, max_queue=1)
    )
    assert away(run).away == {"2"}
    assert starts_h(run)[2] == pytest.approx(0.2, abs=10 / 3600)


def test_short_jobs_leave_at_once():
    where = scenario("v100:1x4", [RigidJob(0, 0.1, 1), RigidJob(0.1, 1, 1)], preemptible=False)
    run = simulate_policy(where, "fifo", cloud=cloud(where, short_h=0.2))
    assert away(run).away == {"0"}


def test_a_long_first_run_of_star_wait_comes_back():
    """A blocks the site for 10 h. B (2 h) runs in the cloud for 0.5 h, comes back with what it has done, and waits; the site is
    full, so it goes there for good."""
    where = scenario("v100:1x4", [RigidJob(0, 10, 4), RigidJob(1, 2, 1)])
    settings = {"wait": "star-wait", "t_max_h": 0.5, "patience": 1.0, "waiting_budget_percent": 25.0}
    run = simulate_policy(where, "fifo", cloud=cloud(where, **settings))
    stays = simulate_policy(
        scenario("v100:1x4", [RigidJob(0, 10, 4), RigidJob(1, 2, 1)], preemptible=False),
        "fifo",
        cloud=cloud(where, **settings),
    )
    assert [len(job.runs) for job in run.jobs] == [1, 2]
    assert run.jobs[1].runs[0].end_s - run.jobs[1].runs[0].start_s == pytest.approx(1800, abs=20)
    assert away(run).gpu_hours["1"] == pytest.approx(2.0, rel=0.02)
    assert [len(job.runs) for job in stays.jobs] == [1, 1], "a job that may not be stopped is never taken back"


def test_a_gang_runs_on_several_instances():
    where = scenario("v100:1x4", [RigidJob(0, 3, 4), RigidJob(0.5, 1, 8)], preemptible=False)
    spec = dataclasses.replace(cloud(where, wait="no-wait"), sizes=(4,))
    run = simulate_policy(where, fifo("out-of-order"), cloud=spec)
    assert away(run).away == {"1"}
    assert [share.gpus for share in run.jobs[1].runs[0].placement.shares] == [4, 4]
    assert away(run).gpu_hours["1"] == pytest.approx(8.0, rel=0.01)
    assert run.failed_rounds == 0


@pytest.mark.parametrize(
    ("nodes", "suspend_s", "ends_s", "expected_h"),
    [
        (None, 0, 0, [0.5, 0.5, 0.5]),
        (1, 0, 0, [0.5, 1.5, 2.5]),
        (1, 1800, 0, [0.5, 2.0, 3.5]),
        (2, 1800, 0, [0.5, 0.5, 2.0]),
        (1, 0, 1800, [0.5, 2.0, 3.5]),
        (1, 900, 900, [0.5, 2.0, 3.5]),
    ],
)
def test_jobs_wait_for_a_cloud_node_that_is_free_and_suspended(nodes, suspend_s, ends_s, expected_h):
    """A holds the site for 10 h, and three jobs of an hour leave at 0.5. Slurm uses a node again `suspend_s` after a run, and
    a run is over when the cloud says that its instance has ended, `ends_s` after it is told to end it. It bills an hour."""
    where = scenario("v100:1x4", [RigidJob(0, 10, 4), *[RigidJob(0.5, 1, 4)] * 3], preemptible=False)
    spec = dataclasses.replace(cloud(where, wait="no-wait"), nodes=nodes, suspend_s=suspend_s, ends_s=ends_s)
    run = simulate_policy(where, fifo("out-of-order"), cloud=spec)
    assert starts_h(run)[1:] == pytest.approx(expected_h, abs=0.05)
    assert away(run).away == {"1", "2", "3"}
    assert away(run).gpu_hours == pytest.approx(dict.fromkeys("123", 4.0), rel=0.01)


def test_a_job_begins_when_slurm_looks_for_nodes_that_have_booted():
    """It leaves at 1,800 s, and its instance works 100 s after that. slurmctld looks every 30 s: at 1,920 s."""
    where = scenario("v100:1x4", [RigidJob(0, 1, 4), RigidJob(0.5, 1, 4)], preemptible=False)
    spec = dataclasses.replace(cloud(where, wait="no-wait", boot_s=100.0), begins_every_s=BEGINS_EVERY_S)
    run = simulate_policy(where, "fifo", cloud=spec)
    assert run.jobs[1].finish_s == pytest.approx(1920 + 3600, abs=2)


@pytest.mark.parametrize("policy", ["sia", "fifo", "srtf", "gandiva", "slurm-backfill"])
def test_every_kind_of_policy_bursts_and_every_instance_ends(policy):
    jobs = [RigidJob(0.05 * number, 1 + number % 3, 1 + number % 4) for number in range(20)]
    where = scenario("v100:1x4", jobs)
    run = simulate_policy(where, policy, cloud=cloud(where, waiting_budget_percent=10.0))
    assert all(job.finish_s is not None for job in run.jobs)
    assert away(run).away
    assert sum(away(run).usd.values()) == pytest.approx(2.0 * sum(away(run).gpu_hours.values()), rel=0.02)


def test_a_budget_is_never_passed():
    jobs = [RigidJob(0.01 * number, 1, 2) for number in range(30)]
    where = scenario("v100:1x4", jobs)
    settings = {"wait": "no-wait", "budget": {"site": {"usd_total": 25.0}}}
    run = simulate_policy(where, "fifo", cloud=cloud(where, **settings))
    assert all(job.finish_s is not None for job in run.jobs)
    assert 15 < sum(away(run).usd.values()) <= 25


def test_what_happens_between_two_rounds_does_not_put_off_the_next_one():
    """As in life, `sia` decides every 60 s, whatever arrives, boots or ends in between."""
    times_s: list[float] = []

    def note(simulation: Simulation) -> None:
        if simulation.ticks[-1].decided:
            times_s.append(simulation.ticks[-1].time_s)

    jobs = [RigidJob(0.011 * number, 0.3, 4) for number in range(8)]
    where = scenario("v100:1x4", jobs)
    run = simulate_policy(where, "sia", cloud=cloud(where, wait="no-wait"), on_tick=note)
    assert away(run).away
    assert len(run.ticks) > len(times_s), "there were ticks between the rounds"
    assert [time_s % 60 for time_s in times_s] == [0.0] * len(times_s)


# --- against Starburst's replay


WAITS = {
    "no-wait": (Wait.NONE, "none", {}),
    "compute-wait": (Wait.COMPUTE, "none", {}),
    "compute-wait, out of order": (Wait.COMPUTE, "out-of-order", {"out_of_order": True}),
    "compute-wait, EASY": (Wait.COMPUTE, "easy", {"easy": True}),
    "runtime-wait, out of order": (Wait.RUNTIME, "out-of-order", {"out_of_order": True}),
}


@needs_data
@pytest.mark.parametrize("way", WAITS)
def test_the_manager_spends_what_the_paper_says(way):
    """Jobs that are never recalled, on the set of the paper's fidelity experiment. The replay acts at once and knows the
    averages from the start; the manager takes some seconds for each step, and learns them."""
    kind, backfill, how = WAITS[way]
    jobs = golden_jobs(FOLDER, "fidelity_s1.1")
    mean = Averages(len(jobs), sum(j.runtime_h for j in jobs) / len(jobs), sum(j.gpus for j in jobs) / len(jobs))
    theirs = replay(jobs, by_budget(kind, 25.0, mean), SiteSpec(4, 8, "best", corrected=True, **how))
    where = scenario("v100:4x8", jobs, preemptible=False)
    run = simulate_policy(where, fifo(backfill), cloud=cloud(where, wait=kind.value))
    near = 0.1 if backfill == "easy" else 0.05  # the replay reserves only GPUs that are free before the wait ends
    assert sum(away(run).gpu_hours.values()) == pytest.approx(sum(theirs.cost_gpu_h), rel=near)
    assert sum(away(run).usd.values()) == pytest.approx(2.0 * sum(theirs.cost_gpu_h), rel=near)


# --- against life


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = open_store(tmp_path / "state", writer=True)
    yield opened
    opened.close()


class LiveStore(MemoryRunStore):
    """The daemon's store for runs, ledger and controls. The recorded history is the simulation's."""

    def __init__(self, store: SqlStore) -> None:
        super().__init__()
        for name in ("cloud_runs", "save_cloud_run", "cloud_ledger", "charge", "control", "set_control"):
            setattr(self, name, getattr(store, name))
        self.sql = store


def live(where: Scenario, policy: PolicyChoice, spec: CloudSpec, store: SqlStore, tick_s: float) -> tuple[float, float]:
    """As the daemon runs it: ticks of the same length, its triggers, its store. Returns GPU-hours and US dollars."""
    clock, driving = SimulatedClock(), driving_of(policy)
    kept = LiveStore(store)
    behind = SimulatedCloud(spec, clock, store=kept)
    jobs = [simulated_job(job, where, driving, in_cloud=True) for job in where.workload.jobs]
    cluster = SimulatedCluster(where.nodes, jobs, clock, cloud=behind)
    made, in_full = make_policy(policy)
    loop = RoundLoop(
        ClusterParts(cluster, cloud_nodes=behind),
        clock,
        store,
        RoundTiming(OnEvent(60.0) if driving.round_s is None else Period(driving.round_s), tick_s),
        made,
        SimulatedModels(cluster.jobs, {}, SpecModels(where.families, RESTART_COST_S, where.gpus)),
        in_full,
        RoundSurroundings(cloud=behind.manager),
    )
    while not cluster.finished or behind.manager.runs:
        loop.tick()
        clock.sleep(tick_s)
    lines = store.ledger(limit=10_000)
    return (
        sum(line.amount for line in lines if line.kind == "cloud-gpu-seconds") / 3600,
        sum(line.amount for line in lines if line.kind == "usd"),
    )


@needs_data
@pytest.mark.parametrize(
    ("policy", "wait", "tick_s"),
    [
        (fifo("none"), "constant-wait", 10.0),
        pytest.param(fifo("out-of-order"), "compute-wait", 10.0, marks=pytest.mark.long),
        pytest.param(fifo("none"), "constant-wait", 2.0, marks=pytest.mark.long),
        pytest.param(fifo("out-of-order"), "star-wait", 2.0, marks=pytest.mark.long),
        pytest.param(fifo("easy"), "compute-wait", 10.0, marks=pytest.mark.long),
        pytest.param(PolicyChoice(name="sia"), "compute-wait", 2.0, marks=pytest.mark.long),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("recalled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_simulation_predicts_the_live_loop(store, policy, wait, tick_s, recalled):
    """The paper's fidelity set (s = 1.1), with instances that boot for three minutes. GPU-hours and cost are the same, since the
    simulation leaves out only ticks of the daemon in which nothing happens."""
    jobs = golden_jobs(FOLDER, "fidelity_s1.1")
    where = scenario("v100:4x8", jobs, preemptible=recalled)
    spec = dataclasses.replace(cloud(where, wait=wait, boot_s=180.0), tick_s=tick_s)
    run = simulate_policy(where, policy, cloud=spec)
    gpu_hours, usd = live(where, policy, spec, store, tick_s)
    assert sum(away(run).gpu_hours.values()) == pytest.approx(gpu_hours, rel=0.001)
    assert sum(away(run).usd.values()) == pytest.approx(usd, rel=0.001)
    assert usd > 10
