"""Reports whose numbers no job has. Each concerns its job alone."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.families import load_families
from penstock_profiles.wire import Checkpointed, Observation, Report, Started, reports_file, reports_folder
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model.plausible import check_plausible
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, snapshot

SEEN = {"gpu_type": "t4", "nodes": 1, "gpus": 1, "atomic_batch": 32, "steps": 10, "step_time_s": 0.1, "progress": 1.0}
HUGE = 10**30


def report(body: Observation | Started | Checkpointed, **fields: object) -> Report:
    return Report.model_validate({"job_id": "1", "epoch": 1, "sequence": 0, "time_s": 1.0, "body": body} | fields)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (report(Observation.model_validate(SEEN | {"steps": 10**400})), "steps"),
        (report(Observation.model_validate(SEEN | {"atomic_batch": HUGE})), "atomic_batch"),
        (report(Observation.model_validate(SEEN | {"gpus": HUGE})), "gpus"),
        (report(Observation.model_validate(SEEN | {"nodes": HUGE})), "nodes"),
        (report(Observation.model_validate(SEEN | {"gpus": 1000, "atomic_batch": 10**9})), "samples of a step"),
        (report(Observation.model_validate(SEEN | {"accumulation_steps": 10**9})), "samples of a step"),
        (report(Observation.model_validate(SEEN | {"step_time_s": 1e-300})), "step_time_s"),
        (report(Observation.model_validate(SEEN | {"step_time_s": 1e300})), "step_time_s"),
        (report(Observation.model_validate(SEEN | {"grad_var": 1e308, "grad_sqr": 1.0})), "grad_var"),
        (report(Observation.model_validate(SEEN | {"progress": 1e300})), "progress"),
        (report(Started(gpu_type="t4", gpu_ids={}, total=1e300)), "total"),
        (report(Started(gpu_type="t4", gpu_ids={}), time_s=1.7e308), "time_s"),
        (report(Checkpointed(progress=1.0, seconds=1.7e308)), "seconds"),
        (report(Checkpointed(progress=1.0, seconds=1.0), sequence=HUGE), "sequence"),
        (report(Checkpointed(progress=1.0, seconds=1.0), epoch=2**31), "epoch"),
    ],
)
def test_it_is_refused_with_the_name_of_the_number_and_the_jobs_other_reports_count(
    tmp_path: Path, wrong: Report, what: str
) -> None:
    with pytest.raises(ValueError, match=f"{what} must be at (most|least)"):
        check_plausible(wrong)
    right = report(Observation.model_validate(SEEN), epoch=wrong.epoch, sequence=1)
    path = reports_file(tmp_path, "1", 7)
    path.parent.mkdir(parents=True)
    lines = [each.model_copy(update={"epoch": 7}).model_dump_json() for each in (wrong, right)]
    path.write_text("\n".join(lines) + "\n")
    if what != "epoch":
        assert [each.sequence for each in Spool(tmp_path).read(["1"])] == [1]


@pytest.mark.parametrize("name", [f"{HUGE}.jsonl", "²³.jsonl", "٣٤.jsonl"])
def test_a_file_of_no_epoch_is_no_reports_file(tmp_path: Path, name: str) -> None:
    reports_folder(tmp_path, "1").mkdir(parents=True)
    (reports_folder(tmp_path, "1") / name).touch()
    assert Spool(tmp_path).next_epoch("1") == 1
    assert Spool(tmp_path).read(["1"]) == []


def test_a_job_that_removes_its_reports_folder_is_alone_in_that(tmp_path: Path) -> None:
    for number in ("1", "2"):
        path = reports_file(tmp_path, number, 1)
        path.parent.mkdir(parents=True)
        path.write_text(report(Checkpointed(progress=1.0, seconds=1.0), job_id=number).model_dump_json() + "\n")
    shutil.rmtree(reports_folder(tmp_path, "1"))
    reports_folder(tmp_path, "1").write_text("a file")
    assert [each.job_id for each in Spool(tmp_path).read(["1", "2"])] == ["2"]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Most of them near the bounds."""
    return st.one_of(st.sampled_from([low, high]), st.floats(low, high))


counts = st.sampled_from([1, 2, 3, 8, 1000, 10**6, 10**9])
observations = st.fixed_dictionaries(
    {
        "gpu_type": st.sampled_from(["t4", "a100", "other"]),
        "nodes": counts,
        "gpus": counts,
        "atomic_batch": counts,
        "accumulation_steps": st.sampled_from([0, 1, 10**9]),
        "steps": counts,
        "step_time_s": numbers(1e-9, 1e9),
        "sync_time_s": st.one_of(st.none(), numbers(0.0, 1e9)),
        "grad_sqr": numbers(0.0, 1e100),
        "grad_var": numbers(0.0, 1e100),
        "progress": numbers(0.0, 1e18),
    }
)


@given(st.lists(observations, min_size=1, max_size=4), st.one_of(st.none(), numbers(1e-9, 1e18)), numbers(0.0, 1e9))
def test_no_report_that_is_let_through_ends_a_round(
    tmp_path_factory: pytest.TempPathFactory, seen: list[dict[str, object]], total: float | None, saved_s: float
) -> None:
    bodies = [Observation.model_validate(each) for each in seen]
    said: list[Report] = [report(Started(gpu_type="t4", gpu_ids={}, total=total))]
    said += [report(each, sequence=number) for number, each in enumerate(bodies, 1)]
    said += [report(Checkpointed(progress=1.0, seconds=saved_s), sequence=9)]
    fine = []
    for each in said:
        try:
            check_plausible(each)
        except ValueError:
            continue
        fine.append(each)
    store = open_store(tmp_path_factory.mktemp("store"), writer=True)
    try:
        models = LearnedModels(SpecModels(load_families(), restart_cost_s=30.0), store)
        jobs = [job("1"), job("2", max_gpus=8)]
        store.add_reports(fine)
        models.learn(fine)
        shot = dataclasses.replace(snapshot("t4:2x4,a100:1x4", jobs), facts=models.facts(jobs, ["t4", "a100"]))
    finally:
        store.close()
    assert "2" in make_policy("sia")[0].decide(shot).assignments
