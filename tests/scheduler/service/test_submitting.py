"""Submissions: a key is one job, however often it is sent and whenever the daemon dies."""

from __future__ import annotations

import hashlib
import threading

import pytest

from penstock_scheduler.client import ApiError
from penstock_scheduler.messages import Submission
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
    assert api.board.store.open_submissions() == []


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
