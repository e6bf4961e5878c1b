"""A storm of random events: components are killed, tasks cleared, marked and deleted, the token replaced.

Afterwards Slurm's records and Airflow must tell the same story, and no job may run that nobody owns. PENSTOCK_STORM_EVENTS (by
default 100, which take a quarter of an hour) and PENSTOCK_STORM_SEED choose the storm. The second storm only kills, slurmctld as
well, until all deferred tasks of one run have ended: PENSTOCK_STORM_TASKS, by default 60, by hand 500. PENSTOCK_STORM_TARGETS
chooses what it kills, such as `slurmctld,triggerer`, and PENSTOCK_STORM_PAUSE_S how often (by default every 40 to 90 s). With
PENSTOCK_STORM_TOGETHER=yes, no job starts until nearly all of the tasks are deferred.
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
from pathlib import Path

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import Client
from tests.airflow_provider.agreement import Ran, Shown, disagreements, with_noted_ends
from tests.airflow_provider.deployment import POLL_S, Deployment
from tests.end_to_end.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

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
    dag: str = "storm"

    # --- events

    def events(self) -> dict[str, Callable[[], None]]:
        """Name -> event."""
        kills = {f"kill {name}": (lambda name=name: self._restart(name)) for name in COMPONENTS}
        return kills | {
            "kill penstockd": self._restart_penstockd,
            "clear": lambda: self._on_run("clear", lambda run: self.airflow.clear(self.dag, run, "job")),
            "clear run": lambda: self._on_run("clear", lambda run: self.airflow.clear(self.dag, run)),
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

    def _restart_slurmctld(self) -> None:
        self.site.slurm.kill_slurmctld()
        time.sleep(self.dice.choice((0, 5)))
        self.site.slurm.start_slurmctld()

    def _on_run(self, what: str, do: Callable[[str], None]) -> None:
        present = self.airflow.runs(self.dag)
        if present:
            run = self.dice.choice(present)
            try:
                do(run)
            except (AssertionError, httpx.TransportError) as refused:  # such as a task that does not exist yet
                self.told.append(f"{what} {run}: {str(refused)[:200]}")

    def _mark(self, run: str) -> None:
        self.marked.add(run)
        self.airflow.mark(self.dag, run, "job", "failed")

    def _delete(self, run: str) -> None:
        self.airflow.ask("DELETE", f"/dags/{self.dag}/dagRuns/{run}")
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
            if run in self.airflow.runs(self.dag):
                return True
            with contextlib.suppress(AssertionError):
                self.airflow.ask("POST", f"/dags/{self.dag}/dagRuns", json=order)
            return run in self.airflow.runs(self.dag)

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

    def calm(self, timeout_s: float = 480) -> None:
        """Wait until every run has ended and no job is left."""
        wait_for(self._is_over, timeout_s, "all runs to end", poll_s=2 * POLL_S, details=self.story)

    def _is_over(self) -> bool:
        return set(self.states().values()) <= {"success", "failed"} and not self._alive()

    def states(self) -> dict[str, str]:
        """Run -> its state, of the runs that Airflow has. Asks again while SQLite is locked."""
        found: dict[str, str] = {}

        def answered() -> bool:
            with contextlib.suppress(AssertionError, httpx.TransportError):
                for each in self.airflow.ask("GET", f"/dags/{self.dag}/dagRuns", params={"limit": 1000})["dag_runs"]:
                    found[each["dag_run_id"]] = each["state"]
                return True
            return False

        wait_for(answered, 120, "the runs", poll_s=POLL_S, details=self.airflow.tail)
        return found

    def _alive(self) -> list[str]:
        return [job.id for job in self.site.gateway.jobs() if f":{self.dag}:" in job.comment]

    def records(self) -> list[Ran]:
        """All runs of all jobs of the storm in Slurm's accounting."""
        words = ["--allusers", "--noheader", "--parsable2", "-X", "--duplicates"]
        told = self.site.slurm.command("sacct", *words, "--format=JobID,State,Start,End,NodeList,Comment%2000").stdout
        found = []
        for line in told.splitlines():
            job, state, start, end, nodes, comment = line.split("|", 5)
            if f":{self.dag}:" in comment:
                key = json.loads(comment)["penstock_key"]
                start_s = _seconds(start) if nodes != "None assigned" else float("inf")
                found.append(Ran(job, key, state.split()[0], start_s, _seconds(end)))
        return found

    def shown(self) -> dict[str, Shown]:
        """What Airflow shows of the runs that it has, by the names of their tasks in the keys of jobs."""
        found = {}
        for run in self.states():
            state = str(self.airflow.task(self.dag, run, "job")["state"])
            job = self.airflow.xcom(self.dag, run, "job", "job_id")
            found[f"airflow:tests:{self.dag}:{run}:job:-1"] = Shown(state, job, self._excuse(run))
        return found

    def _excuse(self, run: str) -> str:
        """Why a run's task may have failed although its newest job completed: a user marked it, or Airflow lost its last try."""
        query = {"dag_id": self.dag, "run_id": run, "limit": 1000}
        events = {each["event"] for each in self.airflow.ask("GET", "/eventLogs", params=query)["event_logs"]}
        lost = events & {
            "state mismatch",
            "heartbeat timeout",
            "stuck in queued reschedule",
            "stuck in queued tries exceeded",
        }
        task = self.airflow.task(self.dag, run, "job")
        if task["state"] == "failed":
            # What Airflow says of a connection that its API server, which the storm kills, does not answer about.
            log = self.airflow.log(self.dag, run, "job", max(task["try_number"], 1))
            lost |= {"no answer about the connection"} if "isn't defined" in log else set()
        return ", ".join(sorted(lost) + (["a user marked it"] if run in self.marked else []))

    def story(self) -> str:
        """What a failing test prints."""
        states = self.states()
        lines = [*self.told, *(f"{run}: {states.get(run, 'deleted')}" for run in self.runs)]
        lines += [str(ran) for ran in sorted(self.records(), key=lambda ran: (ran.owner, ran.attempt))]
        return "\n".join(lines) + f"\nalive: {self._alive()}\n{self.airflow.tail()}"


