"""Starts elastic training jobs (`train_elastic.py`) and reads their records of samples."""

import collections
import contextlib
import json
import multiprocessing.process
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock_loopback.machine import free_ports
from tests.forking import FORKING

from .spool import ROOT, job_environment, send_to_all

SCRIPT = ROOT / "tests" / "executor" / "train_elastic.py"

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")


def environment(spool: Path | None = None) -> dict[str, str]:
    """The environment inside or outside a job."""
    kept = {name: value for name, value in job_environment(spool).items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1"}


def torchrun(processes: int) -> tuple[str, ...]:
    """Python's arguments before the script's."""
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")


@dataclass
class Gang:
    """Processes of one training; `said` is the file with their standard error."""

    processes: list[multiprocessing.process.BaseProcess]
    said: Path

    def send(self, number: signal.Signals) -> None:
        """Send a signal as Slurm does: also to the workers of data loaders and whatever else the processes started."""
        for process in self.processes:
            assert process.pid is not None
            send_to_all(process.pid, number)

    def wait(self) -> int:
        """The exit status, which is the same for all processes."""
        for process in self.processes:
            process.join(240)
        statuses = {process.exitcode for process in self.processes}
        assert len(statuses) == 1, (statuses, self.said.read_text())
        (status,) = statuses
        assert status is not None, self.said.read_text()
        return status

    def finish(self) -> str:
        """Wait for success; returns the standard error."""
        assert self.wait() == 0, self.said.read_text()
        return self.said.read_text()


@contextlib.contextmanager
def gang(
    script: Path, folder: Path, *options: str, processes: int = 1, environ: dict[str, str] | None = None
) -> Iterator[Gang]:
    """Run the script with this many processes, as torchrun starts them. They end with the block. They are outside a job, unless
    `environ` is that of a job.

    They are forked from a process that has imported PyTorch, since that takes most of the time of a short run.
    """
    folder.mkdir(exist_ok=True)
    environ = environ or environment()
    ranks = [{}]
    if processes > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
        place |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    arguments = [str(script), str(folder), *options]
    made = Gang([FORKING.Process(target=_run, args=(arguments, environ | rank)) for rank in ranks], folder / SAID)
    made.said.touch()
    try:
        for child in made.processes:
            child.start()
        yield made
    finally:
        for child in made.processes:
            if child.pid is not None:
                child.kill()
                child.join()


SAID = "said"


def _run(arguments: list[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with (Path(arguments[1]) / SAID).open("ab") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception as error:  # as Python does in a process of a script, and multiprocessing does not
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def last_record(folder: Path) -> dict:
    """The last whole line of `steps`; {} if there is none. Cheap enough for polling."""
    path = folder / "steps.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 4096, 0))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1]) if lines and lines[-1].startswith(b"{") else {}


def steps(folder: Path) -> list[dict]:
    """The records of all processes of all runs."""
    path = folder / "steps.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def surviving(folder: Path) -> list[dict]:
    """Records of the steps that the final parameters are made of.

    If a run began at step s, the steps of earlier runs from s on are lost.
    """
    kept: list[dict] = []
    runs = collections.defaultdict(list)
    for record in steps(folder):
        runs[record["run"]].append(record)
    for run in sorted(runs):
        first = min(record["step"] for record in runs[run])
        kept = [record for record in kept if record["step"] < first] + runs[run]
    return kept


def assert_each_sample_once(folder: Path, epochs: int, size: int) -> None:
    seen = collections.defaultdict(collections.Counter)
    for record in surviving(folder):
        seen[record["epoch"]].update(record["seen"])
    assert sorted(seen) == list(range(epochs))
    for epoch in seen:
        assert seen[epoch] == collections.Counter(range(size)), f"epoch {epoch}"


def final(folder: Path) -> dict:
    """The result of the run that completed."""
    return torch.load(folder / "final.pt")


def largest_difference(one: dict, other: dict) -> float:
    """Largest absolute difference between two sets of final weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def python_path() -> str:
    return os.pathsep.join(str(ROOT / name) for name in ("profiles", "executor"))


PYTHON = sys.executable
