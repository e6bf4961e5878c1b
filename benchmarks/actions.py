"""How long a round's actions take with many jobs: `python benchmarks/actions.py [--jobs N] [--trials N] [--json]`.

It starts a loopback cluster with N emulated GPUs and N held jobs with a job spec, and the daemon's cluster object. Each trial
applies N starts in one call (an epoch in the spool, an update, a release) and, once Slurm has carried them out, N holds. The
nodes are reserved for another user, so that no job runs and only the requests are timed.
Then it times the same number of single writes of one kind. It prints slurmctld's own figures (sdiag) from before and after.
Meanwhile, a user calls `squeue` all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path

from penstock_loopback import LoopbackCluster
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.model import Hold, Placement, Progress, Share, Start
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway, Write
from penstock_slurm.settings import SlurmSettings

LIMIT_S = 10.0
"""Limit for 1,000 actions (issue 6)."""

GPUS = 64


def sdiag(cluster: LoopbackCluster) -> dict[str, int]:
    """Some of slurmctld's own figures since their last reset."""
    text = cluster.command("sdiag").stdout
    words = {
        "agent_queue": r"Agent queue size:\s+(\d+)",
        "threads": r"Server thread count:\s+(\d+)",
        "main_cycle_max_us": r"Max cycle:\s+(\d+)",
        "update_job_mean_us": r"REQUEST_UPDATE_JOB\s.*?ave_time:(\d+)",
    }
    return {name: int(found[1]) for name, pattern in words.items() if (found := re.search(pattern, text))}


class Asker(threading.Thread):
    """Calls squeue repeatedly, as a user."""

    def __init__(self, cluster: LoopbackCluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._over = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self._over.is_set():
            begun = time.perf_counter()
            self._cluster.command("squeue", "-h", "-t", "running")
            self.seconds.append(time.perf_counter() - begun)
            self._over.wait(0.05)

    def stop(self) -> dict[str, float]:
        """Median and longest answer, ms."""
        self._over.set()
        self.join()
        return {"median_ms": 1000 * statistics.median(self.seconds), "max_ms": 1000 * max(self.seconds)}


def main() -> None:  # noqa: PLR0915 (one measurement after the other)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    count = options.jobs
    nodes = -(-count // GPUS)
    comment = json.dumps({"penstock": {"max_gpus": 1}})
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as folder,
        LoopbackCluster(Path(folder) / "slurm", f"t4:{nodes}x{GPUS}") as cluster,
    ):
        cluster.command(
            *("scontrol", "create", "reservation", "ReservationName=kept", "StartTime=now", "Duration=1000"),
            *("Users=nobody", "Nodes=ALL"),
        )
        script = "#!/bin/sh\nsleep 600\n"
        for _ in range(count):
            options_ = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null", f"--comment={comment}")
            cluster.command("sbatch", *options_, input=script)
        gateway = CliGateway(conf=cluster.slurm_conf, timeout_s=60)
        settings = SlurmSettings(partitions=("all",), conf=cluster.slurm_conf, start_patience_s=600)
        slurm = SlurmCluster(gateway, gateway, Spool(Path(folder) / "spool"), WallClock(), settings, lambda spec: None)
        cluster.command("sdiag", "--reset")
        before = sdiag(cluster)
        quiet = Asker(cluster)
        quiet.start()
        time.sleep(3)
        alone = quiet.stop()
        asker = Asker(cluster)
        asker.start()
        for trial in range(options.trials):
            state = slurm.observe()
            assert len(state.jobs) == count, f"Slurm has {len(state.jobs)} of {count} jobs"
            starts = [
                Start(job.id, 2 * trial + 1, Placement("t4", "all", (Share(cluster.nodes[at // GPUS].name, 1),)))
                for at, job in enumerate(state.jobs)
            ]
            slurm._acting.free = dict.fromkeys(slurm._acting.free, GPUS)
            begun = time.perf_counter()
            outcomes = slurm.apply(starts)
            seconds.setdefault("starts", []).append(time.perf_counter() - begun)
            assert all(outcome.text == "waits for Slurm to start it" for outcome in outcomes)
            seen = {job.id: job for job in gateway.jobs()}
            assert not any(job.held for job in seen.values()), "all are released"
            assert all(seen[action.job].required_nodes == action.placement.nodes for action in starts)
            slurm.observe()
            begun = time.perf_counter()
            outcomes = slurm.apply([Hold(action.job, 2 * trial + 2) for action in starts])
            seconds.setdefault("holds", []).append(time.perf_counter() - begun)
            assert all(outcome.progress is Progress.DONE for outcome in outcomes)
            assert all(job.held for job in gateway.jobs()), "all are held"
            begun = time.perf_counter()
            assert set(gateway.write([Write(action.job, "hold") for action in starts])) == {None}
            seconds.setdefault("writes", []).append(time.perf_counter() - begun)
        meanwhile = asker.stop()
        after = sdiag(cluster)
        version = gateway.version()
    result = {name: {"median_s": statistics.median(all_s), "max_s": max(all_s)} for name, all_s in seconds.items()}
    if not options.json:
        print(
            f"{count} actions, Slurm {version[0]}.{version[1]:02d}, Python {platform.python_version()}, "
            f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {options.trials} trials"
        )
        for name, figures in result.items():
            print(f"  {name:<8} median {figures['median_s']:6.2f} s   longest {figures['max_s']:6.2f} s")
        print(
            f"  squeue   alone {alone['median_ms']:.0f} ms (longest {alone['max_ms']:.0f}), meanwhile "
            f"{meanwhile['median_ms']:.0f} ms (longest {meanwhile['max_ms']:.0f})"
        )
        print(f"  sdiag    before {before}\n           after  {after}")
        print(f"  limit for 1,000 actions: {LIMIT_S} s")
    print(
        json.dumps(
            {
                "benchmark": "actions",
                "actions": count,
                "squeue_alone": alone,
                "squeue_meanwhile": meanwhile,
                "sdiag_before": before,
                "sdiag_after": after,
                "within_limit": result["starts"]["max_s"] <= LIMIT_S * count / 1000,
            }
            | result
        )
    )


if __name__ == "__main__":
    main()
