"""A storm over a site: jobs arrive, users and admins interfere, daemons die. Every round and the end are checked.

All random choices come from one seed. `storm.log` lists the actions, one line of JSON each, beside the daemon's own log.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_loopback import LoopbackError, wait_for
from penstock_profiles.wire import Started
from penstock_scheduler.model import Phase
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway.base import ENDED, SlurmJob
from penstock_slurm.gateway.hostlist import expand
from tests.end_to_end.site import RATES, Site
from tests.end_to_end.storm_reasons import Facts, Reasons, Run, history_without_a_round, unexplained, wrong_reasons

NODES = "t4:8x4,rtx:4x4,a100:4x4"
"""16 nodes, 64 GPUs."""

MOST_GPUS = 8
"""Of one job."""


@dataclass
class Storm:
    """One storm over `site`.

    Args:
        jobs: number of jobs, which are submitted evenly over the first four fifths of the time.
        seconds: duration of the storm.
        crashes: whether slurmctld is also killed with -9. It then forgets what happened in the seconds before, whole jobs too.
    """

    site: Site
    jobs: int
    seconds: float
    seed: int
    crashes: bool = False

    def __post_init__(self) -> None:
        self.log = self.site.folder / "storm.log"
        self.stops: Counter[str] = Counter()
        """Code -> stops that Penstock decided; known after `stops_without_a_reason`."""
        self.submitted: list[str] = []
        self.trainers: list[str] = []
        self.checked = 0
        self._chance = random.Random(self.seed)
        self._later: list[tuple[float, str, Callable[[], object]]] = []
        self._attained: dict[str, float] = {}
        self.facts = Facts()
        self._controller_up = self._munge_up = self._takes_jobs = True
        self._begun_s = time.monotonic()

    # --- actions

    def rage(self) -> None:
        """Until the time is over: submit, disturb about once a second, and check the rounds. Then repair everything."""
        events = [
            (self._cancel, 4.0),
            (self._requeue, 5.0),
            (self._drain, 3.0),
            (self._kill_slurmd, 2.0),
            (self._restart_slurmctld, 0.4),
            (self._partition_down, 0.5),
            (self._kill_penstockd, 0.7),
            (self._stop_munge, 0.4),
            (lambda: None, 4.0),
        ]
        if self.crashes:
            events.append((self._kill_slurmctld, 0.4))
        end_s = self._begun_s + self.seconds
        while (now_s := time.monotonic()) < end_s:
            wanted = min(self.jobs, 1 + int(self.jobs * (now_s - self._begun_s) / (0.8 * self.seconds)))
            while self._reachable and self._takes_jobs and len(self.submitted) < wanted:
                self._submit()
            self._do_what_is_due(now_s)
            if self._reachable:
                happen, _ = self._chance.choices(events, [weight for _, weight in events])[0]
                happen()
            self.check_rounds()
            time.sleep(self._chance.uniform(0.3, 1.2))
        self._do_what_is_due(float("inf"))
        while len(self.submitted) < self.jobs:
            self._submit()
        self._say("calm")

    def nodes_are_back(self) -> bool:
        """Whether all nodes are in service. slurmctld refuses RESUME in its first second, so it is repeated."""
        away = [node for node in self.site.slurm.status().nodes if node.state not in ("idle", "mixed", "allocated")]
        for node in away:
            if "drain" in node.state:
                self._resume(node.name)
        return not away

    @property
    def _reachable(self) -> bool:
        return self._controller_up and self._munge_up

    def _submit(self) -> None:
        gpus = self._chance.choice([1, 1, 2, 4, MOST_GPUS])
        spec = {"max_gpus": gpus, "min_gpus": self._chance.choice([1, gpus])}
        kind = self._chance.choices(["trainer", "plain", "deaf"], [5, 8, 1])[0]
        work_s = self._chance.uniform(10, 60)
        if kind == "trainer":
            job = self.site.submit(work_s, **spec)
            self.trainers.append(job)
        else:
            fields = spec | {"goodput_table": RATES, "checkpointable": True}
            comment = json.dumps({"penstock": fields})
            # The job that ignores signals ends by KILL, after KillWait. A plain sleep would end at once.
            script = (
                f"exec sleep {work_s / 3:.1f}" if kind == "plain" else f"trap '' TERM; sleep {work_s / 3:.1f} & wait"
            )
            held = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", "--output=/dev/null")
            job = self.site.sbatch(*held, f"--wrap={script}")
        self.submitted.append(job)
        self._say("submit", job=job, kind=kind, work_s=round(work_s, 1), **spec)

    def _cancel(self) -> None:
        # Rarely: a storm in which all jobs are cancelled tests nothing.
        if self._chance.random() < 0.5 and self.submitted:
            self._command("scancel", self._chance.choice(self.submitted))

    def _requeue(self) -> None:
        running = [job.id for job in self._slurm_jobs() if job.state == "RUNNING"]
        if running:
            job = self._chance.choice(running)
            self.facts.requeued.setdefault(job, []).append(time.time())  # it may be carried out without an answer
            self._command("scontrol", "requeue", job)

    def _partition_down(self) -> None:
        state = self._chance.choice(["DOWN", "INACTIVE"])
        if self._command("scontrol", "update", "PartitionName=all", f"State={state}"):
            self._takes_jobs = state == "DOWN"  # an inactive partition refuses new jobs
            self._in(2, 8, "partition up", self._partition_up)

    def _partition_up(self) -> None:
        self._takes_jobs = self._command("scontrol", "update", "PartitionName=all", "State=UP")
        if not self._takes_jobs:
            self._in(1, 2, "partition up", self._partition_up)

    def _drain(self) -> None:
        node = self._chance.choice(self.site.slurm.nodes).name
        self.facts.drained.setdefault(node, []).append((time.time(), math.inf))
        self._command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=storm")
        self._in(3, 8, f"resume {node}", lambda: self._resume(node))

    def _resume(self, node: str) -> None:
        if self._command("scontrol", "update", f"NodeName={node}", "State=RESUME"):
            spans = self.facts.drained.get(node, [])
            self.facts.drained[node] = [(begin_s, min(end_s, time.time())) for begin_s, end_s in spans]

    def _kill_slurmd(self) -> None:
        node = self._chance.choice(self.site.slurm.nodes).name
        with contextlib.suppress(LoopbackError, KeyError):
            self._say("kill slurmd", node=node)
            self.facts.slurmd_killed.setdefault(node, []).append(time.time())
            self.site.slurm.kill_slurmd(node)
        # Some nodes return before Slurm has given them up, some after.
        self._in(2, 25, f"start slurmd {node}", lambda: self.site.slurm.start_slurmd(node))

    def _restart_slurmctld(self) -> None:
        self._say("stop slurmctld")
        self._controller_up = False
        self.site.slurm.stop_slurmctld()
        self._in(1, 4, "start slurmctld", self._start_slurmctld)

    def _kill_slurmctld(self) -> None:
        self._say("kill slurmctld")
        self._controller_up = False
        self.facts.slurmctld_killed.append(time.time())
        self.site.slurm.kill_slurmctld()
        self._in(1, 4, "start slurmctld", self._start_slurmctld)

    def _start_slurmctld(self) -> None:
        self.site.slurm.start_slurmctld()
        self._controller_up = True

    def _kill_penstockd(self) -> None:
        self._say("kill penstockd")
        self.site.kill()
        self.site.start(wait=False)

    def _stop_munge(self) -> None:
        self._say("stop munged")
        self._munge_up = False
        self.facts.munged_away.append((time.time(), math.inf))
        self.site.slurm.stop_munged()
        self._in(1, 4, "start munged", self._start_munge)

    def _start_munge(self) -> None:
        self.site.slurm.start_munged()
        self._munge_up = True
        begin_s, _ = self.facts.munged_away.pop()
        self.facts.munged_away.append((begin_s, time.time()))

    def _in(self, least_s: float, most_s: float, what: str, act: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + self._chance.uniform(least_s, most_s), what, act))

    def _do_what_is_due(self, now_s: float) -> None:
        # Repairs come first, since other actions may need them.
        for entry in sorted(
            self._later, key=lambda entry: ("slurmctld" not in entry[1], "munged" not in entry[1], entry[0])
        ):
            due_s, what, act = entry
            if due_s <= now_s and (self._reachable or "slurmctld" in what or "munged" in what):
                self._later.remove(entry)
                self._say(what)
                act()

    def _command(self, *argv: str) -> bool:
        """Run one of Slurm's commands. Returns whether it succeeded."""
        done = self.site.slurm.command(*argv, check=False)
        self._say(" ".join(argv), rc=done.returncode, answer=done.stderr.strip()[:200])
        return done.returncode == 0

    def _slurm_jobs(self) -> list[SlurmJob]:
        return [job for job in self.site.gateway.jobs(finished=True) if job.id in self.submitted]

    def _say(self, what: str, **more: object) -> None:
        with self.log.open("a") as file:
            at_s = round(time.monotonic() - self._begun_s, 2)
            file.write(json.dumps({"at_s": at_s, "time": time.strftime("%H:%M:%S"), "what": what} | more) + "\n")

    # --- invariants

    def check_rounds(self) -> None:
        """Check every round that was saved since the last check."""
        store = open_store(self.site.state)
        for number in store.round_numbers():
            if number > self.checked:
                assert number == self.checked + 1, f"round {self.checked + 1} is missing"
                record = store.round(number)
                check_round(record)
                for job, attained in record.snapshot.attained.items():
                    now = sum(attained.values())
                    # A daemon that was killed between two rounds continues from the last one.
                    # A run may have ended shortly before the observation that last showed it, since Slurm's times are whole
                    # seconds. A slurmctld that was killed may show a run as running that it had ended before that; then Slurm's
                    # accounting has the true end, and the figure falls.
                    before = self._attained.get(job, 0.0) - MOST_GPUS * 2.0
                    assert now >= before or self.crashes, (
                        f"round {number}: job {job} had {before}, has {now}: {self._story(job, number)}"
                    )
                    self._attained[job] = now
                self.checked = number

    def _story(self, job: str, number: int) -> str:
        """The job's part of the last rounds up to `number`."""
        store = open_store(self.site.state)
        records = [store.round(each) for each in store.round_numbers() if number - 6 < each <= number]
        return "; ".join(
            f"{record.snapshot.round} at {record.snapshot.time_s}: {record.snapshot.attained_gpu_s(job)}, "
            f"{next((each for each in record.snapshot.jobs if each.id == job), 'gone')}, "
            f"plan {record.plan.assignments.get(job)}"
            for record in records
        )

    def settle(self, timeout_s: float) -> dict[str, str]:
        """Wait until the running jobs match the newest plan, then end the rest. Returns each job's state before that."""

        def agrees() -> bool:
            last = open_store(self.site.state).last_round()
            assert last is not None
            jobs = {job.id: job for job in self._slurm_jobs()}
            for job_id, assignment in last.plan.assignments.items():
                job = jobs.get(job_id)
                if job is None or job.state in ENDED:
                    continue
                if job.state != "RUNNING" or job.nodes != assignment.placement.nodes:
                    return False
            return all(job.held for job_id in last.plan.waiting if (job := jobs.get(job_id)) and job.state not in ENDED)

        wait_for(agrees, timeout_s, "Slurm to run what the plan says", details=self.site.tail)
        found = {job.id: job.state for job in self._slurm_jobs()}
        self._say("settled", states={state: list(found.values()).count(state) for state in set(found.values())})
        left = [job for job, state in found.items() if state not in ENDED]
        if left:
            self._command("scancel", *left)
        wait_for(
            lambda: all(job.state in ENDED for job in self._slurm_jobs()),
            180,
            "all jobs to be over",
            details=lambda: str(
                [(job.id, job.state, job.reason) for job in self._slurm_jobs() if job.state not in ENDED]
            ),
        )
        return found

    def gpu_seconds(self) -> tuple[float, float]:
        """GPU-seconds of all ended jobs together: by the daemon's count, and by Slurm's accounting."""
        store = open_store(self.site.state)
        wait_for(
            lambda: (last := store.last_round()) is not None and not last.snapshot.jobs,
            180,
            "a round after the end of all jobs",
            details=self.site.tail,
        )
        self.check_rounds()

        def seen() -> list[list[str]]:
            fields = "JobIDRaw,State,ElapsedRaw,AllocTRES,Start,End,NodeList"
            text = self.site.slurm.command(
                "sacct", "-a", "-D", "-X", "-n", "-P", "-S", "now-1days", "-o", fields
            ).stdout
            found = sorted((line.split("|") for line in text.splitlines()), key=lambda row: row[4])
            for number, row in enumerate(found):
                later = next(
                    (each for each in found[number + 1 :] if each[0] == row[0] and each[4][:1].isdigit()), None
                )
                if row[1] == "RUNNING" and later is not None:
                    # slurmdbd hears of ends in their order: of this one it never will. It was over when the next run began.
                    row[1], row[2] = "FORGOTTEN", str(_seconds(later[4]) - _seconds(row[4]))
            return found

        def missing(found: list[list[str]]) -> set[str]:
            # Rows that stay PENDING are left over from a slurmctld that was stopped in the middle of a requeue. slurmdbd shows
            # what a killed slurmctld forgot as running for ever.
            states = {job.id: job.state for job in self._slurm_jobs()}
            running = {row[0] for row in found if row[1] == "RUNNING"}
            completed = {job for job, state in states.items() if state == "COMPLETED"}
            return (running & states.keys()) | (completed - {row[0] for row in found if row[1] == "COMPLETED"})

        def rows() -> list[list[str]]:
            found = seen()
            return [] if missing(found) else found

        def details() -> str:
            found = seen()
            late = missing(found)
            return "\n".join(
                [
                    *("|".join(row) for row in found if row[0] in late),
                    *(str((job.id, job.state, job.reason)) for job in self._slurm_jobs() if job.id in late),
                ]
            )

        try:
            account = wait_for(rows, 120, "slurmdbd to know of every end", details=details)
        except TimeoutError:
            account = []
            raise
        finally:
            (self.site.folder / "sacct.txt").write_text("\n".join("|".join(row) for row in account))
        theirs = sum(float(row[2]) * _gpus(row[3]) for row in account if row[0] in self.submitted)
        return sum(self._attained.values()), theirs

    def stops_without_a_reason(self, path: Path | None = None) -> list[str]:
        """Stops by Penstock without a reason, or with one that is not what happened, and ends of runs that nothing explains.

        Args:
            path: the file that `gpu_seconds` wrote; None: Slurm's accounts are not to be trusted, so only the trainers tell.
        """
        store = open_store(self.site.state)
        history = list(store.outcomes())  # before the rounds: a round is stored before it stops a job
        records = {number: store.round(number) for number in store.round_numbers()}
        bare = [
            f"{line.time_s}: {line.action}: {line.text}"
            for line in history
            if ", leaves its GPUs" in line.text and line.stop is None
        ]
        given = [
            (line.time_s, line.action.job, line.action.round, line.stop) for line in history if line.stop is not None
        ]
        wrong = [text for record in records.values() for text in wrong_reasons(record, self.facts)]
        wrong += history_without_a_round(given, records)
        own = [(time_s, job) for time_s, job, _, _ in given]
        runs = [run for job in self.trainers for run in self._runs_of(job)]
        runs += self._accounted(path) if path is not None else []
        self.stops = Counter(stop.code.value for record in records.values() for stop in record.plan.stops.values())
        self._say("reasons", stops=self.stops, runs=len(runs), bare=len(bare), wrong=len(wrong))
        return [*bare, *wrong, *unexplained(runs, Reasons([*records.values()], own), self.facts)]

    def _runs_of(self, trainer: str) -> list[Run]:
        """The trainer's runs but the last one, as it reported them."""
        started: dict[int, tuple[float, frozenset[str]]] = {}
        seen_s: dict[int, float] = {}
        for report in self.site.reports(trainer):
            if isinstance(report.body, Started):
                started[report.epoch] = report.time_s, frozenset(report.body.gpu_ids)
            seen_s[report.epoch] = max(seen_s.get(report.epoch, 0.0), report.time_s)
        epochs = sorted(started)
        return [
            Run(trainer, started[epoch][1], started[epoch][0], seen_s[epoch], started[later][0])
            for epoch, later in itertools.pairwise(epochs)
        ]

    def _accounted(self, path: Path) -> list[Run]:
        """The runs that were neither completed nor cancelled, by the file that `gpu_seconds` wrote."""
        runs = []
        for line in path.read_text().splitlines():
            job, state, _, _, start, end, nodes = line.split("|")
            if (
                job in self.submitted
                and state.split()[0] not in ("COMPLETED", "CANCELLED")
                and "Unknown" not in (start, end)
            ):
                start_s, end_s = _seconds(start), _seconds(end)
                runs.append(Run(job, frozenset(expand(nodes)), start_s, end_s, end_s + 1.0))
        return runs

    def by_job(self, path: Path) -> dict[str, tuple[float, float]]:
        """GPU-seconds by job, Penstock's and Slurm's, from the file that `gpu_seconds` wrote."""
        theirs: dict[str, float] = {}
        for line in path.read_text().splitlines():
            row = line.split("|")
            theirs[row[0]] = theirs.get(row[0], 0.0) + float(row[2]) * _gpus(row[3])
        return {job: (self._attained.get(job, 0.0), theirs.get(job, 0.0)) for job in self.submitted}


