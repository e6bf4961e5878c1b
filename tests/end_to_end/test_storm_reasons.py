"""What the storm takes for a reason: by hand. Each wrong reason and each end of a run that nothing explains is found."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock_scheduler.model import Assignment, Phase, Plan, Reason, ReasonCode, Stop, StopCode
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from tests.end_to_end.storm_reasons import Facts, Reasons, Run, history_without_a_round, unexplained, wrong_reasons
from tests.scheduler.builders import job, on, snapshot

NOW_S = 1000.0
DRAINED = "node t4-00 asks its jobs to leave: drain (storm)"
GAIN = Stop(StopCode.GAIN, "faster", 1.0, 2.0)
ROOM = Stop(StopCode.PREEMPTED, "makes room for job 2 on node t4-00", 1.0, 0.0, "2")


def record(stop: Stop, *, gets: float | None = None, other: bool = True, time_s: float = NOW_S) -> RoundRecord:
    """Job 1 is stopped on t4-00. It gets another place with this goodput, or waits; job 2 gets GPUs or does not."""
    jobs = [job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=2), max_gpus=2), job("2", max_gpus=2)]
    why = Reason(ReasonCode.KEPT, "for the test")
    given = {} if gets is None else {"1": Assignment(on("t4", t4_01=2), why, gets)}
    given |= {"2": Assignment(on("t4", t4_00=2), why, 1.0)} if other else {}
    plan = Plan(7, given, {name: why for name in ("1", "2") if name not in given}, stops={"1": stop})
    return RoundRecord(
        dataclasses.replace(snapshot("t4:2x2", jobs), round=7, time_s=time_s), PolicyChoice(name="sia"), plan
    )


@pytest.mark.parametrize(
    ("made", "right"),
    [
        (record(Stop(StopCode.DRAIN, DRAINED)), True),
        (record(Stop(StopCode.DRAIN, DRAINED), time_s=NOW_S - 100), False),
        (record(Stop(StopCode.DRAIN, DRAINED.replace("t4-00", "t4-01"))), False),
        (record(Stop(StopCode.DRAIN, DRAINED.replace("storm", "Duplicate jobid"))), False),
        (record(GAIN, gets=2.0), True),
        (record(GAIN, gets=1.5), False),
        (record(GAIN), False),
        (record(dataclasses.replace(GAIN, goodput_after=0.5), gets=0.5), False),
        (record(ROOM), True),
        (record(ROOM, other=False), False),
        (record(Stop(StopCode.LIMIT, "a limit")), False),
        (record(Stop(StopCode.UNEXPLAINED, "a bug")), False),
    ],
)
def test_a_reason_has_to_be_what_happened(made: RoundRecord, right: bool) -> None:
    facts = Facts(drained={"t4-00": [(NOW_S - 5, NOW_S + 5)], "t4-01": [(NOW_S - 5, math.inf)]})
    assert (wrong_reasons(made, facts) == []) == right


def test_the_history_has_only_reasons_that_a_round_gave() -> None:
    rounds = {7: record(ROOM), 8: dataclasses.replace(record(GAIN, gets=2.0), stopping={"2": ROOM})}
    right = [(NOW_S, "1", 7, ROOM), (NOW_S, "1", 8, GAIN), (NOW_S, "2", 8, ROOM)]
    right += [(NOW_S, "3", 9, Stop(StopCode.NO_GPUS, "Slurm started it without its GPUs"))]
    assert history_without_a_round(right, rounds) == []
    wrong = [(NOW_S, "1", 7, GAIN), (NOW_S, "2", 7, ROOM), (NOW_S, "1", 9, ROOM)]
    assert len(history_without_a_round(wrong, rounds)) == 3


RUN = Run("1", frozenset({"t4-00"}), NOW_S, NOW_S + 60, NOW_S + 62)


def test_a_job_that_slurm_could_not_send_to_its_node_is_explained() -> None:
    young, facts = dataclasses.replace(RUN, seen_s=NOW_S + 3), Facts(munged_away=[(NOW_S + 1, math.inf)])
    assert unexplained([young], Reasons([]), facts) == []
    assert len(unexplained([young], Reasons([]), Facts(munged_away=[(NOW_S + 4, math.inf)]))) == 1
    assert len(unexplained([young], Reasons([]), Facts(munged_away=[(NOW_S - 9, NOW_S - 3)]))) == 1
    assert len(unexplained([RUN], Reasons([]), facts)) == 1, "it was sent long before it ended"


@pytest.mark.parametrize(
    ("facts", "explained"),
    [
        (Facts(), False),
        (Facts(requeued={"1": [NOW_S + 60]}), True),
        (Facts(requeued={"2": [NOW_S + 60], "1": [NOW_S + 70]}), False),
        (Facts(slurmd_killed={"t4-00": [NOW_S + 30]}), True),
        (Facts(slurmd_killed={"t4-01": [NOW_S + 30], "t4-00": [NOW_S + 70]}), False),
        (Facts(slurmctld_killed=[NOW_S + 3]), True),
        (Facts(slurmctld_killed=[NOW_S - 20, NOW_S + 40]), False),
    ],
)
def test_the_end_of_a_run_has_to_be_explained(facts: Facts, explained: bool) -> None:
    assert (unexplained([RUN], Reasons([]), facts) == []) == explained
    assert unexplained([RUN], Reasons([record(ROOM, time_s=NOW_S + 59)]), facts) == []
    early = Reasons([record(ROOM, time_s=NOW_S + 30)])
    assert (unexplained([RUN], early, facts) == []) == explained, "a reason long before is no reason"
    assert unexplained([RUN], Reasons([], [(NOW_S + 58, "1")]), facts) == []
