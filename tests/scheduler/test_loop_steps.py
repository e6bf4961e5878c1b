"""One tick at a time: what the loop asks of its parts, in which order, and what it does when one of them fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.families import Families
from penstock_profiles.wire import Report, Resumed
from penstock_scheduler.api.ports import ClusterParts, RoundListener, SiteRules
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import (
    Action,
    Assignment,
    ClusterState,
    Hold,
    Job,
    Outcome,
    Pack,
    Phase,
    Plan,
    Progress,
    Reason,
    ReasonCode,
    SharedGpus,
    SharingState,
    Snapshot,
    Start,
    Stop,
    StopCode,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import RoundFailed, StoreError
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.safety.health import StepName
from penstock_scheduler.simulator import SimulatedClock, nodes_from_spec
from tests.scheduler.builders import job, on

NODES = nodes_from_spec("t4:2x4")
HERE = on("t4", t4_00=2)


class Site(RoundListener):
    """A loop on a cluster that shows `jobs`, with a policy that gives each job of `plan` its placement. It writes a diary."""

    def __init__(self, *jobs: Job, plan: dict[str, Any] | None = None, rest_s: float = 0.0, **parts: Any) -> None:
        self.jobs, self.plan, self.shared = jobs, plan or {}, parts.pop("shared", ())
        self.clock, self.store = SimulatedClock(1000.0), parts.pop("store", MemoryStore())
        self.diary: list[str] = []
        self.applied: list[Action] = []
        self.unread: list[Report] = []
        self.refuses: Exception | None = None
        self.name = "by-hand"
        self.loop = RoundLoop(
            ClusterParts(self, agents=parts.pop("agents", None), resume=self.resume),  # type: ignore[arg-type]
            self.clock,
            self.store,
            RoundTiming(
                Period(parts.pop("period_s", 60.0)), parts.pop("tick_s", 10.0), rest_s, parts.pop("settle_s", 0.0)
            ),
            self,
            SpecModels(Families(), 30.0),
            site=RoundSurroundings(listeners=(*parts.pop("before", ()), self), **parts),
        )

    def resume(self, last: Snapshot, plan: Plan) -> None:
        self.diary.append(f"resume {last.round} {sorted(plan.assignments)}")

    def observe(self) -> ClusterState:
        self.diary.append("observe")
        if self.refuses:
            raise self.refuses
        return ClusterState(NODES, self.jobs)

    def reports(self) -> tuple[Report, ...]:
        new, self.unread = tuple(self.unread), []
        return new

    def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
        self.diary.append("apply")
        self.applied = list(todo)
        return tuple(Outcome(each, Progress.UNDER_WAY) for each in todo)

    def decide(self, snapshot: Snapshot) -> Plan:
        self.diary.append("decide")
        self.snapshot = snapshot
        why = Reason(ReasonCode.CHOSEN, "by hand")
        given = {each: Assignment(where, why, 1.0) for each, where in self.plan.items()}
        waiting = {each.id: why for each in snapshot.jobs if each.id not in given}
        asked = {each.id: Stop(StopCode.ASKED, "by hand") for each in snapshot.jobs}
        return Plan(snapshot.round, given, waiting, stops=asked, shared=self.shared)

    def decided(self, record: RoundRecord) -> None:
        assert self.store.last_round() is record
        self.diary.append("on_round")

    def ticks(self, count: int, apart_s: float = 10.0) -> None:
        for _ in range(count):
            self.loop.tick()
            self.clock.sleep(apart_s)


class Agents:
    """Agents that run `groups` and note what they are asked for."""

    def __init__(self, *groups: SharedGpus) -> None:
        self.groups = groups
        self.diary: list[str] = []
        self.asked: list[tuple[SharedGpus, ...]] = []
        self.told: list[tuple[Action, ...]] = []

    def sharing(self) -> SharingState:
        return SharingState(self.groups)

    def share(self, groups: Sequence[SharedGpus], actions: Sequence[Action]) -> None:
        self.diary.append("share")
        self.asked.append(tuple(groups))
        self.told.append(tuple(actions))


def report(sequence: int) -> Report:
    return Report(job_id="1", epoch=1, sequence=sequence, time_s=0.0, body=Resumed(seconds=1.0))


@pytest.mark.parametrize(("settle_s", "resumed"), [(0.0, ["resume 1 ['1']"]), (300.0, [])])
def test_a_restart_goes_on_with_the_last_round_unless_the_store_is_restored(settle_s: float, resumed: list[str]):
    before = Site(job("1"), plan={"1": HERE})
    before.loop.tick()
    assert Site(store=before.store, settle_s=settle_s).diary == resumed


def test_a_plan_is_saved_and_told_before_the_cluster_is_asked_for_anything():
    site = Site(job("1"), plan={"1": HERE})
    outcomes = site.loop.tick()
    assert site.diary == ["observe", "decide", "on_round", "apply"]
    assert outcomes == (Outcome(Start("1", 1, HERE), Progress.UNDER_WAY),)
    assert site.store.outcomes == [(1000.0, outcomes[0])]


def test_a_record_has_the_policy_and_the_time_that_it_took():
    site = Site(job("1"))
    site.loop.tick()
    record = site.store.last_round()
    assert record is not None
    assert record.policy == PolicyChoice(name="by-hand")
    assert set(record.seconds) == {"observe", "decide"}
    assert all(0 <= seconds < 60 for seconds in record.seconds.values())


def test_the_log_says_what_a_round_decided(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "penstock_scheduler.rounds.loop")
    site = Site(job("1"), job("2"), job("3"), plan={"1": HERE})
    site.loop.tick()
    line = next(each for each in caplog.records if each.message == "round").__dict__
    assert (line["round"], line["jobs"], line["placed"], line["waiting"]) == (1, 3, 1, 2)
    assert 0 <= line["decide_s"] < 60


def test_rounds_are_numbered_on_from_the_last_one_in_the_store():
    store = MemoryStore()
    Site(job("1"), store=store).ticks(3, apart_s=60.0)
    Site(job("1"), store=store).ticks(1)
    assert [record.snapshot.round for record in store.rounds] == [1, 2, 3, 4]


def test_between_two_rounds_the_plan_is_carried_on_and_nothing_is_decided():
    site = Site(job("1"), plan={"1": HERE})
    site.ticks(6)
    assert site.diary.count("decide") == 1
    assert site.diary.count("apply") == 6
    assert site.applied == [Start("1", 1, HERE)]
    site.ticks(1)
    assert site.diary.count("decide") == 2


def test_a_loop_without_a_plan_touches_nothing():
    site = Site(job("1", phase=Phase.RUNNING, allocation=HERE))
    site.loop.paused = True
    assert site.loop.tick() == ()
    assert site.diary == ["observe"]


def test_while_paused_no_round_is_decided_and_actions_go_on():
    site = Site(job("1"), plan={"1": HERE})
    site.ticks(1)
    site.loop.paused = True
    site.ticks(12)
    assert (site.diary.count("decide"), site.diary.count("apply")) == (1, 13)
    site.loop.paused = False
    site.ticks(1)
    assert site.diary.count("decide") == 2


def test_a_job_on_its_way_is_shown_where_it_is_sent_and_a_running_one_where_it_is():
    site = Site(
        job("1", phase=Phase.STARTING, allocation=HERE),
        job("2", phase=Phase.RUNNING, allocation=on("t4", t4_01=1)),
        job("3"),
        plan={"1": HERE, "2": on("t4", t4_01=1)},
        period_s=10.0,
    )
    site.ticks(1)
    assert [each.target for each in site.snapshot.jobs] == [None, None, None], "no round has sent a job anywhere"
    site.ticks(1)
    assert [each.target for each in site.snapshot.jobs] == [HERE, None, None]


def test_a_job_that_the_plan_lets_wait_is_held_and_one_that_came_later_is_left_alone():
    running = [job(each, phase=Phase.RUNNING, allocation=HERE) for each in ("1", "2")]
    site = Site(running[0])
    site.ticks(1)
    assert site.applied == [Hold("1", 1)]
    site.jobs = tuple(running)
    site.ticks(1)
    assert site.applied == [Hold("1", 1)]


def test_reports_that_the_store_did_not_take_are_stored_once_and_in_order_when_it_is_back():
    class Forgetful(MemoryStore):
        away = True

        def add_reports(self, reports: Sequence[Report]) -> None:
            if self.away:
                raise StoreError("the disk is full")
            super().add_reports(reports)

    store = Forgetful()
    site = Site(job("1"), store=store)
    for sequence in (0, 1):
        site.unread = [report(sequence)]
        with pytest.raises(StoreError):
            site.loop.tick()
    assert not store.rounds, "no round is decided on a store that keeps nothing"
    store.away = False
    site.unread = [report(2)]
    site.ticks(3)
    assert [report.sequence for report in store.reports] == [0, 1, 2]


def test_while_the_store_is_away_the_newest_100_000_reports_are_kept():
    """Older ones are still in the jobs' own files."""

    class Full(MemoryStore):
        def add_reports(self, reports: Sequence[Report]) -> None:
            offered.append((len(reports), reports[0].sequence))
            raise StoreError("the disk is full")

    offered: list[tuple[int, int]] = []
    site = Site(job("1"), store=Full())
    for unread in ([report(0)], [report(1)] * 99_999, [report(1)]):
        site.unread = unread
        with pytest.raises(StoreError):
            site.loop.tick()
    assert offered == [(1, 0), (100_000, 0), (100_000, 1)]


