"""How much jobs have left: what it makes them weigh, and when a move no longer pays."""

import numpy as np
import pytest

from penstock_profiles.matrix import GoodputMatrix
from penstock_scheduler.model import Phase, Snapshot
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings
from penstock_scheduler.rounds.policies.sia.costs import remaining, size_weights
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from tests.scheduler.builders import job, on, snapshot, table, with_facts
from tests.scheduler.policies.sia.test_aging import PERFECT, starts, tried

sia = Sia(SiaSettings())
LONG, SHORT = 100 * 3600.0, 120.0
LEFT = {"long": LONG, "short": SHORT}


def left(state: Snapshot) -> list[list[float]]:
    return remaining(SiaMatrix(state, SiaSettings(), GoodputMatrix())).tolist()


def test_of_two_jobs_the_one_that_ends_sooner_gets_the_gpu():
    jobs = [job("long", submit_s=1.0), job("short", submit_s=2.0)]
    state = snapshot("t4:1x1", jobs, dict.fromkeys(["long", "short"], PERFECT), remaining=LEFT)
    assert set(sia.decide(state).chosen) == {"short"}
    assert set(Sia(SiaSettings(size_power=0)).decide(state).chosen) == {"long"}, "it came first"


def test_the_job_that_ends_sooner_gets_more_gpus_and_the_other_its_first():
    """The second GPU goes by what is left. By weight alone, the short job's would also come before the long one's first."""
    jobs = [job("long", submit_s=1.0), job("short", submit_s=2.0)]
    state = snapshot("t4:3x1", jobs, dict.fromkeys(LEFT, PERFECT), remaining=LEFT)
    assert {name: each.gpus for name, each in sia.decide(state).chosen.items()} == {"long": 1, "short": 2}
    left = {"long": SHORT, "short": LONG}
    state = snapshot("t4:3x1", jobs, dict.fromkeys(left, PERFECT), remaining=left)
    assert {name: each.gpus for name, each in sia.decide(state).chosen.items()} == {"long": 2, "short": 1}
    both = snapshot("t4:2x4", jobs, dict.fromkeys(LEFT, PERFECT), remaining=LEFT)
    assert set(sia.decide(both).chosen) == {"long", "short"}, "the short one could have all 8"


def test_no_running_job_is_stopped_because_another_ends_sooner():
    """One GPU for both: the job that runs keeps it, whatever it has left."""
    long = job("long", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1, submit_s=-1e6)
    left = {"long": 1e9, "short": 1.0}
    state = snapshot("t4:1x1", [long, job("short", max_gpus=1)], dict.fromkeys(left, PERFECT), remaining=left)
    assert set(sia.decide(state).chosen) == {"long"}


@pytest.mark.parametrize("holders", [1, 2, 8])
def test_a_long_job_waits_at_most_five_times_aging_s_for_gpus_of_jobs_that_always_report_to_end_soon(holders: int):
    """It weighs least, and those that hold its GPUs most; a move of theirs never pays by what they report."""
    work = {"big": 8e6} | {f"small-{number}": 1.0 for number in range(holders)}
    assert starts(with_facts(tried(5 * 3600.0, holders), remaining_work=work))
    assert not starts(with_facts(tried(3600.0, holders), remaining_work=work)), "until then its wait adds nothing"


def test_a_move_must_pay_within_what_is_left():
    """1.9 times as fast elsewhere, and a restart takes 60 s. With 60 s of work left, half of them would be lost."""
    model = {"j": table(t4={1: 1.0}, a100={1: 1.9})}
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1, submit_s=-1e6)
    for work, goes in ((60.0, "t4"), (1e5, "a100")):
        state = snapshot("t4:1x1,a100:1x1", [each], model, restart_cost_s=60.0, remaining={"j": work})
        assert sia.decide(state).chosen["j"].gpu_type == goes
        assert Sia(SiaSettings(amortise_s=None)).decide(state).chosen["j"].gpu_type == "a100"


def test_a_move_must_pay_within_what_is_left_on_the_new_configuration():
    """4 times as fast elsewhere, and a restart takes 30 s. With 25 s left it would be there for 6 s; with 200 s, for 50."""
    model = {"j": table(t4={1: 1.0}, a100={1: 4.0})}
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1, submit_s=-1e6)
    for work, goes in ((25.0, "t4"), (200.0, "a100")):
        state = snapshot("t4:1x1,a100:1x1", [each], model, restart_cost_s=30.0, remaining={"j": work})
        assert sia.decide(state).chosen["j"].gpu_type == goes


def test_what_is_left_is_what_the_job_reports_or_its_kin_or_its_age():
    """The slowest configuration makes 2 of the job's units a second. The middle of the age's heavy tail is the age itself."""
    model = dict.fromkeys("rka", table(t4={1: 2.0, 2: 4.0}))
    state = snapshot("t4:1x4", [job(name) for name in "rka"], model, attained={"a": {"t4": 3600.0}})
    state = with_facts(
        state, remaining_work={"r": 100.0}, likely_work={"k": (300.0, 100.0)}, attained_gpu_s={"a": {"t4": 3600.0}}
    )
    rows = dict(zip(sorted("rka"), left(state), strict=True))
    assert set(rows["r"]) == {50.0}
    assert min(rows["k"]) > 50.0
    assert max(rows["k"]) < 150.0
    assert np.mean(rows["k"]) == pytest.approx(100.0)
    assert rows["k"] == pytest.approx(np.quantile([50.0, 150.0], (np.arange(8) + 0.5) / 8))
    assert rows["a"][3] < 3600.0 + 1800.0 < rows["a"][4]
    assert rows["a"][-1] == pytest.approx(15 * 5400.0)


def test_weights_are_bounded_and_off_at_power_0():
    left_JP = np.array([[0.0], [360.0], [1e4], [1e12]])
    assert size_weights(left_JP, 0.5) == pytest.approx([1.0, 0.5**0.5, (360 / 10360) ** 0.5, 0.05])
    assert size_weights(left_JP, 0.0).tolist() == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("preset", ["sia:artifact", "sia:paper"])
def test_the_presets_do_not_ask_what_is_left(preset: str):
    jobs = [job("long", submit_s=1.0), job("short", submit_s=2.0)]
    state = snapshot("t4:1x1", jobs, dict.fromkeys(["long", "short"], PERFECT), remaining=LEFT)
    assert set(make_policy(preset)[0].decide(state).chosen) == {"long"}


def test_an_owner_reads_what_the_job_has_left_and_what_it_weighs():
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1)
    state = snapshot("t4:1x1", [each], {"j": PERFECT}, remaining={"j": 7200.0})
    said = sia.remarks(state, sia.decide(state), each)
    assert said[-1] == (
        "It has about 2.0 h of work left on 1 t4, as it reports. So it weighs 0.22; a job that is about to end weighs 1."
    )
