"""Replays of recorded history through the API: real rounds in the store, real processes."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_scheduler.api.client import ApiError
from penstock_scheduler.api.whatif_messages import WhatIfOrder
from penstock_scheduler.cli import make_app
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.whatif import WhatIfTasks, arguments
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.sql import open_store
from tests.scheduler.service.api import serving
from tests.scheduler.test_whatif import FIRST_S, record

FIFO = make_policy("fifo")[1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A store with the rounds of six jobs."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder / "state")
    return folder


@pytest.fixture(params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path, recorded):
    with serving(tmp_path, separate=request.param) as api:
        api.app.state.api._whatif = WhatIfTasks(str(recorded / "state"))  # the made-up service has one round only
        yield api


def test_a_replay_has_progress_and_the_figures_of_the_command(api, recorded):
    """The store's rounds are differences. The API and the command give the same figures."""
    with api.client("oz") as oz:
        begun = oz.whatif(WhatIfOrder(add_nodes="a100:1x4", policies=("fifo",)))
        assert (begun.state, begun.user, begun.result) == ("running", "oz", None)
        with pytest.raises(ApiError, match="oz runs one already"):
            oz.whatif(WhatIfOrder())
        wait_for(lambda: oz.whatif_task(begun.id).state != "running", 300, "the replay")
        done = oz.whatif_task(begun.id)
        assert (done.state, done.fraction, done.error) == ("done", 1.0, "")
        assert done.result is not None
        assert set(done.result["policies"]) == {"recorded", "fifo"}
        assert done.result["policies"]["recorded"]["mean"]["avg_jct_h"] > 0
        (listed,) = oz._json("GET", "/v1/whatif")
        assert (listed["id"], listed["result"]) == (begun.id, None)
        assert oz.end_whatif(begun.id).state == "done"
        with pytest.raises(ApiError, match="there is no task"):
            oz.whatif_task(begun.id)
    argv = [
        "simulate",
        "whatif",
        "--store",
        str(recorded / "state"),
        "--add-nodes",
        "a100:1x4",
        "--policy",
        "fifo",
        "--json",
    ]
    by_command = json.loads(CliRunner().invoke(make_app(), argv).stdout)
    assert (
        by_command["policies"]["recorded"]["mean"]["avg_jct_h"]
        == done.result["policies"]["recorded"]["mean"]["avg_jct_h"]
    )
    assert by_command["policies"]["fifo"]["mean"]["avg_jct_h"] == done.result["policies"]["fifo"]["mean"]["avg_jct_h"]


def test_what_cannot_be_replayed_is_refused_or_fails_with_the_reason(api):
    with api.client("oz") as oz:
        for order, words in (
            (WhatIfOrder(add_nodes="no-spec"), "no-spec"),
            (WhatIfOrder(policies=("best",)), "best"),
        ):
            with pytest.raises(ApiError, match=words) as caught:
                oz.whatif(order)
            assert caught.value.status == 422
        task = oz.whatif(WhatIfOrder(to_s=1.0))
        wait_for(lambda: oz.whatif_task(task.id).state != "running", 300, "the replay")
        found = oz.whatif_task(task.id)
        assert (found.state, found.result) == ("failed", None)
        assert "no round is kept of this period" in found.error


def alive(process) -> bool:
    return process.poll() is None


def test_a_replay_is_cancelled_and_ends_at_its_limit(recorded):
    """Its process is gone at once, and the next replay may begin."""
    tasks = WhatIfTasks(str(recorded / "state"))
    first = tasks.begin(WhatIfOrder(), "oz", FIFO, {})
    process = tasks._running.process
    with pytest.raises(Refusal, match="oz runs one already"):
        tasks.begin(WhatIfOrder(), "boss", FIFO, {})
    assert tasks.remove(first.id).state == "cancelled"
    wait_for(lambda: not alive(process), 120, "the process to end")
    short = WhatIfTasks(str(recorded / "state"), longest_s=0.2)
    second = short.begin(WhatIfOrder(), "oz", FIFO, {})
    process = short._running.process
    wait_for(lambda: not alive(process), 120, "the process to end")
    assert short.task(second.id).state == "failed"
    assert "replay a shorter period" in short.task(second.id).error
    third = tasks.begin(WhatIfOrder(), "oz", FIFO, {})
    process = tasks._running.process
    tasks.close()
    wait_for(lambda: not alive(process), 120, "the process to end with penstockd")
    assert tasks.task(third.id).state == "cancelled"


def test_values_of_users_are_no_options():
    """Each is in one word with its option."""
    found = arguments(
        WhatIfOrder(add_nodes="--out=/etc", like="x", policies=("sia", "fifo"), from_s=5.0), FIFO, {"t4": 0.4}
    )
    assert [each for each in found if each.startswith("--out")] == []
    assert {"--add-nodes=--out=/etc", "--like=x", "--policy=sia,fifo", "--from=5.0", "--prices=t4=0.4"} <= set(found)


def test_a_period_has_the_rounds_in_it(recorded):
    from penstock_scheduler.cli.whatif import _numbers

    store = open_store(recorded / "state")
    times = {each.round: each.time_s for each in store.summaries(None, 10_000)}
    middle_s = sorted(times.values())[len(times) // 2]
    assert _numbers(store, None, None) == sorted(times)
    assert _numbers(store, middle_s, None) == sorted(number for number, time_s in times.items() if time_s >= middle_s)
    assert _numbers(store, None, middle_s) == sorted(number for number, time_s in times.items() if time_s <= middle_s)
    assert FIRST_S <= min(times.values()) < time.time()
    store.close()