def test_a_loop_runs_until_it_is_told_to_stop_and_rests_between_two_ticks():
    site = Site(job("1"), tick_s=7.0)
    site.loop.run(lambda: True)
    assert site.diary == [], "it was told to stop before the first tick"
    ended: list[float] = []
    site.loop.run(lambda: len(ended) == 3, lambda: ended.append(site.clock.now_s()))
    assert ended == [1000.0, 1007.0, 1014.0]
    assert site.clock.now_s() == 1014.0, "it does not sleep before it stops"


@pytest.mark.parametrize(
    ("error", "text"),
    [(RoundFailed("slurmctld is away"), "slurmctld is away"), (ValueError("a bug"), "ValueError('a bug')")],
)
def test_a_loop_says_since_when_and_why_every_tick_fails(error: Exception, text: str):
    """Ticks every 10 s, of which the second to fourth fail: at the end of the fourth they have failed for 20 s."""
    site = Site(job("1"))
    seen: list[tuple[float | None, str]] = []

    def note() -> None:
        seen.append((site.loop.failing_s, site.loop.failure))
        site.refuses = error if len(seen) in (1, 2, 3) else None

    assert site.loop.failing_s is None
    site.loop.run(lambda: len(seen) == 5, note)
    assert [failing_s for failing_s, _ in seen] == [None, 0.0, 10.0, 20.0, None]
    assert [failure for _, failure in seen[:4]] == ["", text, text, text]


