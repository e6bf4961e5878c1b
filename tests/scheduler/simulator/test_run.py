"""Whole simulations of a small window that we made up: conservation, determinism, and figures worked by hand."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest

from penstock_profiles.families import Families, load_families
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Adaptivity, Job, JobSpec, Phase, Placement, Share
from penstock_scheduler.simulator import run as run_module
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.jobs import SimulatedJob, SimulatedRun
from penstock_scheduler.simulator.learning import FittedLearner, SimulatedModels
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.results import interval
from penstock_scheduler.simulator.run import Driving, Scenario, prepare, simulate_policy
from penstock_scheduler.simulator.truth import Truth, TruthSettings
from penstock_scheduler.simulator.workloads import BadInput, Workload, WorkloadJob, jittered, rigid_spec
from tests.scheduler.builders import staged
from tests.scheduler.simulator.toy import write_profiles

POLICIES = ("sia", "sia:artifact", "fifo")


def window(jobs: int = 12) -> Workload:
    """Trainings of the toy model, some longer than others, and a few ask for more GPUs."""
    spec = JobSpec(max_gpus=16, batch_size=8, max_batch_size=16)
    return Workload(
        "toys",
        tuple(
            WorkloadJob(
                str(number),
                45.0 * number,
                2 ** (number % 3),
                spec,
                batch_size=16,
                model="toy",
                samples=200.0 * (1 + number % 5),
            )
            for number in range(jobs)
        ),
    )


def scenario(folder: Path, workload: Workload | None = None, spec: str = "t4:3x4", **disturbances: float) -> Scenario:
    nodes = nodes_from_spec(spec)
    tables = Profiles(folder / "p" if (folder / "p").is_dir() else write_profiles(folder / "p"))
    types = tuple(dict.fromkeys(node.gpu_type for node in nodes))
    truth = Truth(types, tables, settings=TruthSettings(node_gpus=dict.fromkeys(types, 4)))
    found = window() if workload is None else workload
    return Scenario(nodes, found, truth, load_families(), load_gpus(), Disturbances(**disturbances))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_all_jobs_end_and_no_gpu_is_held_twice(tmp_path, policy):
    """At every instant the GPUs held are at most those that there are, and their integral is what jobs say they held."""
    simulation = simulate_policy(scenario(tmp_path), policy)
    assert all(job.progress == job.work and job.finish_s is not None for job in simulation.jobs)
    for job in simulation.jobs:
        assert [run.start_s for run in job.runs] == sorted(run.start_s for run in job.runs)
        assert all(before.end_s <= after.start_s for before, after in zip(job.runs, job.runs[1:], strict=False))
        assert job.runs[-1].end_s == job.finish_s
    changes = sorted(
        change
        for job in simulation.jobs
        for run in job.runs
        for share in run.placement.shares
        for change in ((run.end_s, 0, share.node, -share.gpus), (run.start_s, 1, share.node, share.gpus))
    )
    held = dict.fromkeys((node.name for node in simulation.scenario.nodes), 0)
    area = last_s = 0.0
    for at_s, _, node, gpus in changes:
        area, last_s = area + sum(held.values()) * (at_s - last_s), at_s
        held[node] += gpus
        assert 0 <= held[node] <= 4
    rows = job_rows(simulation)
    assert sum(row.gpu_hours for row in rows) * 3600 == pytest.approx(area)
    summary = summarise(simulation, rows)
    assert summary.utilisation * 12 * (simulation.end_s - 0) == pytest.approx(area)
    assert all(tick.running + tick.restarting + tick.queued == tick.jobs for tick in simulation.ticks)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_simulation(tmp_path, policy):
    disturbed = {"node_mtbf_h": 1.0, "straggler_share": 0.3, "estimation_error": 0.1}
    one, two = (simulate_policy(scenario(tmp_path, **disturbed), policy) for _ in range(2))
    assert job_rows(one) == job_rows(two)
    assert one.ticks == two.ticks
    other = simulate_policy(replace(one.scenario, disturbances=replace(one.scenario.disturbances, seed=1)), policy)
    assert job_rows(other) != job_rows(one)


def test_a_job_without_a_profile_is_measured_on_each_type_in_its_first_rounds():
    """The rounds of the daemon's own loop: one GPU of each of three types, and more when all are known. A profile spares that."""
    spec = JobSpec(max_gpus=4, batch_size=12, max_batch_size=384)
    found = Workload("one", (WorkloadJob("0", 0.0, 1, spec, batch_size=12, model="bert-squad", samples=5e5),))
    where = prepare(nodes_from_spec("t4:1x4,rtx:1x4,a100:1x4"), found)

    def shapes(learner: Literal["fitted", "unprofiled"], settings: dict[str, object]) -> list[tuple[str, int]]:
        (job,) = simulate_policy(where, "sia", settings, Driving(learner=learner)).jobs
        assert job.finish_s is not None
        return [(run.placement.gpu_type, run.placement.gpus) for run in job.runs]

    measured = shapes("unprofiled", {"measure_gpu_s": 20.0})
    assert sorted(measured[:3]) == [("a100", 1), ("rtx", 1), ("t4", 1)]
    assert measured[3] == ("a100", 4)
    unmeasured = shapes("unprofiled", {})
    assert len({gpu_type for gpu_type, _ in unmeasured}) < 3
    assert {gpu_type for gpu_type, _ in shapes("fitted", {})} == {"a100"}


