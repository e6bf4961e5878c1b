"""Jobs that share GPUs of the simulated cluster, by the round loop: worked by hand, and what must hold at every moment."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.simulator import nodes_from_spec
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind, SimulatedAgents
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.run import Driving, Simulation, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec
from tests.scheduler.builders import staged

DRIVING = Driving(as_requested=True)
START_S = 30.0
"""What it costs a job of a recorded duration to start."""


def table(**totals: float) -> Colocation:
    """Shares of pairs whose two shares are alike, by names such as `a_b`."""
    known = {}
    for name, total in totals.items():
        one, other = name.split("_")
        known |= {("v100", a, b): Pair(share=total / 2) for a, b in ((one, other), (other, one))}
    return Colocation(known)


def run(
    policy: str,
    spec: str,
    jobs: list[WorkloadJob],
    kinds: dict[str, SharingKind],
    pairs: Colocation,
    agents: AgentSettings | None = None,
    **settings: object,
) -> tuple[Simulation, SimulatedAgents]:
    its = SimulatedAgents(kinds, pairs, agents or AgentSettings(switch_s=0.0))
    scenario = prepare(nodes_from_spec(spec), Workload("test", tuple(sorted(jobs, key=lambda job: job.submit_s))))
    return simulate_policy(scenario, policy, settings, DRIVING, agents=its), its


def recorded(name: str, seconds: float, gpus: int = 1, submit_s: float = 0.0, **spec: object) -> WorkloadJob:
    its = JobSpec.model_validate(rigid_spec(gpus).model_dump() | spec)
    return WorkloadJob(name, submit_s, gpus, its, duration_s=seconds)


def test_six_jobs_on_four_gpus_get_four_sixths_each() -> None:
    """36,000 s of work each: 54,000 s in time slices, less than a fiftieth lost; all six begin within two slices."""
    jobs = [recorded(f"j{n}", 36_000.0) for n in range(6)]
    kinds = {job.id: SharingKind("a", 1.0) for job in jobs}
    simulation, agents = run("gandiva", "v100:1x4", jobs, kinds, table(a_a=0.8), AgentSettings(switch_s=0.1))
    assert simulation.failed_rounds == 0
    for job in simulation.jobs:
        assert job.finish_s is not None
        assert 36_000 / job.finish_s == pytest.approx(4 / 6, rel=0.02)
    assert max(agents.first_slice_s.values()) <= 120.0


def test_a_pack_that_pays_stays_and_both_end_sooner() -> None:
    """b waits out a's first slice, each is profiled in its turn, and then both run at 0.8: far sooner than one by one."""
    jobs, kinds = (
        [recorded("a", 6000.0), recorded("b", 6000.0)],
        {"a": SharingKind("a", 0.4), "b": SharingKind("b", 0.4)},
    )
    simulation, agents = run("gandiva", "v100:1x1", jobs, kinds, table(a_b=1.6))
    assert [trial.total for trial in agents.trials] == [1.6]
    done_s = max(job.finish_s or math.inf for job in simulation.jobs)
    assert done_s == pytest.approx(60 + 60 + (12_000 - 60) / 1.6, rel=0.02)


@pytest.mark.parametrize(
    ("memory_mb", "packs"), [((0, 0), [1.6]), ((15_000, 0), []), ((9000, 5000), [1.6]), ((9000, 6000), [])]
)
def test_a_job_of_unknown_memory_fits_beside_others(memory_mb: tuple[int, int], packs: list[float]) -> None:
    """On 16,000 MB: 9,900 + 5,500 do, 9,900 + 6,600 do not; and 16,500 are more than there is for the one alone."""
    jobs = [recorded("a", 1500.0), recorded("b", 1500.0)]
    kinds = {name: SharingKind(name, 0.4, mb) for name, mb in zip("ab", memory_mb, strict=True)}
    agents = SimulatedAgents(kinds, table(a_b=1.6), AgentSettings(switch_s=0.0), {"v100": 16_000})
    simulation = simulate_policy(
        prepare(nodes_from_spec("v100:1x1"), Workload("test", tuple(jobs))), "gandiva", None, DRIVING, agents=agents
    )
    assert simulation.failed_rounds == 0
    assert [trial.total for trial in agents.trials] == packs