def check_round(record: RoundRecord) -> None:
    """The invariants of one round: of its snapshot and of its plan."""
    snapshot, plan = record.snapshot, record.plan
    where = f"round {snapshot.round}"
    nodes = {node.name: node for node in snapshot.nodes}
    jobs = {job.id: job for job in snapshot.jobs}
    assert len(jobs) == len(snapshot.jobs), f"{where}: a job twice"
    assert not plan.assignments.keys() & plan.waiting.keys(), f"{where}: placed and waiting"
    assert plan.assignments.keys() | plan.waiting.keys() == jobs.keys(), f"{where}: a job is forgotten"
    promised: dict[str, int] = {}
    for job_id, assignment in plan.assignments.items():
        spec, placement = jobs[job_id].spec, assignment.placement
        assert spec.min_gpus <= placement.gpus <= spec.max_gpus, f"{where}: job {job_id} gets {placement}"
        assert len(set(placement.nodes)) == len(placement.nodes), f"{where}: job {job_id} gets a node twice"
        for share in placement.shares:
            node = nodes[share.node]
            assert node.gpu_type == placement.gpu_type, f"{where}: job {job_id} gets {placement}"
            assert placement.partition in node.partitions, f"{where}: job {job_id} gets {placement}"
            promised[share.node] = promised.get(share.node, 0) + share.gpus
    for name, gpus in promised.items():
        node = nodes[name]
        held_here = sum(
            share.gpus
            for job in jobs.values()
            if job.allocation is not None and job.phase is not Phase.QUEUED
            for share in job.allocation.shares
            if share.node == name
        )
        # On a node that accepts no new jobs, the running ones may stay.
        assert gpus <= max(node.gpus_for_us, min(held_here, node.gpus)), f"{where}: {gpus} GPUs of {name} are promised"
    held: dict[str, int] = {}
    for job in jobs.values():
        if job.allocation is not None and job.phase in (Phase.RUNNING, Phase.STOPPING):
            for share in job.allocation.shares:
                held[share.node] = held.get(share.node, 0) + share.gpus
    for name, gpus in held.items():
        assert gpus + nodes[name].gpus_others <= nodes[name].gpus, f"{where}: {gpus} GPUs of {name} are held"


def _gpus(tres: str) -> int:
    return next((int(item.removeprefix("gres/gpu=")) for item in tres.split(",") if item.startswith("gres/gpu=")), 0)


def _seconds(time_of_sacct: str) -> float:
    return time.mktime(time.strptime(time_of_sacct, "%Y-%m-%dT%H:%M:%S"))
