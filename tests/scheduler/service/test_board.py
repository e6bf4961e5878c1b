"""The board: clients learn of changes, and a job's end is charged once."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from penstock_profiles.wire import Ended, Observation, SaveFailed, Started
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.model import ClusterState, Phase, Refusal, WaitingJob
from penstock_scheduler.people.errors import StoreError
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ADAS, BOBS, OBSERVED, report, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_a_client_that_waits_learns_of_a_change(api):
    answers: list[object] = []
    with api.client("ada") as ada, api.client("ada") as other:
        before = ada.job("1")
        thread = threading.Thread(target=lambda: answers.append(other.job("1", wait_s=30, since=before.version)))
        thread.start()
        while not api.board.awaited:
            time.sleep(0.01)
        assert not answers
        api.look(job("1", user="ada"), BOBS)
        thread.join(20)
        (after,) = answers
        assert (after.state, after.version) == ("queued", before.version + 1)
        assert ada.job("1", wait_s=0.05, since=after.version) == after, "no change: the job as it is, after the wait"
        api.look(BOBS, finished={"1": Fate("FAILED", 3, 77.0)})
        ended = ada.wait("1")
        assert (ended.state, ended.ended, ended.exit_code, ended.end_s) == ("ended", "FAILED", 3, 77.0)
        assert ada.explain("1").text == "it has ended: FAILED"


def test_a_job_that_has_ended_waits_for_nothing_any_more(api):
    """Its note is gone, and the start of a run between two observations is known from its end."""
    waits = WaitingJob(BOBS, "waiting-cluster", "waits for Slurm to end it at its deadline")
    api.board.observed(ClusterState(api.board.state.nodes, (ADAS,), waiting=(waits,)), 78.0)
    assert "deadline" in api.board.job("2").note
    api.look(ADAS, finished={"2": Fate("FAILED", 1, 79.0, 70.0)})
    view = api.board.job("2")
    assert (view.ended, view.note, view.start_s) == ("FAILED", "", 70.0)


def test_a_note_says_since_when_it_is_so(api):
    """A task that waits for the job tells it, and a restart of penstockd does not change it."""
    for now_s, text in ((78.0, "is held in Slurm"), (79.0, "is held in Slurm"), (80.0, "waits for its dependency")):
        waits = WaitingJob(BOBS, "held", text)
        api.board.observed(ClusterState(api.board.state.nodes, (ADAS,), waiting=(waits,)), now_s)
        view = api.board.job("2")
        assert (view.note, view.note_s) == (text, 80.0 if now_s == 80.0 else 78.0)
    with api.client("bob") as bob:
        assert bob.explain("2").lines[1].startswith("Penstock has seen this since ")
    api.look(ADAS, BOBS)
    assert (api.board.job("2").note, api.board.job("2").note_s) == ("", None)


def test_a_job_began_when_the_cluster_says_not_when_it_was_seen(api):
    """A short job would otherwise begin after its end, which Slurm gives in whole seconds."""
    runs = dataclasses.replace(ADAS, id="9", started_s=70.0)
    api.board.observed(ClusterState(api.board.state.nodes, (runs,)), 70.9)
    assert api.board.job("9").start_s == 70.0


def test_a_job_that_ends_is_charged_once(api):
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 77.0)}, gpu_seconds={"1": {"t4": 120.0}})
    api.look(BOBS, gpu_seconds={"1": {"t4": 120.0}})
    with api.client("ada") as ada, api.client("bob") as bob:
        (line,) = ada.ledger().lines
        assert (line.job, line.text, line.amount, line.kind) == ("1", "t4", 120.0, "gpu-seconds")
        assert bob.ledger().lines == []


def test_a_job_that_ends_while_it_is_adopted_has_ended(api):
    """A submission is answered with a view that is a moment old; meanwhile a round sees the job's end."""
    with api.client("ada") as ada:
        before = api.board.job("1")
        api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 2.0)})
        api.board.adopt(before.model_copy(update={"key": "night"}))
        assert (ada.job("1").state, ada.job("1").key) == ("ended", "night")
        assert "1" not in {view.id for view in api.board.live()}


