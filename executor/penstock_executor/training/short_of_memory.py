"""What happens when memory runs out: the run notes the batch and restarts from the last checkpoint with a smaller one.

An out-of-memory error may be raised anywhere in the user's loop, in one of several processes, with half of a step done.
So the step is not retried in place: the whole run restarts, and a note in the checkpoint folder says which batch did
not fit.
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
    """Note that `atomic` samples did not fit into the memory of one `gpu_type`."""
    try:
        (folder / "short-of-memory").mkdir(exist_ok=True)
        (folder / "short-of-memory" / f"{gpu_type}-{atomic}.json").write_text(json.dumps([gpu_type, atomic]))
    except OSError as error:
        log.error("atomic=%d does not fit into memory, but the note of it cannot be written: %s", atomic, error)


def noted(folder: Path) -> dict[str, int]:
    """The smallest atomic batch that did not fit, by GPU type."""
    found: dict[str, int] = {}
    for path in folder.glob("short-of-memory/*.json"):
        try:
            gpu_type, atomic = json.loads(path.read_text())
        except ValueError:
            continue  # not written completely
        found[gpu_type] = min(atomic, found.get(gpu_type, atomic))
    return found


def begin_again(processes: int, job_id: str | None) -> None:
    """Restart the run. A single process replaces itself. Several end: Slurm requeues the job, or torchrun restarts
    them."""
    if processes == 1:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
    elif job_id is not None:
        subprocess.run(["scontrol", "requeue", job_id], check=False, timeout=60)
