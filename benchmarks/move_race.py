"""Moves of jobs in a race against a full queue of ordinary jobs, on a real Slurm: how many lose their GPUs.

    python benchmarks/move_race.py [--moves 1000] [--without reservation] [--without priority] [--scheduler bf_continue]

t4:8x4 is full: 16 jobs of one GPU move in waves of 8, each to the place of one of these, and 60 ordinary jobs of 1 or 2
GPUs always wait, with time limits of 1 min to 10 h. They run for 5 to 30 s. A move is what Penstock does: the reservation,
`requeuehold`, the credential pause, the new place, `release` and the highest priority, the end of the reservation. A move is
lost if its job does not run within 4 s. Prints one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock_loopback import LoopbackCluster, wait_for
from penstock_slurm.gateway import CliGateway
from penstock_slurm.gateway.base import MOVES, JobPlacement, SlurmJob, Write
from penstock_slurm.gateway.batch import HIGHEST_PRIORITY

NODES, ON_EACH, AT_ONCE, WAITING = 8, 2, 8, 60
PAUSE_S, LATEST_S = 1.05, 4.0


class Race:
    """One cluster, its jobs that move, and their moves."""

    def __init__(self, cluster: LoopbackCluster, without: Sequence[str], seed: int) -> None:
        self.cluster, self.without, self.random = cluster, without, random.Random(seed)
        self.gateway = CliGateway(conf=cluster.slurm_conf, timeout_s=60)
        self.place = {
            self.sbatch(1, f"--nodelist={node.name}", "--requeue"): node.name
            for node in cluster.nodes
            for _ in range(ON_EACH)
        }
        self.start_s: list[float] = []
        self.lost = 0
        wait_for(lambda: not self.without_gpus(self.place), 120, "the jobs that move to run")

    def sbatch(self, gpus: int, *options: str, seconds: int = 1_000_000) -> str:
        """Submit; the job's id."""
        arguments = ("--parsable", "--output=/dev/null", f"--gres=gpu:{gpus}", *options, f"--wrap=exec sleep {seconds}")
        return self.cluster.command("sbatch", *arguments).stdout.strip()

    def listed(self) -> dict[str, SlurmJob]:
        """Slurm's jobs."""
        return {job.id: job for job in self.gateway.jobs()}

    def without_gpus(self, jobs: Sequence[str] | dict[str, str]) -> list[str]:
        """Those of the jobs that do not run."""
        found = self.listed()
        return [job for job in jobs if found[job].state != "RUNNING"]

    def feed(self, ended: Callable[[], bool]) -> None:
        """Keep the queue full."""
        dice = random.Random(2)
        while not ended():
            waiting = sum(job.state == "PENDING" and job.id not in self.place for job in self.listed().values())
            for _ in range(WAITING - waiting):
                limit = dice.choice(["1", "1", "10", "600"])
                self.sbatch(dice.choice([1, 1, 2]), f"--time={limit}", seconds=dice.randint(5, 30))
            time.sleep(0.3)

    def write(self, writes: Sequence[Write]) -> None:
        """Commands of Penstock, all of which must succeed."""
        errors = self.gateway.write(writes)
        assert not any(errors), errors

    def wave(self) -> None:
        """Some jobs change places."""
        jobs = self.random.sample(sorted(self.place), AT_ONCE)
        targets = [self.place[job] for job in jobs]
        self.random.shuffle(targets)
        self.place |= dict(zip(jobs, targets, strict=True))
        if "reservation" not in self.without:
            self.gateway.keep_nodes(sorted(set(targets)), changes=False)
        self.write([Write(job, "requeue_hold") for job in jobs])
        stopped_s = time.monotonic()
        wait_for(lambda: all(job.held for job in map(self.listed().get, jobs) if job), 60, "the jobs to leave")
        time.sleep(max(PAUSE_S - (time.monotonic() - stopped_s), 0))
        sent_s = time.monotonic()
        self.write(
            [Write(job, "place", JobPlacement("all", (self.place[job],), 1, 1, 1, ends_begin=True)) for job in jobs]
        )
        self.write([Write(job, "release") for job in jobs])
        if "priority" not in self.without:
            self.write([Write(job, "put_first") for job in jobs])
        if "reservation" not in self.without:
            self.gateway.keep_no_nodes()
        while (left := self.without_gpus(jobs)) and time.monotonic() < sent_s + LATEST_S:
            time.sleep(0.05)
        self.start_s.append(time.monotonic() - sent_s)
        self.lost += len(left)
        self.give_back(left)

    def give_back(self, jobs: list[str]) -> None:
        """Bring the jobs that lost their GPUs back: end ordinary jobs on their nodes."""
        while jobs:
            for job in jobs:
                self.cluster.command("scontrol", "update", f"JobId={job}", f"Priority={HIGHEST_PRIORITY}", check=False)
                thief = next(
                    (
                        each.id
                        for each in self.listed().values()
                        if self.place[job] in each.nodes and each.id not in self.place
                    ),
                    None,
                )
                if thief is not None:
                    self.cluster.command("scancel", thief, check=False)
            time.sleep(0.5)
            jobs = self.without_gpus(jobs)


def main() -> None:
    """Run the race and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--without", action="append", choices=["reservation", "priority"], default=[])
    parser.add_argument("--scheduler", default="", help="further SchedulerParameters")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    parameters = "batch_sched_delay=0,sched_min_interval=0,sched_interval=5,bf_interval=5"
    more = f",{arguments.scheduler}" if arguments.scheduler else ""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SchedulerParameters": parameters + more}
        with LoopbackCluster(Path(folder) / "c", f"t4:{NODES}x4", settings=settings) as cluster:
            race, over = Race(cluster, arguments.without, arguments.seed), threading.Event()
            feeder = threading.Thread(target=race.feed, args=(over.is_set,))
            feeder.start()
            try:
                time.sleep(5)
                while len(race.start_s) * AT_ONCE < arguments.moves:
                    race.wave()
                left = MOVES in cluster.command("scontrol", "show", "reservation").stdout
            finally:
                over.set()
                feeder.join()
            version = race.gateway.version()
    result = {
        "benchmark": "move_race",
        "slurm": list(version),
        "cores": len(os.sched_getaffinity(0)),
        "without": arguments.without,
        "scheduler": settings["SchedulerParameters"],
        "moves": len(race.start_s) * AT_ONCE,
        "lost": race.lost,
        "reservation_left": left,
        "start_s": {"median": round(statistics.median(race.start_s), 2), "max": round(max(race.start_s), 2)},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
