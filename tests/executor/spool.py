"""The daemon's side of a spool, and processes on the other side, for the tests of the executor."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from penstock_profiles import wire

T = TypeVar("T")
JOB = "42"
ROOT = Path(__file__).parents[2]


def tell(spool: Path, epoch: int, request: str | None = None, kind: str = "checkpoint") -> None:
    """Write a control message as the daemon does."""
    path = wire.control_file(spool, JOB)
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = wire.Request(id=request, kind=kind, asked_s=time.time()) if request else None
    beside = path.with_suffix(".tmp")
    beside.write_text(wire.ControlMessage(job_id=JOB, epoch=epoch, round=1, request=asked).model_dump_json())
    beside.rename(path)


def reports(spool: Path, epoch: int) -> list[wire.Report]:
    """Whole lines of one run's reports; [] before it has begun."""
    try:
        lines = wire.reports_file(spool, JOB, epoch).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [wire.Report.model_validate_json(line) for line in lines]


def bodies(spool: Path, epoch: int, kind: str) -> list:
    return [report.body for report in reports(spool, epoch) if report.body.kind == kind]


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 300) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in {timeout_s} s no {what}"
        time.sleep(0.02)
    return found


def job_environment(spool: Path | None, path: str = "/nonexistent") -> dict[str, str]:
    """The environment of a Slurm job, without Slurm's commands on the PATH."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PENSTOCK"))}
    folders = [str(ROOT / name) for name in ("profiles", "executor")]
    ours |= {"PATH": path, "PYTHONPATH": os.pathsep.join(folders)}
    if spool is not None:
        ours |= {"PENSTOCK_SPOOL": str(spool), "SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "t4-00"}
    return ours


def send_to_all(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and everything that it started, as Slurm does to a job step."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    for each in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


@contextlib.contextmanager
def process(*arguments: str | Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the block."""
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()
