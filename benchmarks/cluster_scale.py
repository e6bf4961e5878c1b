"""What one tick of penstockd costs with thousands of nodes and jobs: `python benchmarks/cluster_scale.py`; see --help.

Runs the daemon's own loop, store and board in this process, on a stand-in for Slurm's commands and on a spool folder in which
every call on a file takes 1 ms more, as on a shared file system (`slurm_stub/slow_files.c`, built with gcc). The clock is the
benchmark's own: it goes on by 1 s a tick, and a round is due every 60 s.

- `cpu_s` is the time of this process. `commands_s` is the time of Slurm's stand-in commands, which is not in it.
- `calls` are the calls on files of the spool by path, and fsync.
- An idle tick decides no round and nothing happens in it, except that jobs run on. With --reports N, N jobs report before
  each tick.
- The policy's own time is not in the figures of a round.
- Left out is what a daemon that starts asks once about each running job: its output files and the indices of its GPUs, two
  calls of scontrol, for 70 jobs a tick.
- The growth of the store is the median of the rounds at rest, for a day of them, and what the key rounds add: a whole round
  for as many bytes of differences (decision 22).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from slurm_stub.site import StubSite

from penstock_scheduler.daemon.penstockd import make_site
from penstock_scheduler.daemon.service import allocations, output
from penstock_scheduler.model import Plan, Snapshot
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import load_settings
from penstock_scheduler.store.sql import open_store

ROUND_S = 60.0
AHEAD_S = 60.0
"""How long before the time that they show squeue's answers are written, so that no job seems to have been suspended."""
SOURCE = Path(__file__).parent / "slurm_stub" / "slow_files.c"
SIZES = """SELECT avg(CASE WHEN key_round IS NOT NULL THEN length(record) END),
    max(CASE WHEN key_round IS NULL THEN length(record) END) FROM rounds"""
SETTINGS = """
[daemon]
state_dir = "{folder}/state"
round_s = {round_s}
[policy]
name = "{policy}"
[slurm]
partitions = ["gpu"]
spool_dir = "{spool}"
command_timeout_s = 120
[api]
enabled = false
"""


class Clock:
    """A clock that the benchmark moves."""

    def __init__(self) -> None:
        self.time_s = time.time()

    def now_s(self) -> float:
        """See `ports.Clock`."""
        return self.time_s

    def sleep(self, seconds: float) -> None:
        """See `ports.Clock`."""
        self.time_s += seconds


class Timed:
    """A policy whose own time is measured."""

    def __init__(self, name: str) -> None:
        self.policy, self.choice = make_policy(name)
        self.name = self.policy.name
        self.cpu_s = 0.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """See `ports.Policy`."""
        begun = time.process_time()
        try:
            return self.policy.decide(snapshot)
        finally:
            self.cpu_s += time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--running", type=int, default=4000)
    parser.add_argument("--waiting", type=int, default=16_000)
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--ticks", type=int, default=20, help="idle ticks between two rounds")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first one")
    parser.add_argument("--reports", type=int, default=0, help="jobs that report before each tick")
    parser.add_argument("--call-us", type=int, default=1000, help="how much longer each call on a shared file takes")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as name:
        folder = Path(name)
        if "SLOW_FILES_ROOT" not in os.environ:
            library = folder / "slow_files.so"
            subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
            spool = folder / "spool"
            more = {"LD_PRELOAD": str(library), "SLOW_FILES_ROOT": str(spool), "SLOW_FILES_US": "0"}
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=os.environ | more, check=False)
            sys.exit(done.returncode)
        spool = Path(os.environ["SLOW_FILES_ROOT"])
        site = StubSite(folder / "slurm", spool, options.nodes, options.running, options.waiting)
        os.environ["PATH"] = site.environment["PATH"]
        print(json.dumps(measure(site, folder, spool, options)))


