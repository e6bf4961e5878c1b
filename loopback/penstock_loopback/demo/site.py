"""One of the demo's two clusters, and the history of its jobs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from penstock_loopback import LoopbackCluster
from penstock_loopback.demo.jobs import TIME_SCALE, DemoJob
from penstock_profiles.families import Families
from penstock_profiles.wire import Observation, Report, Started
from penstock_scheduler.people.drawing.history import History, JobHistory, NodeShape, Span
from penstock_scheduler.people.errors import PenstockError, StoreError
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway import CliGateway, SlurmError, SlurmJob
from penstock_slurm.gateway.base import ENDED

ROUND_S = 3.0
TICK_S = 0.25
RESTART_COST_S = 3.0
START_S = 0.5
"""Seconds that a job takes to start up once its process runs."""

SLURM_SETTINGS = {
    "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,bf_resolution=1"
}
"""By default backfill runs every 30 s with a resolution of 60 s. In compressed time that would hide all other effects."""

HALF_A_SECOND = 0.5
"""Slurm truncates times to whole seconds, so a job ended on average this much later than recorded."""


class DemoSite:
    """A loopback Slurm with a spool of its own, with or without penstockd.

    Args:
        folder: holds everything. It is made if missing.
        spec: the nodes.
        penstock: whether penstockd decides. Otherwise Slurm does, by each job's plain request.
        time_scale: emulated seconds in one real second.
        recall_models: whether ended jobs teach penstockd how fast new ones are.
        round_s: real seconds from one round to the next.
    """

    def __init__(
        self,
        folder: Path,
        spec: str,
        *,
        penstock: bool,
        time_scale: float = TIME_SCALE,
        recall_models: bool = False,
        round_s: float = ROUND_S,
    ) -> None:
        self.folder = folder
        self.penstock = penstock
        self.time_scale, self.recall_models, self.round_s = time_scale, recall_models, round_s
        self.slurm = LoopbackCluster(folder / "slurm", spec, settings=SLURM_SETTINGS)
        self.spool = folder / "spool"
        self.state = folder / "state"
        self.jobs: dict[str, DemoJob] = {}
        self.records: dict[str, SlurmJob] = {}
        self.submitted_s: dict[str, float] = {}
        self._daemon: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Start the cluster, and penstockd if it decides. Raises LoopbackError."""
        self.slurm.up()
        self.gateway = CliGateway(conf=self.slurm.slurm_conf, timeout_s=15)
        self.spool.mkdir(parents=True, exist_ok=True)
        if not self.penstock:
            return
        config = self.folder / "penstock.toml"
        config.write_text(
            f"[daemon]\ncluster = 'slurm'\nround_s = {self.round_s}\ntick_s = {TICK_S}\nrestart_cost_s = {RESTART_COST_S}\n"
            f"recall_models = {str(self.recall_models).lower()}\n"
            f"state_dir = '{self.state}'\n\n[api]\nsocket = '{self.state}/api.sock'\n\n[slurm]\npartitions = ['all']\n"
            f"conf = '{self.slurm.slurm_conf}'\nspool_dir = '{self.spool}'\n"
            "\n[safety]\nstop_share = 1.0\n"  # a round takes seconds here, so ten minutes of moves pass in one
        )
        with (self.folder / "penstockd.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def next_round_s(self) -> float:
        """Wait for penstockd's next round, and return its time."""
        first, until_s = None, time.time() + 180.0
        while time.time() < until_s and not self.daemon_died:
            try:
                record = open_store(self.state).last_round()
            except StoreError:  # penstockd has not created it yet
                record = None
            if record is not None:
                first = record.snapshot.round if first is None else first
                if record.snapshot.round > first:
                    return record.snapshot.time_s
            time.sleep(0.05)
        raise PenstockError(f"penstockd decides no round; see {self.folder}/penstockd.log")

    def down(self) -> None:
        """End penstockd, the cluster and its jobs."""
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGTERM)
            try:
                self._daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        self.slurm.down()

    @property
    def daemon_died(self) -> bool:
        """Whether penstockd failed. Its exit status is 0 if it was asked to end."""
        return self._daemon is not None and self._daemon.poll() not in (None, 0)

    def submit(self, job: DemoJob, families: Families) -> None:
        """Submit a job with sbatch as a user would, with the job spec in the comment or with the fixed request."""
        trainer = [
            sys.executable,
            "-m",
            "penstock_executor.emulated",
            f"--family={job.family}" if job.rates is None else f"--rates={json.dumps(job.rates)}",
            f"--work={job.work(families):.6g}",
            f"--time-scale={self.time_scale:g}",
            f"--start-seconds={START_S}",
            "--save-seconds=0.3",
            *(["--fixed-batch"] if job.fixed_batch() else []),
        ]
        script = (
            f"exec {shlex.join(trainer)} --checkpoint-dir={shlex.quote(str(self.folder))}/checkpoints/$SLURM_JOB_ID"
        )
        if self.penstock:
            request = [
                "--hold",
                "--requeue",
                "--gres=gpu:1",
                f"--comment={json.dumps({'penstock': job.spec_fields() | {'checkpointable': True}})}",
            ]
        else:
            gpu_type, nodes, gpus = job.plain
            request = [f"--nodes={nodes}", f"--gres=gpu:{gpu_type}:{gpus}" if gpu_type else f"--gres=gpu:{gpus}"]
            if job.limit_min is not None:
                request.append(f"--time={job.limit_min}")
        environment = dict(os.environ, PENSTOCK_SPOOL=str(self.spool)) | self.slurm.environment()
        answer = subprocess.run(
            [
                "sbatch",
                "--parsable",
                f"--job-name={job.name}",
                f"--output={self.folder}/%x.out",
                *request,
                "--wrap",
                script,
            ],
            env=environment,
            cwd=self.folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        job_id = answer.stdout.strip()
        self.jobs[job_id] = job
        self.submitted_s[job_id] = time.time()  # each requeue changes Slurm's own SubmitTime

    def observe(self) -> None:
        """Read Slurm's records of the jobs. Keeps the last ones if Slurm does not answer."""
        try:
            self.records |= {job.id: job for job in self.gateway.jobs(finished=True) if job.id in self.jobs}
        except SlurmError:
            return

    @property
    def ended(self) -> int:
        """Jobs that have ended."""
        return sum(job.state in ENDED for job in self.records.values())

    @property
    def completed(self) -> bool:
        """Whether every job is COMPLETED."""
        return all(self.records[job].state == "COMPLETED" for job in self.jobs if job in self.records)

    def history(self, title: str, note: str, start_s: float, end_s: float, families: Families) -> History:
        """What happened, from the jobs' own reports and Slurm's records."""
        return History(
            title=title,
            nodes=tuple(NodeShape(node.name, node.gpu_type, node.gpus) for node in self.slurm.nodes),
            jobs=tuple(self._job_history(job_id, job, families) for job_id, job in self.jobs.items()),
            start_s=start_s,
            end_s=end_s,
            note=note,
        )

    def _job_history(self, job_id: str, job: DemoJob, families: Families) -> JobHistory:
        record = self.records.get(job_id)
        reports = read_reports(self.spool / job_id / "reports")
        spans = []
        goodput: list[tuple[float, float]] = []
        work = job.work(families)
        for run in reports:
            started = next((report.body for report in run if isinstance(report.body, Started)), None)
            if started is None:
                continue
            spans.append(Span(run[0].time_s, run[-1].time_s, started.gpu_type, started.gpu_ids))
            goodput.append((run[0].time_s, 0.0))
            for report in run:
                if isinstance(report.body, Observation) and report.body.goodput is not None:
                    goodput.append((report.time_s, report.body.goodput * self.time_scale / work))
            goodput.append((run[-1].time_s, 0.0))
        ended = record is not None and record.state in ENDED
        return JobHistory(
            id=job_id,
            name=job.name,
            asks=_asks(job) if self.penstock else f"{job.plain[1] * job.plain[2]} {job.plain[0]}".strip(),
            submit_s=self.submitted_s[job_id],
            start_s=spans[0].start_s if spans else None,
            end_s=record.end_s + HALF_A_SECOND if record and ended and record.end_s is not None else None,
            state=record.state if record else "UNKNOWN",
            spans=tuple(spans),
            goodput=tuple(goodput),
            restarts=max(len(spans) - 1, 0),
        )


def read_reports(folder: Path) -> list[list[Report]]:
    """The reports of a job's runs, in the order of their epochs. Skips incomplete lines."""
    runs = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        run = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                run.append(Report.model_validate_json(line))
            except ValidationError:
                continue
        if run:
            runs.append(run)
    return runs


def _asks(job: DemoJob) -> str:
    low, high = job.spec.get("min_gpus", 1), job.spec["max_gpus"]
    return f"{low}, rigid" if low == high else f"{low} to {high}"