def test_a_running_job_that_cannot_be_read_has_not_ended(api):
    """It is refused, for example because a new Slurm has a word for its state that Penstock does not know."""
    nodes = api.board.state.nodes
    api.board.observed(ClusterState(nodes, (BOBS,), (Refusal("1", "j", "ada", "cannot be read"),)), 78.0)
    with api.client("ada") as ada:
        assert (ada.job("1").state, ada.job("1").ended) == ("running", "")
        assert ada.ledger().lines == []
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 79.0)})
    with api.client("ada") as ada:
        assert ada.job("1").state == "ended"


def test_progress_comes_from_reports(api):
    started = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=started), report(1, body=Observation.model_validate(OBSERVED))])
        api.look(job("1", user="ada", phase=Phase.RUNNING, allocation=on("t4", t4_00=4)), BOBS)
        assert (ada.job("1").progress, ada.job("1").total) == (10.0, 100.0)
        assert len(ada.history("1").observations) == 1


@pytest.mark.parametrize(
    ("last", "shown"),
    [(Ended(outcome="completed", progress=100.0), 100.0), (Ended(outcome="failed", progress=0.0), 10.0)],
)
def test_the_progress_of_a_job_that_has_ended_is_that_of_its_last_report(api, last: Ended, shown: float):
    """It is reported every 30 s, so that the newest observation lacks the end; a run that fails at its start knows of none."""
    started = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=started), report(1, body=Observation.model_validate(OBSERVED))])
        ada.report("1", [report(2, body=last)])
        api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 2.0)})
        assert (ada.job("1").state, ada.job("1").progress, ada.job("1").total) == ("ended", shown, 100.0)


def test_the_figures_of_a_running_job_are_those_of_the_newest_tick(api):
    """Neither its state nor the round's reason changes: only GPU-seconds and progress do, and no client is woken for them."""
    before = api.board.job("1")
    started = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)
    with api.client("ada") as ada:
        for tick in range(1, 4):
            body = Observation.model_validate(OBSERVED | {"progress": 10.0 * tick})
            ada.report("1", [report(0, body=started), report(tick, body=body)])
            api.look(ADAS, BOBS, gpu_seconds={"1": {"t4": 3600.0 * tick}})
            for shown in (ada.job("1"), *ada.jobs(), *ada.jobs(state=("running",))):
                assert (shown.gpu_seconds, shown.progress, shown.total) == ({"t4": 3600.0 * tick}, 10.0 * tick, 100.0)
                assert shown.version == before.version


def test_a_daemon_that_starts_again_shows_the_progress_that_was_reported(api):
    """The store's view of the job is as old as its newest version, the reports in the store are not."""
    started = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=started), report(1, body=Observation.model_validate(OBSERVED))])
    again = Board(api.board.store, None).job("1")
    assert (again.progress, again.total) == (10.0, 100.0)
    reads_again = Board(api.board.store, None)
    reads_again.take_reports([report(0, body=started)])
    assert reads_again.job("1").progress == 10.0, "it reads the spool from its beginning"
    with api.client("ada") as ada:
        ada.report("1", [report(0, epoch=2, body=started)])
    assert Board(api.board.store, None).job("1").progress == 5.0, "the next run restored an older checkpoint"


def test_a_job_that_fails_says_which_process_failed_first_and_where_a_new_one_can_go_on(api):
    """The first process reports later that the connection is gone. A run that begins anew by itself has failed of nothing."""
    started = Started(gpu_type="t4", gpu_ids={}, total=100.0)
    first = Ended(outcome="failed", progress=60.0, text="rank 1 on t4-00: ValueError: a bad\n\tsample")
    later = Ended(outcome="failed", progress=60.0, text="rank 0 on t4-00: RuntimeError: Connection closed by peer")
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=Ended(outcome="failed", progress=0.0, text="out of memory"))])
        ada.report("1", [report(0, epoch=2, body=started), report(1, epoch=2), report(2, epoch=2, body=first)])
        ada.report("1", [report(3, epoch=2, body=later)])
        api.look(BOBS, finished={"1": Fate("FAILED", 1, 181.0)})
        assert ada.job("1").ended_text == "reported 'rank 1 on t4-00: ValueError: a bad sample'"
        assert ada.explain("1").lines[:3] == [
            "Job 1 has ended: FAILED, exit code 1.",
            "It reported 'rank 1 on t4-00: ValueError: a bad sample'.",
            "Its newest checkpoint has 1 of 100 samples, saved 3 min before its end. With penstock_executor, a new job goes on "
            "from there: sbatch --export=ALL,PENSTOCK_CONTINUE=1 SCRIPT.",
        ]


