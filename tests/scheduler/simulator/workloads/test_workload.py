from __future__ import annotations

import pytest

from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, Wrong, rigid_spec


def job(name: str, submit_s: float = 0.0, **fields: object) -> WorkloadJob:
    return WorkloadJob(id=name, submit_s=submit_s, **({"gpus": 1, "spec": rigid_spec(1), "duration_s": 5.0} | fields))  # type: ignore[arg-type]


def test_a_window_starts_at_0_and_excludes_its_end():
    workload = Workload("x", (job("a", 0), job("b", 10), job("c", 15), job("d", 20)))
    assert [(each.id, each.submit_s) for each in workload.window(10, 10).jobs] == [("b", 0), ("c", 5)]


def test_equal_rigid_specs_are_one_object():
    assert rigid_spec(4) is rigid_spec(4)


@pytest.mark.parametrize(
    ("jobs", "words"),
    [((job("a"), job("a")), "job 'a' twice"), ((job("a", 5), job("b", 4)), "jobs out of order")],
)
def test_ids_differ_and_jobs_are_in_order(jobs, words):
    with pytest.raises(Wrong, match=words):
        Workload("x", jobs)


@pytest.mark.parametrize(
    "fields",
    [
        {"submit_s": -1},
        {"gpus": 0},
        {"duration_s": -1},
        {"duration_s": float("inf")},
        {"cpus": 0},
        {"data_gb": -1},
        {"id": ""},
    ],
)
def test_numbers_are_in_their_range(fields):
    with pytest.raises(Wrong, match=next(iter(fields))):
        job(**({"name": "a"} | {"name" if key == "id" else key: value for key, value in fields.items()}))


def test_no_data_is_an_amount_of_data():
    assert job("a", data_gb=0).data_gb == 0
