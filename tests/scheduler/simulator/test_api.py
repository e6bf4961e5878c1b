"""The simulator for Python users, and its notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator import simulate
from penstock_scheduler.simulator.workloads import BadInput, Workload, WorkloadJob, from_frame, rigid_spec, to_frame

ROOT = Path(__file__).parents[3]

JOBS = pd.DataFrame({"id": ["a", "b"], "submit_s": [0, 10], "gpus": [4, 4], "duration_s": [20.0, 20.0]})


def test_jobs_rounds_and_summary_by_hand():
    """Both jobs take all 4 GPUs for 20 s after 30 s of starting: the first ends at 50 s and the second at 100 s."""
    result = simulate("t4:1x4", JOBS, "fifo", prices={"t4": 36.0})
    assert result.jobs[["policy", "seed", "id", "start_s", "end_s", "jct_s"]].to_numpy().tolist() == [
        ["fifo", 0, "a", 0.0, 50.0, 50.0],
        ["fifo", 0, "b", 50.0, 100.0, 90.0],
    ]
    assert result.jobs.cost.tolist() == pytest.approx([2.0, 2.0])
    assert result.rounds.decided.any()
    assert result.rounds.gpus_held.max() == 4
    (summary,) = result.summary.to_dict("records")
    assert (summary["policy"], summary["jobs"], summary["ended"], summary["interrupted"]) == ("fifo", 2, 2, False)
    assert summary["avg_jct_h"] * 3600 == pytest.approx(70)


def test_each_policy_and_seed_has_its_rows():
    result = simulate("t4:1x4", JOBS, ["fifo", "srtf"], seeds=2)
    assert result.summary[["policy", "seed"]].to_numpy().tolist() == [
        ["fifo", 0],
        ["srtf", 0],
        ["fifo", 1],
        ["srtf", 1],
    ]
    assert len(result.jobs) == 8


def test_settings_of_a_policy_apply():
    result = simulate("t4:1x4", JOBS, {"slurm-backfill": {"default_time_limit_s": 60.0}})
    assert result.summary.policy.tolist() == ["slurm-backfill"]
    with pytest.raises(ConfigError, match="nonsense"):
        simulate("t4:1x4", JOBS, {"slurm-backfill": {"nonsense": 60.0}})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("t4:1x4", JOBS.drop(columns="gpus")), "found no column 'gpus'; expected id, submit_s, gpus, and only"),
        (("t4:1x4", JOBS.assign(gpu=1)), "found the column 'gpu'"),
        (("t4:1x4", JOBS.assign(gpus=[4, 0])), "found gpus=0; expected at least 1"),
        (("t4:1x4", JOBS.assign(submit_s=-1)), "row 0: found submit_s=-1"),
        (("t4:1x4", JOBS.assign(id="a")), "found job 'a' twice"),
        (("t4:1x2", JOBS), "a need of 4 GPUs of t4; expected at most the 2 that the cluster has"),
        (("t4:1x4", JOBS, "best"), "best"),
    ],
)
def test_a_wrong_argument_is_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        simulate(*arguments)


def test_a_workload_is_the_same_as_a_frame():
    jobs = (
        WorkloadJob("a", 0.0, 2, rigid_spec(2), duration_s=5.0, mem_mb=100.0),
        WorkloadJob("b", 1.0, 4, rigid_spec(4, ("t4",)), user="ada", duration_s=5.0, cpus=8),
    )
    frame = to_frame(Workload("x", jobs))
    assert frame.dtypes["submit_s"] == "float64"
    assert frame.cpus.tolist()[1] == 8
    assert from_frame(frame).jobs == jobs
    text = frame.assign(spec=[None, '{"max_gpus": 8}'])
    assert [job.spec.max_gpus for job in from_frame(text).jobs] == [2, 8]
    with pytest.raises(BadInput, match=r"found spec='\{', which is not JSON"):
        from_frame(frame.assign(spec="{"))


def test_the_cells_of_the_notebook_run():
    pytest.importorskip("matplotlib").use("Agg")
    notebook = json.loads((ROOT / "examples/compare_policies/compare_policies.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs are not kept"
            exec("".join(cell["source"]), names)
    assert set(names["result"].summary.policy) == {"sia", "fifo"}  # type: ignore[attr-defined]
