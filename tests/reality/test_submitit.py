"""submitit, with its real package, submits adaptive jobs; its checkpoint protocol carries a job to another GPU type."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_slurm.gateway import SlurmJob
from tests.reality.cluster import TWO_TYPES
from tests.reality.differential import Differential, running

pytest.importorskip("submitit", reason="submitit is not installed")

pytestmark = pytest.mark.slurm

TRAINING = """
import os, time
from pathlib import Path

import submitit


def double(number):
    return 2 * number


class Training:
    \"\"\"Counts to a number, and notes where each count was made.\"\"\"

    def __init__(self, folder):
        self.folder, self.done = Path(folder), 0

    def __call__(self, until):
        while self.done < until or not (self.folder / "enough").exists():
            self.done += 1
            with (self.folder / "counts").open("a") as file:
                file.write(f"{self.done} {os.environ['SLURMD_NODENAME']}\\n")
            time.sleep(0.2)
        return self.done

    def checkpoint(self, until):
        return submitit.helpers.DelayedSubmission(self, until)
"""

SUBMIT = """
import json, sys

import submitit

import training

folder, call, more = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
executor = submitit.SlurmExecutor(folder=folder)
executor.update_parameters(time=60, gpus_per_node=1, signal_delay_s=30, additional_parameters={"adaptive": True} | more)
work = training.Training(folder) if call == "Training" else training.double
print(executor.submit(work, 21).job_id)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Differential]:
    with running(tmp_path_factory.mktemp("submitit"), TWO_TYPES) as differential:
        differential.site.start()
        yield differential


def submit(site: Differential, folder: Path, call: str, **more: object) -> str:
    """Submit as a user's script does; the job's id."""
    (folder / "training.py").write_text(TRAINING)
    (folder / "submit.py").write_text(textwrap.dedent(SUBMIT))
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    arguments = (sys.executable, str(folder / "submit.py"), str(folder), call, json.dumps(more))
    return site.cluster.command("env", f"PYTHONPATH={path}", *arguments).stdout.split()[-1]


def result(folder: Path, job: str) -> object:
    """What the job returned, as submitit saves it."""
    import cloudpickle

    path = folder / f"{job}_0_result.pkl"
    wait_for(path.exists, 120, f"the result of {job}", details=lambda: said(folder))
    with path.open("rb") as file:
        outcome, value = cloudpickle.load(file)
    assert outcome == "success", value
    return value


def said(folder: Path) -> str:
    """What the jobs printed."""
    return "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.[oe]*")))


def record(site: Differential, job: str) -> SlurmJob:
    return site.site.job(job)


def test_a_function_runs_and_returns(site: Differential, tmp_path: Path) -> None:
    assert result(tmp_path, submit(site, tmp_path, "double")) == 42


def test_a_checkpoint_carries_a_job_to_another_gpu_type_and_nothing_is_lost(site: Differential, tmp_path: Path) -> None:
    """SIGUSR2 reaches it as from --signal shortly before the time limit; meanwhile its node is drained."""
    job = submit(site, tmp_path, "Training")
    counts = tmp_path / "counts"
    wait_for(
        lambda: counts.exists() and len(counts.read_text().splitlines()) > 3, 120, "counts", details=site.site.tail
    )
    (first,) = record(site, job).nodes
    site.command("scontrol", "update", f"NodeName={first}", "State=DRAIN", "Reason=test")
    site.command("scancel", "--signal=USR2", job)
    wait_for(
        lambda: record(site, job).state == "RUNNING" and record(site, job).nodes not in ((), (first,)),
        180,
        "the job to run on the other type",
        details=lambda: site.site.tail() + said(tmp_path),
    )
    before = len(counts.read_text().splitlines())
    wait_for(
        lambda: len(counts.read_text().splitlines()) > before + 3, 60, "counts there", details=lambda: said(tmp_path)
    )
    (tmp_path / "enough").touch()
    done = result(tmp_path, job)
    lines = [line.split() for line in counts.read_text().splitlines()]
    assert [int(count) for count, _ in lines] == list(range(1, len(lines) + 1)), "no count was lost or made twice"
    assert done == len(lines)
    assert {node for _, node in lines} == {"t4-1", "a100-1"}
