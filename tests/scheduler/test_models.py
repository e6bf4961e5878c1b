import pytest

from penstock_profiles.estimators import LinearEstimator, TableEstimator, TrainingEstimator
from penstock_profiles.families import load_families
from penstock_scheduler.errors import BadWish
from penstock_scheduler.model import JobWish
from penstock_scheduler.models import WishModels
from tests.scheduler.builders import job


def source() -> WishModels:
    return WishModels(load_families(), restart_cost_s=30.0)


def estimator(types=("t4", "a100"), **wish):
    return source().models([job("1", **wish)], types).estimators["1"]


def test_a_measured_table_comes_before_a_family_and_a_family_before_nothing():
    assert isinstance(estimator(goodput_table={"t4": {1: 2.0}}), TableEstimator)
    assert isinstance(estimator(model_family="yolov3"), TrainingEstimator)
    assert isinstance(estimator(), LinearEstimator)


def test_a_family_goes_by_the_sites_names():
    assert set(estimator(("rtx2080ti", "t4"), model_family="yolov3").models) == {"rtx2080ti", "t4"}


def test_a_family_that_knows_no_type_of_the_site_knows_nothing():
    assert isinstance(estimator(("abacus",), model_family="yolov3"), LinearEstimator)


def test_a_job_keeps_its_estimator_until_its_wish_or_the_site_changes():
    models = source()
    one, two = job("1", model_family="yolov3"), job("2")
    first = models.models([one, two], ["t4"]).estimators
    again = models.models([two, one], ["t4"]).estimators
    assert all(again[name] is first[name] for name in "12")
    changed = models.models([job("1", model_family="ncf"), two], ["t4"]).estimators
    assert changed["1"] is not first["1"]
    assert changed["2"] is first["2"]
    assert models.models([two], ["t4", "a100"]).estimators["2"] is not first["2"]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"model_family": "yolov9"}, "unknown model family 'yolov9'.*did you mean yolov3"),
        (
            {"model_family": "yolov3", "max_batch_size": 4},
            "model_family 'yolov3': max_batch=4 is below initial_batch=8",
        ),
    ],
)
def test_a_wish_that_no_model_fits_is_refused(wish, words):
    with pytest.raises(BadWish, match=words):
        source().check(JobWish(max_gpus=4, **wish))


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
    costs_s = source().models(jobs, ["t4"]).restart_costs_s
    assert costs_s == {"measured": 5.0, "once": 20.0, "says": 60.0, "family": 7.0, "other": 30.0, "none": 30.0}
