import pytest

from penstock_profiles.estimators import LinearEstimator, TableEstimator, TrainingEstimator
from penstock_profiles.families import Families, load_families
from penstock_profiles.learning import JobModel
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import Observation, Report, Started
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.saving import RestartCosts
from penstock_scheduler.model import JobSpec, Phase, Plan
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import BadJobSpec
from tests.scheduler.builders import job, on, rate, snapshot, with_facts

STARTED = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)


def source() -> SpecModels:
    return SpecModels(load_families(), restart_cost_s=30.0)


def estimator(types=("t4", "a100"), **spec):
    return source().facts([job("1", **spec)], types)["1"].model


def test_a_measured_table_comes_before_a_family_and_a_family_before_nothing():
    assert isinstance(estimator(goodput_table={"t4": {1: 2.0}}), TableEstimator)
    assert isinstance(estimator(model_family="yolov3"), TrainingEstimator)
    assert isinstance(estimator(), LinearEstimator)


def test_a_family_goes_by_the_sites_names():
    assert set(estimator(("rtx2080ti", "t4"), model_family="yolov3").models) == {"rtx2080ti", "t4"}


def test_a_family_that_knows_no_type_of_the_site_knows_nothing():
    assert isinstance(estimator(("abacus",), model_family="yolov3"), LinearEstimator)


def test_a_job_of_which_nothing_is_known_is_taken_to_be_as_fast_on_each_type_as_the_families_are():
    """On one GPU. A type that no family has run on would be taken for a slow or a fast one, so then all types are alike."""
    unknown = estimator()
    fast, slow = (float(unknown.goodput(gpu_type, [1], [1])[0]) for gpu_type in ("a100", "t4"))
    assert slow == 1.0
    assert 2.0 < fast < 4.0
    assert estimator(("t4", "abacus")) == LinearEstimator()
    assert estimator(("rtx2080ti", "t4")).speeds.keys() == {"rtx2080ti", "t4"}, "under the site's names"


def test_a_job_keeps_its_estimator_until_its_spec_or_the_site_changes():
    models = source()
    one, two = job("1", model_family="yolov3"), job("2")
    first = models.facts([one, two], ["t4"])
    again = models.facts([two, one], ["t4"])
    assert all(again[name].model is first[name].model for name in "12")
    changed = models.facts([job("1", model_family="ncf"), two], ["t4"])
    assert changed["1"].model is not first["1"].model
    assert changed["2"].model is first["2"].model
    assert models.facts([two], ["t4", "a100"])["2"].model is not first["2"].model


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model_family": "yolov9"}, "unknown model family 'yolov9'.*did you mean yolov3"),
        (
            {"model_family": "yolov3", "max_batch_size": 4},
            "model_family 'yolov3': max_batch=4 is below initial_batch=8",
        ),
    ],
)
def test_a_spec_that_no_model_fits_is_refused(spec, words):
    with pytest.raises(BadJobSpec, match=words):
        source().check(JobSpec(max_gpus=4, **spec))


def test_a_spec_that_should_not_have_been_let_in_is_no_more_than_a_bad_one():
    """Whatever a user gets past the checks of a job spec, no round may fail of it."""
    with pytest.raises(BadJobSpec, match=r"no model.*has no measurement"):
        source().check(JobSpec.model_construct(max_gpus=4, goodput_table={"t4": {}}))


def test_a_restart_costs_what_was_measured_on_the_job_then_what_it_says_then_its_familys_then_the_sites():
    """Medians: of 4, 9 and 5 s it is 5; of the family's 4, 9, 5 and 20 s together 7."""
    jobs = [
        job("measured", model_family="yolov3", restart_cost_s=60.0, pauses_s=(4.0, 9.0, 5.0)),
        job("once", model_family="yolov3", pauses_s=(20.0,)),
        job("says", model_family="yolov3", restart_cost_s=60.0),
        job("family", model_family="yolov3"),
        job("other", model_family="ncf"),
        job("none"),
    ]
    costs_s = {name: known.restart_cost_s for name, known in source().facts(jobs, ["t4"]).items()}
    assert costs_s == {"measured": 5.0, "once": 20.0, "says": 60.0, "family": 7.0, "other": 30.0, "none": 30.0}


