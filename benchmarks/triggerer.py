"""A thousand tasks that wait in one triggerer of a real Airflow.

    PENSTOCK_AIRFLOW_PYTHON=.venv-airflow/bin/python python -m benchmarks.triggerer [--tasks 1000] [--seconds 60] [--whole]

Airflow's API, scheduler, dag-processor and triggerer are real, and so is penstockd's service, with its real store and HTTP. The
cluster behind it is simulated. The tasks belong to one mapped task. The benchmark itself writes them to Airflow's database as
deferred, because a worker takes seconds of processor time to defer each. After `--seconds` of waiting, a tenth of the jobs end
at once. The benchmark measures how long it takes until Airflow's database has the last of their tasks as scheduled again. The
last line is JSON: CPU in shares of a core, memory in MiB, requests to penstockd a second, seconds. With `--sleepers`, the
triggers only sleep: what Airflow's triggerer takes by itself.

With `--whole`, real workers submit the jobs and defer the tasks, which takes minutes of processor time. After `--seconds` of
waiting, all jobs end, ten a second, and each task ends in the triggerer (`end_from_trigger`). Measured is how long after its job
each task has ended by Airflow's database, which is PostgreSQL if there is one. It fails if a task has two jobs or a second try.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
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
from tests.scheduler.databases import available, postgresql
from tests.scheduler.service.api import ME, Api, serving

from penstock_loopback import wait_for
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.model import Job, Phase

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

WHOLE = """
from airflow.sdk import DAG
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("whole", schedule=None, catchup=False):
    PenstockSubmitOperator.partial(
        task_id="train", command=["train"], max_gpus=1, check_first=False, end_from_trigger=True, retries=2
    ).expand(environment=[{"N": str(n)} for n in range({tasks})])
"""

ENDS_PER_S = 10

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


def running(folder: Path, tasks: int, first: int = 10_000, user: str = "ada") -> list[Job]:
    """Running jobs, each with an output file."""
    jobs = [
        job(str(first + number), user=user, max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
        for number in range(tasks)
    ]
    for each in jobs:
        (folder / "service" / f"{each.id}.out").write_text("epoch 1\n")
    return jobs


def connection_to(api: Api, who: str = "ada") -> dict[str, object]:
    port = int(api.url.rpartition(":")[2])
    made = {"conn_type": "penstock", "host": "127.0.0.1", "port": port, "password": api.tokens[who]}
    return made | {"extra": {"tls": False, "deployment": "benchmark"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--direct", action="store_true", help="the triggers alone, without a triggerer")
    parser.add_argument("--sleepers", action="store_true", help="triggers that only sleep")
    parser.add_argument("--whole", action="store_true", help="real workers submit the jobs, and the tasks end")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Airflow's components end with it
    python = os.environ.get("PENSTOCK_AIRFLOW_PYTHON") or str(Path(".venv-airflow/bin/python").absolute())
    limits = {"submissions_per_hour": 10 * given.tasks}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "service", **limits) as api:
        if given.direct:
            found = direct(Path(folder), python, api, given.tasks, given.seconds)
        elif given.whole:
            found = whole(Path(folder), python, api, given.tasks, given.seconds)
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
        found = {
            "tasks": tasks,
            "taken_up_s": round(taken_up_s),
            "requests_until_then": requests(api) - before,
        } | waiting(airflow, api, seconds)
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


def waiting(airflow: Deployment, api: Api, seconds: float) -> dict[str, float]:
    """What the triggerer takes for its waiting tasks."""
    runner = airflow.members("triggerer")
    cpu_s, asked, since_s = sum(map(cpu, runner)), requests(api), time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - since_s
    return {
        "triggerer_cpu": round((sum(map(cpu, runner)) - cpu_s) / passed_s, 3),
        "triggerer_mib": round(sum(map(memory_mib, runner))),
        "requests_per_s": round((requests(api) - asked) / passed_s, 2),
    }


def whole(folder: Path, python: str, api: Api, tasks: int, seconds: float) -> dict[str, object]:
    (folder / "whole.py").write_text(WHOLE.replace("{tasks}", str(tasks)))
    settings = {"TRIGGERER__CAPACITY": str(tasks + 10), "CORE__MAX_MAP_LENGTH": str(tasks), "CORE__PARALLELISM": "8"}
    connections = {"penstock_default": connection_to(api, "me")}  # ada is made up, and may submit nothing
    with contextlib.ExitStack() as stack:
        if available():
            url = stack.enter_context(postgresql()).replace("+psycopg:", "+psycopg2:")
            settings["DATABASE__SQL_ALCHEMY_CONN"] = f"{url}/postgres"
        airflow = stack.enter_context(
            Deployment(python, folder / "airflow", connections, [folder / "whole.py"], **settings)
        )
        run, began_s = airflow.trigger("whole"), time.monotonic()
        path = f"/dags/whole/dagRuns/{run}/taskInstances"

        def are(state: str) -> bool:
            found, failed = (
                airflow.ask("GET", path, params={"limit": 1, "state": each})["total_entries"]
                for each in (state, "failed")
            )
            say(f"{found} tasks are {state}, {len(api.submitter.jobs)} jobs")
            assert not failed, airflow.story("whole", run)
            return bool(found == tasks)

        wait_for(lambda: are("deferred"), 7200, "all tasks to wait", poll_s=15.0, details=airflow.tail)
        deferred_s = time.monotonic() - began_s
        jobs = running(folder, tasks, 1000, ME)  # as the made-up submitter numbers them
        assert {each.id for each in jobs} == set(api.submitter.jobs), "a task has two jobs, or none"
        api.look(*jobs)
        time.sleep(30)
        found = {"tasks": tasks, "all_deferred_s": round(deferred_s)} | waiting(airflow, api, seconds)
        ended_s = {}
        for first in range(0, tasks, ENDS_PER_S):
            ending = jobs[first : first + ENDS_PER_S]
            api.look(
                *jobs[first + ENDS_PER_S :],
                finished={each.id: Fate("COMPLETED", 0, time.time(), "") for each in ending},
            )
            ended_s |= {each.id: time.time() for each in ending}
            time.sleep(1)
        wait_for(lambda: are("success"), 1800, "all tasks to end", poll_s=5.0, details=airflow.tail)
        ends = {each["map_index"]: each for each in airflow.ask("GET", path, params={"limit": 1000})["task_instances"]}
        assert {each["try_number"] for each in ends.values()} == {1}
        lags = []
        for name, (_, order) in api.submitter.jobs.items():
            shown = ends[int(order.environment["AIRFLOW_CTX_MAP_INDEX"])]["end_date"]
            lags.append(datetime.fromisoformat(shown).timestamp() - ended_s[name])
    lags.sort()
    return found | {
        "jobs": len(api.submitter.jobs),
        "task_after_job_median_s": round(statistics.median(lags), 2),
        "task_after_job_p99_s": round(lags[int(0.99 * (len(lags) - 1))], 2),
        "task_after_job_last_s": round(lags[-1], 2),
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
