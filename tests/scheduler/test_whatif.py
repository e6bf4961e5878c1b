"""`penstock whatif`: a record that a daemon's loop has really written, replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock_profiles.estimators import TableEstimator
from penstock_profiles.families import load_families
from penstock_profiles.wire import Ended, Observation, Report, Started
from penstock_scheduler.cli import make_app
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.loop import RoundLoop
from penstock_scheduler.model import JobWish
from penstock_scheduler.models import WishModels
from penstock_scheduler.policies import make_policy
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from penstock_scheduler.simulator.past import past
from penstock_scheduler.store import open_store
from penstock_scheduler.triggers import Period

RATES = {"t4": {1: 1.0, 2: 1.9, 4: 3.6, 8: 6.0}, "a100": {1: 4.0, 2: 7.6, 4: 14.0, 8: 24.0}}
RESTART_S = 30.0
FIRST_S = 1.7e9
JOBS = 6


def record(folder: Path, until_s: float = 20_000.0) -> list[SimulatedJob]:
    """Six jobs under `sia` on a simulated cluster, with the rounds in a store as penstockd keeps them; what became of them."""
    wish = JobWish(max_gpus=8, goodput_table=RATES)
    clock = SimulatedClock(FIRST_S)
    work = [4000.0 * (1 + number % 3) for number in range(JOBS)]
    jobs = [
        SimulatedJob(
            str(number),
            f"j{number}",
            wish,
            EstimatedJob(TableEstimator(RATES), work[number], RESTART_S),
            FIRST_S + 65.0 * number,
        )
        for number in range(JOBS)
    ]
    cluster = SimulatedCluster(nodes_from_spec("t4:2x4,a100:1x4"), jobs, clock)
    policy, settings = make_policy("sia")
    store = open_store(folder, writer=True)
    models = WishModels(load_families(), RESTART_S)
    loop = RoundLoop(cluster, clock, store, Period(60.0), policy, models, tick_s=10.0, settings=settings)
    ended_s = FIRST_S + until_s
    loop.run(lambda: cluster.finished or clock.now_s() > ended_s)
    clock.sleep(60.0)
    loop.tick()
    store.close()
    assert cluster.finished == (until_s >= 20_000.0)
    return jobs


def whatif(store: Path, *argv: object) -> Result:
    result = CliRunner().invoke(make_app(), ["whatif", "--store", str(store), *map(str, argv)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(store: Path, *argv: object) -> dict[str, object]:
    return json.loads(whatif(store, "--json", *argv).stdout)  # type: ignore[no-any-return]


def test_the_same_cluster_and_policy_give_what_really_happened(tmp_path):
    """Known to a round (60 s): the record alone does not tell at which instant jobs started and ended."""
    jobs = record(tmp_path / "s")
    document = told(tmp_path / "s", "--policy", "sia,fifo")
    assert list(document["policies"]) == ["recorded", "sia", "fifo"]
    real = sum(job.finish_s - job.submit_s for job in jobs) / JOBS
    recorded, again = (document["policies"][name]["mean"] for name in ("recorded", "sia"))
    assert recorded["ended"] == again["ended"] == JOBS
    assert recorded["avg_jct_h"] * 3600 == pytest.approx(real, abs=60)
    assert again["avg_jct_h"] == pytest.approx(recorded["avg_jct_h"], rel=0.1)


def test_more_nodes_help_and_fewer_do_not(tmp_path):
    record(tmp_path / "s")
    average = {
        change: told(tmp_path / "s", *change)["policies"]["sia"]["mean"]["avg_jct_h"]
        for change in ((), ("--add-nodes", "a100:2x4"), ("--remove-nodes", "a100:1x4"))
    }
    more, same, fewer = average["--add-nodes", "a100:2x4"], average[()], average["--remove-nodes", "a100:1x4"]
    assert more < 0.9 * same < same < fewer


def test_a_type_that_nobody_ran_on_has_to_be_told(tmp_path):
    record(tmp_path / "s")
    with pytest.raises(ConfigError, match=r"no job of the record is known to run on h100; .* --like h100=t4:2"):
        whatif(tmp_path / "s", "--add-nodes", "h100:2x8")
    with pytest.raises(ConfigError, match="the record has no v100; it has a100, t4"):
        whatif(tmp_path / "s", "--add-nodes", "h100:2x8", "--like", "h100=v100:2")
    helped = told(tmp_path / "s", "--add-nodes", "h100:2x8", "--like", "h100=a100:2")
    assert helped["cluster"] == "t4:2x4,a100:1x4,h100:2x8"
    assert helped["policies"]["sia"]["mean"]["avg_jct_h"] < helped["policies"]["recorded"]["mean"]["avg_jct_h"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--remove-nodes", "a100:2x4"), "there are not so many; the record has t4:2x4,a100:1x4"),
        (("--remove-nodes", "t4:2x4,a100:1x4"), "leaves no node"),
        (("--like", "h100"), "is no NEW=KNOWN:TIMES"),
        (("--policy", ""), "names no policy"),
        (("--policy", "fifo,sia+gandiva-share"), "policy sia.gandiva-share needs agents"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, change, words):
    record(tmp_path / "s", until_s=600)
    with pytest.raises(ConfigError, match=words):
        whatif(tmp_path / "s", *change)


def test_the_page_says_what_the_record_cannot_tell(tmp_path):
    record(tmp_path / "s", until_s=700)
    document = told(tmp_path / "s", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    left = [note for note in document["notes"] if "do not tell how much is left: they are left out" in note]
    assert left
    assert left[0] in page
    assert (tmp_path / "out" / "gpus-recorded.png").exists()


def report(job: str, epoch: int, sequence: int, at_s: float, body: object) -> Report:
    return Report(job_id=job, epoch=epoch, sequence=sequence, time_s=FIRST_S + at_s, body=body)  # type: ignore[arg-type]


def seen(progress: float) -> Observation:
    return Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=1, steps=1, step_time_s=1.0, progress=progress)


def test_reports_tell_work_by_hand(tmp_path):
    """Job 0 ran 100 s on 1 T4 (rate 1) and 50 s on 2 (1.9): 195; of the 300 that it then had done, 60 were done twice: 162.5.

    Job 1 ran 100 s on 1 T4, has done 25 of the 100 that it says are all, and goes on: 400.
    """
    record(tmp_path / "s", until_s=650)
    store = open_store(tmp_path / "s")
    one, two = {"t4-00": (0,)}, {"t4-00": (0, 1)}
    reports = [
        report("0", 1, 0, 60, Started(gpu_type="t4", gpu_ids=one)),
        report("0", 1, 1, 160, seen(160)),
        report("0", 2, 0, 200, Started(gpu_type="t4", gpu_ids=two, progress=100)),
        report("0", 2, 1, 250, Ended(outcome="completed", progress=300)),
        report("1", 1, 0, 120, Started(gpu_type="t4", gpu_ids=one, total=100)),
        report("1", 1, 1, 220, seen(25)),
    ]
    found = past((store.round(number) for number in store.round_numbers()), reports)
    assert found.truths["0"].work == pytest.approx(195 * 300 / 360)
    assert found.lived[0].finish_s == 250
    assert [run.end_s - run.start_s for run in found.lived[0].runs] == pytest.approx([100, 50])
    jobs = {job.id: job for job in found.lived}
    assert jobs["1"].finish_s is None
    assert found.truths["1"].work == pytest.approx(400)
    assert found.ended == {"0"} | {job.id for job in found.lived if job.finish_s is not None}
    assert any("had not ended when the record ends" in note for note in found.notes)


def test_a_store_without_rounds_is_told(tmp_path):
    open_store(tmp_path, writer=True).close()
    with pytest.raises(ConfigError, match="the store has no rounds"):
        whatif(tmp_path)
    by_variable = CliRunner(env={"PENSTOCK_STORE": str(tmp_path)}).invoke(make_app(), ["whatif"])
    assert "the store has no rounds" in str(by_variable.exception)
