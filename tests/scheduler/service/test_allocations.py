"""Allocation spans: written once for each time in which a job holds the same GPUs, with what began and ended it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import httpx
import pytest

from penstock_profiles.wire import Report, Started
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.model import (
    ClusterState,
    EndedRun,
    Outcome,
    Pack,
    Phase,
    Plan,
    Progress,
    Reason,
    ReasonCode,
    Refusal,
    Resize,
    SharedGpus,
    Stop,
    StopCode,
)
from penstock_scheduler.model.plan import Assignment
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import MadeUp, serving

NODES = snapshot("t4:2x4", []).nodes
TWO, FOUR = on("t4", t4_00=2), on("t4", t4_00=2, t4_01=2)


def ran(restarts: int = 0, held=TWO, started_s: float | None = 1000.0, **fields):
    return job("1", phase=Phase.RUNNING, allocation=held, restarts=restarts, started_s=started_s, **fields)


def waits(restarts: int, stopped_s: float | None = None, **fields):
    return job("1", restarts=restarts, stopped_s=stopped_s, **fields)


@dataclasses.dataclass
class Site:
    """A board and an allocation log over one store, as the daemon has them."""

    store: SqlStore
    submitter: MadeUp
    gpus: dict[str, dict[str, tuple[int, ...]]]

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new penstockd on the same store."""
        self.board = Board(self.store, self.submitter)
        self.log = AllocationLog(self.store, lambda name: self.gpus.get(name, {}), list)

    def look(self, now_s: float, *jobs, ended=(), refused=()) -> None:
        state = ClusterState(NODES, jobs, tuple(refused), ended=tuple(EndedRun("1", *each) for each in ended))
        self.board.observed(state, now_s, {})
        self.log.observed(state, now_s)

    def decide(self, now_s: float, held=TWO, code=ReasonCode.CHOSEN, shared=(), jobs=()) -> None:
        plan = Plan(1, {"1": Assignment(held, Reason(code, "it fits"), 1.0)}, shared=shared)
        state = dataclasses.replace(snapshot(NODES, list(jobs)), time_s=now_s)
        record = RoundRecord(state, make_policy("fifo")[1], plan)
        self.store.save_round(record)
        self.log.decided(record)

    def spans(self) -> list[tuple[float, float | None, int, str, bool]]:
        """(from, to, GPUs, end, exact) of job 1's spans."""
        return [(each.from_s, each.to_s, each.gpus, each.end, each.exact) for each in self.store.job_spans("1")]


@pytest.fixture
def site(tmp_path) -> Iterator[Site]:
    store = open_store(tmp_path / "state", writer=True)
    yield Site(store, MadeUp(tmp_path), {})
    store.close()


def test_a_job_that_starts_moves_and_ends(site):
    """2 GPUs from 1,000 s; stopped at 1,100 s for 4 GPUs from 1,130 s; completed at 1,200 s."""
    site.decide(999.0)
    site.look(1001.0, ran())
    site.look(1050.0, ran())
    assert site.spans() == [(1000.0, None, 2, "", True)]
    stop = Stop(StopCode.GAIN, "it trains 1.9 times as fast")
    site.store.add_outcomes(1090.0, [Outcome(Resize("1", 1, FOUR), Progress.UNDER_WAY, stop=stop)])
    site.decide(1091.0, FOUR)
    site.look(1101.0, waits(1, 1100.0))
    assert site.spans() == [(1000.0, 1100.0, 2, "gain", True)]
    site.look(1131.0, ran(1, FOUR, 1130.0))
    site.submitter.ended["1"] = Fate("COMPLETED", 0, 1200.0)
    site.look(1201.0, ended=[(FOUR, 1130.0, 1200.0)])
    assert site.spans() == [(1000.0, 1100.0, 2, "gain", True), (1130.0, 1200.0, 4, "ended", True)]
    first, second = site.store.job_spans("1")
    assert (first.cause, first.end_text) == ("chosen: it fits", "it trains 1.9 times as fast")
    assert second.end_text == "COMPLETED"
    assert second.nodes == {"t4-00": 2, "t4-01": 2}
    assert (second.user, second.gpu_type, second.partition, second.run_s, second.restarts) == (
        "ada",
        "t4",
        "all",
        1130,
        1,
    )