def test_a_pack_that_does_not_pay_is_undone_after_one_slice() -> None:
    jobs, kinds = (
        [recorded("a", 3000.0), recorded("b", 3000.0)],
        {"a": SharingKind("a", 0.4), "b": SharingKind("b", 0.4)},
    )
    _, agents = run("gandiva", "v100:1x1", jobs, kinds, table(a_b=0.7))
    assert [(trial.slices, trial.ended) for trial in agents.trials] == [(1, False)], "and is never tried again"


def test_a_suspended_job_makes_no_progress_and_a_resumed_job_pays_for_the_switch() -> None:
    """Among equals the running job stays for two slices: 120 s. The resume takes 6 s of them. 10,800 s / 0.95."""
    jobs, kinds = (
        [recorded("a", 5400.0), recorded("b", 5400.0)],
        {"a": SharingKind("a", 1.0), "b": SharingKind("b", 1.0)},
    )
    simulation, agents = run(
        "gandiva", "v100:1x1", jobs, kinds, table(a_b=0.5), AgentSettings(switch_s=6.0), mode="reactive"
    )
    assert agents.resumes.total() == pytest.approx(95, abs=5)
    assert max(job.finish_s or math.inf for job in simulation.jobs) == pytest.approx(11_370, rel=0.02)


def test_a_guaranteed_job_keeps_its_speed_and_its_opportunistic_job_gets_what_is_left() -> None:
    """The guaranteed job has half its speed while the opportunistic job trains.

    So it takes 5 % longer if the opportunistic job trains 2 - 2 / 1.05 = 9.52 % of the time.
    """
    jobs = [
        recorded("low", 10_000.0, gpu_class="opportunistic"),
        recorded("high", 20_000.0, submit_s=600.0, gpu_class="guaranteed"),
    ]
    kinds = {"low": SharingKind("low"), "high": SharingKind("high", 0.5, 0, 0.1)}
    simulation, _ = run("antman", "v100:1x1", jobs, kinds, table(low_high=1.0))
    low, high = simulation.jobs
    assert high.finish_s is not None
    assert low.finish_s is not None
    slower = (high.finish_s - 600 - START_S) / 20_000 - 1
    assert 0.04 < slower <= 0.05, "the search for the share included"
    alone_s = 600 - START_S
    joining = (10_000 - alone_s - (low.finish_s - high.finish_s)) / (high.finish_s - 600)
    assert 0.9 * 0.0952 / 2 <= joining <= 0.0952 / 2, "at half its speed"
    assert low.restarts == 0, "it stays where it is"


def test_sia_with_a_stage_gives_a_first_slice_though_the_cluster_is_full() -> None:
    jobs = [recorded("a", 20_000.0), recorded("b", 1000.0, submit_s=3600.0)]
    kinds = {"a": SharingKind("a"), "b": SharingKind("b")}
    with_stage, agents = run(staged("sia", "gandiva-share"), "v100:1x1", jobs, kinds, table(a_b=0.9))
    assert agents.first_slice_s["b"] - 3600 <= 180
    assert all(job.finish_s is not None for job in with_stage.jobs)


