"""When memory runs out: remember at which batch, and begin again from the last checkpoint with a smaller one.

An out-of-memory error comes up anywhere in the user's loop, in one process of several, with half of a step done. So a step
is not tried again in place: the run begins again, and the note below the checkpoints says what did not fit.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

log = logging.getLogger(__name__)


def note(folder: Path, gpu_type: str, atomic: int) -> None:
    """`atomic` samples did not fit into the memory of one `gpu_type`."""
    try:
        (folder / "short-of-memory").mkdir(exist_ok=True)
        (folder / "short-of-memory" / f"{gpu_type}-{atomic}.json").write_text(json.dumps([gpu_type, atomic]))
    except OSError as error:
        log.error("atomic=%d cannot be noted as too large: %s", atomic, error)


def noted(folder: Path) -> dict[str, int]:
    """GPU type -> the smallest atomic batch that did not fit."""
    found: dict[str, int] = {}
    for path in folder.glob("short-of-memory/*.json"):
        try:
            gpu_type, atomic = json.loads(path.read_text())
        except ValueError:
            continue  # half written
        found[gpu_type] = min(atomic, found.get(gpu_type, atomic))
    return found


def begin_again(processes: int, job_id: str | None) -> None:
    """One process: in its place. Several: Slurm requeues the job, and elsewhere they end (torchrun --max-restarts)."""
    if processes == 1:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
    elif job_id is not None:
        subprocess.run(["scontrol", "requeue", job_id], check=False, timeout=60)
