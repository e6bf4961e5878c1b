"""The emulated trainer in real jobs of a real Slurm."""

import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster
from penstock_profiles.wire import Report, reports_file

from .spool import ROOT, wait_for


@pytest.mark.slurm
def test_requeued_onto_other_gpus_it_goes_on_where_it_was(loopback: LoopbackCluster, tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir()
    script = (
        f"exec {shlex.quote(sys.executable)} -m penstock_executor.emulated --family resnet18-cifar10 --work 1e9 "
        f"--checkpoint-dir {tmp_path}/ckpt --start-seconds 0 --save-seconds 0.1 --report-every 0.2"
    )
    paths = os.pathsep.join(str(ROOT / name) for name in ("profiles", "executor"))
    job = loopback.command(
        *("sbatch", "--parsable", "--requeue", "--partition=t4", "--gres=gpu:2", f"--output={tmp_path}/log"),
        *(f"--export=ALL,PENSTOCK_SPOOL={spool},PYTHONPATH={paths}", "--wrap", script),
    ).stdout.strip()

    def said(epoch: int, kind: str) -> list:
        try:
            lines = reports_file(spool, job, epoch).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        reports = [Report.model_validate_json(line).body for line in lines]
        return [body for body in reports if body.kind == kind]

    def state() -> str:
        return loopback.command("squeue", "-h", "-o", "%T", "-j", job).stdout.strip()

    seen = wait_for(lambda: said(1, "observation"), "observation")[0]
    assert (seen.gpu_type, seen.nodes, seen.gpus) == ("t4", 1, 2)
    assert {len(ids) for ids in said(1, "started")[0].gpu_ids.values()} == {2}

    loopback.command("scontrol", "requeuehold", job)
    wait_for(lambda: state() == "PENDING", "requeue")
    (ended,) = said(1, "ended")
    assert ended.outcome == "stopped"
    time.sleep(1.3)  # less, and Slurm 22.05 may fail the job: "Job credential revoked"
    update = (
        *("scontrol", "update", f"JobId={job}", "Partition=rtx", "NumNodes=2-2", "NumTasks=2", "NumCPUs=2"),
        *("TresPerNode=gres:gpu:3", "StartTime=now"),
    )
    # A busy slurmctld may say "Resource temporarily unavailable".
    wait_for(lambda: loopback.command(*update, check=False).returncode == 0, "the update")
    loopback.command("scontrol", "release", job)

    seen = wait_for(lambda: said(2, "observation"), "observation on rtx")[0]
    assert (seen.gpu_type, seen.nodes, seen.gpus) == ("rtx", 2, 6)
    assert said(2, "started")[0].progress == ended.progress > 0
    assert seen.progress > ended.progress
    loopback.command("scancel", job)


@pytest.mark.slurm
def test_a_launcher_on_each_node_starts_a_process_for_each_gpu(loopback: LoopbackCluster, tmp_path: Path):
    """They join one group over both nodes, as those of srun do."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    (tmp_path / "train.py").write_text(
        "import os, pathlib, penstock_executor as px\n"
        f"run = px.start('{tmp_path}/checkpoints')\n"
        "said = run._group.gather((run.rank, os.environ['SLURMD_NODENAME'], os.environ['SLURM_LOCALID']))\n"
        f"pathlib.Path('{tmp_path}', f'said-{{run.rank}}').write_text(str(said))\n"
    )
    paths = os.pathsep.join(str(ROOT / name) for name in ("profiles", "executor"))
    launcher = f"{shlex.quote(sys.executable)} -m penstock_executor.launch {tmp_path}/train.py"
    loopback.command(
        *("sbatch", "--wait", "--partition=t4", "--nodes=2", "--ntasks=2", "--gres=gpu:2", f"--output={tmp_path}/log"),
        *(f"--export=ALL,PYTHONPATH={paths}", f"--wrap=exec srun --ntasks-per-node=1 --cpu-bind=none {launcher}"),
        timeout_s=240,
    )
    place = [(0, "t4-00", "0"), (1, "t4-00", "1"), (2, "t4-01", "0"), (3, "t4-01", "1")]
    said = {path.name: path.read_text() for path in tmp_path.glob("said-*")}
    assert said == {f"said-{rank}": str(place) for rank in range(4)}, (tmp_path / "log").read_text()
