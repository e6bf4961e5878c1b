import dataclasses
import os
from pathlib import Path

import pytest

from penstock_executor import Allocation, Environment, UnknownAllocation, find_allocation
from penstock_executor.allocation import parse_job
from penstock_profiles.wire import ControlMessage
from penstock_scheduler.store.spool import Spool

ONE_NODE = (
    "JobId=7 JobName=wrap UserId=root(0) JobState=RUNNING Partition=t4 NodeList=t4-00 BatchHost=t4-00 NumNodes=1 "
    "JOB_GRES=gpu:t4:3   Nodes=t4-00 CPU_IDs=0 Mem=0 GRES=gpu:t4:3(IDX:0-1,3) MinCPUsNode=1 TresPerNode=gres:gpu:3"
)
IN_SLURM = Environment("7", ("t4-00", "t4-01"), "t4-00", 2, (0, 3))


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a pretended scontrol first on the PATH, which runs the given lines of shell."""

    def put(script: str) -> Path:
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return tmp_path / "calls"

    return put


def test_one_node():
    assert parse_job(ONE_NODE, "7") == Allocation("t4", {"t4-00": (0, 1, 3)})


def test_several_nodes_alike_and_not():
    text = (
        "JobId=8 X=1   Nodes=rtx-[00-01] CPU_IDs=0 Mem=0 GRES=gpu:rtx:2(IDX:0-1)   "
        "Nodes=rtx-03 CPU_IDs=0-3 Mem=0 GRES=shard:1(IDX:0),gpu:rtx:1(IDX:7) Y=2"
    )
    found = parse_job(text, "8")
    assert found == Allocation("rtx", {"rtx-00": (0, 1), "rtx-01": (0, 1), "rtx-03": (7,)})
    assert (found.nodes, found.gpus) == (3, 5)


def test_no_gpus_no_nodes_and_another_job():
    assert parse_job("JobId=7 Nodes=a CPU_IDs=0 Mem=0 GRES= Z=1", "7") == Allocation("", {"a": ()})
    assert parse_job("JobId=7 JobState=PENDING", "7") is None
    assert parse_job(ONE_NODE, "77") is None
    assert parse_job(ONE_NODE.replace("=7", "=70") + "\n" + ONE_NODE, "7") == Allocation("t4", {"t4-00": (0, 1, 3)})


def test_slurm_is_asked_again_while_it_is_away(scontrol):
    calls = scontrol(f"[ $(wc -l <$(dirname $0)/../calls) -lt 3 ] && exit 1\necho '{ONE_NODE}'")
    assert find_allocation(IN_SLURM, "other", retry_s=0.01) == Allocation("t4", {"t4-00": (0, 1, 3)})
    assert calls.read_text().splitlines() == ["-o -d show job 7"] * 3


def test_the_caller_may_set_a_gpu_type_that_slurm_does_not_report(scontrol, caplog: pytest.LogCaptureFixture):
    scontrol("echo slurm_load_jobs error >&2; exit 1")
    assert find_allocation(IN_SLURM, "k80", retry_s=0) == Allocation("k80", {"t4-00": (0, 3), "t4-01": (0, 3)})
    assert caplog.text.count("slurm_load_jobs error") == 3
    with pytest.raises(UnknownAllocation, match="set it with --gpu-type"):
        find_allocation(IN_SLURM, retry_s=0)


@pytest.mark.parametrize("answer", ["exit 1", "echo JobId=7 JobState=PENDING"], ids=["away", "forgot the start"])
def test_the_type_that_penstockd_sent_the_job_to_counts_if_slurm_names_none(scontrol, tmp_path: Path, answer: str):
    scontrol(answer)
    environment = dataclasses.replace(IN_SLURM, spool=tmp_path)
    with pytest.raises(UnknownAllocation):
        find_allocation(environment, retry_s=0)
    told = ControlMessage(job_id="7", epoch=1, round=1, gpu_type="t4", nodes=2, gpus=4)
    Spool(tmp_path).tell(told, os.getuid())
    assert find_allocation(environment, retry_s=0) == Allocation("t4", {"t4-00": (0, 3), "t4-01": (0, 3)})


def test_outside_slurm():
    assert find_allocation(Environment(), "cpu") == Allocation("cpu", {"localhost": ()})