def test_a_job_that_slurm_cleans_up_holds_its_gpus_until_its_fate_is_known(site):
    """Slurm tells the end of its run at once, but not yet how the job ended."""
    site.look(1001.0, ran())
    site.submitter.ended["1"] = None
    site.look(1201.0, ended=[(TWO, 1000.0, 1200.0)])
    assert site.spans() == [(1000.0, None, 2, "", True)]
    site.submitter.ended["1"] = Fate("CANCELLED", None, 1200.0)
    site.look(1210.0)
    assert site.spans() == [(1000.0, 1200.0, 2, "ended", True)]
    assert site.store.job_spans("1")[0].end_text == "CANCELLED"


def test_penstockd_starts_again_without_double_or_open_spans(site):
    """It was away from 1,020 s to 2,000 s. The run that was there ended at 1,500 s, and another one began at 1,600 s."""
    site.look(1010.0, ran())
    site.decide(1020.0, code=ReasonCode.KEPT, jobs=[ran()])
    site.start()
    site.look(1030.0, ran())
    assert site.spans() == [(1000.0, None, 2, "", True)], "the run goes on"
    site.start()
    site.look(2000.0, ran(1, FOUR, 1600.0, stopped_s=1500.0))
    site.look(2001.0, ran(1, FOUR, 1600.0, stopped_s=1500.0))
    assert site.spans() == [(1000.0, 1500.0, 2, "requeued", True), (1600.0, None, 4, "", True)]


def test_an_end_that_nobody_saw_is_estimated_and_then_told_by_the_accounts(site):
    """The first run was last seen at 1,020 s and was over by 1,600 s: (1,020 + 1,600) / 2 = 1,310 s."""
    site.look(1010.0, ran())
    site.decide(1020.0, code=ReasonCode.KEPT, jobs=[ran()])
    site.start()
    site.look(2000.0, ran(3, FOUR, 1600.0))
    assert site.spans() == [(1000.0, 1310.0, 2, "requeued", False), (1600.0, None, 4, "", True)]
    runs = [EndedRun("1", TWO, 1000.0, 1100.0), EndedRun("1", FOUR, 1200.0, 1300.0), EndedRun("1", TWO, 100.0, 200.0)]
    for _ in range(2):
        site.log.correct(0.0, 100, lambda jobs, since_s: runs if set(jobs) == {"1"} and since_s <= 1000 else [])
    assert site.spans() == [
        (1000.0, 1100.0, 2, "requeued", True),
        (1200.0, 1300.0, 4, "unknown", True),
        (1600.0, None, 4, "", True),
    ]


def test_the_last_run_of_a_job_that_slurm_has_forgotten(site):
    site.look(1010.0, ran())
    site.submitter.ended["1"] = Fate("UNKNOWN", None, None)
    site.look(1012.0)
    assert site.spans() == [(1000.0, 1010.0, 2, "ended", False)], "no time without a witness counts"
    site.log.correct(0.0, 100, lambda jobs, since_s: [EndedRun("1", TWO, 1000.0, 1011.0)])
    assert site.spans() == [(1000.0, 1011.0, 2, "ended", True)]


def test_a_run_between_two_observations_has_a_span(site):
    site.look(1000.0, waits(0))
    site.submitter.ended["1"] = Fate("FAILED", 1, 1007.0)
    site.look(1010.0, ended=[(TWO, 1002.0, 1007.0)])
    site.look(1011.0, ended=[(TWO, 1002.0, 1007.0)])
    assert site.spans() == [(1002.0, 1007.0, 2, "ended", True)]
    assert site.store.job_spans("1")[0].end_text == "FAILED"


def test_a_run_that_loses_nodes_or_shares_its_gpus_begins_a_new_span(site):
    beside = (SharedGpus("t4-00", 2, (Pack(("1", "2"), 2),)),)
    alone = (SharedGpus("t4-00", 2, (Pack(("1",), 2),)),)
    site.look(1010.0, ran(held=FOUR))
    site.look(1020.0, ran(held=TWO))
    site.decide(1030.0, shared=beside)
    site.look(1031.0, ran(held=TWO))
    site.decide(1040.0, shared=alone)
    site.look(1041.0, ran(held=TWO))
    ends = [(1000.0, 1020.0, 4, "resized"), (1020.0, 1031.0, 2, "sharing"), (1031.0, 1041.0, 2, "sharing")]
    assert site.spans() == [(*each, True) for each in ends] + [(1041.0, None, 2, "", True)]
    assert [each.shared for each in site.store.job_spans("1")] == [False, False, True, False]