def test_a_policy_of_parts_is_driven_as_its_first():
    with_las = staged("fifo", partitions={"debug": "las"})
    assert run_module.driving_of(with_las) == run_module.driving_of(staged("fifo", "synergy-tune"))
    assert run_module.driving_of(with_las).as_requested
    assert run_module.driving_of(staged("sia", partitions={"debug": "fifo"})) == Driving()
    assert run_module.driving_of(staged("sia:artifact", partitions={"debug": "fifo"})).moves_are_free


def test_fifo_by_hand(tmp_path):
    """Two jobs that ask for 4 of the 4 GPUs, and one that comes while both wait.

    Each has 80 GPU-seconds, so 20 s of training after a start of 30 s: they end at 50, 100 and 150.
    """
    jobs = tuple(
        WorkloadJob(name, at, 4, rigid_spec(4), duration_s=20.0) for name, at in (("a", 0), ("b", 0), ("c", 10))
    )
    rows = job_rows(simulate_policy(scenario(tmp_path, Workload("w", jobs), "t4:1x4"), "fifo"))
    assert [row.end_s for row in rows] == [50, 100, 150]
    assert [row.queue_s for row in rows] == [0, 50, 90]
    assert [row.gpu_hours * 3600 for row in rows] == [200, 200, 200]
    # a sees 2 jobs for 10 s and 3 for 40 s; b then 2 for 50 s; c 3 for 40 s, 2 for 50 s, 1 for 50 s.
    assert [row.contention for row in rows] == pytest.approx([140 / 50, 240 / 100, 270 / 140])
    # alone on 4 / contention GPUs it has its 4 for that share of the time: 50 s x contention.
    assert [row.ftf_rho for row in rows] == pytest.approx([50 / 140, 100 / 120, 140 / (50 * 270 / 140)])
    priced = job_rows(simulate_policy(scenario(tmp_path, Workload("w", jobs), "t4:1x4"), "fifo"), {"t4": 36.0})
    assert [row.cost for row in priced] == pytest.approx([2, 2, 2])


def test_backfill_knows_time_limits(tmp_path):
    """A holds two of four GPUs for at most 200 s. C, of at most 90 s, passes B, which waits for all; without a limit it waits."""
    for limit_s, starts in ((90.0, [0, 130, 2]), (None, [0, 130, 210])):
        jobs = (
            WorkloadJob("a", 0, 2, rigid_spec(2), duration_s=100.0, time_limit_s=200.0),
            WorkloadJob("b", 1, 4, rigid_spec(4), duration_s=50.0, time_limit_s=200.0),
            WorkloadJob("c", 2, 2, rigid_spec(2), duration_s=50.0, time_limit_s=limit_s),
        )
        rows = job_rows(simulate_policy(scenario(tmp_path, Workload("w", jobs), "t4:1x4"), "slurm-backfill"))
        assert [row.start_s for row in rows] == starts


def test_the_scheduler_hears_what_is_left_of_a_training_once_it_runs(tmp_path):
    """In samples of the batch that its user asked for, 16: 200 samples at 8 are 250 of them. Before it runs: unknown."""
    given = scenario(tmp_path, window(1))
    spec = window(1).jobs[0].as_requested
    truth = given.truth.of(given.workload.jobs[0])
    simulated = SimulatedJob(
        "0", "0", spec, truth, 0.0, learner=FittedLearner("0", truth, spec, ("t4",), Families(), Disturbances())
    )
    models = SimulatedModels({"0": simulated}, {"0": 30.0}, SpecModels(load_families(), 30.0))
    seen = Job(id="0", name="0", user="u", account="", spec=spec, partitions=("all",), phase=Phase.QUEUED, submit_s=0.0)
    assert models.facts([seen], ("t4",))["0"].remaining_work is None
    simulated.runs.append(SimulatedRun(0.0, 0.0, Placement("t4", "all", (Share("t4-00", 1),)), 40.0, 0.0))
    assert models.facts([seen], ("t4",))["0"].remaining_work == pytest.approx(200 * 1.25)


