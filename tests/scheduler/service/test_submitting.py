"""Submissions: a key is one job, however often it is sent and whenever the daemon dies."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time

import httpx
import pytest

from penstock_scheduler.api.client import ApiError
from penstock_scheduler.api.messages import Owner, OwnerView, Submission
from penstock_scheduler.store import tables
from tests.scheduler.databases import open_submissions
from tests.scheduler.service.api import ME, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_a_key_is_one_job(api):
    order = Submission(key="k", command=("train",), name="n")
    with api.client("me") as me:
        first = me.submit(order)
        again = me.submit(order)
        assert first.id == again.id
        assert (first.user, first.key, first.state) == (ME, "k", "queued")
        assert len(api.submitter.jobs) == 1
        with pytest.raises(ApiError) as error:
            me.submit(Submission(key="k", command=("other",)))
        assert error.value.code == "key-used"
        assert me.submit(Submission(key="l", command=("train",))).id != first.id
        assert [found.id for found in me.jobs(key="k")] == [first.id]


def test_a_submission_is_found_after_the_daemon_died_in_between(api):
    """The key was noted and sbatch had run, but the job was not noted."""
    order = Submission(key="k", command=("train",))
    lost = api.submitter.submit(order, ME, 0)
    api.board.store.begin_submission(ME, "k", hashlib.sha256(order.model_dump_json().encode()).hexdigest())
    with api.client("me") as me:
        assert me.submit(order).id == lost
    assert len(api.submitter.jobs) == 1
    assert open_submissions(api.board.store) == []


def test_a_submission_is_answered_although_the_daemon_stops_meanwhile(api, monkeypatch):
    """sbatch takes longer than the daemon waits for requests at its end. The client hears that it must look."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(order: Submission, user: str, uid: int) -> str:
        begun.set()
        goes_on.wait(60)
        return "1000"

    monkeypatch.setattr(api.submitter, "submit", slow)
    stopping = threading.Thread(target=lambda: (begun.wait(60), api.service.stop()))
    stopping.start()
    try:
        order = Submission(key="k", command=("train",)).model_dump(mode="json")
        token = {"Authorization": f"Bearer {api.tokens['me']}"}
        answer = httpx.post(f"{api.url}/v1/jobs", json=order, headers=token, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "daemon-away")
        assert "look whether the request was carried out" in answer.json()["error"]["message"]
    finally:
        goes_on.set()
        stopping.join()


def test_concurrent_submissions_with_the_same_key_are_one_job(api):
    order = Submission(key="k", command=("train",))
    found: list[str] = []

    def submit() -> None:
        with api.client("me") as me:
            found.append(me.submit(order).id)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(api.submitter.jobs) == 1


def owned(attempt: int, generation: str, key: str | None = None, **given: object) -> Submission:
    owner = Owner(name="airflow:ours:dag:run:task:-1", generation=generation, attempt=attempt)
    return Submission(key=key or f"try-{attempt}", owner=owner, command=("train",), **given)


def end(api, job: str, state: str) -> None:
    view = api.board.job(job)
    with api.board._changing:
        api.board._live.pop(job, None)
        api.board.store.save_jobs([view.model_copy(update={"state": "ended", "ended": state})])


def test_tries_of_one_generation_share_a_job_until_it_fails(api):
    with api.client("me") as me:
        first = me.submit(owned(1, "g"))
        assert me.submit(owned(2, "g", name="edited in between")).id == first.id
        end(api, first.id, "FAILED")
        second = me.submit(owned(3, "g"))
        assert second.id != first.id
        assert me.submit(owned(3, "g")).id == second.id, "the same try, whose answer was lost"
        end(api, second.id, "COMPLETED")
        assert me.submit(owned(4, "g")).id == second.id
        assert me.owner("airflow:ours:dag:run:task:-1").job == second.id
    assert api.submitter.cancelled == []
    assert [order.dependency for _, order in api.submitter.jobs.values()] == [None, None]


def test_another_generation_cancels_the_job_and_starts_after_its_end(api):
    with api.client("me") as me:
        first = me.submit(owned(1, "g"))
        second = me.submit(owned(2, "h", dependency="afterok:12"))
        assert second.id != first.id
        assert api.submitter.cancelled == [first.id]
        assert api.submitter.jobs[second.id][1].dependency == f"afterok:12,afterany:{first.id}"
        end(api, second.id, "COMPLETED")
        third = me.submit(owned(3, "i"))
        assert third.id not in (first.id, second.id), "a result of another generation is not taken"
        assert api.submitter.cancelled == [first.id], "a job that has ended stays as it is"
        for late in (owned(2, "h", key="late"), owned(3, "j", key="twin")):
            with pytest.raises(ApiError, match=f"job {third.id} of a later try") as error:
                me.submit(late)
            assert error.value.code == "superseded"
    assert len(api.submitter.jobs) == 3