def test_a_run_whose_beginning_slurm_moves_is_still_the_same(site):
    """Slurm counts a run on a cloud node from the moment at which the node is up, though the job holds it before."""
    site.look(1001.0, ran())
    site.look(1010.0, ran(started_s=1009.0))
    assert site.spans() == [(1000.0, None, 2, "", True)], "nobody has put it back into the queue"
    site.start()
    site.look(1020.0, ran(held=FOUR, started_s=1009.0))
    site.submitter.ended["1"] = Fate("UNKNOWN", None, None)
    site.look(1030.0)
    ends = [(1000.0, 1020.0, 2, "resized", True)]
    assert site.spans() == [*ends, (1020.0, 1020.0, 4, "ended", False)]
    assert {each.run_s for each in site.store.job_spans("1")} == {1009.0}
    site.log.correct(0.0, 100, lambda jobs, since_s: [EndedRun("1", FOUR, 1009.0, 1025.0)])
    assert site.spans() == [*ends, (1020.0, 1025.0, 4, "ended", True)], "and the accounts know the run by that moment"


def test_a_later_beginning_on_other_nodes_is_another_run(site):
    """As a slurmctld begins a job that it has forgotten in a crash: with the same number of restarts."""
    site.look(1001.0, ran())
    site.look(1010.0, ran(held=FOUR, started_s=1009.0))
    assert site.spans() == [(1000.0, 1005.0, 2, "requeued", False), (1009.0, None, 4, "", True)]


def test_a_running_job_that_cannot_be_read_keeps_its_span(site):
    """It is refused, for example because a new Slurm has a word for its state that Penstock does not know."""
    site.look(1010.0, ran())
    site.look(1020.0, refused=[Refusal("1", "j", "ada", "cannot be read")])
    assert site.spans() == [(1000.0, None, 2, "", True)]
    site.look(1030.0, ran())
    assert site.spans() == [(1000.0, None, 2, "", True)]


def test_the_daemons_clock_counts_where_the_cluster_tells_no_times(site):
    site.look(1010.0, ran(started_s=None))
    site.look(1020.0, ran(started_s=None))
    site.look(1030.0, waits(1))
    assert site.spans() == [(1010.0, 1025.0, 2, "requeued", False)], "between 1,020 s and 1,030 s"