@dataclass
class Crowd(Storm):
    """Many deferred tasks of one run, through kills of everything."""

    dag: str = "crowd"
    longest_s: float = 3600.0
    """After it, nothing is killed any more."""
    targets: str = ""
    """What is killed, separated by commas; empty: everything."""
    pause_s: float = 40.0
    """Between two kills at least; at most a little more than twice as long."""
    together: int = 0
    """Once so many tasks are deferred, Penstock's rounds are resumed."""

    @property
    def folder(self) -> Path:
        """Each run of a job adds the time of its end to `completed/JOB-NUMBER` here."""
        return self.site.folder

    def rage_until_the_end(self, run: str) -> None:
        """Kill one thing after the other until all tasks of the run have ended."""
        until_s = time.monotonic() + self.longest_s
        kills = {name: do for name, do in self.events().items() if name.startswith("kill ")}
        kills["kill slurmctld"] = self._restart_slurmctld
        kills = {name: do for name, do in kills.items() if not self.targets or name[5:] in self.targets.split(",")}
        while time.monotonic() < until_s and self.states().get(run) not in ("success", "failed"):
            time.sleep(self.dice.uniform(self.pause_s, 2.25 * self.pause_s))
            name = self.dice.choice(list(kills))
            self.told.append(f"{len(self.told)}: {name}")
            print(f"{time.strftime('%H:%M:%S')} {self.told[-1]}: {self.counts(run)}", flush=True)
            kills[name]()
            if self.together and self.deferred(run) >= self.together:
                self.together = 0
                self.pause_rounds(paused=False)
        if self.together:
            self.pause_rounds(paused=False)

    def deferred(self, run: str) -> int:
        """How many tasks of the run wait in the triggerer."""
        return sum(each["state"] == "deferred" for each in self.airflow.tasks(self.dag, run, limit=1000))

    def pause_rounds(self, *, paused: bool) -> None:
        """No job starts while the rounds are paused."""
        with Client(f"unix:{self.site.state / 'api.sock'}") as admin:
            admin.pause(paused=paused)

    def _is_over(self) -> bool:
        self._repair()
        return super()._is_over()

    def _repair(self) -> None:
        """What an admin does after a crash of slurmctld. It forgets the start of a job a moment before, starts the job again on
        the node that runs it, and so drains the node ("Duplicate jobid") and holds the job."""
        waiting = self.site.slurm.command("squeue", "--noheader", "--format=%i %r").stdout.splitlines()
        held = [line.split()[0] for line in waiting if "launch failed requeued held" in line]
        nodes = self.site.slurm.command("sinfo", "--noheader", "--Node", "--format=%N %T %E").stdout.splitlines()
        for node in {line.split()[0] for line in nodes if " drain" in line and "Duplicate jobid" in line}:
            self.site.slurm.command("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        for job in held:
            self.told.append(f"{len(self.told)}: release {job}")
            self.site.slurm.command("scontrol", "release", job, check=False)  # if not, it is held the next time, too

    def noted_ends(self, run: str) -> dict[tuple[str, str], list[float]]:
        """(job, owner) -> when its runs completed, by their own notes."""
        ends = {}
        for note in (self.folder / "completed").iterdir():
            job, number = note.name.split("-")
            ends[job, f"airflow:tests:{self.dag}:{run}:job:{number}"] = [
                float(line) for line in note.read_text().split()
            ]
        return ends

    def about(self, owner: str) -> str:
        """All that is known of a task: its own logs, penstockd's view of its jobs, Slurm's records and the jobs' own notes."""
        number = int(owner.rpartition(":")[2])
        (run,) = self.states()
        task = self.airflow.task(self.dag, run, "job", number)
        lines = [f"--- {owner}: {task['state']}, try {task['try_number']}"]
        for attempt in range(1, task["try_number"] + 1):
            lines += [f"log of try {attempt}:", self.airflow.log(self.dag, run, "job", attempt, number)[-3000:]]
        with Client(f"unix:{self.site.state / 'api.sock'}") as admin:
            lines += [str(job) for job in admin.jobs() if (job.key or "").startswith(f"{owner}:")]
        lines += [str(ran) for ran in self.records() if ran.owner == owner]
        return "\n".join(lines + [str(note) for note in (self.folder / "completed").glob(f"*-{number}")])

    def counts(self, run: str) -> str:
        """The states of the run's tasks, and of its jobs in Slurm."""
        tasks = Counter(str(each["state"]) for each in self.airflow.tasks(self.dag, run, limit=1000))
        return f"{dict(tasks)}, {len(self._alive())} jobs have not ended, load {os.getloadavg()[0]:.1f}"


def test_many_deferred_tasks_end_once_each_although_everything_is_killed(
    airflow: Deployment, site: Site, connection: dict[str, object]
) -> None:
    seed = int(os.environ.get("PENSTOCK_STORM_SEED", time.time_ns() % 10**6))
    tasks = int(os.environ.get("PENSTOCK_STORM_TASKS", "60"))
    print(f"seed {seed}, {tasks} tasks", flush=True)
    crowd = Crowd(
        *(airflow, site, connection, random.Random(seed)),
        token="",
        longest_s=tasks * 2.5,
        targets=os.environ.get("PENSTOCK_STORM_TARGETS", ""),
        pause_s=float(os.environ.get("PENSTOCK_STORM_PAUSE_S", "40")),
    )
    (crowd.folder / "completed").mkdir()
    if os.environ.get("PENSTOCK_STORM_TOGETHER"):
        crowd.together = tasks * 19 // 20
        crowd.pause_rounds(paused=True)
    began_s = time.monotonic()
    run = airflow.trigger(crowd.dag, tasks=tasks, life=5, folder=str(crowd.folder))
    crowd.rage_until_the_end(run)
    crowd.calm(1800)
    took_s = time.monotonic() - began_s
    ended = [each for each in airflow.tasks(crowd.dag, run, limit=1000) if each["task_id"] == "job"]
    shown = {}
    for each in ended:
        number = each["map_index"]
        job = airflow.xcom(crowd.dag, run, "job", "job_id", number)
        shown[f"airflow:tests:{crowd.dag}:{run}:job:{number}"] = Shown(str(each["state"]), job, "")
    by_slurm = crowd.records()
    records = with_noted_ends(by_slurm, crowd.noted_ends(run))
    assert len(shown) == tasks
    wrong = disagreements(shown, records)
    told = [crowd.about(owner) for owner in shown if any(text.startswith(f"{owner}: ") for text in wrong)]
    assert wrong == [], "\n".join([*wrong, *told, crowd.story()])
    print(*(f"only its run knows: {ran}" for ran in records if ran not in by_slurm), sep="\n", flush=True)
    assert {each.state for each in shown.values()} == {"success"}
    print(
        f"{took_s:.0f} s; {len({ran.job for ran in records})} jobs, {len(records)} runs of jobs "
        f"({Counter(ran.state for ran in records)}); tries: {Counter(each['try_number'] for each in ended)}; "
        f"{Counter(text.partition(': ')[2] for text in crowd.told)}",
        flush=True,
    )


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
    airflow.wait_dag(storm.dag)
    storm.rage(int(os.environ.get("PENSTOCK_STORM_EVENTS", "100")))
    storm.calm()
    records, shown = storm.records(), storm.shown()
    wrong = disagreements(shown, records)
    told = [storm.airflow.story(storm.dag, run) for run in storm.states() if any(f":{run}:" in text for text in wrong)]
    assert wrong == [], "\n".join([*wrong, *told, storm.story()])
    assert records
    excused = {owner: each.excuse for owner, each in shown.items() if each.state == "failed" and each.excuse}
    jobs, runs = {ran.job for ran in records}, {ran.owner for ran in records}
    print(
        f"{len(jobs)} jobs of {len(runs)} runs, {len(shown)} of them present; failed with an excuse: {excused}",
        flush=True,
    )
    print(Counter(text.partition(": ")[2] for text in storm.told if text.partition(":")[0].isdecimal()), flush=True)