def test_no_report_makes_a_restart_free():
    """Sia's factor needs a positive cost. A report may claim that saving took 0 s; a clock that was set shows any pause."""
    jobs = [
        job("moved", pauses_s=(0.0,)),
        job("shown"),
        job("family", model_family="yolov3"),
        job("of-it", model_family="yolov3", pauses_s=(0.0,)),
        job("alike"),
    ]
    claimed = RestartCosts(own_s={"shown": 0.0}, alike_s={"alike": 0.0})
    known = source().facts(jobs, ["t4"], claimed)
    assert {each.restart_cost_s for each in known.values()} == {1.0}


class NoHistory:
    """A store with what a test puts there."""

    def __init__(self) -> None:
        self.seen: list[Report] = []
        self.stored: list[Profile] = []
        self.kept: list[tuple[str, object]] = []
        self.asked: list[object] = []
        self.looked: list[str] = []

    def observations(self, job, newest):
        self.looked.append(job)
        return [report for report in self.seen if report.job_id == job][-newest:]

    def observed_since(self, row):
        self.asked.append(row)
        return len(self.seen), frozenset(report.job_id for report in self.seen[row or 0 :] if row is not None)

    def profiled(self):
        return frozenset(("ada", profile.job) for profile in self.stored)

    def newest_reports(self, job, kinds, newest=None):
        return [report for report in self.seen if report.job_id == job and report.body.kind in kinds][-(newest or 0) :]

    def profiles(self, user, job_name=None):
        return [profile for profile in self.stored if profile.job == job_name and user == "ada"]

    def add_model(self, job, time_s, estimator):
        self.kept.append((job, estimator))


def measured(gpus: int, atomic: int, gpu_type: str = "t4", job_id: str = "1") -> Report:
    """A step takes 0.1 s + 0.01 s a sample, and 0.05 s of synchronisation on several GPUs."""
    sync_s = 0.05 if gpus > 1 else 0.0
    seen = Observation(
        gpu_type=gpu_type,
        nodes=1,
        gpus=gpus,
        atomic_batch=atomic,
        steps=50,
        step_time_s=0.1 + 0.01 * atomic + sync_s,
        sync_time_s=sync_s,
        progress=10.0,
    )
    return Report(job_id=job_id, epoch=1, sequence=atomic, time_s=1.0, body=seen)


REPORTS = [measured(1, 16), measured(1, 32), measured(2, 16), measured(4, 32)]


def learned(history: NoHistory) -> LearnedModels:
    return LearnedModels(SpecModels(Families(), 30.0), history)


def test_the_store_is_asked_for_a_job_without_measurements_once_and_again_when_it_has_some():
    history = NoHistory()
    models, jobs = learned(history), [job("1"), job("2")]
    before = models.facts(jobs, ["t4"])
    models.facts(jobs, ["t4"])
    assert history.looked == ["1", "2"]
    history.seen += REPORTS  # another process has stored them
    after = models.facts(jobs, ["t4"])
    assert after["1"].model is not before["1"].model
    assert after["2"].model is before["2"].model
    assert history.looked == ["1", "2", "1"]


def test_a_profile_that_is_stored_later_counts_at_once():
    history = NoHistory()
    models, mine = learned(history), job("1")
    before = models.facts([mine], ["t4"])["1"].model
    seen = tuple(report.body for report in REPORTS)
    history.stored.append(
        Profile(job=mine.name, gpu_type="t4", measured_s=1.0, versions={}, ended="", observations=seen)
    )
    assert models.facts([mine], ["t4"])["1"].model is not before


