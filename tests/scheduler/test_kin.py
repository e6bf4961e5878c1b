"""Jobs start with what earlier jobs of their kind have shown, and leave it as soon as they differ."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from penstock_profiles.estimators import LinearEstimator
from penstock_profiles.families import Families
from penstock_profiles.learning import CERTAINTY, STRANGERS_CERTAINTY, Belief, Kin, kind_by_name
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.api.model_messages import Taught
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Job, JobFacts, Phase, Placement, Share
from penstock_scheduler.people.errors import NoSuchKind, StoreError
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.scheduler.builders import job

TYPES = ("a100", "t4")
SYNC_S = 0.02


def seen(
    gpus: int, slower: float = 1.0, progress: float = 100.0, gpu_type: str = "t4", atomic: int = 16
) -> Observation:
    """Steps of 0.1 s and 0.02 s of synchronisation, or `slower` times that."""
    sync_s = SYNC_S if gpus > 1 else 0.0
    return Observation(
        gpu_type=gpu_type, nodes=1, gpus=gpus, atomic_batch=atomic, steps=100,
        step_time_s=slower * (0.005 * atomic + 0.02 + sync_s), sync_time_s=slower * sync_s, progress=progress,
    )  # fmt: skip


def report(of: str, sequence: int, body: Observation) -> Report:
    return Report(job_id=of, epoch=1, sequence=sequence, time_s=float(sequence), body=body)


def ended(store: SqlStore, number: int, *bodies: Observation, ended: str = "COMPLETED", **more: object) -> None:
    spec = new(f"x-{number}").spec
    view = JobView(
        id=str(number), version=1, name=more.pop("name", f"train-{number}"), user=more.pop("user", "ada"), state="ended",
        ended=ended, submit_s=0.0, end_s=more.pop("end_s", time.time()), spec=more.pop("spec", spec), **more,
    )  # fmt: skip
    store.save_jobs([view])
    store.add_reports([report(str(number), place, body) for place, body in enumerate(bodies)])
    if bodies:
        store.add_model(str(number), 1.0, LinearEstimator())


def new(name: str = "train-99", **fields: object) -> Job:
    made = job("99", batch_size=64, max_batch_size=512, **fields)
    return Job("99", name, made.user, made.spec, made.partitions, made.phase, made.submit_s)


@pytest.fixture
def store(tmp_path: Path):
    opened = open_store(tmp_path, writer=True)
    yield opened
    opened.close()


def models(store: SqlStore) -> LearnedModels:
    specs = SpecModels(Families(), 30.0)
    return LearnedModels(specs, store, kin=KinOfJobs(store, specs.beginning).of)


def facts(of: LearnedModels, each: Job) -> JobFacts:
    return of.facts([each], TYPES)[each.id]


def on(known: JobFacts, gpus: int) -> float:
    return float(known.model.goodput("t4", np.array([1]), np.array([gpus]))[0])


def test_a_new_job_starts_with_what_ended_jobs_of_its_kind_have_shown(store: SqlStore):
    ended(store, 1, seen(1), seen(4), progress=5000.0, total=6000.0)
    ended(store, 2, seen(2, progress=8000.0))
    ended(store, 3, seen(8, progress=10.0), ended="CANCELLED")
    known = facts(models(store), new())
    assert known.largest_run_gpus == 8
    assert sorted(known.likely_work) == [6000.0, 8000.0], "a cancelled job does not tell how long such jobs are"
    assert 1.5 * on(known, 1) < on(known, 4) < 4 * on(known, 1), "it scales as they did, and not perfectly"


@pytest.mark.parametrize(
    "unlike",
    [{"user": "bob"}, {"name": "evaluate-1"}, {"spec": job("1", batch_size=32, max_batch_size=512).spec}],
    ids=["user", "name", "batch size"],
)
def test_jobs_of_another_kind_are_not_kin(store: SqlStore, unlike: dict[str, object]):
    ended(store, 1, seen(1), seen(4), **unlike)
    known = facts(models(store), new())
    assert (known.largest_run_gpus, known.likely_work) == (0, ())
    assert known.model.kind == "linear"


def test_kin_by_which_a_job_could_never_start_are_not_recalled(store: SqlStore):
    """Somebody's test of one GPU and four samples a step says nothing of a job on eight GPUs."""
    spec = job("1", max_gpus=1).spec
    ended(store, 1, seen(1, atomic=4), spec=spec)
    made = job("99", min_gpus=8, max_gpus=8)
    eight = replace(made, name="train-99")
    assert facts(models(store), eight).model.kind == "linear"
    one = replace(job("99", max_gpus=8), name="train-99")
    assert facts(models(store), one).model.kind == "training"


