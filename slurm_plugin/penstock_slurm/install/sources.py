"""The C and Lua sources for Slurm, the plugin built from them, and the systemd units."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock_scheduler.people.errors import PenstockError

_PACKAGE = Path(__file__).parent.parent


def source(name: str) -> Path:
    """The folder `spank`, `lua` or `systemd`: inside an installed package, or beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def build_plugin(slurm_cflags: str = "", *, name: str = "penstock.so", werror: bool = False) -> bytes:
    """penstock.so, or cloud_runner.so for gateway nodes, compiled against the headers of the Slurm on this machine.

    Raises:
        PenstockError: make, a compiler or Slurm's headers are missing, with the names of Debian's packages.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-build-") as folder:
        build = Path(folder) / "spank"
        shutil.copytree(source("spank"), build, ignore=shutil.ignore_patterns("*.so", "check_flags"))
        command = ["make", "-C", str(build), name, f"SLURM_CFLAGS={slurm_cflags}"]
        try:
            done = subprocess.run(
                [*command, "WERROR=-Werror"] if werror else command, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise PenstockError("make is not installed; install make, gcc and libslurm-dev (Debian's names)") from None
        if done.returncode != 0:
            raise PenstockError(
                f"{name} cannot be built; is gcc installed, and are Slurm's headers (Debian: libslurm-dev)? "
                f"--slurm-cflags=-I/opt/slurm/include names another folder. The end of make's output:\n{done.stderr[-1500:]}"
            )
        return (build / name).read_bytes()
