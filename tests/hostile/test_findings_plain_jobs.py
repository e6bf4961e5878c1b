"""What a review found in the room for plain jobs: one that Slurm does not start kept all GPUs from adaptive jobs for ever."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_scheduler.model import Job, Phase
from penstock_scheduler.rounds.plan_gate import PlanGate, SafetySettings
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator import SimulatedClock, nodes_from_spec
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.observe.plain_jobs import MOST_PAUSE_S, Attempts, with_room
from penstock_slurm.settings import SlurmSettings
from tests.scheduler.builders import job, on, snapshot
from tests.slurm_plugin.test_cluster import Told
from tests.slurm_plugin.test_cluster import pending as waiting
from tests.slurm_plugin.test_notes_and_plain_jobs import pending

MOST_S, TICK_S, DAY_S = 400.0, 20.0, 86_400.0
NODES = nodes_from_spec("t4:4x8")
RUN = [job(str(n), user=f"u{n}", phase=Phase.RUNNING, allocation=on("t4", **{f"t4_{n:02}": 8})) for n in range(4)]


def stays(_: Job) -> bool:
    """No job moves."""
    return False


Plain = Callable[[float], list[SlurmJob]]
"""The plain jobs at a time."""


def plain(job_id: str = "99", uid: int = 1, **fields: object) -> SlurmJob:
    """It asks for all GPUs, and has waited for longer than all others. For want of CPUs, Slurm does not start it."""
    wants = {"partition": ("all",), "gpus_per_node": 8, "node_count": 4, "exclusive": True, "eligible_s": 1.0}
    return pending(**({"id": job_id, "uid": uid} | wants | fields))


def lived(jobs: Plain, until_s: float, attempts: Attempts | None = None) -> list[tuple[float, str]]:
    """Time and job of each observation that sets GPUs aside."""
    attempts, found, now_s = attempts or Attempts(MOST_S), [], 0.0
    while now_s < until_s:
        managed = [*RUN, job("w", user="w", submit_s=10.0)]
        nodes = with_room(
            NODES, jobs(now_s), managed, ["all"], now_s=now_s, patience_s=300.0, attempts=attempts, moves=stays
        )
        found += [(now_s, name) for name in sorted({each.set_aside_for for each in nodes} - {""})]
        now_s += TICK_S
    return found


def parts(found: list[tuple[float, str]]) -> list[tuple[float, float]]:
    """Begin and end of each time without a gap."""
    begins = [now for n, (now, _) in enumerate(found) if n == 0 or now - found[n - 1][0] > TICK_S]
    ends = [now + TICK_S for n, (now, _) in enumerate(found) if n + 1 == len(found) or found[n + 1][0] - now > TICK_S]
    return list(zip(begins, ends, strict=True))


def resubmitted(now_s: float) -> list[SlurmJob]:
    """Another job every five minutes."""
    return [plain(str(now_s // 300))]


def in_turn(now_s: float) -> list[SlurmJob]:
    """Two jobs, of which one is always held."""
    return [plain("98", priority=now_s // 100 % 2), plain("99", priority=1 - now_s // 100 % 2)]


def cancelled(now_s: float) -> list[SlurmJob]:
    """Each is cancelled before the attempt ends, and Slurm still lists it."""
    number = int(now_s // 300)
    return [
        plain(str(number)),
        *(plain(str(before), state="CANCELLED") for before in range(max(number - 3, 0), number)),
    ]


@pytest.mark.parametrize("jobs", [lambda now_s: [plain()], resubmitted, in_turn, cancelled])
def test_gpus_are_set_aside_for_a_bounded_time_and_pauses_double(jobs: Plain) -> None:
    times = parts(lived(jobs, DAY_S))
    assert {end - begin for begin, end in times[:-1]} == {MOST_S}
    pauses = [after[0] - before[1] for before, after in itertools.pairwise(times)]
    assert pauses[:4] == [MOST_S, 2 * MOST_S, 4 * MOST_S, 8 * MOST_S]
    assert pauses[6:] == [MOST_PAUSE_S] * 2


def test_a_pause_concerns_one_user() -> None:
    """The others' plain jobs get their room in the meantime, and one that Slurm starts costs nothing."""

    def jobs(now_s: float) -> list[SlurmJob]:
        if now_s >= 1200.0:
            return [plain("8", uid=2, eligible_s=5.0)]
        return [plain(), plain("7", uid=2, eligible_s=5.0, state="RUNNING" if now_s >= 900.0 else "PENDING")]

    found = lived(jobs, 2000.0)
    assert parts([each for each in found if each[1] == "99"]) == [(320.0, 720.0), (1120.0, 1200.0)]
    assert parts([each for each in found if each[1] == "7"]) == [(720.0, 900.0)]
    assert parts([each for each in found if each[1] == "8"]) == [(1200.0, 1600.0)], "a whole attempt"