def test_summary_by_hand(tmp_path):
    jobs = tuple(WorkloadJob(name, 0.0, 4, rigid_spec(4), duration_s=20.0) for name in "ab")
    simulation = simulate_policy(scenario(tmp_path, Workload("w", jobs), "t4:1x4"), "fifo")
    told = asdict(summarise(simulation, job_rows(simulation)))
    assert told["avg_jct_h"] == pytest.approx(75 / 3600)
    assert (told["jobs"], told["ended"], told["max_contention"], told["restarts_per_job"]) == (2, 2, 2, 0)
    assert (told["makespan_h"], told["utilisation"]) == (pytest.approx(100 / 3600), pytest.approx(1))
    assert told["contention"] == pytest.approx(1.5)
    assert told["queue_h"] == pytest.approx(25 / 3600)
    json.dumps(told)


def test_ctrl_c_leaves_what_there_is(tmp_path):
    def stop(simulation):
        if len(simulation.ticks) == 8:
            raise KeyboardInterrupt

    simulation = simulate_policy(scenario(tmp_path), "sia", on_tick=stop)
    assert simulation.interrupted
    assert simulation.end_s == 7 * 60
    rows = job_rows(simulation)
    summary = summarise(simulation, rows)
    assert 0 < summary.ended < summary.jobs
    assert summary.makespan_h is None
    assert any(row.end_s is None and row.gpu_hours > 0 for row in rows)
    assert all(job.runs[-1].end_s <= simulation.end_s for job in simulation.jobs if job.runs)


def test_jobs_that_can_never_run_do_not_keep_it_going(tmp_path):
    """Seven GPUs exist, but not on one node of four, and not in equal parts of three: no policy has such a configuration."""
    jobs = (
        WorkloadJob("a", 0.0, 7, rigid_spec(7), duration_s=20.0),
        WorkloadJob("b", 500.0, 1, rigid_spec(1), duration_s=20.0),
    )
    for policy in ("sia", "fifo"):
        simulation = simulate_policy(scenario(tmp_path, Workload("w", jobs)), policy)
        assert [job.finish_s is None for job in simulation.jobs] == [True, False]


def test_what_can_never_run_is_said_before_anything_runs(tmp_path):
    jobs = (WorkloadJob("a", 0.0, 16, rigid_spec(16), duration_s=20.0),)
    with pytest.raises(BadInput, match=r"job 'a': found a need of 16 GPUs of t4; expected at most the 12"):
        scenario(tmp_path, Workload("w", jobs)).check()


def test_a_policy_may_be_driven_otherwise(tmp_path):
    """Rounds every 300 s: no job starts in between."""
    simulation = simulate_policy(scenario(tmp_path), "sia", {"fairness_p": -1.0}, Driving(round_s=300.0))
    assert {run.start_s % 300 for job in simulation.jobs for run in job.runs} == {0}


@pytest.mark.parametrize("growth", [2.0, 4.0])
def test_an_adaptive_job_grows_step_by_step(tmp_path, growth: float):
    """Alone on the cluster, it doubles or quadruples from round to round, because its scaling is unknown."""
    long = WorkloadJob("a", 0.0, 1, JobSpec(max_gpus=8, batch_size=8, max_batch_size=16), model="toy", samples=20_000.0)
    simulation = simulate_policy(scenario(tmp_path, Workload("w", (long,)), "t4:2x4"), "sia", {"growth": growth})
    gpus = [run.placement.gpus for run in simulation.jobs[0].runs]
    assert gpus[:2] == [1, growth]
    assert all(after <= growth * before for before, after in itertools.pairwise(gpus))


def test_strong_scaling_keeps_its_batch(tmp_path):
    spec = JobSpec(adaptivity=Adaptivity.STRONG_SCALING, max_gpus=4, batch_size=8)
    job = WorkloadJob("a", 0.0, 1, spec, model="toy", samples=2000.0)
    seen = set()
    simulate_policy(
        scenario(tmp_path, Workload("w", (job,))),
        "sia",
        on_tick=lambda simulation: seen.update(
            each.batch.atomic_batch * (each.batch.accumulation_steps + 1) * each.allocation.gpus
            for each in simulation.jobs
            if each.batch is not None and each.allocation is not None
        ),
    )
    assert seen == {8}


def test_jitter_is_a_seeds_luck():
    assert jittered(window(), 0) == window()
    one, again, other = jittered(window(), 1), jittered(window(), 1), jittered(window(), 2)
    assert one == again != other
    by_id = {job.id: job.submit_s for job in window().jobs}
    assert all(0 <= job.submit_s - by_id[job.id] <= 60 for job in one.jobs)