def test_what_a_job_measured_is_its_model():
    """Batch 32: one T4 has 32 / 0.42 = 76.2 samples/s, two with 16 each 32 / 0.31 = 103.2."""
    history = NoHistory()
    models = learned(history)
    training = job("1", batch_size=32, max_gpus=4)
    before = models.facts([training], {"t4"})
    assert isinstance(before["1"].model, LinearEstimator)
    models.learn([*REPORTS, Report(job_id="1", epoch=1, sequence=99, time_s=1.0, body=STARTED)])
    after = models.facts([training], {"t4"})
    model = after["1"].model
    assert rate(model, "t4", 1, 1) == pytest.approx(32 / 0.42, rel=0.02)
    assert rate(model, "t4", 1, 2) == pytest.approx(32 / 0.31, rel=0.05)
    assert after["1"].remaining_work == 95.0
    assert models.facts([training], {"t4"})["1"].model is model, "nothing new: the very object"
    assert history.kept == [("1", model)]


def test_a_daemon_that_starts_learns_from_the_store():
    history = NoHistory()
    history.seen = list(REPORTS)
    training = job("1", batch_size=32, max_gpus=4)
    model = learned(history).facts([training], {"t4"})["1"].model
    assert rate(model, "t4", 1, 1) == pytest.approx(32 / 0.42, rel=0.02)


def test_a_daemon_that_starts_learns_nothing_from_the_old_reports_that_it_reads_again():
    """It reads the spool's files from their beginning, 1 MiB in a tick: on the first day, the job was twice as slow."""

    def said(sequence: int, step_time_s: float, progress: float) -> Report:
        body = measured(1, 32).body.model_copy(update={"step_time_s": step_time_s, "progress": progress})
        return Report(job_id="1", epoch=1, sequence=sequence, time_s=float(sequence), body=body)

    begun = Report(job_id="1", epoch=1, sequence=0, time_s=0.0, body=STARTED)
    old = [begun, *(said(number, 0.8, float(number)) for number in range(1, 21))]
    new = [said(number, 0.4, float(number)) for number in range(21, 61)]
    training = job("1", batch_size=32, phase=Phase.RUNNING, allocation=on("t4", t4_00=1))

    def known(*read_in_ticks: list[Report]) -> list[tuple[float, float | None]]:
        history, found = NoHistory(), []
        history.seen = [*old, *new]
        models = learned(history)
        for read in read_in_ticks:
            models.learn(read)
            facts = models.facts([training], {"t4"})["1"]
            found.append((rate(facts.model, "t4", 1, 1), facts.remaining_work))
        return found

    (right,) = known([])
    assert right[0] == pytest.approx(32 / 0.4, rel=0.05)
    assert right[1] == pytest.approx(100.0 - 60.0)
    assert known(old, new) == [right, right]
    newer, later = known(old, [said(61, 0.4, 61.0)])
    assert newer == right
    assert later[1] == pytest.approx(100.0 - 61.0)


