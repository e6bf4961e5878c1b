"""A thousand tasks that wait in one triggerer of a real Airflow.

    PENSTOCK_AIRFLOW_PYTHON=.venv-airflow/bin/python python -m benchmarks.triggerer [--tasks 1000] [--seconds 60] [--sleepers]

Airflow's API, scheduler, dag-processor and triggerer are real, and so is penstockd's service, with its real store and HTTP. The
cluster behind it is simulated. The tasks belong to one mapped task. The benchmark itself writes them to Airflow's database as
deferred, because a worker takes seconds of processor time to defer each. After `--seconds` of waiting, a tenth of the jobs end
at once. The benchmark measures how long it takes until Airflow's database has the last of their tasks as scheduled again. The
last line is JSON: CPU in shares of a core, memory in MiB, requests to penstockd a second, seconds. With `--sleepers`, the
triggers only sleep: what Airflow's triggerer takes by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.airflow_provider.deployment import Deployment
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import Api, serving

from penstock_scheduler.model import Job, Phase
from penstock_scheduler.ports import Fate
from penstock_slurm.loopback import wait_for

DAG = """
from airflow.sdk import DAG
from airflow_provider_penstock.operators.penstock import PenstockWaitOperator

with DAG("waiting", schedule=None, catchup=False):
    PenstockWaitOperator.partial(task_id="wait", pool="nobody").expand(job_id=[str(10_000 + n) for n in range({tasks})])
"""

SLEEPER = """
import asyncio
from airflow.triggers.base import BaseTrigger

class Sleeper(BaseTrigger):
    def serialize(self):
        return "sleeper.Sleeper", {}

    async def run(self):
        self.log.info("sleeps")
        await asyncio.Event().wait()
        yield
"""

DEFER = """
import sys
from datetime import UTC, datetime
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import Trigger
from airflow.utils.session import create_session
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger

with create_session() as session:
    for ti in session.query(TaskInstance).filter(TaskInstance.dag_id == "waiting", TaskInstance.map_index >= 0):
        made = PenstockJobTrigger("penstock_default", str(10_000 + ti.map_index), 2.0, False, 30.0)
        if "--sleepers" in sys.argv:
            from sleeper import Sleeper
            made = Sleeper()
        trigger = Trigger.from_object(made)
        session.add(trigger)
        session.flush()
        ti.state, ti.trigger_id, ti.next_method, ti.start_date = "deferred", trigger.id, "execute_complete", datetime.now(UTC)
        ti.next_kwargs = {}
"""


DIRECT = """
import asyncio, json, os, sys, time
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger

async def main(tasks, seconds):
    ended = []
    async def wait(number):
        await anext(PenstockJobTrigger("penstock_default", str(10_000 + number), 2.0, False, 30.0).run())
        ended.append(time.time())
    waiting = [asyncio.create_task(wait(number)) for number in range(tasks)]
    await asyncio.sleep(15)
    print("= 0", flush=True)
    cpu_s = time.process_time()
    await asyncio.sleep(seconds)
    print("=", time.process_time() - cpu_s, flush=True)
    while len(ended) < tasks // 10:
        await asyncio.sleep(0.05)
    print("=", max(ended), flush=True)
    os._exit(0)

asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
"""


def direct(folder: Path, python: str, api: Api, tasks: int, seconds: float) -> dict[str, object]:
    """Only the triggers, in one event loop in Airflow's interpreter, without a triggerer and a database."""
    jobs = running(folder, tasks)
    api.look(*jobs)
    connection = connection_to(api)
    environment = os.environ | {
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW_CONN_PENSTOCK_DEFAULT": json.dumps(connection),
    }
    words = [python, "-c", DIRECT, str(tasks), str(seconds)]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        # The triggers' logs are there as well.
        figures = (float(line.split()[1]) for line in runner.stdout if line.startswith("= "))
        next(figures)
        asked = requests(api)
        cpu_s = next(figures)
        asked = requests(api) - asked
        memory = memory_mib(runner.pid)
        ending = jobs[: tasks // 10]
        api.look(*jobs[tasks // 10 :], finished={each.id: Fate("COMPLETED", 0, time.time(), "") for each in ending})
        ended_s = time.time()
        seen_s = next(figures) - ended_s
    return {
        "tasks": tasks,
        "cpu": round(cpu_s / seconds, 3),
        "mib": round(memory),
        "requests_per_s": round(asked / seconds, 2),
        "ended": len(ending),
        "seen_s": round(seen_s, 2),
        "load": os.getloadavg()[0],
    }


def running(folder: Path, tasks: int) -> list[Job]:
    """Running jobs, each with an output file."""
    jobs = [
        job(str(10_000 + number), user="ada", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
        for number in range(tasks)
    ]
    for each in jobs:
        (folder / "service" / f"{each.id}.out").write_text("epoch 1\n")
    return jobs


def connection_to(api: Api) -> dict[str, object]:
    port = int(api.url.rpartition(":")[2])
    made = {"conn_type": "penstock", "host": "127.0.0.1", "port": port, "password": api.tokens["ada"]}
    return made | {"extra": {"tls": False, "deployment": "benchmark"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--direct", action="store_true", help="the triggers alone, without a triggerer")
    parser.add_argument("--sleepers", action="store_true", help="triggers that only sleep")
    given = parser.parse_args()
    python = os.environ.get("PENSTOCK_AIRFLOW_PYTHON", ".venv-airflow/bin/python")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "service") as api:
        if given.direct:
            found = direct(Path(folder), python, api, given.tasks, given.seconds)
        else:
            found = measure(Path(folder), python, api, given.tasks, given.seconds, sleepers=given.sleepers)
        print(json.dumps(found))


def measure(
    folder: Path, python: str, api: Api, tasks: int, seconds: float, *, sleepers: bool = False
) -> dict[str, object]:
    jobs = running(folder, tasks)
    api.look(*jobs)
    (folder / "waiting.py").write_text(DAG.replace("{tasks}", str(tasks)))
    settings = {"TRIGGERER__CAPACITY": str(tasks + 10), "CORE__MAX_MAP_LENGTH": str(tasks)}
    connections = {"penstock_default": connection_to(api)}
    (folder / "sleeper.py").write_text(SLEEPER)
    files = [folder / "waiting.py", folder / "sleeper.py"]
    with Deployment(python, folder / "airflow", connections, files, **settings) as airflow:
        airflow.ask("POST", "/pools", json={"name": "nobody", "slots": 0})
        airflow.trigger("waiting")
        database = folder / "airflow/airflow.db"
        say(f"waiting for the scheduler to make {tasks} tasks")
        wait_for(lambda: count(database, "scheduled") == tasks, 600, "all tasks", poll_s=2.0, details=airflow.tail)
        airflow.kill("dag-processor", "scheduler", "triggerer")
        words = [python, "-c", DEFER, *(["--sleepers"] if sleepers else [])]
        subprocess.run(words, env=airflow.environment, check=True, cwd=folder)
        airflow.start("triggerer")
        say("waiting for the triggerer to run them all")
        before, began_s = requests(api), time.monotonic()
        wait_for(lambda: told(folder) == tasks, 1800, "all triggers to run", poll_s=2.0, details=airflow.tail)
        taken_up_s = time.monotonic() - began_s
        time.sleep(30)
        say(f"measuring for {seconds:g} s")
        runner = airflow.members("triggerer")
        cpu_s, asked, since_s = sum(map(cpu, runner)), requests(api), time.monotonic()
        time.sleep(seconds)
        passed_s = time.monotonic() - since_s
        found = {
            "tasks": tasks,
            "taken_up_s": round(taken_up_s),
            "requests_until_then": asked - before,
            "triggerer_cpu": round((sum(map(cpu, runner)) - cpu_s) / passed_s, 3),
            "triggerer_mib": round(sum(map(memory_mib, runner))),
            "requests_per_s": round((requests(api) - asked) / passed_s, 2),
        }
        if sleepers:
            return found | {"load": os.getloadavg()[0]}
        ending = jobs[: tasks // 10]
        api.look(*jobs[tasks // 10 :], finished={each.id: Fate("COMPLETED", 0, time.time(), "") for each in ending})
        ended_s = time.time()
        wait_for(
            lambda: count(database, "scheduled") == len(ending),
            300,
            "the ends of the jobs to arrive",
            details=airflow.tail,
        )
        seen_s = sorted(moment - ended_s for moment in scheduled(database))
        return found | {
            "ended": len(ending),
            "seen_median_s": round(statistics.median(seen_s), 2),
            "seen_last_s": round(seen_s[-1], 2),
            "load": os.getloadavg()[0],
        }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def requests(api: Api) -> int:
    return int(api.board.counters["requests"])


def ask(database: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as line:
        return line.execute(query).fetchall()


def count(database: Path, state: str) -> int:
    """Mapped tasks in a state."""
    query = f"select count(*) from task_instance where map_index >= 0 and state = '{state}'"
    return int(ask(database, query)[0][0])


def scheduled(database: Path) -> list[float]:
    """When each of the mapped tasks that are scheduled became so, s since 1970."""
    rows = ask(database, "select updated_at from task_instance where map_index >= 0 and state = 'scheduled'")
    return [datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() for (text,) in rows]


def told(folder: Path) -> int:
    """Number of running triggers. Each writes its job's place to the task's log."""
    return sum(1 for _ in (folder / "airflow/logs").glob("**/*.trigger.*.log"))


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Proportional memory (PSS): shared pages count once."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
