"""`penstock try`: stop and continue a training script on this machine, before Penstock moves it.

The work is in `penstock_executor.try_run`, which imports PyTorch. It runs in the Python of the script.
"""

from __future__ import annotations

import os
import shutil
import sys

import typer


def try_script(
    command: list[str] = typer.Argument(help="The script and its arguments."),
    processes: int = typer.Option(2, min=1, help="Processes to move to. 1: do not move."),
    seed: int = typer.Option(0, help="For the steps that are disturbed."),
    timeout: float = typer.Option(600.0, min=1.0, help="Seconds for each run of the script."),
    python: str = typer.Option("", help="Python with PyTorch. Default: the python of PATH, else Penstock's own."),
) -> None:
    """Run a training script undisturbed, stop it in several ways, and say in words what differs.

    The exit status is 1 if something differs. See docs/user/scripts.md.
    """
    python = python or shutil.which("python") or sys.executable
    options = (f"--processes={processes}", f"--seed={seed}", f"--timeout={timeout}")
    sys.stdout.flush()
    os.execvp(python, [python, "-m", "penstock_executor.try_run", *options, *command])  # noqa: S606