def test_an_invalid_plan_is_neither_saved_nor_carried_out():
    """Two jobs share GPUs on a cluster without agents."""
    site = Site(job("1"), plan={"1": HERE}, shared=(SharedGpus("t4-00", 2, (Pack(("1",), 2),)),))
    with pytest.raises(
        RoundFailed, match=r"policy by-hand made an invalid plan: .*no agent runs; please report this as a bug"
    ):
        site.loop.tick()
    assert site.diary == ["observe", "decide"]
    assert not site.store.rounds


def test_agents_hear_of_the_whole_plan_before_a_job_starts_and_in_each_tick():
    agents = Agents()
    group = SharedGpus("t4-00", 2, (Pack(("1",), 2),))
    site = Site(job("1"), plan={"1": HERE}, shared=(group,), agents=agents)
    agents.diary = site.diary
    site.ticks(2)
    assert agents.asked == [(group,), (group,)]
    assert agents.told[0] == (Start("1", 1, HERE),)
    assert site.diary == ["observe", "decide", "on_round", "share", "apply", "observe", "share", "apply"]
    assert site.snapshot.sharing == SharingState()


def test_idle_gpus_are_counted_from_round_to_round_without_those_that_jobs_share():
    """Of 4 GPUs, job 1 has 1 and grows into idle ones, and a group has 2."""
    group = SharedGpus("t4-00", 2, (Pack(("2",), 2),))
    agents = Agents(group)
    grows = job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), grow_shrink=True)
    site = Site(grows, plan={"1": on("t4", t4_00=1)}, agents=agents, period_s=10.0)
    site.ticks(1)
    assert site.snapshot.idle_since_s == {"t4-00": (1000.0,)}
    agents.groups = ()
    site.ticks(1)
    assert site.snapshot.idle_since_s == {"t4-00": (1000.0, 1010.0, 1010.0)}


def rounds_at(site: Site) -> list[float]:
    return [record.snapshot.time_s - 1000.0 for record in site.store.rounds]


def running() -> Job:
    return job("1", phase=Phase.RUNNING, allocation=HERE, started_s=1000.0)


def test_a_plan_stands_for_the_time_of_rest_and_no_longer():
    """Rounds are due every 10 s, and only the job's GPU-seconds grow."""
    site = Site(running(), plan={"1": HERE}, period_s=10.0, rest_s=30.0)
    site.ticks(8)
    assert rounds_at(site) == [0.0, 30.0, 60.0]
    assert site.store.rounds[1].snapshot.attained_gpu_s("1") == {"t4": 60.0}