def test_kin_on_another_gpu_type_tell_of_a_type_that_nobody_knows(store: SqlStore):
    """No catalogue here. The job asks for a type on which its kin never ran."""
    ended(store, 1, seen(1, gpu_type="t4"), seen(4, gpu_type="t4"))
    asks = new(gpu_types=("a100",))
    known = facts(models(store), asks)
    assert float(known.model.goodput("a100", np.array([1]), np.array([4]))[0]) == on(known, 4) > 0
    (kind,) = kinds(store).kinds("ada/train-#@64-512").kinds
    assert kind.taught is not None
    assert kind.taught.estimator.models.keys() == {"t4"}, "what is only assumed is not taught to others"


def test_a_running_job_is_not_recalled_as_one_that_makes_no_progress(store: SqlStore):
    ended(store, 1, seen(1, atomic=4), spec=job("1", max_gpus=1).spec)
    held = Placement("t4", "all", (Share("t4-00", 8),))
    running = replace(job("99", max_gpus=8, phase=Phase.RUNNING, allocation=held), name="train-99")
    assert facts(models(store), running).model.kind == "linear"


@pytest.mark.parametrize(
    ("where", "count"),
    [(("most_gpus",), 10**30), (("estimator", "max_batch"), 10**30), (("models", "max_atomic_batch"), 10**400)],
)
def test_an_import_with_a_number_that_no_job_has_is_refused(store: SqlStore, where: tuple[str, ...], count: int):
    ended(store, 1, seen(1), seen(4))
    taught = kinds(store).kinds("ada/train-#@64-512").kinds[0].taught
    assert taught is not None
    given = taught.model_dump(mode="json")
    at = given if where[0] == "most_gpus" else given["estimator"]
    at = at["models"]["t4"] if where[0] == "models" else at
    at[where[-1]] = count
    with pytest.raises(ValidationError, match=r"less than or equal to|at most 1,000,000,000"):
        Taught.model_validate(given)


