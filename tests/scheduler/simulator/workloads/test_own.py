"""What is written is read again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import Adaptivity, JobSpec
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, read_workload, rigid_spec, write

texts = st.text(st.characters(categories=["L", "N", "P", "S"], include_characters=" \n"), max_size=8).filter(
    lambda text: text == text.strip()
)
amounts = st.floats(1e-6, 1e12)
maybe = st.none() | amounts
counts = st.integers(1, 10**6)


@st.composite
def specs(draw: st.DrawFn, gpus: int, batch_size: int | None) -> JobSpec:
    if draw(st.booleans()):
        return rigid_spec(gpus, draw(st.sampled_from([None, ("t4",), ("a100", "t4")])), batch_size)
    return JobSpec(
        adaptivity=draw(st.sampled_from([Adaptivity.ADAPTIVE, Adaptivity.STRONG_SCALING])),
        max_gpus=draw(st.integers(1, 64)),
        preemptible=draw(st.booleans()),
        restart_cost_s=draw(maybe),
        goodput_table=draw(st.sampled_from([None, {"t4": {1: 2.5, 4: 9.0}}])),
    )


@st.composite
def jobs(draw: st.DrawFn, number: int) -> WorkloadJob:
    gpus, batch_size = draw(counts), draw(st.none() | counts)
    amount = draw(st.sampled_from(["duration_s", "samples", "epochs", None]))
    return WorkloadJob(
        id=f"{number}{draw(texts)}",
        submit_s=number + draw(st.floats(0, 0.9)),
        gpus=gpus,
        spec=draw(specs(gpus, batch_size)),
        name=draw(texts),
        user=draw(texts) or "user",
        account=draw(texts),
        gpu_type=draw(st.sampled_from([None, "t4", "NVIDIA A100-SXM4-80GB"])),
        batch_size=batch_size,
        model=draw(st.sampled_from(["bert", "m"]) if amount != "duration_s" else st.sampled_from([None, "bert"])),
        time_limit_s=draw(maybe),
        cpus=draw(st.none() | counts),
        mem_mb=draw(maybe),
        data_gb=draw(maybe),
        **({amount: draw(amounts)} if amount else {}),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload("x", tuple(draw(jobs(number)) for number in range(draw(st.integers(1, 4)))), "made up")


@given(workloads(), st.sampled_from(["x.csv", "x.json"]))
def test_what_is_written_is_read_again(workload, name):
    with tempfile.TemporaryDirectory() as folder:
        write(workload, Path(folder) / name)
        again = read_workload(Path(folder) / name)
    assert again.jobs == workload.jobs
    assert again.name == workload.name


def test_a_csv_has_only_the_columns_that_are_used(tmp_path):
    job = WorkloadJob(id="a", submit_s=0, gpus=2, spec=rigid_spec(2), duration_s=60)
    write(Workload("x", (job,)), tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "id,submit_s,gpus,duration_s\na,0,2,60\n"
