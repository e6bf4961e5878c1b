"""A running Airflow for tests: api-server, scheduler (LocalExecutor), dag-processor and triggerer, on SQLite and loopback."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock_loopback import wait_for

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "airflow_provider/airflow_provider_penstock/example_dags"

POLL_S = 1.0
"""Airflow's API takes tens of milliseconds for an answer."""

LOCKED_S = 60.0
"""For how long Airflow's SQLite may be locked, at load."""

Instance = dict[str, Any]
"""A task instance, as Airflow's API has it."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _members(session: int) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _session(int(name)) == session]


def _session(pid: int) -> int:
    """The session of a process; -1 if it has ended. Airflow's children have process groups of their own, but no sessions."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if stat[0] == "Z" else int(stat[3])


class Deployment:
    """Use as a context manager. Each component is a process group of its own, to be killed and started again."""

    def __init__(
        self,
        python: str,
        folder: Path,
        connections: Mapping[str, Mapping[str, Any]],
        dags: Sequence[Path],
        **settings: str,
    ) -> None:
        """`connections` by name, for Airflow's database; `dags` are files beside the provider's examples; `settings` are by
        `SECTION__KEY`."""
        self.python, self.folder = python, folder
        self.dags = folder / "dags"
        self.port = free_port()
        url = f"http://127.0.0.1:{self.port}"
        own = {
            "AIRFLOW_HOME": str(folder),
            "PYTHONPATH": str(self.dags),
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "NO_PROXY": "127.0.0.1",
        }
        given = {
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__DAGS_FOLDER": str(self.dags),
            "CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": "8",
            "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "API__BASE_URL": url,
            "API__MAXIMUM_PAGE_LIMIT": "1000",
            "API__SECRET_KEY": secrets.token_hex(16),
            "API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder}/airflow.db",
            "DAG_PROCESSOR__REFRESH_INTERVAL": "10",
            "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
            "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "20",
            "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
            "TRIGGERER__JOB_HEARTBEAT_SEC": "2",
            "USAGE_DATA_COLLECTION__ENABLED": "False",
            # By default 5 s, after which a busy machine costs a task its try before our code runs.
            "WORKERS__EXECUTION_API_TIMEOUT": "60",
        } | settings
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON", "PENSTOCK"))
        }
        self.environment |= own
        self.environment |= {f"AIRFLOW__{name}": value for name, value in given.items()}
        self._connections = connections
        self.environment |= {"AIRFLOW_VAR_PENSTOCK_FOLDER": str(folder.parent)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._client = httpx.Client(base_url=f"{url}/api/v2", timeout=60, trust_env=False)
        self.dags.mkdir(parents=True)
        for file in (*EXAMPLES.glob("example_*.py"), *dags):
            shutil.copy(file, self.dags)

    def __enter__(self) -> Deployment:
        try:
            self.command("db", "migrate")
            for name in ("api-server", "scheduler", "dag-processor", "triggerer"):
                self.start(name)
            wait_for(self.answers, 180, "Airflow's API to answer", details=self.tail)
            token = httpx.get(f"{str(self._client.base_url).removesuffix('/api/v2/')}/auth/token", timeout=60)
            self._client.headers["Authorization"] = f"Bearer {token.json()['access_token']}"
            for name, connection in self._connections.items():
                self.connect(name, connection)
            wait_for(self._healthy, 180, "Airflow's components to be healthy", details=self.tail)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill(*self._processes)
        self._client.close()

    def command(self, *words: str) -> str:
        """Run a command of Airflow's, such as `db migrate`, and return its output. It must succeed."""
        command = [self.python, "-m", "airflow", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=300, cwd=self.folder, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def start(self, name: str) -> None:
        """Start a component."""
        words = {
            "api-server": ["api-server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"],
            "scheduler": ["scheduler", "--skip-serve-logs"],
            "triggerer": ["triggerer", "--skip-serve-logs"],
            "dag-processor": ["dag-processor"],
        }[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [self.python, "-m", "airflow", *words],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self, *names: str) -> None:
        """End components with SIGKILL, and all processes that they have started."""
        for name in names:
            process = self._processes.pop(name)
            while members := _members(process.pid):
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()

    def members(self, name: str) -> list[int]:
        """The processes of a component."""
        return _members(self._processes[name].pid)

    def tail(self) -> str:
        """The ends of all components' logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2500:]}" for path in sorted(self.folder.glob("*.log")))

    # --- the REST API

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """The API's answer. SQLite may be locked for a moment, for which Airflow's answer is 500: what may be repeated is."""
        until_s = time.monotonic() + LOCKED_S
        answer = self._client.request(method, path, **request)
        while method != "POST" and answer.status_code == 500 and time.monotonic() < until_s:
            time.sleep(POLL_S)
            answer = self._client.request(method, path, **request)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json() if answer.content else None

    def connect(self, name: str, connection: Mapping[str, Any]) -> None:
        """Store a connection in Airflow's database, or replace it."""
        body = {"connection_id": name, **connection, "extra": json.dumps(connection["extra"])}
        known = self._client.get(f"/connections/{name}").is_success
        self.ask("PATCH" if known else "POST", f"/connections/{name}" if known else "/connections", json=body)

    def answers(self) -> bool:
        """Whether the API server answers."""
        try:
            return self._client.get("/monitor/health").is_success
        except httpx.TransportError:
            return False

    def _healthy(self) -> bool:
        health = self._client.get("/monitor/health").json()
        return all(health[name]["status"] == "healthy" for name in ("scheduler", "triggerer", "dag_processor"))

    def wait_dag(self, dag: str) -> None:
        """Wait until a DAG has been read."""
        wait_for(
            lambda: self._client.get(f"/dags/{dag}").is_success, 180, f"DAG {dag}", poll_s=POLL_S, details=self.tail
        )

    def trigger(self, dag: str, **conf: object) -> str:
        """Start a DAG run; its id. Waits until the DAG has been read."""
        self.wait_dag(dag)
        run = self.ask("POST", f"/dags/{dag}/dagRuns", json={"logical_date": None, "conf": conf})
        return str(run["dag_run_id"])

    def runs(self, dag: str) -> list[str]:
        """The runs of a DAG, oldest first; none while it is not known."""
        answer = self._client.get(f"/dags/{dag}/dagRuns", params={"limit": 1000})
        found = answer.json()["dag_runs"] if answer.is_success else []
        return [each["dag_run_id"] for each in sorted(found, key=lambda each: each["queued_at"])]

    def state(self, dag: str, run: str) -> str:
        return str(self.ask("GET", f"/dags/{dag}/dagRuns/{run}")["state"])

    def tasks(self, dag: str, run: str, limit: int = 100) -> list[Instance]:
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances"
        return list(self.ask("GET", path, params={"limit": limit})["task_instances"])

    def task(self, dag: str, run: str, task: str, map_index: int = -1) -> Instance:
        tasks = self.tasks(dag, run)
        return next((each for each in tasks if (each["task_id"], each["map_index"]) == (task, map_index)), {})

    def wait(self, dag: str, run: str, state: str = "success", timeout_s: float = 300) -> None:
        """Wait until the run is in `state`."""

        def there() -> bool:
            now = self.state(dag, run)
            assert now == state or now not in ("success", "failed"), f"{now}: {self.story(dag, run)}"
            return now == state

        wait_for(there, timeout_s, f"{run} to be {state}", poll_s=POLL_S, details=lambda: self.story(dag, run))

    def wait_task(
        self, dag: str, run: str, task: str, *states: str, map_index: int = -1, timeout_s: float = 240
    ) -> None:
        """Wait until a task is in one of `states`."""
        wait_for(
            lambda: self.task(dag, run, task, map_index).get("state") in states,
            timeout_s,
            f"{task} of {run} to be {states}",
            poll_s=POLL_S,
            details=lambda: self.story(dag, run),
        )

    def xcom(self, dag: str, run: str, task: str, key: str = "return_value", map_index: int = -1) -> Any:
        """The value of an XCom; None if there is none."""
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances/{task}/xcomEntries/{key}"
        answer = self._client.get(path, params={"map_index": map_index, "deserialize": "false", "stringify": "false"})
        return answer.json()["value"] if answer.is_success else None

    def log(self, dag: str, run: str, task: str, number: int = 1, map_index: int = -1) -> str:
        """A try's log; of an exception its message."""
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances/{task}/logs/{number}"
        answer = self.ask("GET", path, params={"map_index": map_index}, headers={"Accept": "application/json"})
        told = []
        for line in answer["content"]:
            told.append(str(line.get("event", line)) if isinstance(line, dict) else str(line))
            if isinstance(line, dict):
                told += [f"{each['exc_type']}: {each['exc_value']}" for each in line.get("error_detail") or ()]
        return "\n".join(told)

    def links(self, dag: str, run: str, task: str, map_index: int = -1) -> dict[str, str]:
        """Name -> URL of the task's extra links."""
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances/{task}/links"
        return dict(self.ask("GET", path, params={"map_index": map_index})["extra_links"])

    def mark(self, dag: str, run: str, task: str, state: str) -> None:
        """Does what the button "mark as" does."""
        self.ask("PATCH", f"/dags/{dag}/dagRuns/{run}/taskInstances/{task}", json={"new_state": state})

    def clear(self, dag: str, run: str, *tasks: str) -> None:
        """Does what the button "clear" does, for tasks or, without tasks, for the whole run."""
        if not tasks:
            self.ask("POST", f"/dags/{dag}/dagRuns/{run}/clear", json={"dry_run": False})
            return
        body = {"dry_run": False, "dag_run_id": run, "task_ids": list(tasks), "only_failed": False}
        self.ask("POST", f"/dags/{dag}/clearTaskInstances", json=body)

    def story(self, dag: str, run: str) -> str:
        """The details that a failing test prints."""
        told = [f"DAG run {self.state(dag, run)}"]
        for each in self.tasks(dag, run):
            told.append(f"--- {each['task_id']} {each['map_index']}: {each['state']}, try {each['try_number']}")
            if each["state"] not in ("success", None):
                try:
                    told.append(
                        self.log(dag, run, each["task_id"], max(each["try_number"], 1), each["map_index"])[-3000:]
                    )
                except AssertionError as error:
                    told.append(str(error))
        return "\n".join(told) + "\n" + self.tail()