def test_one_that_starts_does_not_pay_for_another() -> None:
    """A small job of the same user starts now and then. The attempt for the other ends all the same."""

    def jobs(now_s: float) -> list[SlurmJob]:
        turn, small = now_s // 200 % 2, str(now_s // 400)
        state = "RUNNING" if now_s % 400 >= 240 else "PENDING"
        return [plain(priority=1 - turn), plain(small, gpus_per_node=1, node_count=1, state=state)]

    found = lived(jobs, DAY_S)
    assert sum(TICK_S for _, name in found if name == "99") <= 10 * MOST_S


def test_after_a_restart_and_after_a_long_time_all_begins_anew() -> None:
    attempts = Attempts(MOST_S)
    first = parts(lived(lambda now_s: [plain()] if now_s < 3000.0 else [], 3 * MOST_PAUSE_S, attempts))
    assert first == parts(lived(lambda now_s: [plain()], 3000.0))
    assert attempts.may(1, 0.0)


def test_the_plans_pass_again_and_gpus_are_given() -> None:
    """Under sia, each plan was refused because it stopped all jobs, and nobody got the GPUs of the jobs that had ended."""
    gate, policy, attempts = PlanGate(SafetySettings()), make_policy("sia")[0], Attempts(MOST_S)
    began: dict[str, Any] = {"submit_s": 100.0, "started_s": 100.0}
    runs = [
        job(
            f"{n}{half}",
            user=f"u{n}",
            phase=Phase.RUNNING,
            allocation=on("t4", **{f"t4_{n:02}": 4}),
            max_gpus=4,
            **began,
        )
        for n in range(4)
        for half in "ab"
    ]
    given: dict[float, bool] = {}
    for now_s in (5000.0, 5060.0, 5300.0, 5360.0, 5420.0, 5480.0):
        there = runs if now_s < 5300.0 else runs[:6]
        seen = snapshot("t4:4x8", [*there, job("w", user="w", submit_s=200.0)], time_s=now_s)
        nodes = with_room(
            seen.nodes, [plain()], seen.jobs, ["all"], now_s=now_s, patience_s=300.0, attempts=attempts, moves=stays
        )
        seen = dataclasses.replace(seen, nodes=nodes)
        plan = policy.decide(seen)
        refused = gate.judge(seen, plan)
        if refused:
            seen = dataclasses.replace(seen, kept=gate.kept(refused))
            plan = policy.decide(seen)
        else:
            gate.accepted(seen, plan)
        given[now_s] = "w" in plan.assignments
    assert given == {now_s: now_s >= 5420.0 for now_s in given}


def test_what_an_observation_leaves_to_adaptive_jobs(tmp_path: Path) -> None:
    """With the default settings: set aside for 7 minutes after 5 minutes of patience, and then not for 7 minutes."""
    told, clock, folder = Told(), SimulatedClock(), tmp_path / "spool"
    settings = SlurmSettings(partitions=("gpu",), spool_dir=folder)
    cluster = SlurmCluster(told, told, Spool(folder), clock, settings, lambda spec: None)  # type: ignore[arg-type]
    begin_s = clock.now_s()
    wants = {"comment": "", "admin_comment": "", "priority": 9, "reason": "Resources", "gpus_per_node": 4}
    told.listed = [waiting("gpu", eligible_s=begin_s + 1.0, **wants)]
    left: dict[float, int] = {}
    while (now_s := clock.now_s() - begin_s) < 1200.0:
        left[now_s] = sum(node.gpus_for_us for node in cluster.observe().nodes)
        clock.sleep(60.0)
    assert [now_s for now_s, gpus in left.items() if gpus == 0] == [*range(360, 780, 60)]