def test_intervals_by_hand():
    """Of 1 and 3: 12.706 x sqrt(2) / sqrt(2)."""
    assert interval([2.0]) == (2.0, None)
    assert interval([1.0, 3.0]) == (2.0, pytest.approx(12.706, rel=1e-4))


def queue_of(seed: int, *, mtbf_h: float | None) -> Scenario:
    """Rigid jobs, some at the same instant, some too large for one type or for the whole cluster."""
    random_, at_s, jobs = random.Random(seed), 0.0, []
    for number in range(40):
        at_s += random_.choice([0.0, 5.0, random_.expovariate(1 / 60)])
        gpus, types = random_.choice([1, 1, 1, 2, 3, 4, 8, 10, 12, 20]), random_.choice([None, ("t4",), ("t4", "a100")])
        seconds = random_.choice([10.0, 100.0, 1 + random_.expovariate(1 / 400)])
        jobs.append(WorkloadJob(str(number), at_s, gpus, rigid_spec(gpus, types), duration_s=seconds))
    nodes = nodes_from_spec("t4:3x4,a100:1x8")
    return prepare(nodes, Workload("q", tuple(jobs)), disturbances=Disturbances(node_mtbf_h=mtbf_h, node_repair_h=0.2))


@pytest.mark.parametrize("mtbf_h", [None, 3.0])
def test_a_strict_queue_does_the_same_when_its_front_alone_is_shown(monkeypatch, mtbf_h):
    """Same nodes for the same jobs at the same times, also where some never fit and nodes fail under others."""
    observe, shown_jobs = run_module.SimulatedCluster.observe, 0

    def counted(cluster):
        nonlocal shown_jobs
        state = observe(cluster)
        shown_jobs += sum(each.phase is Phase.QUEUED for each in state.jobs)
        return state

    monkeypatch.setattr(run_module.SimulatedCluster, "observe", counted)
    for seed in range(2):
        runs, looks, queued = [], [], []
        for front in (0, 1, 3):
            shown_jobs = 0
            monkeypatch.setattr(run_module, "FRONT", front)
            simulation = simulate_policy(queue_of(seed, mtbf_h=mtbf_h), "fifo")
            queued.append(shown_jobs)
            runs.append([[(run.start_s, run.placement) for run in job.runs] for job in simulation.jobs])
            looks.append(simulation.rounds)
        for shown in runs[1:]:
            for mine, whole in zip(shown, runs[0], strict=True):
                assert [where for _, where in mine] == [where for _, where in whole]
                assert [at_s for at_s, _ in mine] == pytest.approx([at_s for at_s, _ in whole])
        assert looks[2] <= looks[0], "nothing is decided while no job waits"
        assert max(queued[1:]) < queued[0], "the front alone is shown"


def test_a_strict_queue_is_not_asked_before_its_first_may_fit():
    """Four jobs of one GPU on four GPUs; the fifth wants three, and starts when the third has ended. No rounds until then."""
    sizes = [(0.0, 1, 10.0), (0.0, 1, 20.0), (0.0, 1, 30.0), (0.0, 1, 40.0), (1.0, 3, 5.0), (2.0, 1, 5.0)]
    jobs = [WorkloadJob(str(n), at_s, gpus, rigid_spec(gpus), duration_s=s) for n, (at_s, gpus, s) in enumerate(sizes)]
    simulation = simulate_policy(prepare(nodes_from_spec("t4:1x4"), Workload("q", tuple(jobs))), "fifo")
    starts_s = [job.runs[0].start_s for job in simulation.jobs]
    assert starts_s[4] == simulation.jobs[2].finish_s
    assert starts_s[5] == simulation.jobs[3].finish_s
    assert not [tick for tick in simulation.ticks if 1.0 < tick.time_s < starts_s[4]]


def test_backfill_sees_all_jobs(monkeypatch):
    """It considers jobs behind the first of the queue, and the ends of running jobs."""
    seen: list[int] = []
    monkeypatch.setattr(run_module, "FRONT", 1)
    scenario = queue_of(1, mtbf_h=None)
    for settings in ({}, {"backfill": "easy"}):
        most = 0
        original = run_module.SimulatedCluster.observe

        def observe(cluster, original=original):
            nonlocal most
            state = original(cluster)
            most = max(most, len(state.jobs))
            return state

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module.SimulatedCluster, "observe", observe)
            simulate_policy(scenario, "fifo", settings)
        seen.append(most)
    assert seen[0] < seen[1]
