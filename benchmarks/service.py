"""Load of the API: jobs that report every 30 s, clients that wait for changes, and clients that read.

    python benchmarks/service.py [--separate] [--jobs 2000] [--waiting 500] [--readers 50] [--round-s 2] [--seconds 60]
                                 [--half-open 1100]

The service is a process of its own with the real store (SQLite, or `--store URL`; every acknowledged report is synced to disk),
real sockets and HTTP. The cluster behind it is simulated: every job runs, and ten jobs change each second. Jobs report over the
Unix socket. Readers ask once a second for a job, a page of jobs, the queue or the cluster. The clients are this process, on the
machine's other cores. With `--separate`, penstock-api serves them, in one more process that may use all cores. `--round-s` makes
Python compute for so long every 10 s beside penstockd's service, as a large round does. With `--half-open` another user (nobody,
so it needs root) keeps so many requests half open. On a machine with other load, `--realtime` (as root) gives the benchmark
priority. The last line is JSON: latencies in milliseconds, memory in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import random
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock_profiles.families import Families
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.accounts.rules import BudgetSettings, SchedulingRules
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.daemon.service import process
from penstock_scheduler.daemon.service.app import make_app
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.port import Chosen
from penstock_scheduler.daemon.service.publisher import Publisher
from penstock_scheduler.daemon.service.server import Service
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.daemon.service.vitals import leading
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import ClusterState, Job, JobSpec, Node, Phase, Placement, Share
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import parse_settings
from penstock_scheduler.safety import open_files
from penstock_scheduler.store.sql import open_store

EVERY_S = 30.0


def serve(
    folder: Path,
    jobs: int,
    ready: object,
    cores: int,
    round_s: float = 0.0,
    separate: bool = False,
    queued: int = 0,
    at: str | None = None,
) -> None:
    """The service, or penstockd for a penstock-api, and a cluster on which ten jobs a second change."""
    open_files.raise_limit()
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    user = __import__("getpass").getuser()
    store = open_store(at or folder, writer=True)
    board = Board(store, None)
    models = SpecModels(Families(), 30.0)
    choice = make_policy("sia")[1]
    controls: Any = SimpleNamespace(
        chosen=choice,
        paused=False,
        settings=parse_settings("", "text"),
        rules=SchedulingRules(BudgetSettings(), LimitSettings(), store),
        vitals=SimpleNamespace(
            health=lambda now_s: Health(status="ok", version=""), leader=lambda: leading(store.leadership, None)
        ),
        cloud=None,
        kin=KinOfJobs(store, models.beginning),
        store_place=str(folder),
    )
    settings = ApiSettings.model_validate(api_settings(folder) | {"embedded": not separate})
    app = make_app(settings, board, controls, models, models.check)
    service = Service(settings, app, board, private=separate)
    publisher = Publisher(board, lambda: Chosen.of(controls), lambda: 0)
    spec = JobSpec(max_gpus=8)

    def observe(round_: int) -> None:
        running = tuple(
            Job(
                str(number),
                f"job {number}",
                user,
                spec,
                ("all",),
                Phase.RUNNING,
                0.0,
                restarts=round_ * 10 // jobs + (number < round_ * 10 % jobs),
                allocation=Placement("a100", "all", (Share(f"n{number}", 8),)),
            )
            for number in range(jobs)
        )
        nodes = tuple(Node(f"n{number}", "a100", 8, ("all",)) for number in range(jobs))
        waits = tuple(Job(str(jobs + n), f"job {n}", user, spec, ("all",), Phase.QUEUED, 0.0) for n in range(queued))
        now_s = time.time()
        amounts = {job.id: {"a100": 8 * (now_s - begin_s)} for job in running}
        board.observed(ClusterState(nodes, running + waits), now_s, amounts)

    begin_s = time.time()
    observe(0)
    if separate:
        publisher.start()
    service.start()
    ready.set()  # type: ignore[attr-defined]
    round_ = 0
    while True:
        time.sleep(1.0)
        round_ += 1
        observe(round_)
        if round_ % 10 == 0:
            until_s = time.thread_time() + round_s
            while time.thread_time() < until_s:
                sum(range(1000))


def api_settings(folder: Path) -> dict[str, Any]:
    """Section `[api]`, for both processes."""
    paths = {"socket": str(folder / "api.sock"), "private_socket": str(folder / "penstockd.sock")}
    return paths | {"requests_per_s": 1e9}


def serve_separately(folder: Path, at: str | None) -> None:
    """penstock-api."""
    where = f'state_dir = "{folder}"' if at is None else f'store = "{at}"'
    lines = [f"{key} = {json.dumps(value)}" for key, value in (api_settings(folder) | {"embedded": False}).items()]
    text = "\n".join(["[daemon]", where, "[api]", *lines])
    (folder / "api.toml").write_text(text)
    sys.exit(process.main(["--config", str(folder / "api.toml")]))


def attack(path: Path, connections: int) -> None:
    """Keep this many requests half open, as an ordinary user. The service ends each after 10 s."""
    os.setgid(65534)
    os.setuid(65534)
    open_files.raise_limit()
    held: deque[socket.socket] = deque()
    while True:
        each = socket.socket(socket.AF_UNIX)
        each.settimeout(20)
        held.append(each)
        try:
            each.connect(str(path))
            each.sendall(b"GET /v1/me HTTP/1.1\r\nHost: x\r\n")
        except OSError:  # it was refused
            time.sleep(0.01)
        if len(held) >= connections:
            held.popleft().close()
            time.sleep(10.0 / connections)  # all are new every 10 s


class Line:
    """One kept-alive HTTP connection to the service. With a client library, 2,500 of them would cost more than the service."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, dict[str, object]]:
        """(status, answer)."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(str(self._path))
        reader, writer = self._streams
        head = f"{method} {target} HTTP/1.1\r\nHost: penstock\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in answer.lower().split("\r\n") if line.startswith("content-length:"))
        text = await reader.readexactly(int(length.partition(":")[2]))
        return int(answer.split(" ", 2)[1]), json.loads(text)

    def close(self) -> None:
        """End it."""
        if self._streams is not None:
            self._streams[1].close()


async def read(folder: Path, number: int, jobs: int, from_s: float, took_s: list[float]) -> None:
    """Ask once a second, until cancelled, and note how long each answer takes from the time `from_s` on."""
    line, asked = Line(folder / "api.sock"), number
    await asyncio.sleep(random.Random(number).uniform(0, 1))
    while True:
        paths = (f"/v1/jobs/{asked % jobs}", "/v1/jobs?limit=50", "/v1/queue?limit=50", "/v1/cluster")
        began_s = time.perf_counter()
        status, answer = await line.ask("GET", paths[asked % len(paths)])
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        if time.monotonic() >= from_s:
            took_s.append(time.perf_counter() - began_s)
        asked += 1
        await asyncio.sleep(1)


async def load(
    folder: Path,
    jobs: int,
    waiting: int,
    readers: int,
    seconds: float,
    seed: int,
    servers: Sequence[int],
    every_s: float = EVERY_S,
) -> dict[str, object]:
    """Report, read and wait for `every_s` until all clients have started, then for `seconds`, whose latencies are returned."""
    chance = random.Random(seed)
    took_s: list[float] = []
    read_s: list[float] = []
    acknowledged = waits = woken = errors = 0
    from_s = time.monotonic() + every_s
    until_s = from_s + seconds

    async def report(job: int) -> None:
        nonlocal acknowledged, errors
        sequence = 0
        await asyncio.sleep(chance.uniform(0, every_s))
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            body = Observation(
                gpu_type="a100", nodes=1, gpus=8, atomic_batch=32, steps=50, step_time_s=0.4, progress=sequence
            )
            each = Report(job_id=str(job), epoch=1, sequence=sequence, time_s=time.time(), body=body)
            text = json.dumps({"reports": [each.model_dump(mode="json")]}).encode()
            line = Line(folder / "api.sock")  # the service closes idle connections sooner than the next report comes
            status, answer = await line.ask("POST", f"/v1/jobs/{job}/reports", text)
            line.close()
            if time.monotonic() >= from_s:
                took_s.append(time.perf_counter() - began_s)
            if status == 200:
                acknowledged += int(str(answer["accepted"]))
            else:
                errors += 1
            sequence += 1
            await asyncio.sleep(every_s - (time.perf_counter() - began_s))

    async def wait(number: int) -> None:
        nonlocal waits, woken, errors
        line, version = Line(folder / "api.sock"), 0
        await asyncio.sleep(chance.uniform(0, every_s))
        while time.monotonic() < until_s:
            status, answer = await line.ask("GET", f"/v1/jobs/{number % jobs}?wait=30&since={version}")
            waits += time.monotonic() >= from_s
            if status == 200:
                woken += int(str(answer["version"])) > version
                version = int(str(answer["version"]))
            else:
                errors += 1

    tasks = [asyncio.create_task(report(job)) for job in range(jobs)]
    tasks += [asyncio.create_task(read(folder, number, jobs, from_s, read_s)) for number in range(readers)]
    tasks += [asyncio.create_task(wait(number)) for number in range(waiting)]
    await asyncio.sleep(every_s)
    before_s = [cpu_s(server) for server in servers]
    await asyncio.sleep(seconds)
    each_s = [round(cpu_s(server) - then_s, 2) for server, then_s in zip(servers, before_s, strict=True)]
    used_s = sum(each_s)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        errors += ended is not None and not isinstance(ended, asyncio.CancelledError)
    return {
        "reads": len(read_s),
        **_times("read_", read_s),
        **_times("", took_s),
        "requests": len(took_s),
        "server_cpu_s": round(used_s, 2),
        "server_cores": round(used_s / seconds, 3),
        "cpu_s_of_each": each_s,
        "acknowledged": acknowledged,
        "waits": waits,
        "woken": woken,
        "errors": errors,
    }


def _times(what: str, took_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(took_s) or [0.0]
    shown = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}
    return {f"{what}{name}_ms": round(1000 * each_s, 1) for name, each_s in shown.items()}


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int | None) -> float:
    """Memory of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--readers", type=int, default=50, help="clients that read once a second")
    parser.add_argument("--store", help="URL of the store; absent: SQLite in a folder of its own")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cores", type=int, default=1, help="of the service; 0: all")
    parser.add_argument("--every-s", type=float, default=EVERY_S, help="seconds between two reports of a job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--round-s", type=float, default=0.0, help="seconds that Python computes every 10 s, as in a round"
    )
    parser.add_argument("--separate", action="store_true", help="penstock-api serves, in a process of its own")
    parser.add_argument("--half-open", type=int, default=0, help="requests that another user keeps half open")
    parser.add_argument("--queued", type=int, default=0, help="further jobs that wait")
    parser.add_argument("--realtime", action="store_true", help="service and clients go before all other programs")
    return parser.parse_args()


