"""The commands of the documentation's pages, run word for word but for the paths of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def blocks(page: str, first: str) -> list[list[str]]:
    """The commands of each code block of a page that begins with `first`, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [
        [line for each in block.splitlines() if (line := each.partition("  #")[0].strip()) and line[0] != "#"]
        for block in found
        if block.lstrip().startswith(first)
    ]


def run(
    line: str, folder: Path, environment: Mapping[str, str], *, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """A line of a page, as a shell runs it in `folder`; standard error is in its output, too."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "PENSTOCK_"))}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder,
        env=clean | {"PATH": f"{BIN}:{os.environ['PATH']}"} | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )
