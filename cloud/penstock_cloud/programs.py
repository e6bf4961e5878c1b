"""penstock-resume and penstock-suspend: Slurm's ResumeProgram and SuspendProgram.

They launch and end nothing. They write a request for penstockd into a shared folder, since only penstockd knows what was
ordered and what may be spent. Without penstockd nothing is launched: Slurm gives up such nodes after ResumeTimeout and queues
their jobs again.

The request contains `SLURM_RESUME_FILE` (job -> nodes) if it can be read, so that a job gets all its nodes or none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock_cloud.settings import CloudSettings
from penstock_profiles.files import save_whole
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import guard
from penstock_scheduler.rounds.settings import load_settings
from penstock_scheduler.safety import children

CONFIG = Path("/etc/penstock/penstock.toml")
"""The settings file, unless PENSTOCK_CONFIG names another: slurmctld passes no further arguments."""


def resume() -> int:
    """`penstock-resume NODES`. Exit status: 0 if penstockd was told, else 1."""
    return _tell("resume", sys.argv[1:])


def suspend() -> int:
    """`penstock-suspend NODES`. Exit status: 0 if penstockd was told, else 1."""
    return _tell("suspend", sys.argv[1:])


def _tell(kind: str, argv: Sequence[str]) -> int:
    guard()
    try:
        if len(argv) != 1:
            raise ValueError(f"usage: penstock-{kind} NODES, as slurmctld calls it")
        settings = load_settings(Path(os.environ.get("PENSTOCK_CONFIG", CONFIG))).section(CloudSettings)
        file = os.environ.get("SLURM_RESUME_FILE") if kind == "resume" else None
        told = {"jobs": _jobs(file) if file else {}, "nodes": _names(argv[0]), "time_s": time.time()}
        save_whole(settings.share / kind / f"{time.time_ns()}-{os.getpid()}.json", json.dumps(told))
    except (PenstockError, OSError, ValueError, KeyError) as error:
        print(f"penstock-{kind}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _jobs(file: str) -> dict[str, list[str]]:
    """Slurm's number of each job that waits for nodes -> these nodes. Empty if the file does not tell them: Slurm deletes it
    after ten seconds. penstockd then finds the jobs in Slurm's own records."""
    try:
        jobs = json.loads(Path(file).read_text(encoding="utf-8"))["jobs"]
        return {str(job["job_id"]): _names(job.get("nodes_resume") or job["nodes"]) for job in jobs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"SLURM_RESUME_FILE={file} cannot be read ({error!r}); penstockd is told the nodes without their jobs"
        print(f"penstock-resume: {text}", file=sys.stderr)  # noqa: T201
        return {}


def _names(hostlist: str) -> list[str]:
    """Expand `cloud-[0-1]` with Slurm's own rules."""
    done = children.run([children.program("scontrol"), "show", "hostnames", hostlist], env=os.environ, timeout_s=20.0)
    if done.returncode != 0:
        raise PenstockError(f"scontrol show hostnames: {done.err.strip()}")
    return done.out.split()


if __name__ == "__main__":
    sys.exit({"resume": resume, "suspend": suspend}[sys.argv.pop(1)]())
