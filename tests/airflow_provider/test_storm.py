"""A storm of random events: components are killed, tasks cleared, marked and deleted, the token replaced.

Afterwards Slurm's records and Airflow must tell the same story, and no job may run that nobody owns. PENSTOCK_STORM_EVENTS (by
default 100, which take a quarter of an hour) and PENSTOCK_STORM_SEED choose the storm.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import httpx
import pytest

from penstock_scheduler.access_messages import TokenOrder
from penstock_scheduler.client import Client
from penstock_slurm.loopback import wait_for
from tests.airflow_provider.deployment import POLL_S, Deployment
from tests.end_to_end.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

DAG = "storm"
COMPONENTS = ("triggerer", "scheduler", "dag-processor", "api-server")
RUNS = 6
"""Runs that have not ended while the storm goes on."""


@dataclass(frozen=True)
class Record:
    """A job in Slurm's accounting."""

    id: str
    state: str
    start_s: float
    end_s: float


@dataclass
class Storm:
    airflow: Deployment
    site: Site
    connection: dict[str, object]
    dice: random.Random
    token: str
    runs: list[str] = field(default_factory=list)
    """All runs that were ever triggered, also those that were deleted."""
    told: list[str] = field(default_factory=list)
    half_done: set[str] = field(default_factory=set)
    """Runs for which Airflow answered a request with an error. It may have done a part: marked the task, and not the run."""

    # --- events

    def events(self) -> dict[str, Callable[[], None]]:
        """Name -> event."""
        kills = {f"kill {name}": (lambda name=name: self._restart(name)) for name in COMPONENTS}
        return kills | {
            "kill penstockd": self._restart_penstockd,
            "clear": lambda: self._on_run("clear", lambda run: self.airflow.clear(DAG, run, "job")),
            "clear run": lambda: self._on_run("clear", lambda run: self.airflow.clear(DAG, run)),
            "mark failed": lambda: self._on_run("mark", lambda run: self.airflow.mark(DAG, run, "job", "failed")),
            "delete": lambda: self._on_run("delete", self._delete),
            "rotate token": self._rotate,
        }

    def _restart(self, name: str) -> None:
        self.airflow.kill(name)
        time.sleep(self.dice.choice((0, 0, 5)))
        self.airflow.start(name)
        if name == "api-server":
            wait_for(self.airflow.answers, 180, "Airflow's API", poll_s=POLL_S, details=self.airflow.tail)

    def _restart_penstockd(self) -> None:
        self.site.kill()
        time.sleep(self.dice.choice((0, 5)))
        self.site.start()

    def _on_run(self, what: str, do: Callable[[str], None]) -> None:
        present = self.airflow.runs(DAG)
        if present:
            run = self.dice.choice(present)
            try:
                do(run)
            except (AssertionError, httpx.TransportError) as refused:  # such as a task that does not exist yet
                self.told.append(f"{what} {run}: {str(refused)[:200]}")
                self.half_done.add(run)

    def _delete(self, run: str) -> None:
        self.airflow.ask("DELETE", f"/dags/{DAG}/dagRuns/{run}")
        if self.dice.random() < 0.5:  # once more under the same name
            self._trigger(run)

    def _rotate(self) -> None:
        with Client(f"unix:{self.site.state / 'api.sock'}") as admin:
            new = admin.create_token(TokenOrder(user=admin.me().user))
            self.airflow.connect("penstock_default", self.connection | {"password": new.token})
            time.sleep(1)  # who has just read the former one
            admin.revoke_token(self.token)
        self.token = new.view.id

    def _trigger(self, run: str) -> None:
        """Trigger a run with this id. SQLite may be locked for a moment, which is Airflow's answer 500."""
        conf = {"life": self.dice.choice((1, 10, 30, 60)), "status": self.dice.choice((0, 0, 0, 1))}
        order = {"logical_date": None, "dag_run_id": run, "conf": conf}

        def is_there() -> bool:
            if run in self.airflow.runs(DAG):
                return True
            with contextlib.suppress(AssertionError):
                self.airflow.ask("POST", f"/dags/{DAG}/dagRuns", json=order)
            return run in self.airflow.runs(DAG)

        wait_for(is_there, 60, f"run {run}", poll_s=POLL_S, details=self.airflow.tail)

    def keep_runs(self) -> None:
        """Trigger runs until enough have not ended."""
        open_runs = [run for run, state in self.states().items() if state in ("queued", "running")]
        for _ in range(RUNS - len(open_runs)):
            self.runs.append(f"storm-{len(self.runs)}.")
            self._trigger(self.runs[-1])

    def rage(self, events: int) -> None:
        """Let events happen."""
        kinds = self.events()
        for number in range(events):
            self.keep_runs()
            time.sleep(self.dice.uniform(1, 6))
            name = self.dice.choice(list(kinds))
            self.told.append(f"{number}: {name}")
            print(self.told[-1], flush=True)
            kinds[name]()

    # --- what is true afterwards

    def calm(self) -> None:
        """Wait until every run has ended and no job is left."""
        wait_for(self._is_over, 480, "all runs to end", poll_s=2 * POLL_S, details=self.story)

    def _is_over(self) -> bool:
        return set(self.states().values()) <= {"success", "failed"} and not self._alive()

    def states(self) -> dict[str, str]:
        """Run -> its state, of the runs that Airflow has. Asks again while SQLite is locked."""
        found: dict[str, str] = {}

        def answered() -> bool:
            with contextlib.suppress(AssertionError, httpx.TransportError):
                for each in self.airflow.ask("GET", f"/dags/{DAG}/dagRuns", params={"limit": 1000})["dag_runs"]:
                    found[each["dag_run_id"]] = each["state"]
                return True
            return False

        wait_for(answered, 60, "the runs", poll_s=POLL_S, details=self.airflow.tail)
        return found

    def _alive(self) -> list[str]:
        return [job.id for job in self.site.gateway.jobs() if f":{DAG}:" in job.comment]

    def records(self) -> dict[str, list[Record]]:
        """Run -> the jobs of its task in Slurm's accounting, by their start."""
        words = ["--allusers", "--noheader", "--parsable2", "-X", "--duplicates"]
        told = self.site.slurm.command("sacct", *words, "--format=JobID,State,Start,End,Comment%2000").stdout
        found: dict[str, list[Record]] = {run: [] for run in self.runs}
        for line in told.splitlines():
            job, state, start, end, comment = line.split("|", 4)
            if f":{DAG}:" not in comment:
                continue
            (run,) = [run for run in self.runs if f":{DAG}:{run}:job:" in comment]
            found[run].append(Record(job, state.split()[0], _seconds(start), _seconds(end)))
        return {run: sorted(jobs, key=lambda job: job.start_s) for run, jobs in found.items()}

    def blames_airflow(self, run: str) -> bool:
        """Whether Airflow lost a try of the run's task, or a user marked the task, by Airflow's audit log."""
        query = {"dag_id": DAG, "run_id": run, "limit": 1000}
        events = {each["event"] for each in self.airflow.ask("GET", "/eventLogs", params=query)["event_logs"]}
        return bool(events & {"state mismatch", "heartbeat timeout", "patch_task_instance"})

    def story(self) -> str:
        """What a failing test prints."""
        states = self.states()
        lines = [*self.told, *(f"{run}: {states.get(run, 'deleted')} {jobs}" for run, jobs in self.records().items())]
        return "\n".join(lines) + f"\nalive: {self._alive()}\n{self.airflow.tail()}"