def test_a_job_that_is_killed_without_a_word_says_so(api):
    """By Slurm's out-of-memory killer, for example: a single process cannot report it."""
    api.look(BOBS, finished={"1": Fate("FAILED", 137, 181.0)})
    with api.client("ada") as ada:
        assert ada.explain("1").lines[1] == "It was killed by signal 9; often out of memory."


def test_a_job_that_cannot_save_is_shown_as_such_until_it_has_saved(api):
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=SaveFailed(text="the disk is full"))])
        assert ada.job("1").cannot_save == "the disk is full"
        assert Board(api.board.store, None).job("1").cannot_save == "the disk is full"
        ada.report("1", [report(1)])
        assert ada.job("1").cannot_save == Board(api.board.store, None).job("1").cannot_save == ""


def test_a_job_is_charged_for_what_was_counted_while_the_store_was_away(api, monkeypatch):
    """The count forgets a job some minutes after its end; the store may be away for longer."""
    save = api.board.store.save_jobs

    def away(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(api.board.store, "save_jobs", away)
    with pytest.raises(StoreError):
        api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 77.0)}, gpu_seconds={"1": {"t4": 120.0}})
    monkeypatch.setattr(api.board.store, "save_jobs", save)
    api.look(BOBS)
    with api.client("ada") as ada:
        assert [line.amount for line in ada.ledger().lines] == [120.0]


NEWER = dataclasses.replace(job("1", user="bob", submit_s=2e9), name="other")
"""A job of somebody else that has the id of ada's job now."""


def test_a_job_whose_id_another_job_has_is_kept_under_an_id_of_its_own(api):
    """It ends where the cluster tells that it has forgotten it, and is charged; the other job begins without a past."""
    with api.client("ada") as ada, api.client("bob") as bob:
        ada.report("1", [report(0, body=Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0))])
        before = ada.job("1")
        state = api.board.state
        api.board.observed(ClusterState(state.nodes, (BOBS,), replaced=frozenset("1")), 999.0, {"1": {"t4": 60.0}})
        assert (ada.job("1").ended, ada.job("1").gpu_seconds) == ("UNKNOWN", {"t4": 60.0})
        assert "another job has its id now" in ada.job("1").ended_text
        api.look(NEWER, BOBS)
        new = bob.job("1")
        assert (new.name, new.state, new.submit_s, new.start_s) == ("other", "queued", 2e9, None)
        assert (new.progress, new.gpu_seconds, new.stopped, new.key) == (None, {}, "", None)
        assert new.version > before.version
        assert not bob.history("1").outcomes + bob.history("1").observations + bob.ledger().lines
        (former,) = (view for view in ada.jobs(user="ada", state=["ended"]))
        assert former.id.startswith("1@19700101T")
        assert ada.job(former.id) == former
        (line,) = ada.ledger().lines
        assert (line.job, line.amount) == (former.id, 60.0)
        api.look(NEWER, BOBS)
        assert bob.job("1").version == new.version


def test_a_job_that_was_never_seen_to_end_is_ended_when_another_job_has_its_id(api):
    """penstockd was away meanwhile."""
    api.look(NEWER, BOBS)
    with api.client("ada") as ada, api.client("bob") as bob:
        (former,) = (view for view in ada.jobs(user="ada", state=["ended"]))
        assert (former.ended, former.end_s is not None) == ("UNKNOWN", True)
        assert bob.job("1").name == "other"