def main() -> int:
    """Run it."""
    arguments = options()
    open_files.raise_limit()
    if arguments.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as name:
        folder, ready = Path(name), context.Event()
        server = context.Process(
            target=serve,
            args=(
                folder,
                arguments.jobs,
                ready,
                arguments.cores,
                arguments.round_s,
                arguments.separate,
                arguments.queued,
                arguments.store,
            ),
            daemon=True,
        )
        server.start()
        if not ready.wait(120):
            print("the service did not start")
            return 1
        servers = [server]
        if arguments.separate:
            servers.append(context.Process(target=serve_separately, args=(folder, arguments.store), daemon=True))
            servers[-1].start()
            until_s = time.monotonic() + 120
            while not (folder / "api.sock").exists() and time.monotonic() < until_s:
                time.sleep(0.1)
        time.sleep(2)
        before_mb = resident_mb(servers[-1].pid)
        if others := sorted(os.sched_getaffinity(0))[arguments.cores :]:
            os.sched_setaffinity(0, others)
        attacker = context.Process(target=attack, args=(folder / "api.sock", arguments.half_open), daemon=True)
        if arguments.half_open:
            folder.chmod(0o755)
            attacker.start()
        gc.freeze()  # a pause of this process would count as the service's
        found = asyncio.run(
            load(
                folder,
                arguments.jobs,
                arguments.waiting,
                arguments.readers,
                arguments.seconds,
                arguments.seed,
                [each.pid or 0 for each in servers],
                arguments.every_s,
            )
        )
        after_mb = resident_mb(servers[-1].pid)
        for each in [*servers, *([attacker] if arguments.half_open else [])]:
            each.kill()
            each.join()
        store = open_store(arguments.store or folder)
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
    print(f"{found['reads']} reads: p50 {found['read_p50_ms']} ms, p99 {found['read_p99_ms']} ms")
    print(f"{found['requests']} reports: p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; lost {found['lost']}")
    print(json.dumps(found))
    return 1 if found["lost"] or found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
