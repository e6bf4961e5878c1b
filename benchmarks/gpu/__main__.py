"""Checks Penstock on a machine with one NVIDIA GPU: `script/gpu-check [CHECK ...]`.

Each check runs in a process of its own, so one that fails or hangs fails alone. It prints one JSON line for each claim
(`pass` or `FAIL`) and for figures about which nothing is claimed (`note`). The lines are also written to `report.jsonl`
in `--out`. Without a GPU the checks go through the motions on the processor, or are skipped. No setting of the GPU is
changed, and no more than 24 GiB of its memory is used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.checking import ROOT, Skip


def main() -> int:
    """The command; its exit status is 0 if every claim holds."""
    from benchmarks.gpu.executor import CHECKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"{', '.join(CHECKS)}; all of them by default")
    parser.add_argument("--out", type=Path, help="folder for report.jsonl and the output of each check")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds that a check may take (default: 100)")
    parser.add_argument("--here", choices=CHECKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return _check(options.here)
    if unknown := [name for name in options.checks if name not in CHECKS]:
        parser.error(f"unknown checks: {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
    out = options.out or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    out.mkdir(parents=True, exist_ok=True)
    _describe()
    found = [line for name in options.checks or CHECKS for line in _run(name, out, options.limit)]
    (out / "report.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    failed = [each for each in found if each["is"] == "FAIL"]
    print(f"\n{sum(each['is'] == 'pass' for each in found)} claims hold, {len(failed)} do not; details in {out}")
    for each in failed:
        print("FAIL", each["check"], each["what"])
    return 1 if failed else 0


def _check(name: str) -> int:
    """Run one check in this process."""
    from benchmarks.gpu.executor import CHECKS

    try:
        CHECKS[name]()
    except Skip as reason:
        print(json.dumps({"is": "skip", "what": str(reason)}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # reporters of runs that were left are not waited for


def _run(name: str, out: Path, limit_s: float) -> list[dict[str, object]]:
    """Run one check in a process of its own; its lines, printed as they come."""
    print(f"--- {name}", flush=True)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", name]
    with (out / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            ended = f"it ended with status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"it took longer than {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it, and what it started
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    found = []
    for line in lines:
        if line.startswith('{"is": '):
            found.append({"check": name} | json.loads(line))
    if status:
        found.append({"check": name, "is": "FAIL", "what": ended, "last": lines[-6:]})
    for each in found:
        print(json.dumps(each), flush=True)
    print(f"    {time.monotonic() - began_s:.0f} s", flush=True)
    return found


def _describe() -> None:
    """Print what the figures belong to."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    system = os.uname()
    driver = "none"
    with contextlib.suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    print(f"{name}; driver: {driver}; PyTorch {torch.__version__}; {os.cpu_count()} processors; {system.release}")


if __name__ == "__main__":
    sys.exit(main())