@pytest.mark.parametrize("error", [OverflowError, TypeError, ValueError])
def test_a_job_whose_measurements_cannot_be_used_is_alone_in_that(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    history, both = NoHistory(), [job("1", batch_size=32, max_gpus=4), job("2", batch_size=32, max_gpus=4)]
    models = learned(history)
    observe = JobModel.observe_report

    def fail(model: JobModel, seen: Observation) -> None:
        if seen.progress == 666.0:
            raise error("no such number")
        observe(model, seen)

    monkeypatch.setattr(JobModel, "observe_report", fail)
    lying = measured(1, 32).body.model_copy(update={"progress": 666.0})
    models.learn([Report(job_id="1", epoch=1, sequence=0, time_s=1.0, body=lying), measured(1, 32, job_id="2")])
    for _ in range(2):
        known = models.facts(both, {"t4"})
        assert isinstance(known["1"].model, LinearEstimator)
        assert isinstance(known["2"].model, TrainingEstimator)


def test_a_type_that_the_catalogue_does_not_know_is_taken_for_the_slowest_and_not_for_useless():
    """The job has run on an a100, and may now have a type of which nothing tells."""
    history = NoHistory()
    models = LearnedModels(SpecModels(load_families(), 30.0), history)
    models.learn([measured(1, 32, "a100")])
    known = models.facts([job("1", batch_size=32, max_gpus=4)], {"a100", "t4", "abacus", "cpu"})["1"].model
    assert rate(known, "abacus", 1, 1) == rate(known, "t4", 1, 1) > 0
    assert rate(known, "a100", 1, 1) > rate(known, "t4", 1, 1)
    assert "cpu" not in known.models


def test_what_a_job_has_run_on_is_remembered_while_it_holds_nothing():
    """Between two runs, and when the daemon begins anew: else each move would start it on one GPU again. By the cluster: what a
    report says of its GPUs is a claim."""
    history, types = NoHistory(), {"t4"}
    models = learned(history)
    held = job("1", batch_size=32, phase=Phase.RUNNING, allocation=on("t4", t4_00=4))
    never, between = job("1", batch_size=32), job("1", batch_size=32, restarts=1)
    assert models.facts([never], types)["1"].largest_run_gpus == 0
    assert models.facts([held], types)["1"].largest_run_gpus == 4
    assert models.facts([between], types)["1"].largest_run_gpus == 4, "it has reported nothing, but it ran"
    history.seen = list(REPORTS)
    assert learned(history).facts([between], types)["1"].largest_run_gpus == 0
    seen = with_facts(snapshot("t4:1x4", [held]), largest_run_gpus={"1": 4})
    round_before = RoundRecord(seen, PolicyChoice(), Plan(1, {}, {}))
    anew = LearnedModels(SpecModels(Families(), 30.0), history, before=round_before)
    assert anew.facts([between], types)["1"].largest_run_gpus == 4
    assert models.facts([], types) == {}
    assert models.facts([never], types)["1"].largest_run_gpus == 0, "another job, or it never ran"


def test_a_stored_profile_is_for_its_users_jobs_of_that_name():
    history = NoHistory()
    seen = tuple(report.body for report in REPORTS[:2])
    history.stored = [Profile(job="name-1", gpu_type="t4", measured_s=1.0, versions={}, ended="", observations=seen)]
    mine, other, hers = (job("1", batch_size=32), job("2", batch_size=32), job("1", batch_size=32, user="bob"))
    assert isinstance(learned(history).facts([mine], {"t4"})["1"].model, TrainingEstimator)
    assert isinstance(learned(history).facts([other], {"t4"})["2"].model, LinearEstimator)
    assert isinstance(learned(history).facts([hers], {"t4"})["1"].model, LinearEstimator)


def unmeasured(models, jobs, types):
    return {name: known.unmeasured_types for name, known in models.facts(jobs, types).items() if known.unmeasured_types}


def test_what_is_unmeasured_of_a_job():
    """Without a family all types, until it reports from one or a profile is stored; a catalogue's family is known on its own."""
    history, types = NoHistory(), {"t4", "a100", "mi50"}
    models = LearnedModels(SpecModels(load_families(), 30.0), history)
    jobs = [job("1"), job("2", model_family="bert-squad"), job("3", goodput_table={"t4": {1: 5.0}})]
    assert unmeasured(models, jobs, types) == {"1": ("a100", "mi50", "t4"), "2": ("mi50",)}
    models.learn(REPORTS[:1])
    assert unmeasured(models, jobs, types) == {"1": ("a100", "mi50"), "2": ("mi50",)}
    assert unmeasured(models, jobs, types)["1"] == ("a100", "mi50"), "also in the next round"
    seen = tuple(measured(1, 16, name).body for name in types)
    history.stored = [Profile(job="name-4", gpu_type="t4", measured_s=1.0, versions={}, ended="", observations=seen)]
    assert unmeasured(models, [job("4")], types) == {}


def test_a_measured_table_stays_what_it_is():
    models = learned(NoHistory())
    table_job = job("1", goodput_table={"t4": {1: 5.0}})
    models.learn(REPORTS)
    assert rate(models.facts([table_job], {"t4"})["1"].model, "t4", 1, 1) == 5.0


def test_a_restart_that_is_only_said_to_cost_a_year_costs_half_an_hour():
    jobs = [job("says", restart_cost_s=3e7), job("shown"), job("moved", pauses_s=(4000.0,))]
    known = source().facts(jobs, ["t4"], RestartCosts(own_s={"shown": 1e9}))
    assert {name: each.restart_cost_s for name, each in known.items()} == {
        "says": 1800.0,
        "shown": 1800.0,
        "moved": 4000.0,
    }
    assert [name for name, each in known.items() if each.doubts] == ["says"]


def running(job_id: str = "1", gpus: int = 4, **fields: object):
    return job(job_id, phase=Phase.RUNNING, allocation=on("t4", t4_00=gpus), **fields)


def test_silence_is_worth_less_than_perfect_scaling():
    """A job that runs and measures nothing: 4 GPUs are twice one, with a table or without one. One that has not run may try."""
    models, table = learned(NoHistory()), {"t4": {1: 1.0, 4: 4.0}}
    assert rate(models.facts([job("1")], {"t4"})["1"].model, "t4", 1, 4) == 4.0
    for each in (running(), running("2", goodput_table=table)):
        facts = models.facts([each], {"t4"})[each.id]
        assert rate(facts.model, "t4", 1, 4) / rate(facts.model, "t4", 1, 1) == pytest.approx(2.0)
        assert facts.largest_run_gpus == 4
        assert models.facts([each], {"t4"})[each.id].model is facts.model, "nothing new: the very object"


def test_a_table_that_the_jobs_steps_contradict_counts_as_measured():
    """Its table says that 4 GPUs are 100 times as fast as one; by its steps 3 times (152 / 0.42 / 76.2)."""
    history, spec = NoHistory(), {"goodput_table": {"t4": {1: 1.0, 4: 100.0}}}
    models = learned(history)
    models.learn([measured(1, 32), measured(4, 32)])
    facts = models.facts([running(**spec)], {"t4"})["1"]
    assert rate(facts.model, "t4", 1, 4) == pytest.approx((4 * 32 / 0.47) / (32 / 0.42), rel=0.01)
    assert "of the speed that its goodput_table gives for 4 t4 GPUs" in facts.doubts[0]
    assert models.facts([running(**spec)], {"t4"})["1"].model == facts.model


def test_a_speed_on_gpus_that_a_job_has_never_held_is_none():
    models = learned(NoHistory())
    models.learn([measured(64, 32)])
    facts = models.facts([running(gpus=1)], {"t4"})["1"]
    assert isinstance(facts.model, LinearEstimator)
    assert facts.largest_run_gpus == 1
    assert "it reported a speed on 64 t4 GPUs, and has never held them" in facts.doubts[0]
    assert rate(facts.model, "t4", 1, 4) == rate(facts.model, "t4", 1, 1), "it is taken not to scale"
    models.learn([measured(1, 33)])
    assert isinstance(models.facts([running(gpus=1)], {"t4"})["1"].model, TrainingEstimator)


def test_the_first_total_that_a_job_reports_is_its_promise():
    models = learned(NoHistory())
    later = Report(job_id="1", epoch=2, sequence=0, time_s=1.0, body=STARTED.model_copy(update={"total": 900.0}))
    models.learn([Report(job_id="1", epoch=1, sequence=0, time_s=1.0, body=STARTED), measured(1, 32), later])
    facts = models.facts([running(gpus=1)], {"t4"})["1"]
    assert facts.remaining_work == 900.0 - 5.0
    assert facts.promise is not None
    assert facts.promise.work == 100.0
