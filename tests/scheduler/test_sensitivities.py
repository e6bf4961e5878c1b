"""Profiles of CPU and memory as the daemon has them: read from the site's folder, corrected by what jobs report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.families import load_families
from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile, SensitivityStore
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.sensitivities import FEWEST, Sensitivities, corrected
from penstock_scheduler.model import Job, JobSpec, Phase, Placement, Share
from penstock_scheduler.people.errors import BadJobSpec, ConfigError
from tests.scheduler.builders import job
from tests.scheduler.test_models import NoHistory

IMAGE = Sensitivity(1, (3, 6, 12), (60_000,), ((1,), (1.75,), (3,)))


def stored(folder: Path, table: Sensitivity = IMAGE, model: str = "image") -> Path:
    return SensitivityStore(folder).save(SensitivityProfile(model, (table,)))


def running(cpus: int, started_s: float) -> Job:
    held = Placement("t4", "all", (Share("n0", 1, cpus, 60_000),))
    return job("1", model_family="image", phase=Phase.RUNNING, allocation=held, started_s=started_s)


def reports(time_s: float, samples_per_s: float, count: int = FEWEST, batch: int = 32) -> list[Report]:
    seen = Observation(
        gpu_type="t4", nodes=1, gpus=1, atomic_batch=batch, steps=9, step_time_s=batch / samples_per_s, progress=1
    )
    return [Report(job_id="1", epoch=1, sequence=n, time_s=time_s, body=seen) for n in range(count)]


def speeds(found: Sensitivities) -> list[float]:
    return [line[0] for line in found["image"].tables[0].speed_CM]


def test_a_job_that_runs_with_another_share_corrects_the_profile(tmp_path: Path):
    """With 12 CPUs it makes 300 samples/s and with 3 CPUs 200: a speed of 3 x 200 / 300 = 2, of which half is believed."""
    stored(tmp_path / "site")
    found = Sensitivities(tmp_path / "site", tmp_path / "learned")
    found.learn([running(12, 10.0)], {"1": reports(20.0, 300.0)})
    assert speeds(found) == [1, 1.75, 3], "nothing to compare with"
    found.learn([running(3, 100.0)], {"1": reports(120.0, 200.0)})
    assert speeds(found) == [1.5, 1.75, 3]
    for _ in range(8):
        found.learn([running(3, 100.0)], {"1": reports(120.0, 200.0)})
    assert speeds(found) == pytest.approx([2, 2, 3], rel=0.05), "more CPUs are at least as fast"
    again = Sensitivities(tmp_path / "site", tmp_path / "learned")
    assert speeds(again) == speeds(found), "it is kept"
    fresh = stored(tmp_path / "site")
    os.utime(fresh, ns=(2**62, 2**62))
    found.refresh()
    assert speeds(found) == [1, 1.75, 3], "measured anew, which counts more"


@pytest.mark.parametrize(
    ("then", "heard"),
    [
        (running(3, 100.0), reports(50.0, 200.0)),
        (running(3, 100.0), reports(120.0, 200.0, FEWEST - 1)),
        (running(3, 100.0), reports(120.0, 200.0, batch=64)),
        (running(0, 100.0), reports(120.0, 200.0)),
        (running(3, 100.0), reports(120.0, 102.0)),
    ],
    ids=["of the run before", "too few", "another batch", "a share that is not ours", "as the profile says"],
)
def test_what_says_nothing_new_changes_nothing(tmp_path: Path, then: Job, heard: list[Report]):
    stored(tmp_path)
    found = Sensitivities(tmp_path)
    found.learn([running(12, 10.0)], {"1": reports(20.0, 300.0)})
    found.learn([then], {"1": heard})
    assert speeds(found) == [1, 1.75, 3]


@given(st.sampled_from([3, 6, 12]), st.sampled_from([3, 4, 6, 12]), st.floats(1, 1000), st.floats(1, 1000))
def test_the_share_that_is_compared_with_keeps_its_speed(before: int, now: int, base: float, speed: float):
    """Else two noisy speeds would drive each other up."""
    table = IMAGE
    for _ in range(3):
        heard = {(before, 60_000): [base] * (FEWEST + 1), (now, 60_000): [speed] * FEWEST}
        table = corrected(table, (now, 60_000), heard) or table
    assert table.speed(before, 60_000) == IMAGE.speed(before, 60_000)


def test_the_site_may_change_its_profiles_while_the_daemon_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stored(tmp_path)
    found = Sensitivities(tmp_path)
    specs = SpecModels(load_families(), 30.0, sensitivities=found)
    spec = JobSpec(max_gpus=1, sensitivity="voice")
    with pytest.raises(BadJobSpec, match="'voice' is not known here; the profiles are image"):
        specs.check(spec)
    stored(tmp_path, model="voice")
    models = LearnedModels(specs, NoHistory(), found)
    known = models.facts([job("1", sensitivity="voice")], {"t4"})
    specs.check(spec)
    assert known["1"].sensitivity.model == "voice"
    (tmp_path / "voice.json").write_text("{")
    found.refresh()
    assert "the old ones stay" in caplog.text
    assert set(found) == {"image", "voice"}
    with pytest.raises(ConfigError, match=r"sensitivities: .*voice.json is not JSON"):
        Sensitivities(tmp_path)
    (tmp_path / "voice.json").unlink()
    found.refresh()
    assert set(found) == {"image"}


def test_reports_reach_the_profiles_through_the_daemons_models(tmp_path: Path):
    stored(tmp_path)
    found = Sensitivities(tmp_path)
    models = LearnedModels(SpecModels(load_families(), 30.0, sensitivities=found), NoHistory(), found)
    for cpus, time_s, samples_per_s in ((12, 10.0, 300.0), (3, 100.0, 200.0)):
        models.learn(reports(time_s + 5, samples_per_s))
        held = Placement("t4", "all", (Share("n0", 1, cpus, 60_000),))
        runs = job("1", sensitivity="image", phase=Phase.RUNNING, allocation=held, started_s=time_s)
        known = models.facts([runs], {"t4"})
    assert known["1"].sensitivity.tables[0].speed(3, 60_000) == 1.5