def _seconds(text: str) -> float:
    """A time of sacct's; infinite if it never came."""
    return float("inf") if text in ("Unknown", "None", "") else datetime.fromisoformat(text).timestamp()


def test_after_a_storm_slurms_records_are_what_airflow_shows(
    airflow: Deployment, site: Site, connection: dict[str, object]
) -> None:
    seed = int(os.environ.get("PENSTOCK_STORM_SEED", time.time_ns() % 10**6))
    print(f"seed {seed}", flush=True)
    with Client(f"unix:{site.state / 'api.sock'}") as admin:
        (token,) = [each.id for each in admin.tokens()]
    storm = Storm(airflow, site, connection, random.Random(seed), token)
    airflow.wait_dag(DAG)
    storm.rage(int(os.environ.get("PENSTOCK_STORM_EVENTS", "100")))
    storm.calm()
    records, present = storm.records(), storm.states()
    for run, jobs in records.items():
        for former, later in itertools.pairwise(jobs):
            assert former.end_s <= later.start_s, f"two jobs of {run} ran at once: {former} {later}\n{storm.story()}"
        if run not in present:
            continue
        state = airflow.task(DAG, run, "job")["state"]
        assert state == present[run] or run in storm.half_done, f"{run} {state}\n{storm.story()}"
        newest = max(jobs, key=lambda each: int(each.id), default=None)
        if state == "success":
            assert newest is not None
            assert newest.id == airflow.xcom(DAG, run, "job", "job_id"), f"{run} shows an older job\n{storm.story()}"
            assert newest.state == "COMPLETED", f"{run}\n{storm.story()}"
        elif newest is None or newest.state == "COMPLETED":
            assert storm.blames_airflow(run), f"{run} has failed, but not its newest job {newest}\n{storm.story()}"
            print(f"{run}: failed by Airflow or a user, its newest job is {newest}", flush=True)
    print(f"{sum(map(len, records.values()))} jobs of {len(records)} runs, {len(present)} of them present", flush=True)
