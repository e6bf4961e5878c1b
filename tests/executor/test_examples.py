"""The examples as their users submit them: `sbatch submit.sbatch` on a real Slurm."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster
from penstock_profiles.wire import Report, reports_file

from .elastic import python_path
from .spool import ROOT, wait_for

EXAMPLES = [
    ("image_classification", "torch", 2, ("--epochs=2", "--size=1024")),
    ("transformer", "transformers", 1, ("--steps=40",)),
    ("lightning", "lightning", 1, ("--epochs=2",)),
]


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.parametrize(("name", "package", "gpus", "options"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
def test_it_runs_as_submitted(
    loopback: LoopbackCluster, tmp_path: Path, name: str, package: str, gpus: int, options: tuple[str, ...]
):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder, spool = tmp_path / name, tmp_path / "spool"
    shutil.copytree(ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    spool.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    exported = f"--export=ALL,PENSTOCK_SPOOL={spool},PYTHONPATH={python_path()},PATH={path},OMP_NUM_THREADS=1"
    submit = ("--parsable", "--partition=t4", f"--gres=gpu:{gpus}", f"--chdir={folder}", "--output=out", exported)
    job = loopback.command("sbatch", *submit, str(folder / "submit.sbatch"), *options).stdout.strip()

    def state() -> str:
        return loopback.command("squeue", "-h", "-o", "%T", "-j", job, check=False).stdout.strip()

    wait_for(lambda: state() in ("", "COMPLETED", "FAILED"), "end", 500)
    said = (folder / "out").read_text()
    lines = reports_file(spool, job, 1).read_bytes().splitlines()
    reports = [Report.model_validate_json(line).body for line in lines]
    assert (reports[0].kind, reports[0].gpu_type) == ("started", "t4"), said
    assert sum(map(len, reports[0].gpu_ids.values())) == gpus
    assert (reports[-1].kind, reports[-1].outcome) == ("ended", "completed"), said
    assert any(report.kind == "checkpointed" for report in reports), said
    assert list((folder / "checkpoints" / job).iterdir())
