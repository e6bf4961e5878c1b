"""How long one reading of Slurm takes with many jobs in it: `python benchmarks/gateway.py [--jobs N] [--json]`.

Submits one held array of N elements, each with a job spec in its comment, to a loopback cluster of its own, checks that
every element is read whole, and times the three readings of a round ten times.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

from penstock_slurm.gateway import open_gateway
from penstock_slurm.loopback import LoopbackCluster

TRIALS = 10
TARGET_S = 0.5
"""For 10,000 jobs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    limits = {"MaxArraySize": str(options.jobs + 1), "MaxJobCount": str(options.jobs + 1000)}
    comment = json.dumps({"penstock": {"max_gpus": 8, "gpu_types": ["t4", "a100"]}})
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as folder,
        LoopbackCluster(Path(folder) / "slurm", "t4:6x4,rtx:3x8,a100:2x8", settings=limits) as cluster,
    ):
        cluster.command(
            "sbatch", "--hold", "--gres=gpu:1", f"--comment={comment}", f"--array=0-{options.jobs - 1}", "--wrap=true"
        )
        gateway = open_gateway("cli", conf=cluster.slurm_conf, timeout_s=60)
        jobs = gateway.jobs()
        assert len({job.id for job in jobs}) == options.jobs, "every element is read, and once"
        assert all(job.comment == comment for job in jobs), "no comment is cut"
        seconds: dict[str, list[float]] = {}
        for _ in range(TRIALS):
            for name, read in (("jobs", gateway.jobs), ("nodes", gateway.nodes), ("partitions", gateway.partitions)):
                begun = time.perf_counter()
                read()
                seconds.setdefault(name, []).append(time.perf_counter() - begun)
        version = gateway.version()
    result = {name: {"median_s": statistics.median(all_s), "max_s": max(all_s)} for name, all_s in seconds.items()}
    if not options.json:
        print(
            f"{options.jobs} jobs, Slurm {version[0]}.{version[1]:02d}, Python {platform.python_version()}, {TRIALS} trials"
        )
        for name, figures in result.items():
            print(
                f"  {name:<11} median {figures['median_s'] * 1000:7.1f} ms   longest {figures['max_s'] * 1000:7.1f} ms"
            )
        print(f"  target for 10,000 jobs: {TARGET_S} s")
    print(json.dumps({"jobs": options.jobs, "backend": "cli"} | result))


if __name__ == "__main__":
    main()