def test_a_try_whose_job_is_forgotten_is_refused_and_another_generation_runs_anew(api):
    """Its job may have completed: to run it once more without a word would be a guess."""
    with api.client("me") as me:
        first = me.submit(owned(1, "g"))
        end(api, first.id, "COMPLETED")
        with api.board.store.write() as db:
            db.execute(tables.jobs.delete())
        with pytest.raises(ApiError, match=f"history of job {first.id}") as error:
            me.submit(owned(2, "g"))
        assert error.value.code == "forgotten"
        assert me.submit(owned(3, "h")).id != first.id
    assert len(api.submitter.jobs) == 2


def test_an_owner_is_noted_after_the_daemon_died_before_it_could(api):
    order = owned(2, "h")
    with api.client("me") as me:
        first = me.submit(owned(1, "g"))
        lost = api.submitter.submit(order, ME, 0)
        api.board.store.begin_submission(ME, "try-2", hashlib.sha256(order.model_dump_json().encode()).hexdigest())
        assert me.submit(order).id == lost
        assert me.owner(order.owner.name).job == lost
    assert set(api.submitter.cancelled) == {first.id}


@pytest.mark.parametrize("generation", ["g", "h"])
def test_a_job_is_found_by_the_next_try_after_the_daemon_died_before_it_was_noted(api, generation):
    """sbatch had run for the first try, but neither its key nor its owner had the job; the next try has another key."""
    first = owned(1, "g")
    lost = api.submitter.submit(first, ME, 0)
    api.board.store.begin_submission(ME, "try-1", "digest")
    api.board.store.save_owner(ME, OwnerView(**first.owner.model_dump(), key="try-1"))
    with api.client("me") as me:
        found = me.submit(owned(2, generation))
        if generation == "g":
            assert found.id == lost
        else:
            assert found.id != lost
            assert api.submitter.cancelled == [lost]
            assert api.submitter.jobs[found.id][1].dependency == f"afterany:{lost}"
        assert me.owner(first.owner.name).job == found.id


def test_a_try_that_was_noted_and_never_submitted_leaves_the_former_job_in_place_of_its_own(api):
    with api.client("me") as me:
        former = me.submit(owned(1, "g")).id
        lost = OwnerView(**owned(2, "h").owner.model_dump(), key="try-2", former=former)
        api.board.store.save_owner(ME, lost)  # penstockd stopped here, before sbatch
        found = me.submit(owned(3, "h"))
        assert found.id != former, "it is of another generation"
        assert api.submitter.jobs[found.id][1].dependency == f"afterany:{former}"


@contextlib.contextmanager
def after_a_cancel(folder, *, restart: bool, for_owner: bool):
    """The job of a first try was cancelled, and has not ended; penstockd may have been restarted since."""
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(serving(folder))
        with api.client("me") as me:
            first = me.submit(owned(1, "g")).id
            me.cancel(first, for_owner=for_owner)
        if restart:
            stack.close()
            jobs = api.submitter.jobs
            api = stack.enter_context(serving(folder))
            api.submitter.jobs.update(jobs)
        yield api, first


@pytest.mark.parametrize("restart", [False, True])
def test_a_try_does_not_take_up_a_job_that_its_owner_gave_up_and_that_has_not_ended_yet(tmp_path, restart):
    """As after `execution_timeout`: the job saves its state, and Airflow tries the task again meanwhile."""
    with after_a_cancel(tmp_path, restart=restart, for_owner=True) as (api, first), api.client("me") as me:
        second = me.submit(owned(2, "g"))
        assert second.id != first
        assert api.submitter.jobs[second.id][1].dependency == f"afterany:{first}"
        assert me.submit(owned(3, "g")).id == second.id
        assert not me.owner(owned(3, "g").owner.name).given_up, "that was the first job"


@pytest.mark.parametrize("restart", [False, True])
def test_a_job_that_its_owner_gave_up_is_followed_by_another(tmp_path, restart):
    with after_a_cancel(tmp_path, restart=restart, for_owner=True) as (api, first), api.client("me") as me:
        end(api, first, "CANCELLED")
        assert me.submit(owned(2, "g")).id != first


@pytest.mark.parametrize("restart", [False, True])
def test_a_try_submits_no_job_in_place_of_one_that_somebody_cancelled(tmp_path, restart):
    """The try that waited for it was lost, for example with its worker, so that this one is the first to hear of the cancel."""
    with after_a_cancel(tmp_path, restart=restart, for_owner=False) as (api, first), api.client("me") as me:
        assert me.submit(owned(2, "g")).id == first, "it waits for the end, which it then shows"
        end(api, first, "CANCELLED")
        with pytest.raises(ApiError, match=f"job {first}, the job of an earlier try, was cancelled") as error:
            me.submit(owned(3, "g"))
        assert error.value.code == "cancelled"
        assert me.submit(owned(4, "h")).id != first, "the task was cleared"
        assert len(api.submitter.jobs) == 2


