"""What the jobs of a workload are beside others, by hand."""

from __future__ import annotations

import pytest

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import JobSpec
from penstock_scheduler.simulator import nodes_from_spec
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind, SimulatedAgents
from penstock_scheduler.simulator.cluster_sharing import sharers
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.run import Driving, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec

TABLE = Colocation(
    {
        ("t4", "net", "net"): Pair(share=0.8),
        ("t4", "('lm', 2)", "('lm', 2)"): Pair(share=0.4),
        ("a100", "('lm', 4)", "('lm', 4)"): Pair(share=0.9),
    },
    {("t4", "net"): 0.3},
)


def job(job_id: str, gpus: int = 1, **more: object) -> WorkloadJob:
    return WorkloadJob(job_id, 0.0, gpus, rigid_spec(gpus), duration_s=600.0, **more)  # type: ignore[arg-type]


def kinds(*jobs: WorkloadJob, drawn: bool = False, seed: int = 0) -> dict[str, SharingKind]:
    settings = AgentSettings(seed=seed)
    return dict(sharers(Workload("w", jobs), ("t4", "a100"), TABLE, settings, drawn=drawn).kinds)


def test_a_job_is_found_in_the_table_by_kind_family_model_and_name() -> None:
    """One that is not is of its user's kind, as in penstockd."""
    family = WorkloadJob("f", 0.0, 1, JobSpec(max_gpus=1, model_family="net"), name="lm", duration_s=1.0)
    found = kinds(job("k", kind="net", name="lm"), family, job("n", 2, name="lm"), job("x", name="other"), job("net"))
    assert {name: kind.name for name, kind in found.items()} == {
        "k": "net",
        "f": "net",
        "n": "('lm', 2)",
        "x": "user/other",
        "net": "net",
    }


def test_what_it_uses_alone_is_told_or_measured_or_explains_it_beside_itself() -> None:
    """net was measured at 0.3. lm on two GPUs has 0.4 of its speed beside itself, as two have that need more than there is: 1."""
    found = kinds(
        job("told", kind="net", gpu_utilisation=0.7),
        job("net"),
        job("lm", 2),
        job("unknown"),
        job("four", 4, kind="lm"),
    )
    assert [found[name].utilisation for name in ("told", "net", "lm", "unknown")] == [0.7, 0.3, 1.0, 1.0]
    assert found["four"].utilisation == pytest.approx(1 / 1.8), "0.9 + 0.9 beside itself"


def test_kinds_are_drawn_by_size_and_by_seed() -> None:
    jobs = [job(f"j{number}", gpus) for number, gpus in enumerate((2, 3, 4, 8))]
    assert [kind.name for kind in kinds(*jobs, drawn=True).values()] == [
        "('lm', 2)",
        "('lm', 2)",
        "('lm', 4)",
        "('lm', 4)",
    ]
    apart = Colocation({("t4", f"('of {size}', {size})", "x"): Pair(share=0.5) for size in (2, 8)})
    sizes = Workload("w", (job("one", 1), job("seven", 7)))
    found = sharers(sizes, ("t4",), apart, AgentSettings(), drawn=True).kinds
    assert {kind.name for kind in found.values()} == {"('of 2', 2)"}, "the next fewer, or else the smallest"
    several = Colocation({("t4", f"('k{number}', 1)", "x"): Pair(share=0.5) for number in range(9)})
    two = Workload("w", (job("a"), job("b")))
    drawn = [sharers(two, ("t4",), several, AgentSettings(seed=seed), drawn=True).kinds for seed in (0, 0, 1, 2)]
    names = [tuple(kind.name for kind in each.values()) for each in drawn]
    assert names[0] == names[1]
    assert len(set(names)) > 1


def test_gpu_memory_is_the_catalogues() -> None:
    told = sharers(Workload("w", (job("a", gpu_mem_mb=5000.0),)), ("a100", "mine"), TABLE, AgentSettings())
    assert told.gpu_memory_mb == {"a100": 38146}, "40 GB; that of the site's own type is unknown"
    assert told.kinds["a"].memory_mb == 5000


def test_the_first_minute_is_the_same_with_and_without_agents() -> None:
    """Three jobs of 10, 0.5 and 10 minutes, one after the other on one GPU, each with 30 s to start and a pause to a round."""
    jobs = tuple(
        WorkloadJob(name, 0.0, 1, rigid_spec(1), duration_s=seconds)
        for name, seconds in (("a", 600.0), ("b", 30.0), ("c", 600.0))
    )
    scenario = prepare(nodes_from_spec("t4:1x1"), Workload("w", jobs))
    rows = {}
    for agents in (None, SimulatedAgents({}, Colocation())):
        simulation = simulate_policy(scenario, "fifo", None, Driving(as_requested=True), agents=agents)
        rows[agents is None] = job_rows(simulation)
        assert summarise(simulation, rows[agents is None]).utilisation == pytest.approx(1320 / 1350, abs=0.05)
    assert [row.feedback_s for row in rows[True]] == [row.feedback_s for row in rows[False]]
    assert [row.gpu_hours for row in rows[True]] == pytest.approx([row.gpu_hours for row in rows[False]])
    assert rows[True][0].feedback_s == 90.0
    assert rows[True][1].feedback_s == rows[True][1].jct_s, "it ended before a minute was over"