POLICIES = [
    PolicyChoice(name="gandiva"),
    PolicyChoice(name="antman"),
    staged("sia", "gandiva-share"),
    staged("fifo", "gandiva-share"),
    staged("sia", "antman-share"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_at_every_moment_no_gpu_runs_more_than_the_plan_says(policy: PolicyChoice, seed: int) -> None:
    """Also while nodes fail, with measurements that err, and with jobs of several sizes and classes."""
    source = random.Random(seed)
    jobs, kinds = [], {}
    for n in range(24):
        gpus = source.choice([1, 1, 1, 2, 4, 8])
        its = source.choice(["guaranteed", "opportunistic"])
        jobs.append(recorded(f"j{n:02d}", source.uniform(300, 5000), gpus, source.uniform(0, 5000), gpu_class=its))
        kinds[jobs[-1].id] = SharingKind(source.choice("abc"), source.uniform(0.3, 1.0), source.choice([4000, 9000]))
    pairs = table(a_a=1.4, a_b=0.8, a_c=1.7, b_b=0.6, b_c=1.1, c_c=0.0)
    agents = SimulatedAgents(kinds, pairs, AgentSettings(noise=0.03, seed=seed), {"v100": 16_000})
    nodes = nodes_from_spec("v100:4x4")
    scenario = prepare(nodes, Workload("test", tuple(sorted(jobs, key=lambda job: job.submit_s))))
    looked = 0

    def look(simulation: Simulation) -> None:
        nonlocal looked
        looked += 1
        held: Counter[str] = Counter()
        for job in simulation.jobs:
            if job.allocation is not None and job.id not in agents.group_of:
                held.update({share.node: share.gpus for share in job.allocation.shares})
        for group in agents.groups:
            held[group.order.node] += group.order.gpus
            assert sum(pack.gpus for pack in group.running) <= group.order.gpus
            trains = {job for pack in group.running for job in pack.jobs}
            for job in simulation.jobs:
                if job.id in group.order.jobs:
                    assert job.allocation is not None
                    assert job.allocation.nodes == (group.order.node,)
                    assert job.rate == 0 or job.id in trains, "a suspended job makes no progress"
            for pack in group.running:
                if len(pack.jobs) > 1 and pack.guaranteed is None:
                    assert sum(kinds[job].memory_mb for job in pack.jobs) <= 16_000
        assert all(gpus <= 4 for gpus in held.values()), held

    failing = Disturbances(node_mtbf_h=3.0, node_repair_h=0.1, seed=seed)
    simulation = simulate_policy(
        dataclasses.replace(scenario, disturbances=failing), policy, None, DRIVING, look, agents=agents
    )
    assert simulation.failed_rounds == 0
    assert all(job.finish_s is not None for job in simulation.jobs), "no job is lost"
    assert looked > 50


def test_a_job_grows_into_gpus_that_stay_idle_and_shrinks_when_a_job_arrives() -> None:
    """On one node of four GPUs a job that grows has one, and another the other three until second 880.

    They are seen idle at 900, and at 1200, five minutes later, it grows: it has done 1170, and from 1230 on does four a second.
    At 1500 it has done 2250. Somebody comes, and in that round it gives back three GPUs: both train from 1530 on, it has its last
    500 done at 2030, and the newcomer its 600 at 2130.
    """
    grows = recorded("a", 2750.0, adaptivity="adaptive", min_gpus=1, max_gpus=4, grow_shrink=True)
    jobs = [grows, recorded("b", 600.0, submit_s=1490.0), recorded("c", 850.0, 3)]
    its = SimulatedAgents({}, Colocation(), AgentSettings(switch_s=0.0))
    workload = Workload("test", tuple(sorted(jobs, key=lambda job: job.submit_s)))
    had: list[tuple[float, int]] = []

    def look(simulation: Simulation) -> None:
        job = next(job for job in simulation.jobs if job.id == "a")
        gpus = job.allocation.gpus if job.allocation is not None else 0
        if not had or had[-1][1] != gpus:
            had.append((simulation.ticks[-1].time_s, gpus))

    simulation = simulate_policy(
        prepare(nodes_from_spec("v100:1x4"), workload), "gandiva", None, Driving(), look, agents=its
    )
    assert simulation.failed_rounds == 0
    assert had == [(0.0, 1), (1200.0, 4), (1500.0, 1), (2040.0, 0)]
    assert {job.id: job.finish_s for job in simulation.jobs} == pytest.approx({"a": 2030, "b": 2130, "c": 880})
    assert {job.id: job.restarts for job in simulation.jobs} == {"a": 2, "b": 0, "c": 0}