def test_concurrent_tries_of_an_owner_are_one_job(api):
    found: list[str] = []

    def submit(attempt: int) -> None:
        with contextlib.suppress(ApiError), api.client("me") as me:  # an earlier try may come too late
            found.append(me.submit(owned(attempt, "g")).id)

    threads = [threading.Thread(target=submit, args=[attempt]) for attempt in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(api.submitter.jobs) == 1


def test_an_owner_without_a_key_and_an_unknown_owner_are_refused(api):
    with pytest.raises(ValueError, match="needs a key"):
        Submission(owner=Owner(name="n", generation="g", attempt=1), command=("train",))
    with api.client("me") as me, pytest.raises(ApiError, match="no job of yours"):
        me.owner("unknown")


def test_a_submission_that_comes_too_soon_cancels_no_earlier_job_and_notes_no_owner(tmp_path):
    """The former job was cancelled, and the one that was to take its place refused."""
    with serving(tmp_path, submissions_per_hour=1) as api, api.client("me") as me:
        first = me.submit(owned(1, "g")).id
        for order in (
            owned(2, "h"),
            owned(1, "g").model_copy(update={"owner": Owner(name="x", generation="g", attempt=1)}),
        ):
            with pytest.raises(ApiError) as error:
                me.submit(order)
            assert error.value.code == "too-many"
        assert me.job(first).state == "queued"
        assert me.owner(owned(1, "g").owner.name).generation == "g"
        with pytest.raises(ApiError, match="no job of yours"):
            me.owner("x")


@pytest.mark.parametrize("job", ["1\x1b[31m", "../tokens", "1/cancel", "\u202e1", "%31", "?", ""])
def test_an_id_that_no_job_can_have_is_unknown(api, job):
    with api.client("me") as me, pytest.raises(ApiError):
        me.explain(job)


def taken_by_another(api, job: str) -> None:
    """Slurm has forgotten the job, and another one of the same user has its id, which was submitted with the key "another"."""
    view = api.board.job(job)
    with api.board._changing:
        api.board._live[job] = view.model_copy(update={"key": "another"})
        api.board.store.save_jobs([api.board._live[job]])


def test_a_job_that_has_the_id_of_a_forgotten_one_is_not_taken_for_it(api):
    """slurmctld was killed before it saved its state: it gives the ids of its last seconds once more."""
    with api.client("me") as me:
        first = me.submit(Submission(key="k", command=("train",)))
        taken_by_another(api, first.id)
        with pytest.raises(
            ApiError, match=f"job {first.id} of this key is forgotten, and another job has its id"
        ) as error:
            me.submit(Submission(key="k", command=("train",)))
    assert error.value.code == "forgotten"
    assert list(api.submitter.jobs) == [first.id]


def test_the_job_that_has_the_id_of_an_owners_forgotten_one_is_neither_taken_nor_cancelled(api):
    with api.client("me") as me:
        first = me.submit(owned(1, "g"))
        taken_by_another(api, first.id)
        with pytest.raises(ApiError, match=f"history of job {first.id}") as error:
            me.submit(owned(2, "g"))
        assert error.value.code == "forgotten"
        assert me.submit(owned(3, "h")).id != first.id
    assert api.submitter.cancelled == []


def test_a_job_found_by_its_key_is_not_taken_for_the_forgotten_one_whose_id_it_has(api):
    """penstockd died between sbatch and the note, and Slurm had forgotten a job before."""
    order = Submission(key="l", command=("train",))
    with api.client("me") as me:
        first = me.submit(Submission(key="k", command=("train",)))
        api.submitter.jobs[first.id] = (ME, order)
        api.board.store.begin_submission(ME, "l", hashlib.sha256(order.model_dump_json().encode()).hexdigest())
        second = me.submit(order)
        assert (second.id, second.key) == (first.id, "l")
        assert [found.id for found in me.jobs(key="k")] != [first.id]


def test_a_job_found_by_its_key_is_the_one_that_rounds_have_seen(api):
    """It has no key yet: penstockd died before it noted one, and a round has seen the job since."""
    order = Submission(key="k", command=("train",))
    lost = api.submitter.submit(order, ME, 0)
    api.board.store.begin_submission(ME, "k", hashlib.sha256(order.model_dump_json().encode()).hexdigest())
    with api.client("me") as me:
        seen = me.submit(Submission(key="other", command=("train",)))
        long_ago = seen.model_copy(update={"id": lost, "key": None, "submit_s": seen.submit_s - 1e6})
        api.board.store.save_jobs([long_ago])
        found = me.submit(order)
        assert (found.id, found.key, found.submit_s) == (lost, "k", long_ago.submit_s)


def test_a_job_that_slurm_has_lost_is_submitted_again_by_the_next_try_though_another_has_its_id(api):
    with api.client("me") as me:
        first = me.submit(owned(1, "g"))
        another = me.job(first.id).model_copy(update={"key": "another", "submit_s": time.time() + 900})
        api.board.adopt(another)
        assert (me.job(first.id).key, next(iter(me.jobs(key=owned(1, "g").key))).ended) == ("another", "UNKNOWN")
        second = me.submit(owned(2, "g"))
        assert second.id not in (first.id, another.id)
        assert me.job(first.id).state != "ended"
    assert api.submitter.cancelled == []
