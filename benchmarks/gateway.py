"""How long one reading of Slurm takes with many jobs in it: `python benchmarks/gateway.py [--jobs N] [--json]`.

Submits N held jobs to a loopback cluster of its own, each with a record and a job spec of its own: an array, of which an update
gives every element a record, a name and a comment. Checks that every job is read whole, and times the readings of a round ten
times: all jobs for the first time, all jobs when one record has changed since, nodes, and partitions.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock_loopback import LoopbackCluster
from penstock_slurm.gateway import CliGateway

TRIALS = 10
TARGET_S = 0.5
"""For 10,000 jobs."""


def comment(index: int) -> str:
    """The comment of a job; no two are alike."""
    return json.dumps({"penstock": {"max_gpus": 8 + index, "gpu_types": ["t4", "a100"]}}, separators=(",", ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    limits = {"MaxArraySize": str(options.jobs + 1), "MaxJobCount": str(2 * options.jobs + 1000)}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as folder,
        LoopbackCluster(Path(folder) / "slurm", "t4:6x4,rtx:3x8,a100:2x8", settings=limits) as cluster,
    ):
        submitted = cluster.command(
            "sbatch", "--parsable", "--hold", "--gres=gpu:1", f"--array=0-{options.jobs - 1}", "--wrap=true"
        )
        array = submitted.stdout.strip()
        comments = {f"{array}_{index}": comment(index) for index in range(options.jobs)}
        updates = (f"update JobId={job} JobName=train-{job} Comment={text}\n" for job, text in comments.items())
        cluster.command("scontrol", input="".join(updates), timeout_s=600)
        gateway = CliGateway(conf=cluster.slurm_conf, timeout_s=60)
        jobs = gateway.jobs()
        assert {job.id: job.comment for job in jobs} == comments, "every job is read whole, and once"
        assert len({job.number for job in jobs}) == options.jobs, "every job has a record of its own"
        seconds: dict[str, list[float]] = {}

        def timed(name: str, read: Callable[[], object]) -> None:
            begun = time.perf_counter()
            read()
            seconds.setdefault(name, []).append(time.perf_counter() - begun)

        for trial in range(TRIALS):
            timed("all jobs", CliGateway(conf=cluster.slurm_conf, timeout_s=60).jobs)
            cluster.command("scontrol", "update", f"JobId={array}_{trial}", f"JobName=again-{trial}")
            timed("jobs again", gateway.jobs)
            timed("nodes", gateway.nodes)
            timed("partitions", gateway.partitions)
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