def test_a_submission_that_gets_the_id_of_a_former_job_is_not_that_job(api):
    """The former one had a key, and has ended: the new one with another key, or with none, is queued."""
    api.board.adopt(api.board.job("1").model_copy(update={"key": "night"}))
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 77.0)})
    fresh = api.board.job("1").model_copy(update={"state": "queued", "submit_s": 900.0, "key": "day", "end_s": None})
    api.board.adopt(fresh)
    with api.client("ada") as ada:
        assert (ada.job("1").state, ada.job("1").key) == ("queued", "day")
        assert [view.key for view in ada.jobs(user="ada", state=["ended"])] == ["night"]


@pytest.mark.parametrize(
    ("runs", "state", "holds"), [(True, "running", True), (False, "queued", False), (None, "running", True)]
)
def test_a_job_that_is_not_managed_any_more_is_shown_as_it_is(api, runs, state, holds):
    refused = Refusal("1", "j", "ada", "its comment no longer has the job spec", runs)
    api.board.observed(ClusterState(api.board.state.nodes, (BOBS,), (refused,)), 78.0)
    with api.client("ada") as ada:
        view = ada.job("1")
        assert (view.state, view.allocation is not None, view.reason) == (state, holds, "refused")
        assert view.note == "is not managed any more: its comment no longer has the job spec"
        version = view.version
        api.board.observed(ClusterState(api.board.state.nodes, (BOBS,), (refused,)), 79.0)
        assert ada.job("1").version == version, "nothing has changed"


@pytest.mark.parametrize("run", [{"phase": Phase.RUNNING, "allocation": on("t4", t4_00=1), "started_s": 60.0}, {}])
def test_a_job_that_has_completed_stays_so_and_does_not_run_again_when_slurm_has_forgotten_its_end(api, run):
    """A slurmctld that was killed showed it as running for minutes and then requeued it, or as pending at once."""
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 77.0, 60.0)}, gpu_seconds={"1": {"t4": 17.0}})
    with api.client("ada") as ada:
        before = ada.job("1")
        for _ in range(2):
            api.look(job("1", user="ada", **run), BOBS)
            assert ada.job("1") == before
        api.look(BOBS, finished={"1": Fate("CANCELLED", 0, 99.0)})
        assert ada.job("1") == before
        assert len(ada.ledger().lines) == 1
    assert set(api.submitter.cancelled) == {"1"}


@pytest.mark.parametrize(
    ("state", "run"),
    [
        ("COMPLETED", {"restarts": 1}),
        ("COMPLETED", {"phase": Phase.RUNNING, "allocation": on("t4", t4_00=1), "started_s": 80.0}),
        ("UNKNOWN", {}),
        ("FAILED", {}),
    ],
    ids=["requeued", "runs again", "its end was not seen", "failed"],
)
def test_a_job_that_runs_again_is_left_alone(api, state, run):
    api.look(BOBS, finished={"1": Fate(state, 0, 77.0, 60.0)})
    api.look(job("1", user="ada", **run), BOBS)
    with api.client("ada") as ada:
        assert ada.job("1").state != "ended"
    assert api.submitter.cancelled == []


@pytest.mark.parametrize(
    ("fate", "ended"),
    [
        (Fate("COMPLETED", 0, 99.0, submit_s=50.0), "UNKNOWN"),
        (Fate("COMPLETED", 0, -900.0, submit_s=-1000.0), "UNKNOWN"),
        (Fate("COMPLETED", 0, 99.0, submit_s=0.0), "COMPLETED"),
        (Fate("COMPLETED", 0, 99.0), "COMPLETED"),
    ],
    ids=["of a later job", "of an earlier job", "its own", "Slurm lists it"],
)
def test_the_end_of_another_job_with_the_same_id_is_not_taken_from_the_accounts(api, fate, ended):
    """penstockd was away while slurmctld lost the job, and another one with its id came and completed."""
    api.look(BOBS, finished={"1": fate})
    view = api.board.job("1")
    assert (view.ended, view.exit_code) == (ended, None if ended == "UNKNOWN" else 0)
