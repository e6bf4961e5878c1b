"""The plan gate: faults of Slurm, of the store and of policies stop no running job. Each scenario counts interrupted runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.families import Families
from penstock_scheduler.api.ports import ClusterParts, Policy
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import (
    Action,
    Assignment,
    ClusterState,
    EndedRun,
    Hold,
    Job,
    LeaveCause,
    LeaveRequest,
    Outcome,
    Partition,
    Phase,
    Plan,
    Progress,
    Reason,
    ReasonCode,
    Snapshot,
    Start,
    Stop,
    StopCode,
)
from penstock_scheduler.model.records import StoppedThen, dump_round, load_round
from penstock_scheduler.people.errors import ClusterAway, StoreError
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.plan_gate import (
    Approval,
    NothingToApprove,
    PlanGate,
    SafetySettings,
    View,
    lacks,
    refusals,
)
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import SimulatedClock, nodes_from_spec
from tests.scheduler.builders import job, on, snapshot

NODES = nodes_from_spec("t4:8x4")
SAFETY = SafetySettings()


def running(count: int = 8) -> list[Job]:
    """A preemptible job on each node."""
    return [
        job(str(n), phase=Phase.RUNNING, allocation=on("t4", **{f"t4_0{n}": 4}), max_gpus=4, started_s=500.0)
        for n in range(count)
    ]


class Site:
    """A loop with the gate on a cluster that shows what a test says. `stopped`: jobs whose run was ever to be stopped."""

    def __init__(self, jobs: Sequence[Job], policy: str | Policy = "sia", **parts: Any) -> None:
        self.state = ClusterState(NODES, tuple(jobs), partitions=(Partition("all"),))
        self.clock, self.store = SimulatedClock(1000.0), parts.pop("store", MemoryStore())
        self.error: Exception | None = None
        self.stopped: set[str] = set()
        self.started: set[str] = set()
        self._made = make_policy(policy)[0] if isinstance(policy, str) else policy
        self.loop = self.again()

    def again(self) -> RoundLoop:
        """Start penstockd, again."""
        self.loop = RoundLoop(
            ClusterParts(self),  # type: ignore[arg-type]
            self.clock,
            self.store,
            RoundTiming(Period(60.0), 10.0),
            self._made,
            SpecModels(Families(), 30.0),
            site=RoundSurroundings(safety=SAFETY),
        )
        return self.loop

    def observe(self) -> ClusterState:
        if self.error is not None:
            raise self.error
        return self.state

    def reports(self) -> tuple[()]:
        return ()

    def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
        runs = {each.id for each in self.state.jobs if each.phase is Phase.RUNNING}
        self.stopped |= {each.job for each in todo if each.job in runs}
        self.started |= {each.job for each in todo if isinstance(each, Start)}
        return tuple(Outcome(each, Progress.UNDER_WAY) for each in todo)

    def ticks(self, count: int = 30) -> None:
        """Five minutes by default. A tick that fails is tried again, as in `RoundLoop.run`."""
        done: list[None] = []
        self.loop.run(lambda: len(done) >= count, lambda: done.append(None))
        self.clock.sleep(10.0)

    def with_nodes(self, names: Sequence[str], **changes: object) -> None:
        nodes = tuple(dataclasses.replace(n, **changes) if n.name in names else n for n in self.state.nodes)  # type: ignore[arg-type]
        self.state = dataclasses.replace(self.state, nodes=nodes)


ALL = [node.name for node in NODES]
POLICIES = ["sia", "gavel", "las", "antman"]


@pytest.mark.parametrize("policy", POLICIES)
def test_slurmctld_killed_and_back_with_unregistered_nodes_stops_nothing(policy):
    site = Site(running(), policy)
    site.ticks(7)
    site.error = ClusterAway("slurm_load_jobs: Unable to contact slurm controller")
    site.ticks(6)
    site.error = None
    site.with_nodes(ALL, may_start=False, state="UNKNOWN")
    site.ticks()
    site.with_nodes(ALL, may_start=True, state="IDLE")
    site.ticks()
    assert site.stopped == set()


@pytest.mark.parametrize("policy", POLICIES)
def test_slurmctld_back_with_another_configuration_stops_nothing(policy):
    """Two nodes have left the partition, one is gone, one has fewer GPUs than its job holds, and a new node is there."""
    site = Site(running(), policy)
    site.ticks(7)
    site.with_nodes(["t4-00", "t4-01"], partitions=("other",))
    site.with_nodes(["t4-02"], gpus=2)
    more = nodes_from_spec("t4:9x4")[8:]
    site.state = dataclasses.replace(site.state, nodes=(*(n for n in site.state.nodes if n.name != "t4-03"), *more))
    before = {each.id: each for each in site.state.jobs}
    site.ticks(60)
    gone_elsewhere = {"0", "1", "2", "3"}
    assert site.stopped.isdisjoint(gone_elsewhere)
    assert before.keys() >= site.stopped


@pytest.mark.parametrize("policy", POLICIES)
def test_all_partitions_down_stops_nothing(policy):
    site = Site([*running(), job("new", max_gpus=1)], policy)
    site.state = dataclasses.replace(site.state, partitions=(Partition("all", may_start=False, state="DOWN"),))
    site.ticks(60)
    assert (site.stopped, site.started) == (set(), set())


@pytest.mark.parametrize("policy", POLICIES)
def test_half_of_the_nodes_not_responding_stops_nothing(policy):
    site = Site(running(), policy)
    site.ticks(7)
    site.with_nodes(ALL[::2], may_start=False, state="IDLE+NOT_RESPONDING")
    site.ticks(60)
    assert site.stopped == set()


@pytest.mark.parametrize("policy", POLICIES)
def test_half_of_the_jobs_missing_in_one_answer_stops_nothing(policy):
    """Their GPUs look like those of jobs that Penstock does not manage."""
    site = Site(running(), policy)
    site.ticks(7)
    whole = site.state
    site.state = dataclasses.replace(whole, jobs=whole.jobs[::2])
    site.with_nodes(ALL[1::2], gpus_others=4)
    site.ticks(7)
    site.state = whole
    site.ticks(60)
    assert site.stopped == set()


class Failing(MemoryStore):
    """A store that is away at times."""

    away = False

    def save_round(self, record):
        if self.away:
            raise StoreError("the database is away")
        super().save_round(record)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_database_away_stops_nothing(policy):
    store = Failing()
    site = Site(running(), policy, store=store)
    site.ticks(7)
    store.away = True
    site.ticks(12)
    store.away = False
    site.ticks()
    assert site.stopped == set()


class Wild:
    """A policy that stops the first `count` running jobs, for no reason, or for the one that it is given."""

    name = "wild"

    def __init__(self, count: int, stop: Stop | None) -> None:
        self.count, self.stop = count, stop

    def decide(self, state: Snapshot) -> Plan:
        if state.kept is not None:
            return make_policy("fifo")[0].decide(state)
        going = [each.id for each in state.jobs if each.phase is Phase.RUNNING][: self.count]
        why = Reason(ReasonCode.KEPT, "wild")
        given = {
            each.id: Assignment(each.allocation, why, 1.0)
            for each in state.jobs
            if each.allocation is not None and each.id not in going
        }
        waiting = {each.id: why for each in state.jobs if each.id not in given}
        return Plan(state.round, given, waiting, stops={} if self.stop is None else dict.fromkeys(going, self.stop))


GAIN, ASKED = Stop(StopCode.GAIN, "faster"), Stop(StopCode.ASKED, "its user asks")


def test_a_stop_without_a_reason_is_refused_and_what_runs_is_kept():
    site = Site([*running(4), job("new", max_gpus=4)], Wild(1, None))
    site.ticks(1)
    record = site.store.last_round()
    assert record.gate.refused == ("it stops 1 running job without a reason (0); please report this as a bug",)
    assert {job: stop.code for job, stop in record.gate.stops.items()} == {"0": StopCode.UNEXPLAINED}
    assert (site.stopped, site.started) == (set(), {"new"}), "new jobs start where GPUs are free"
    assert load_round(dump_round(record), "here").gate == record.gate


@pytest.mark.parametrize(("count", "passes"), [(4, True), (5, False)])
def test_four_jobs_may_be_stopped_in_any_case(count, passes):
    """8 jobs on 32 GPUs: 4 jobs are half of the GPUs, and 5 are more than 4 and more than a quarter."""
    site = Site(running(8), Wild(count, GAIN))
    site.ticks(1)
    assert len(site.stopped) == (count if passes else 0)
    assert bool(site.store.last_round().gate.refused) is not passes


def single_gpu_jobs(count: int) -> Snapshot:
    """Jobs of one GPU on one node of 40 GPUs."""
    jobs = [job(str(n), phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1) for n in range(count)]
    return snapshot(nodes_from_spec("t4:1x40"), jobs)


def test_a_quarter_of_the_gpus_may_become_idle_and_no_more_within_ten_minutes():
    state = single_gpu_jobs(40)
    assert refusals(state, Wild(10, GAIN).decide(state), (), SAFETY) == ()
    (text,) = refusals(state, Wild(11, GAIN).decide(state), (), SAFETY)
    assert text == (
        "it stops 11 running jobs and leaves 11 of their GPUs idle: together 11 of the 40 GPUs that jobs run on, "
        "and [safety] stop_share = 0.25 allows 10"
    )
    (text,) = refusals(state, Wild(6, GAIN).decide(state), (StoppedThen(900.0, 5, 5),), SAFETY)
    assert (
        "6 running jobs and leaves 6 of their GPUs idle and 5 running jobs before, within 10 min: together 11" in text
    )


@pytest.mark.parametrize(("takes", "refused"), [(30, False), (20, False), (19, True)])
def test_gpus_that_another_job_gets_do_not_count(takes: int, refused: bool):
    """30 jobs are stopped. A job that starts takes some of their GPUs; 10 of 40 may become idle."""
    state = single_gpu_jobs(40)
    plan = Wild(30, Stop(StopCode.PREEMPTED, "makes room for job new")).decide(state)
    new = job("new", min_gpus=takes, max_gpus=takes)
    starts = Assignment(on("t4", t4_00=takes), Reason(ReasonCode.CHOSEN, "starts"), 1.0)
    state = dataclasses.replace(state, jobs=(*state.jobs, new))
    plan = dataclasses.replace(plan, assignments=plan.assignments | {"new": starts})
    assert bool(refusals(state, plan, (), SAFETY)) is refused


def test_a_job_that_starts_elsewhere_is_no_excuse_for_gpus_that_become_idle():
    jobs = [job(str(n), phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1) for n in range(40)]
    state = snapshot(nodes_from_spec("t4:2x40"), [*jobs, job("new", max_gpus=40)])
    plan = Wild(11, GAIN).decide(state)
    starts = Assignment(on("t4", t4_01=40), Reason(ReasonCode.CHOSEN, "starts"), 1.0)
    plan = dataclasses.replace(plan, assignments=plan.assignments | {"new": starts})
    assert refusals(state, plan, (), SAFETY)


def test_jobs_that_get_other_gpus_do_not_count():
    """Each of 40 jobs is moved: that is what policies do, and each stop has its reason."""
    state = snapshot(nodes_from_spec("t4:2x40"), single_gpu_jobs(40).jobs)
    there = Assignment(on("t4", t4_01=1), Reason(ReasonCode.CHOSEN, "faster"), 2.0)
    names = [each.id for each in state.jobs]
    plan = Plan(1, dict.fromkeys(names, there), stops=dict.fromkeys(names, GAIN))
    assert refusals(state, plan, (), SAFETY) == ()


def test_stops_are_forgotten_after_ten_minutes_and_a_restart_does_not_forget_them():
    site = Site(running(8), Wild(4, GAIN))
    site.ticks(1)
    assert len(site.stopped) == 4
    site.again()
    site.clock.sleep(300.0)
    site.stopped.clear()
    site.ticks(1)
    assert site.stopped == set(), "four more within ten minutes"
    site.clock.sleep(400.0)
    site.ticks(1)
    assert len(site.stopped) == 4


def test_what_a_person_asked_for_does_not_count():
    site = Site(running(8), Wild(8, ASKED))
    site.ticks(1)
    assert len(site.stopped) == 8


def test_a_drain_of_half_of_the_cluster_by_an_admin_is_done():
    jobs = running(8)[:4]
    site = Site(jobs)
    site.with_nodes(ALL[:4], may_start=False, leave=LeaveRequest(LeaveCause.PENSTOCK_DRAIN, "oz: power"))
    site.ticks(1)
    assert site.stopped == {"0", "1", "2", "3"}
    stops = site.store.last_round().plan.stops
    assert {stop.code for stop in stops.values()} == {StopCode.PENSTOCK_DRAIN}
    assert stops["0"].text == "node t4-00 asks its jobs to leave: penstock-drain (oz: power)"


def test_an_admin_approves_the_stops_of_a_refused_round():
    policy = Wild(6, GAIN)
    site = Site(running(8), policy)
    site.ticks(1)
    record = site.store.last_round()
    assert site.stopped == set()
    approval = Approval.of(record, "root", site.clock.now_s())
    assert approval.jobs == set(record.gate.stops)
    assert site.loop.gate is not None
    site.loop.gate.approval = approval
    site.ticks(7)
    assert site.stopped == {"0", "1", "2", "3", "4", "5"}
    with pytest.raises(NothingToApprove, match="round 2 was not refused"):
        Approval.of(site.store.last_round(), "root", site.clock.now_s())


def test_an_approval_holds_for_a_while_and_for_its_jobs_only():
    site = Site(running(8), Wild(6, GAIN))
    site.ticks(1)
    record = site.store.last_round()
    with pytest.raises(NothingToApprove, match="is 20 min"):
        Approval.of(record, "root", site.clock.now_s() + 1200.0)
    approval = Approval(round=1, jobs=frozenset({"0"}), by="root", until_s=site.clock.now_s() + 900)
    assert site.loop.gate is not None
    site.loop.gate.approval = approval
    site.ticks(7)
    assert site.stopped == set(), "five others are still too many"


def test_after_a_restart_of_penstockd_nothing_is_stopped_while_nodes_are_missing():
    site = Site(running(8), "sia")
    site.ticks(1)
    site._made = Wild(1, GAIN)
    site.again()
    site.with_nodes(ALL[:1], may_start=False, state="UNKNOWN")
    site.ticks(12)
    assert site.stopped == set()
    (text,) = site.store.last_round().gate.refused
    assert "the view of the cluster is incomplete: penstockd has started, and 1 of 8 nodes do not answer" in text
    site.with_nodes(ALL[:1], may_start=True, state="IDLE")
    site.ticks(12)
    assert site.stopped == {"0"}


def test_a_node_that_stays_away_holds_nothing_up_for_longer_than_the_grace():
    site = Site(running(8), "sia")
    site.ticks(1)
    site._made = Wild(1, GAIN)
    site.again()
    site.with_nodes(ALL[7:], may_start=False, state="DOWN")
    site.ticks(29)
    assert site.stopped == set()
    site.ticks(12)
    assert site.stopped == {"0"}


def test_jobs_that_have_ended_are_not_missing():
    gate = PlanGate(SAFETY)
    jobs = running(8)
    gate.saw(ClusterState(NODES, tuple(jobs)), 0.0)
    gate.failed(1.0, "away")
    ended = tuple(EndedRun(each.id, each.allocation, 0.0, 1.0) for each in jobs[:4] if each.allocation)
    gate.saw(ClusterState(NODES, tuple(jobs[4:]), ended=ended), 2.0)
    assert gate.incomplete == ""


def test_a_large_part_that_vanishes_at_once_counts_as_incomplete_even_if_slurm_answered_all_the_time():
    gate = PlanGate(SAFETY)
    gate.saw(ClusterState(NODES, tuple(running(8))), 0.0)
    gate.saw(ClusterState(NODES[:4], tuple(running(8))), 1.0)
    assert "4 of 8 nodes do not answer or are missing (t4-04, t4-05, t4-06, t4-07)" in gate.incomplete
    gate.saw(ClusterState(NODES, tuple(running(8))), 2.0)
    assert gate.incomplete == ""


def test_one_node_that_fails_in_the_middle_of_the_day_holds_nothing_up():
    gate = PlanGate(SAFETY)
    gate.saw(ClusterState(NODES, tuple(running(8))), 0.0)
    gate.saw(ClusterState(NODES[1:], tuple(running(8))), 1.0)
    assert gate.incomplete == ""


def test_what_lacks_is_named_up_to_five():
    before = View(frozenset("abcdefg"), frozenset("12"), frozenset("12"))
    assert lacks(before, View(frozenset("a"), frozenset(), frozenset("2"))) == (
        "6 of 7 nodes do not answer or are missing (b, c, d, e, f and 1 others), and 1 of 2 running jobs are missing (1)"
    )


def test_a_job_that_came_to_run_after_the_round_is_left_alone():
    """An admin released it in Slurm: the plan lets it wait, but has no reason to stop it."""
    waits = job("w", max_gpus=4, min_gpus=4)
    site = Site([*running(8), waits], "fifo")
    site.ticks(1)
    site.state = dataclasses.replace(
        site.state,
        jobs=(*running(8)[:7], dataclasses.replace(waits, phase=Phase.RUNNING, allocation=on("t4", t4_07=4))),
    )
    site.ticks(2)
    assert site.stopped == set()
    assert Hold("w", 1) not in site.started


def test_one_node_that_is_missing_after_slurm_was_away_counts():
    """In the middle of the day one node holds nothing up, but after a restart of slurmctld the others may follow."""
    gate = PlanGate(SAFETY)
    gate.saw(ClusterState(NODES, tuple(running(8))), 0.0)
    gate.failed(1.0, "no answer")
    gate.saw(ClusterState(NODES[1:], tuple(running(8))), 2.0)
    assert gate.incomplete == (
        "Slurm or the store was away (no answer), and 1 of 8 nodes do not answer or are missing (t4-00). Nothing is stopped "
        "until they are back, at the latest until 00:05:01 UTC"
    )
