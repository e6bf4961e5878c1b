"""A storm of random events: components are killed, tasks cleared, marked and deleted, the token replaced.

Afterwards Slurm's records and Airflow must tell the same story, and no job may run that nobody owns. PENSTOCK_STORM_EVENTS (by
default 100, which take a quarter of an hour) and PENSTOCK_STORM_SEED choose the storm.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import Client
from tests.airflow_provider.agreement import Ran, Shown, disagreements
from tests.airflow_provider.deployment import POLL_S, Deployment
from tests.end_to_end.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

DAG = "storm"
COMPONENTS = ("triggerer", "scheduler", "dag-processor", "api-server")
RUNS = 6
"""Runs that have not ended while the storm goes on."""


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
    marked: set[str] = field(default_factory=set)
    """Runs whose task was marked as failed. Airflow may have done so, too, if it answered with an error."""

    # --- events

    def events(self) -> dict[str, Callable[[], None]]:
        """Name -> event."""
        kills = {f"kill {name}": (lambda name=name: self._restart(name)) for name in COMPONENTS}
        return kills | {
            "kill penstockd": self._restart_penstockd,
            "clear": lambda: self._on_run("clear", lambda run: self.airflow.clear(DAG, run, "job")),
            "clear run": lambda: self._on_run("clear", lambda run: self.airflow.clear(DAG, run)),
            "mark failed": lambda: self._on_run("mark", self._mark),
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

    def _mark(self, run: str) -> None:
        self.marked.add(run)
        self.airflow.mark(DAG, run, "job", "failed")

    def _delete(self, run: str) -> None:
        self.airflow.ask("DELETE", f"/dags/{DAG}/dagRuns/{run}")
        if self.dice.random() < 0.5:  # once more under the same name
            self._trigger(run)

    def _rotate(self) -> None:
        with Client(f"unix:{self.site.state / 'api.sock'}") as admin:
            new = admin.create_token(TokenOrder(user=admin.me().user))
            self.airflow.connect("penstock_default", self.connection | {"password": new.token})
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

        wait_for(is_there, 120, f"run {run}", poll_s=POLL_S, details=self.airflow.tail)

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

        wait_for(answered, 120, "the runs", poll_s=POLL_S, details=self.airflow.tail)
        return found

    def _alive(self) -> list[str]:
        return [job.id for job in self.site.gateway.jobs() if f":{DAG}:" in job.comment]

    def records(self) -> list[Ran]:
        """All runs of all jobs of the storm in Slurm's accounting."""
        words = ["--allusers", "--noheader", "--parsable2", "-X", "--duplicates"]
        told = self.site.slurm.command("sacct", *words, "--format=JobID,State,Start,End,NodeList,Comment%2000").stdout
        found = []
        for line in told.splitlines():
            job, state, start, end, nodes, comment = line.split("|", 5)
            if f":{DAG}:" in comment:
                key = json.loads(comment)["penstock_key"]
                start_s = _seconds(start) if nodes != "None assigned" else float("inf")
                found.append(Ran(job, key, state.split()[0], start_s, _seconds(end)))
        return found

    def shown(self) -> dict[str, Shown]:
        """What Airflow shows of the runs that it has, by the names of their tasks in the keys of jobs."""
        found = {}
        for run in self.states():
            state = str(self.airflow.task(DAG, run, "job")["state"])
            job = self.airflow.xcom(DAG, run, "job", "job_id")
            found[f"airflow:tests:{DAG}:{run}:job:-1"] = Shown(state, job, self._excuse(run))
        return found

    def _excuse(self, run: str) -> str:
        """Why a run's task may have failed although its newest job completed: a user marked it, or Airflow lost its last try."""
        query = {"dag_id": DAG, "run_id": run, "limit": 1000}
        events = {each["event"] for each in self.airflow.ask("GET", "/eventLogs", params=query)["event_logs"]}
        lost = events & {
            "state mismatch",
            "heartbeat timeout",
            "stuck in queued reschedule",
            "stuck in queued tries exceeded",
        }
        task = self.airflow.task(DAG, run, "job")
        if task["state"] == "failed":
            # What Airflow says of a connection that its API server, which the storm kills, does not answer about.
            log = self.airflow.log(DAG, run, "job", max(task["try_number"], 1))
            lost |= {"no answer about the connection"} if "isn't defined" in log else set()
        return ", ".join(sorted(lost) + (["a user marked it"] if run in self.marked else []))

    def story(self) -> str:
        """What a failing test prints."""
        states = self.states()
        lines = [*self.told, *(f"{run}: {states.get(run, 'deleted')}" for run in self.runs)]
        lines += [str(ran) for ran in sorted(self.records(), key=lambda ran: (ran.owner, ran.attempt))]
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
    records, shown = storm.records(), storm.shown()
    wrong = disagreements(shown, records)
    told = [storm.airflow.story(DAG, run) for run in storm.states() if any(f":{run}:" in text for text in wrong)]
    assert wrong == [], "\n".join([*wrong, *told, storm.story()])
    assert records
    excused = {owner: each.excuse for owner, each in shown.items() if each.state == "failed" and each.excuse}
    jobs, runs = {ran.job for ran in records}, {ran.owner for ran in records}
    print(
        f"{len(jobs)} jobs of {len(runs)} runs, {len(shown)} of them present; failed with an excuse: {excused}",
        flush=True,
    )
    print(Counter(text.partition(": ")[2] for text in storm.told if text.partition(":")[0].isdecimal()), flush=True)