def test_the_kinds_that_are_kept_in_memory_are_bounded(store: SqlStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock_scheduler.jobs.kin.KEPT", 3)
    of = kinds(store)
    for number in range(6):
        ended(store, number, seen(1), name=f"{'abcdef'[number]}-1")
    of.of([new(f"{letter}-2") for letter in "abcdefghij"])
    assert len(of._found) == 3


def test_a_job_keeps_its_kins_scaling_while_it_measures_the_same(store: SqlStore):
    """A tenth slower on one GPU: everything it has not measured is a tenth slower too."""
    ended(store, 1, *(seen(gpus, atomic=atomic) for gpus in (1, 2, 4, 8) for atomic in (16, 64)))
    fresh = models(store)
    before = facts(fresh, new())
    fresh.learn([report("99", 0, seen(1, slower=1.1))])
    after = facts(fresh, new())
    assert after.largest_run_gpus == 8
    for gpus in (1, 4, 8):
        assert on(after, gpus) == pytest.approx(on(before, gpus) / 1.1, rel=0.02)


def test_a_job_that_is_unlike_its_kin_is_on_its_own_after_its_first_measurement(store: SqlStore):
    """It is three times as slow. What is known of it is then exactly what would be known without any kin."""
    ended(store, 1, seen(1), seen(4), progress=5000.0)
    wrong, alone = models(store), LearnedModels(SpecModels(Families(), 30.0), store)
    for each in (wrong, alone):
        facts(each, new())
        each.learn([report("99", 0, seen(1, slower=3.0))])
    known, expected = facts(wrong, new()), facts(alone, new())
    assert known.model.models == expected.model.models
    assert (known.largest_run_gpus, known.likely_work) == (expected.largest_run_gpus, ())


def test_what_such_jobs_have_left_shrinks_with_progress(store: SqlStore):
    ended(store, 1, seen(1), seen(4), total=1000.0)
    ended(store, 2, seen(1), total=300.0)
    fresh = models(store)
    facts(fresh, new())
    fresh.learn([report("99", 0, seen(1, progress=400.0))])
    assert facts(fresh, new()).likely_work == (600.0,)


def test_a_store_that_does_not_answer_is_no_error_and_is_asked_again(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog
):
    ended(store, 1, seen(1), seen(4))

    def broken(**_: object) -> None:
        raise StoreError("the disk is gone")

    there = models(store)
    with monkeypatch.context() as away:
        away.setattr(store, "jobs", broken)
        assert facts(there, new()).model.kind == "linear"
    assert "not recalled" in caplog.text
    assert facts(there, new()).largest_run_gpus == 4


def kinds(store: SqlStore) -> KinOfJobs:
    return KinOfJobs(store, SpecModels(Families(), 30.0).beginning)


KIND = "ada/train-#@64-512"


def recall(store: SqlStore, of: Job) -> Kin | None:
    return kinds(store).of([of])[of.id]


def test_a_forgotten_kind_teaches_no_new_job_until_one_ends_again(store: SqlStore):
    """A job that is there keeps what it has recalled, and other kinds teach on."""
    ended(store, 1, seen(1), seen(4))
    ended(store, 2, seen(1), seen(2), name="evaluate-1")
    there, other = models(store), new("evaluate-9")
    assert facts(there, new()).largest_run_gpus == 4
    kinds(store).forget(KIND, time.time() + 1)
    assert facts(there, new()).largest_run_gpus == 4
    assert facts(models(store), new()).model.kind == "linear"
    assert facts(models(store), other).largest_run_gpus == 2
    ended(store, 3, seen(1), seen(8), end_s=time.time() + 2)
    assert facts(models(store), new()).largest_run_gpus == 8
    with pytest.raises(NoSuchKind, match="ada/nosuch"):
        kinds(store).forget("ada/nosuch", 1.0)


def test_what_one_site_has_learned_is_recalled_at_another_by_all_users(store: SqlStore, tmp_path: Path):
    """Their own earlier jobs come first."""
    ended(store, 1, seen(1), seen(4), progress=6000.0, total=6000.0)
    taught = kinds(store).kinds(KIND).kinds[0].taught
    assert taught is not None
    elsewhere = open_store(tmp_path / "elsewhere", writer=True)
    try:
        assert kinds(elsewhere).bring([taught], 5.0) == ["/train-#@64-512"]
        known = facts(models(elsewhere), new())
        assert (known.largest_run_gpus, known.likely_work) == (4, (6000.0,))
        assert on(known, 4) == pytest.approx(on(facts(models(store), new()), 4))
        assert facts(models(elsewhere), new("evaluate-1")).model.kind == "linear", "another kind"
        ended(elsewhere, 1, seen(1), seen(2))
        assert facts(models(elsewhere), new()).largest_run_gpus == 2
        kinds(elsewhere).forget("/train-#@64-512", 6.0)
        assert [each.kind for each in kinds(elsewhere).kinds().kinds] == [KIND]
    finally:
        elsewhere.close()


@pytest.mark.parametrize(("account", "expected"), [("vision", 4), ("speech", 0), ("", 0)])
def test_jobs_of_others_in_the_account_are_recalled_and_believed_less(store: SqlStore, account: str, expected: int):
    """Jobs of the user's own count first; a kind that was forgotten teaches nobody."""
    ended(store, 1, seen(1), seen(4), user="bob", account="vision")
    mine = replace(new(), account=account)
    found = recall(store, mine)
    assert (0 if found is None else found.most_gpus) == expected
    assert found is None or found.certainty == STRANGERS_CERTAINTY
    kinds(store).forget("bob/train-#@64-512", time.time() + 1)
    assert recall(store, mine) is None
    ended(store, 2, seen(1), seen(2), account=account)
    own = recall(store, mine)
    assert own is not None
    assert (own.most_gpus, own.certainty) == (2, CERTAINTY)


def test_an_import_is_believed_less_than_own_jobs():
    """A step more than a third longer: kin of the same user may still be right, an import is dropped."""
    own, imported = Belief(), Belief(STRANGERS_CERTAINTY)
    for each in (own, imported):
        each.saw(1.0, 1.38)
    assert (own.holds, imported.holds) == (True, False)


def test_many_new_jobs_of_one_kind_ask_the_store_once(store: SqlStore, monkeypatch: pytest.MonkeyPatch):
    """A search of 500 trials is submitted at once."""
    ended(store, 1, seen(1), seen(4))
    asked: list[str] = []
    for name in ("jobs", "observations"):
        real = getattr(store, name)
        monkeypatch.setattr(
            store, name, lambda *args, real=real, name=name, **more: asked.append(name) or real(*args, **more)
        )
    jobs = [Job(str(n), f"train-{n}", "ada", new().spec, ("all",), new().phase, 0.0) for n in range(100, 120)]
    found = kinds(store).of(jobs)
    assert [each.most_gpus for each in found.values() if each is not None] == 20 * [4]
    assert asked == ["jobs", "observations"]


def test_a_round_reads_the_reports_of_few_kinds_and_users_take_turns(store: SqlStore, monkeypatch: pytest.MonkeyPatch):
    """mallory submits a job of each of six kinds, and ada, bob and cleo one each. The measurements of 5 jobs take a second."""
    monkeypatch.setattr("penstock_scheduler.jobs.kin.READ", 4)
    users = {"a": "ada", "b": "bob", "c": "cleo"} | dict.fromkeys("mnopqr", "mallory")
    for number, (letter, user) in enumerate(users.items()):
        ended(store, number, seen(1), seen(4), name=f"{letter}-1", user=user)
    jobs = [replace(new(f"{letter}-2"), id=letter, user=user) for letter, user in users.items()]
    jobs.sort(key=lambda each: each.user != "mallory")
    of, rounds = kinds(store), []
    while jobs:
        found = of.of(jobs)
        assert all(kin is not None and kin.most_gpus == 4 for kin in found.values())
        rounds.append("".join(sorted(found)))
        jobs = [each for each in jobs if each.id not in found]
    assert rounds == ["am", "bc", "no", "pq", "r"]


def test_a_kind_that_was_read_is_recalled_also_where_a_round_reads_no_more(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock_scheduler.jobs.kin.READ", 1)
    ended(store, 1, seen(1), seen(4))
    ended(store, 2, seen(1), name="evaluate-1")
    jobs = [replace(new(f"{name}-9"), id=f"{name}{n}") for name in ("train", "evaluate") for n in range(3)]
    there = models(store)
    first = there.facts(jobs, TYPES)
    assert [first[each.id].largest_run_gpus for each in jobs] == [4, 4, 4, 0, 0, 0]
    assert first["evaluate0"].model.kind == "linear"
    assert [each.largest_run_gpus for each in there.facts(jobs, TYPES).values()] == [4, 4, 4, 1, 1, 1]


def test_belief_falls_with_errors_and_recovers_with_hits():
    belief = Belief()
    assert belief.probability == pytest.approx(CERTAINTY)
    belief.saw(1.0, 1.02)
    assert belief.probability > 0.95
    for _ in range(2):
        belief.saw(1.0, 2.0)
    assert not belief.holds
    for _ in range(4):
        belief.saw(1.0, 1.0)
    assert belief.holds


def test_numbers_in_names_do_not_count():
    assert kind_by_name("train-lr0.1-17") == kind_by_name("train-lr0.03-5") == "train-lr#-#"
    assert kind_by_name("train-a") != kind_by_name("train-b")
