"""`penstock try` on scripts that others wrote: `python -m benchmarks.foreign.tried --sources FOLDER [NAME ...]`.

FOLDER contains clones, as for `python -m benchmarks.foreign`. Each script is copied, its lines are changed, and it runs on two
processors with small made-up data. Prints what the command says, and how long it took.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.foreign.__main__ import lay_out
from benchmarks.foreign.scripts import SCRIPTS

NAMES = [name for name, script in SCRIPTS.items() if script.tried is not None]


def tried(sources: Path, name: str) -> tuple[int, str]:
    """The exit status of `penstock try`, and what it has printed."""
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        place = lay_out(sources, Path(folder), name)
        command = [
            sys.executable,
            "-m",
            "penstock_executor.try_run",
            Path(script.path).name,
            *shlex.split(script.tried or ""),
        ]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=place, env=environ, text=True, capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, metavar="FOLDER", help="contains the clones")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=NAMES, default=NAMES)
    options = parser.parse_args()
    differ = []
    for name in options.names:
        began_s = time.monotonic()
        status, said = tried(options.sources, name)
        print(f"{name}: {SCRIPTS[name].added(name)} lines, {time.monotonic() - began_s:.0f} s\n{said}", flush=True)
        if status:
            differ.append(name)
    if differ:
        raise SystemExit(f"differs: {', '.join(differ)}")


if __name__ == "__main__":
    main()
