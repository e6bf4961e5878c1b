"""What a review found in claims that nothing measures: model families, profiles, other users' jobs, late reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.families import load_families
from penstock_profiles.learning import Kin
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import ControlMessage, Observation, Report, Started
from penstock_scheduler.jobs.claims import GRACE_S, believed
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import MOST_COST_S, SpecModels
from penstock_scheduler.model import JobFacts, Phase
from penstock_scheduler.store.sql import SqlStore
from penstock_slurm.observe.reporting import measured
from tests.scheduler.builders import job, on, rate
from tests.scheduler.test_kin import ended, new, seen, store
from tests.scheduler.test_models import NoHistory

__all__ = ["store"]

SCALES = tuple(
    Observation(
        gpu_type="t4", nodes=1, gpus=gpus, atomic_batch=64, steps=100, step_time_s=0.3,
        sync_time_s=0.0 if gpus == 1 else 0.01, grad_sqr=1e-9, grad_var=1e3, progress=0.0,
    )
    for gpus in (1, 8)
)  # fmt: skip
"""Steps that are nearly as short on 8 GPUs as on one."""


def report(step: Observation, sequence: int) -> Report:
    return Report(job_id="1", epoch=1, sequence=sequence, time_s=float(sequence), body=step)


@pytest.mark.parametrize("told", ["family", "family, steps of no use", "profile", "kin"])
def test_what_is_only_said_of_a_jobs_speed_counts_for_minutes(told: str) -> None:
    """Its job spec, a profile or ended jobs say that it scales. It runs, and measures no step that shows it."""
    specs, history = SpecModels(load_families(), 30.0), NoHistory()
    spec = {"model_family": "resnet50-imagenet"} if told.startswith("family") else {}
    runs = job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=8), batch_size=128, max_batch_size=4096, **spec)
    if told == "profile":
        profile = Profile(job="name-1", gpu_type="t4", measured_s=1.0, versions={}, ended="", observations=SCALES)
        history.stored.append(profile)
    kin = None
    if told == "kin":
        taught = specs.beginning(runs.spec, SCALES[0])
        for step in SCALES:
            taught.observe_report(step)
        assert isinstance(taught.estimator, TrainingEstimator)
        kin = Kin(taught.estimator, 8, (1e9,))
    models = LearnedModels(specs, history, kin=lambda jobs: {each.id: kin for each in jobs})
    if told == "family, steps of no use":
        models.learn([report(SCALES[1].model_copy(update={"sync_time_s": None}), 0)])

    def after(held_s: float) -> JobFacts:
        return believed(models.facts([runs], ["t4"])["1"].with_attained({"t4": 8 * held_s}))

    assert faster(after(GRACE_S - 1)) > 4.0
    late = after(GRACE_S + 1)
    assert faster(late) == pytest.approx(8**0.5)
    assert late.largest_run_gpus == 8
    models.learn([report(step, 1 + n) for n, step in enumerate(SCALES)])
    assert faster(after(10 * GRACE_S)) > 4.0, "its own steps show that it scales"


def faster(facts: JobFacts) -> float:
    """How many times as fast it counts on 8 GPUs of a node as on one."""
    return rate(facts.model, "t4", 1, 8) / rate(facts.model, "t4", 1, 1)


def test_ended_jobs_of_others_do_not_tell_how_long_a_job_is(store: SqlStore) -> None:
    """Mallory ends short jobs by the name of Bob's, in the account of both."""
    ended(store, 1, seen(1), seen(4), user="mallory", account="vision", total=1.0)
    bobs = replace(new(), user="bob", account="vision")
    found = KinOfJobs(store, SpecModels(load_families(), 30.0).beginning).of([bobs])[bobs.id]
    assert found is not None
    assert (found.most_gpus, found.work) == (4, ())


def test_a_job_that_reports_its_beginning_days_late_is_not_costly_to_move_for_ever() -> None:
    moved = ControlMessage(job_id="7", epoch=2, round=4, moved_s=1000.0)
    begun = Report(job_id="7", epoch=2, sequence=0, time_s=1e6, body=Started(gpu_type="t4", gpu_ids={}, progress=0.0))
    found = measured(moved, begun, now_s=1e6)
    assert found is not None
    assert found.pauses_s == (MOST_COST_S,)
