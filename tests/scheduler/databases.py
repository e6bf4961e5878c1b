"""A PostgreSQL server of the tests' own, where its programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_slurm.loopback.machine import free_ports

REASON = "needs PostgreSQL's initdb and pg_ctl on PATH"


def available() -> bool:
    return all(map(shutil.which, ("initdb", "pg_ctl")))


@contextmanager
def postgresql() -> Iterator[str]:
    """URL of a fresh server on loopback, up to the database's name. It refuses root, so root starts it as nobody."""
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as name:
        folder = Path(name)
        who: dict[str, object] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        port = free_ports(1)
        common = {"check": True, "stdout": subprocess.DEVNULL, "cwd": folder, "env": {"PATH": os.environ["PATH"]}} | who
        data, options = folder / "data", f"-p {port} -h 127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        subprocess.run(["initdb", "-D", data, "-U", "penstock", "-A", "trust", "-E", "UTF8"], **common)  # type: ignore[call-overload]
        log = ["-l", folder / "log"]
        subprocess.run(["pg_ctl", "-D", data, *log, "-w", "-t", "60", "-o", options, "start"], **common)  # type: ignore[call-overload]
        try:
            yield f"postgresql+psycopg://penstock@127.0.0.1:{port}"
        finally:
            subprocess.run(["pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"], **common)  # type: ignore[call-overload]