def measure(site: StubSite, folder: Path, spool: Path, options: argparse.Namespace) -> dict[str, Any]:
    output.AT_ONCE = allocations.CHECKS = 0
    clock = Clock()
    site.write(time.time() + AHEAD_S)
    settings = folder / "penstock.toml"
    settings.write_text(SETTINGS.format(folder=folder, spool=spool, round_s=ROUND_S, policy=options.policy))
    store = open_store(folder / "state", writer=True)
    live = make_site(settings, load_settings(settings), clock, store)
    timed = Timed(options.policy)
    live.loop.decide_by(timed, timed.choice)
    library = os.environ["LD_PRELOAD"].split(":")[0]
    count = ctypes.CDLL(library).slow_files_count
    count.restype = ctypes.c_long
    sequence = 1
    libc = ctypes.CDLL(None)

    def tick() -> dict[str, float]:
        nonlocal sequence
        for index in range(options.reports):
            site.report((sequence * options.reports + index) % options.running, sequence, clock.now_s())
        sequence += 1
        site.write_jobs(time.time() + AHEAD_S)
        before = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        calls, policy_s, wall = count(), timed.cpu_s, time.perf_counter()
        libc.setenv(b"SLOW_FILES_US", str(options.call_us).encode(), 1)
        live.loop.tick()
        libc.setenv(b"SLOW_FILES_US", b"0", 1)
        wall = time.perf_counter() - wall
        after = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        own, commands = (
            each[1].ru_utime + each[1].ru_stime - each[0].ru_utime - each[0].ru_stime
            for each in zip(before, after, strict=True)
        )
        clock.sleep(1.0)
        return {
            "cpu_s": own - (timed.cpu_s - policy_s),
            "policy_s": timed.cpu_s - policy_s,
            "commands_s": commands,
            "calls": count() - calls,
            "wall_s": wall,
        }

    first = tick()
    state = live.board.state
    assert state is not None
    assert len(state.jobs) == options.running + options.waiting, "a round decides on every job"
    idle, rounds = [], []
    for _ in range(3):
        tick()
    for _ in range(options.rounds + 1):
        for _ in range(options.ticks):
            idle.append(tick())
        clock.time_s += ROUND_S - options.ticks - 1
        size_before = stored(folder)
        decided = len(store.round_numbers())
        rounds.append(tick())
        assert len(store.round_numbers()) == decided + 1, "a round was due"
        rounds[-1]["bytes"] = stored(folder) - size_before
    del rounds[0]  # after the second round, the store holds one whole round more
    with store.read() as db:
        per_round, whole = db.execute(sa.text(SIZES)).one()
    result = {
        "nodes": options.nodes,
        "running": options.running,
        "waiting": options.waiting,
        "policy": options.policy,
        "reports_a_tick": options.reports,
        "first": first,
        "idle": summary(idle),
        "round": summary(rounds),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "difference_bytes": per_round,
        "whole_round_bytes": whole,
        "store_mb_a_day": 86_400 / ROUND_S * (statistics.median(each["bytes"] for each in rounds) + per_round) / 1e6,
    }
    if not options.json:
        show(result)
    live.watcher.notifier.stop()
    store.close()
    return result


def stored(folder: Path) -> int:
    """Bytes of rows in the store."""
    import sqlite3

    with sqlite3.connect(folder / "state" / "penstock.db") as db:
        pages, free = db.execute("PRAGMA page_count").fetchone()[0], db.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * db.execute("PRAGMA page_size").fetchone()[0]


def summary(ticks: list[dict[str, float]]) -> dict[str, Any]:
    """Median and largest of each figure."""
    return {
        name: {"median": statistics.median(each[name] for each in ticks), "max": max(each[name] for each in ticks)}
        for name in ticks[0]
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; {result['nodes']} nodes, "
        f"{result['running']} running and {result['waiting']} waiting jobs, policy {result['policy']}"
    )
    for name in ("idle", "round"):
        for figure, each in result[name].items():
            print(f"  {name:<6} {figure:<11} median {each['median']:10.3f}   largest {each['max']:10.3f}")
    print(f"  memory {result['memory_mb']:.0f} MiB, store {result['store_mb_a_day']:.1f} MB a day of rounds")


if __name__ == "__main__":
    main()
