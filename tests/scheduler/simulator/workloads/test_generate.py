from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.workloads import GeneratorSettings, generate

SETTINGS = st.builds(
    GeneratorSettings,
    jobs=st.integers(1, 60),
    rate_per_h=st.floats(0.1, 1000),
    like=st.sampled_from(["philly", "helios"]),
    cv=st.floats(0.2, 4),
    max_gpus=st.integers(1, 64),
    max_duration_s=st.floats(10, 1e7),
    models=st.booleans(),
    seed=st.integers(0, 2**32),
)


@given(SETTINGS)
def test_equal_settings_give_equal_workloads_within_their_bounds(settings):
    workload = generate(settings)
    assert workload == generate(settings)
    assert len(workload.jobs) == settings.jobs
    for job in workload.jobs:
        assert job.gpus <= settings.max_gpus
        assert job.duration_s is None or job.duration_s <= settings.max_duration_s + 0.1
        assert (job.model is not None) == settings.models


def test_another_seed_gives_other_jobs():
    assert generate(GeneratorSettings(20, 10, seed=1)).jobs != generate(GeneratorSettings(20, 10, seed=2)).jobs


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_burstiness_asked_for(cv):
    """30,000 gaps at 20 per hour: 180 s, within 4 standard errors (cv / sqrt(30,000)) of the mean."""
    workload = generate(GeneratorSettings(30_000, 20, cv=cv))
    gaps = np.diff([0.0, *(job.submit_s for job in workload.jobs)])
    assert gaps.mean() == pytest.approx(180, rel=4 * cv / np.sqrt(30_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_philly_has_many_short_jobs_on_one_gpu():
    """Its published median is 1,144 s and 93 % of its jobs ask for one GPU; the larger ones are longer."""
    jobs = generate(GeneratorSettings(30_000, 20, like="philly")).jobs
    seconds, gpus = np.array([job.duration_s for job in jobs]), np.array([job.gpus for job in jobs])
    assert np.mean(gpus == 1) == pytest.approx(0.932, abs=0.006)
    assert np.median(seconds) == pytest.approx(1144, rel=0.1)
    assert np.median(seconds[gpus >= 4]) > 10 * np.median(seconds[gpus == 1])


def test_helios_has_the_published_averages():
    """Median 206 s, mean 6,652 s (of so heavy a tail a sample's mean is a rough figure), 3.7 GPUs."""
    jobs = generate(GeneratorSettings(100_000, 20, like="helios")).jobs
    seconds = np.array([job.duration_s for job in jobs])
    assert np.median(seconds) == pytest.approx(206, rel=0.03)
    assert seconds.mean() == pytest.approx(6652, rel=0.25)
    assert np.mean([job.gpus for job in jobs]) == pytest.approx(3.7, rel=0.03)


def test_models_come_with_requests_that_scale_and_specs_that_do_not_tell_the_speed():
    jobs = generate(GeneratorSettings(400, 20, models=True)).jobs
    assert {job.model for job in jobs} == {"cifar10", "ncf", "bert", "deepspeech2", "yolov3", "imagenet"}
    for job in jobs:
        assert job.spec.model_family is None
        assert job.spec.batch_size is not None
        assert job.batch_size is not None
        assert job.spec.batch_size <= job.batch_size <= (job.spec.max_batch_size or 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"jobs": 0}, "jobs=0"),
        ({"rate_per_h": 0}, "rate_per_h=0"),
        ({"cv": -1}, "cv=-1"),
        ({"like": "x"}, "philly, helios"),
    ],
)
def test_settings_out_of_range(fields, words):
    with pytest.raises(ConfigError, match=words):
        GeneratorSettings(**({"jobs": 1, "rate_per_h": 1} | fields))