def test_without_rest_every_round_is_decided():
    site = Site(running(), plan={"1": HERE}, period_s=10.0)
    site.ticks(3)
    assert rounds_at(site) == [0.0, 10.0, 20.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda site: setattr(site, "jobs", (*site.jobs, job("2"))),
        lambda site: setattr(site, "jobs", ()),
        lambda site: setattr(site, "jobs", (dataclasses.replace(running(), weight=2.0),)),
        lambda site: site.loop.decide_by(site, PolicyChoice(name="by-hand", settings={"by-hand": {"new": True}})),
    ],
    ids=["a job came", "a job ended", "a weight changed", "the site changed its policy"],
)
def test_whatever_changes_but_the_time_ends_the_rest(change: Callable[[Site], None]):
    site = Site(running(), plan={"1": HERE}, period_s=10.0, rest_s=300.0)
    site.ticks(2)
    assert rounds_at(site) == [0.0]
    change(site)
    site.ticks(2)
    assert rounds_at(site) == [0.0, 20.0]


def test_while_agents_measure_there_is_no_rest():
    site = Site(running(), plan={"1": HERE}, agents=Agents(), period_s=10.0, rest_s=300.0)
    site.ticks(3)
    assert rounds_at(site) == [0.0, 10.0, 20.0]


def test_another_policy_decides_from_the_next_round_on_and_stands_in_its_record():
    site, other = Site(job("1")), Site(job("1"))
    site.ticks(1)
    site.loop.decide_by(other, PolicyChoice(name="other"))
    site.ticks(5)
    assert other.diary == [], "the round is not due yet"
    site.ticks(7)
    assert other.diary == ["decide", "decide"]
    assert [record.policy.name for record in site.store.rounds] == ["by-hand", "other", "other"]


def test_another_pace_holds_for_ticks_and_rounds():
    site = Site(job("1"))
    ended: list[float] = []

    def note() -> None:
        ended.append(site.clock.now_s() - 1000.0)
        if len(ended) == 2:
            site.loop.pace(Period(5.0), 5.0)

    site.loop.run(lambda: len(ended) == 5, note)
    assert ended == [0.0, 10.0, 15.0, 20.0, 25.0]
    assert rounds_at(site) == [0.0, 15.0, 20.0, 25.0]


def test_gpu_seconds_of_a_job_that_has_ended_stay_with_the_next_rounds():
    site = Site(running(), plan={"1": HERE}, period_s=10.0)
    site.ticks(2)
    site.jobs = ()
    site.ticks(1)
    assert site.snapshot.facts == {}
    (held,) = site.snapshot.ended_gpu_s.values()
    assert held["t4"] == pytest.approx(30.0), "2 GPUs for 10 s, and then to the middle of two observations"


def test_a_run_that_nobody_saw_between_two_ticks_is_counted():
    """Sent at 0 s and back in the queue at 40 s after a restart: about 10 s on 2 GPUs. Job 2 was not sent, and has none."""
    site = Site(job("1"), job("2"), plan={"1": HERE}, period_s=10.0)
    site.ticks(1, apart_s=40.0)
    site.jobs = (job("1", restarts=1), job("2", restarts=1))
    site.ticks(1)
    assert site.snapshot.attained == {"1": {"t4": 20.0}}


class NoJobs(SiteRules):
    def on(self, snapshot: Snapshot) -> Snapshot:
        return snapshot.only(())


def test_a_site_that_gives_rules_decides_by_them():
    site = Site(job("1"), rules=NoJobs())
    site.ticks(1)
    assert site.snapshot.jobs == ()


class Broken(RoundListener):
    """A listener that fails on the name of a job, as nobody foresaw."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: object = None) -> None:
        raise self.error

    def decided(self, record: RoundRecord) -> None:
        raise self.error


def test_a_listener_that_fails_ends_no_round_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """One job's content made every tick fail, for everybody."""
    site = Site(job("1"), plan={"1": HERE}, before=[Broken(KeyError("ada's secret job"))])
    site.ticks(2)
    assert [each.job for each in site.applied] == ["1"]
    assert site.diary[:4] == ["observe", "decide", "on_round", "apply"]
    told = {step.name: step for step in site.loop.health.steps()}[StepName.TELL]
    assert (told.failed, told.error) == (True, "Broken: KeyError")
    assert "a listener failed, rounds go on" in caplog.text


def test_a_listener_that_cannot_write_to_the_store_ends_the_tick() -> None:
    site = Site(job("1"), plan={"1": HERE}, before=[Broken(StoreError("the disk is full"))])
    with pytest.raises(StoreError):
        site.loop.tick()
    assert site.diary == ["observe"]
