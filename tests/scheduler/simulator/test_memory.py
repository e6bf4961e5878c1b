"""A simulated site remembers what ended jobs have shown about jobs of their kind."""

from __future__ import annotations

from statistics import mean

from penstock_scheduler.model import JobSpec
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.learning import SimulatedMemory
from penstock_scheduler.simulator.run import Driving, Simulation, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob

SPEC = JobSpec(max_gpus=12, batch_size=12, max_batch_size=384)


def day(memory: SimulatedMemory | None, name: str = "bert-{}") -> Simulation:
    """Six equal trainings, one every ten minutes, of which nothing is known."""
    jobs = tuple(
        WorkloadJob(
            str(number),
            600.0 * number,
            1,
            SPEC,
            name=name.format(number),
            batch_size=12,
            model="bert-squad",
            samples=5e5,
        )
        for number in range(6)
    )
    where = prepare(nodes_from_spec("t4:1x4,rtx:1x4,a100:1x4"), Workload("day", jobs))
    return simulate_policy(where, "sia", driving=Driving(learner="unprofiled"), memory=memory)


def hours(simulation: Simulation) -> float:
    return mean((job.finish_s or 0.0) - job.submit_s for job in simulation.jobs) / 3600


def test_the_second_day_is_shorter_than_one_without_memory_and_moves_jobs_less():
    memory, without = SimulatedMemory(), day(None)
    day(memory)
    second = day(memory)
    assert hours(second) < hours(without)
    assert sum(job.restarts for job in second.jobs) < sum(job.restarts for job in without.jobs)


def test_jobs_of_another_kind_are_not_recalled():
    memory = SimulatedMemory()
    day(memory, "other-{}")
    assert memory.recall("other-#", 12, 384) is not None
    assert memory.recall("bert-#", 12, 384) is None
    assert memory.recall("other-#", 24, 384) is None, "another batch size"
