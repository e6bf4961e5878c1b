"""Load of the API: jobs that report every 30 s, and clients that wait for changes.

    python benchmarks/service.py [--jobs 2000] [--waiting 500] [--seconds 60] [--cores 1]

The service is a process of its own with the real store (SQLite, every acknowledged report synced to disk), real sockets and
HTTP; the cluster behind it is made up: every job runs, and ten of them change each second. Jobs report over the unix socket.
The last line is JSON: latencies in milliseconds, memory in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx

from penstock_profiles.families import Families
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.model import ClusterState, Job, JobWish, Node, Phase, Placement, Share
from penstock_scheduler.models import WishModels
from penstock_scheduler.service.app import Controls, make_app
from penstock_scheduler.service.board import Board
from penstock_scheduler.service.server import Service
from penstock_scheduler.service.settings import ApiSettings
from penstock_scheduler.store import open_store

EVERY_S = 30.0


def serve(folder: Path, jobs: int, ready: object, cores: int) -> None:
    """The service, and a cluster on which ten jobs a second change."""
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    user = __import__("getpass").getuser()
    store = open_store(folder, writer=True)
    board = Board(store, None)
    models = WishModels(Families(), 30.0)
    controls = Controls(lambda: ("sia", {}), lambda n, s: {}, lambda: False, lambda p: None, dict)
    settings = ApiSettings(requests_per_s=1e9, burst=10**9)
    app = make_app(settings, board, controls, models, models.check)
    service = Service(settings, folder / "api.sock", app, board)
    wish = JobWish(max_gpus=8)

    def look(round_: int) -> None:
        running = tuple(
            Job(
                str(number),
                f"job {number}",
                user,
                wish,
                ("all",),
                Phase.RUNNING,
                0.0,
                restarts=round_ * 10 // jobs + (number < round_ * 10 % jobs),
                allocation=Placement("a100", "all", (Share(f"n{number}", 8),)),
            )
            for number in range(jobs)
        )
        nodes = tuple(Node(f"n{number}", "a100", 8, ("all",)) for number in range(jobs))
        board.saw(ClusterState(nodes, running), time.time())

    look(0)
    service.start()
    ready.set()  # type: ignore[attr-defined]
    round_ = 0
    while True:
        time.sleep(1.0)
        round_ += 1
        look(round_)


async def load(folder: Path, jobs: int, waiting: int, seconds: float, seed: int) -> dict[str, object]:
    """Reports and waits; what they took."""
    chance = random.Random(seed)
    transport = httpx.AsyncHTTPTransport(
        uds=str(folder / "api.sock"), limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
    )
    took_s: list[float] = []
    acknowledged = woken = errors = 0
    until_s = time.monotonic() + seconds
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock", timeout=90) as http:

        async def report(job: int) -> None:
            nonlocal acknowledged, errors
            await asyncio.sleep(chance.uniform(0, min(EVERY_S, seconds)))
            sequence = 0
            while time.monotonic() < until_s:
                body = Observation(
                    gpu_type="a100", nodes=1, gpus=8, atomic_batch=32, steps=50, step_time_s=0.4, progress=sequence
                )
                each = Report(job_id=str(job), epoch=1, sequence=sequence, time_s=time.time(), body=body)
                began_s = time.perf_counter()
                answer = await http.post(f"/v1/jobs/{job}/reports", json={"reports": [each.model_dump(mode="json")]})
                took_s.append(time.perf_counter() - began_s)
                if answer.status_code == 200:
                    acknowledged += answer.json()["accepted"]
                else:
                    errors += 1
                sequence += 1
                await asyncio.sleep(EVERY_S)

        async def wait(number: int) -> None:
            nonlocal woken, errors
            version = 0
            while time.monotonic() < until_s:
                answer = await http.get(f"/v1/jobs/{number % jobs}", params={"wait": 30, "since": version})
                if answer.status_code == 200:
                    woken += answer.json()["version"] > version
                    version = answer.json()["version"]
                else:
                    errors += 1

        tasks = [asyncio.create_task(report(job)) for job in range(jobs)]
        tasks += [asyncio.create_task(wait(number)) for number in range(waiting)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    took_s.sort()
    return {
        "requests": len(took_s),
        "acknowledged": acknowledged,
        "woken": woken,
        "errors": errors,
        "p50_ms": round(1000 * took_s[len(took_s) // 2], 1),
        "p99_ms": round(1000 * took_s[int(len(took_s) * 0.99)], 1),
        "max_ms": round(1000 * took_s[-1], 1),
    }


def resident_mb(pid: int | None) -> float:
    """Memory of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cores", type=int, default=1, help="of the service; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as name:
        folder, ready = Path(name), context.Event()
        server = context.Process(target=serve, args=(folder, arguments.jobs, ready, arguments.cores), daemon=True)
        server.start()
        if not ready.wait(60):
            print("the service did not start")
            return 1
        time.sleep(2)
        before_mb = resident_mb(server.pid)
        found = asyncio.run(load(folder, arguments.jobs, arguments.waiting, arguments.seconds, arguments.seed))
        after_mb = resident_mb(server.pid)
        server.kill()
        server.join()
        store = open_store(folder)
        kept = sum(1 for _ in store.reports())
        store.close()
    found |= {
        "kept": kept,
        "lost": max(int(str(found["acknowledged"])) - kept, 0),
        "memory_before_mb": round(before_mb, 1),
        "memory_after_mb": round(after_mb, 1),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
    } | vars(arguments)
    print(f"{found['requests']} reports: p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; lost {found['lost']}")
    print(json.dumps(found))
    return 1 if found["lost"] or found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
