"""Whose a folder of checkpoints is. Of two jobs that train in one folder, the later would end the earlier one's run."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

from penstock_executor.environment import Environment

log = logging.getLogger(__name__)

NAME = "job"
"""The file in the folder that names the job."""

HOLDS = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
"""A job in one of these states will write to its folder again."""

TIMEOUT_S = 20


def claim(folder: Path, environment: Environment) -> str | None:
    """Make the folder this job's. Returns why that cannot be; None if it is. A job that has ended gives its folder up."""
    job = environment.job_id
    if job is None:
        return None
    path = folder / NAME
    with contextlib.suppress(OSError):  # then the run cannot save either, and says why
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x") as file:
                file.write(job)
            return None
        except FileExistsError:
            owner = path.read_text().strip()
        state = _state(owner) if owner not in ("", job) else None
        if state is not None:
            return (
                f"{folder} is the folder of job {owner}, which is {state}: two jobs in one folder would end each other."
                f" Give this job a folder of its own, such as {str(folder / job)!r}, or end job {owner} first"
            )
        beside = folder / f"{NAME}.{job}.tmp"
        beside.write_text(job)
        beside.rename(path)
    return None


def link(folder: Path, source: Path) -> str | None:
    """Make `folder` a link to that of an ended job. Returns why that cannot be; None if it is."""
    if not any(source.glob("epoch-*/step-*")):
        return f"{source} has no checkpoint to continue from: name an ended job that has saved, or its folder"
    if folder.exists() and folder.samefile(source):
        return None
    if folder.exists():
        return f"{folder} has checkpoints of its own: it cannot continue from {source}. Move one of them away"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(os.path.relpath(source.resolve(), folder.parent.resolve()))
    except OSError as error:
        return f"{folder} cannot become a link to {source}: {error}"
    return None


def _state(job: str) -> str | None:
    """The state of a job that may still train; None: it has ended, or Slurm cannot be asked."""
    if not job.isdigit() or not shutil.which("squeue"):
        return None
    command = ["squeue", "--noheader", f"--jobs={job}", f"--states={HOLDS}", "--format=%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("job=%s may still run in the same folder: cannot ask Slurm: %s", job, error)
        return None
    if answer.returncode and "nvalid job id" not in answer.stderr:
        log.warning("job=%s may still run in the same folder: cannot ask Slurm: %s", job, answer.stderr.strip())
    return answer.stdout.split()[0] if answer.stdout.split() else None