def test_a_store_that_is_away_loses_no_span(site, monkeypatch):
    save = site.store.save_spans

    def away(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(site.store, "save_spans", away)
    with pytest.raises(StoreError):
        site.look(1010.0, ran())
    monkeypatch.setattr(site.store, "save_spans", save)
    site.look(1020.0, ran())
    assert site.spans() == [(1000.0, None, 2, "", True)]


def test_the_indices_are_the_clusters_or_else_the_runs_own(site):
    site.look(1010.0, ran())
    assert site.store.job_spans("1")[0].gpu_ids is None
    body = Started(gpu_type="t4", gpu_ids={"t4-00": (0, 3)})
    site.store.add_reports([Report(job_id="1", epoch=1, sequence=0, time_s=1005.0, body=body)])
    site.look(1012.0, ran())
    assert site.store.job_spans("1")[0].gpu_ids == {"t4-00": (0, 3)}
    site.gpus["1"] = {"t4-00": (1, 2), "t4-01": (0, 1)}
    site.look(1020.0, waits(1, 1015.0))
    site.look(1030.0, ran(1, FOUR, 1025.0))
    assert site.store.job_spans("1")[1].gpu_ids == site.gpus["1"]


@pytest.mark.parametrize("ids", [{"t4-01": (0, 3)}, {"t4-00": (0,)}, {"t4-00": (1, 1)}])
def test_indices_that_cannot_be_the_jobs_are_not_believed(site, ids):
    body = Started(gpu_type="t4", gpu_ids=ids)
    site.store.add_reports([Report(job_id="1", epoch=1, sequence=0, time_s=1005.0, body=body)])
    site.look(1010.0, ran())
    assert site.store.job_spans("1")[0].gpu_ids is None


def test_nobody_asks_for_ever_for_indices_that_the_cluster_does_not_tell(site):
    asked: list[str] = []
    site.log = AllocationLog(site.store, lambda name: asked.append(name) or {}, list)
    for second in range(3000):
        site.look(1010.0 + second, ran())
    assert len(asked) == 11, "1, 2, 4, ... 512 s after one another"


# --- the API


@pytest.fixture
def api(tmp_path) -> Iterator:
    with serving(tmp_path) as api:
        yield api


def get(api, who: str, path: str, **query: object) -> httpx.Response:
    return httpx.get(api.url + path, params=query, headers={"Authorization": f"Bearer {api.tokens[who]}"})


def spanned(api, name: str, user: str, from_s: float, to_s: float | None) -> None:
    log = AllocationLog(api.board.store, None, list)
    held = job(name, user=user, phase=Phase.RUNNING, allocation=TWO, started_s=from_s)
    log.decided(RoundRecord(snapshot(NODES, []), make_policy("fifo")[1], Plan(1, {name: given()})))
    log.observed(ClusterState(NODES, (held,)), from_s)
    if to_s is not None:
        (span,) = (each for each in api.board.store.open_spans() if each.job == name)
        api.board.store.save_spans([span.model_copy(update={"to_s": to_s, "end": "gain", "end_text": "why"})])


def given() -> Assignment:
    return Assignment(TWO, Reason(ReasonCode.CHOSEN, "secret"), 1.0)


def test_the_spans_of_a_job_in_pages(api):
    for begin_s in range(7):
        spanned(api, "1", "ada", 1000.0 + begin_s, 1000.5 + begin_s)
    with api.client("ada") as ada:
        assert [each.from_s for each in ada.allocations("1")] == [1000.0 + begin_s for begin_s in range(7)]
    first = get(api, "ada", "/v1/jobs/1/allocations", limit=3).json()
    then = get(api, "ada", "/v1/jobs/1/allocations", limit=5, after=first["next"]).json()
    assert ([each["from_s"] for each in then["spans"]], then["next"]) == ([1003.0, 1004.0, 1005.0, 1006.0], None)
    assert first["spans"][0]["cause"] == "chosen: secret"


def test_users_see_who_held_what_but_not_why(api):
    now_s = time.time()
    spanned(api, "1", "ada", now_s - 100, None)
    spanned(api, "2", "bob", now_s - 300, now_s - 200)
    with api.client("bob") as bob, api.client("oz") as oz:
        (seen,) = bob.allocations()
        assert (seen.job, seen.user, seen.nodes, seen.to_s, seen.cause) == ("1", "ada", {"t4-00": 2}, None, "")
        assert [each.job for each in bob.allocations(from_s=now_s - 250)] == ["1", "2"]
        assert [each.end for each in bob.allocations(from_s=now_s - 250, to_s=now_s - 150)] == ["gain"]
        assert next(oz.allocations()).cause == "chosen: secret"
    one = get(api, "bob", "/v1/allocations", **{"from": now_s - 250}, limit=1).json()
    (two,) = get(api, "bob", "/v1/allocations", **{"from": now_s - 250}, limit=2, after=one["next"]).json()["spans"]
    assert (one["spans"][0]["job"], two["job"]) == ("1", "2")


def test_the_jobs_of_a_node_with_the_indices_of_their_gpus(api):
    now_s = time.time()
    for name, user in (("1", "ada"), ("2", "bob")):
        spanned(api, name, user, now_s, None)
    (first,) = (span for span in api.board.store.open_spans() if span.job == "1")
    api.board.store.save_spans([first.model_copy(update={"gpu_ids": {"t4-00": (1, 3)}})])
    with api.client("ada") as ada:
        found = {
            node.name: [(each.job, each.user, each.gpus, each.gpu_ids) for each in node.jobs] for node in ada.nodes()
        }
    assert found == {"t4-00": [("2", "bob", 2, None), ("1", "ada", 2, [1, 3])], "t4-01": []}


def test_a_site_may_keep_the_jobs_of_others_private(tmp_path):
    with serving(tmp_path, private_data=["jobs"]) as api:
        spanned(api, "1", "ada", time.time() - 100, None)
        with api.client("bob") as bob, api.client("ada") as ada, api.client("oz") as oz:
            assert list(bob.allocations()) == []
            assert [node.jobs for node in bob.nodes()] == [[], []]
            assert [each.job for each in ada.allocations()] == [each.job for each in oz.allocations()] == ["1"]


@pytest.mark.parametrize("after", ["", "1", "1:", "1:nan", "1:inf", ":1", "1:x", "\0:1"])
def test_a_wrong_cursor_is_an_error(api, after):
    for path in ("/v1/allocations", "/v1/jobs/1/allocations"):
        answer = get(api, "ada", path, after=after)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad-body")
