"""A small site for end-to-end tests: a loopback Slurm, a penstockd, and emulated trainers, all real processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from multiprocessing.process import BaseProcess
from pathlib import Path

from penstock_loopback import LoopbackCluster, wait_for
from penstock_profiles.wire import Ended, Observation, Report, Started
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway import CliGateway, SlurmJob
from tests.constants import set_constants
from tests.forking import FORKING

RATES = {
    "t4": {"1": 1.0, "2": 1.9, "4": 3.6, "8": 6.5, "16": 12.0},
    "rtx": {"1": 2.0, "2": 3.8, "4": 7.2, "8": 13.0, "16": 24.0},
    "a100": {"1": 4.0, "2": 7.6, "4": 14.4, "8": 26.0, "16": 48.0},
}

UNFORESEEN = "failed unexpectedly; please report this as a bug"
"""The daemon's words for an error that nothing provides for: its loop survives even that, and a recovery is missing."""


MAIN = """import json, sys
sys.path.append(sys.argv[1])
from penstock_scheduler.daemon.penstockd import main
from tests.constants import set_constants
set_constants(json.loads(sys.argv[2]))
sys.exit(main(sys.argv[3:]))"""
ROOT = Path(__file__).parents[2]


def penstockd(
    config: Path,
    log: Path,
    environment: Mapping[str, str],
    files: tuple[int, int] | None,
    under: Sequence[str],
    constants: Mapping[str, Mapping[str, object]],
) -> None:
    """What `UNDER penstockd --config CONFIG >>LOG 2>&1` does, in a process of its own, with limits on open files (soft, hard)
    and with constants of the test, by section and name."""
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    arguments = ["--config", str(config)]
    if under:
        os.execvp(under[0], [*under, sys.executable, "-c", MAIN, str(ROOT), json.dumps(constants), *arguments])
    from penstock_scheduler.daemon.penstockd import main

    set_constants(constants)
    sys.exit(main(arguments))


class Site:
    """One cluster and one daemon. `stop` ends what it started."""

    def __init__(
        self, slurm: LoopbackCluster, folder: Path, policy: str = "sia", stages: Sequence[str] = (), **daemon: object
    ) -> None:
        self.slurm = slurm
        self.folder = folder
        self.spool = folder / "spool"
        self.state = folder / "state"
        self.log = folder / "penstockd.log"
        self.config = folder / "penstock.toml"
        self.daemon: BaseProcess | None = None
        self.gateway: CliGateway = CliGateway(conf=slurm.slurm_conf, timeout_s=60)
        self.partitions = ["all"]
        self.policy: dict[str, object] = {"name": policy, "stages": stages}
        self.settings: dict[str, object] = {
            "round_s": 2.0,
            "tick_s": 0.2,
            "restart_cost_s": 1.0,
        } | daemon
        self.safety: dict[str, object] = {"stop_share": 1.0, "grace_s": 10.0}
        """A round takes seconds here, so ten minutes of moves pass in one."""
        self.api: dict[str, object] = {"socket": str(self.state / "api.sock")}
        self.extra = ""
        """Further sections of the settings file."""
        self.files: tuple[int, int] | None = None
        """penstockd's limits on open files, soft and hard; None: those of the tests."""
        self.under: Sequence[str] = ()
        """A command that penstockd runs under, such as setpriv with its options."""
        self.slurm_settings: dict[str, object] = {"checkpoint_wait_s": 10, "start_patience_s": 20}
        self.constants: dict[str, dict[str, object]] = {}
        """Constants of the test, by section and name."""

    @property
    def store(self) -> str | Path:
        """Where the store is: a folder, or a database's URL."""
        return self.settings.get("store") or self.state  # type: ignore[return-value]

    def start(self, *, wait: bool = True) -> None:
        """Start penstockd; it keeps the state of the one before."""
        self.write_settings()
        before = self._started()
        arguments = (self.config, self.log, dict(os.environ), self.files, self.under, self.constants)
        self.daemon = FORKING.Process(target=penstockd, args=arguments)
        self.daemon.start()
        if wait:
            wait_for(lambda: self._started() > before, 300, "penstockd to start", details=self.tail)

    def write_settings(self) -> None:
        """Write the settings file of penstockd."""
        daemon = {"cluster": "slurm", "state_dir": str(self.state)} | self.settings
        slurm = {
            "partitions": self.partitions,
            "conf": str(self.slurm.slurm_conf),
            "spool_dir": str(self.spool),
        } | self.slurm_settings
        text = ""
        tables = {"daemon": daemon, "slurm": slurm, "policy": self.policy, "api": self.api}
        if "safety" in entry_points(group="penstock.settings").names:
            tables["safety"] = self.safety
        for name, table in tables.items():
            text += f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        self.config.write_text(text + self.extra)

    def _started(self) -> int:
        return self.log.read_text().count("event=started") if self.log.exists() else 0

    @property
    def runs(self) -> bool:
        """Whether penstockd runs."""
        return self.daemon is not None and self.daemon.is_alive()

    def kill(self) -> None:
        """End penstockd with -9."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.join()

    def ended(self, timeout_s: float = 120) -> int | None:
        """penstockd's exit status, minus the number of a signal that ended it; None if it runs on after all that time."""
        assert self.daemon is not None
        self.daemon.join(timeout_s)
        return self.daemon.exitcode

    def stop(self) -> None:
        """End penstockd as systemd would."""
        if self.daemon is not None and self.runs:
            self.daemon.terminate()
            status = self.ended()
            if status is None:
                self.kill()
            assert status == 0, self.tail()

    def sbatch(self, *arguments: str) -> str:
        """Submit, with the spool in the environment; the job's id."""
        environment = dict(os.environ, PENSTOCK_SPOOL=str(self.spool)) | self.slurm.environment()
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env=environment,
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(
        self,
        work_s: float,
        *flags: str,
        rates: dict[str, dict[str, float]] | None = None,
        options: str = "",
        **spec: object,
    ) -> str:
        """An emulated trainer: `work_s` seconds of work on one T4. Held, untyped GPUs, the job spec in its comment.

        `options` are further ones of the trainer's.
        """
        rates = rates or RATES
        comment = json.dumps({"penstock": {"max_gpus": 1, "goodput_table": rates, "checkpointable": True} | spec})
        held = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", f"--output={self.folder}/%j.out")
        return self.sbatch(*held, *flags, f"--wrap={self.trainer(work_s, rates)} {options}")

    def submit_with_flags(self, work_s: float, *flags: str) -> str:
        """The same by sbatch's flags, of whose speed nothing is known beforehand."""
        output = f"--output={self.folder}/%j.out"
        mode = [] if any(flag.startswith("--adaptive") for flag in flags) else ["--adaptive"]
        return self.sbatch(*mode, "--checkpointable", output, *flags, f"--wrap={self.trainer(work_s)}")

    def trainer(self, work_s: float, rates: dict[str, dict[str, float]] = RATES) -> str:
        """The command of an emulated trainer."""
        trainer = [
            f"exec {shlex.quote(sys.executable)} -m penstock_executor.emulated",
            f"--rates {shlex.quote(json.dumps(rates))} --work {work_s} --time-scale 1",
            f"--checkpoint-dir {shlex.quote(str(self.folder))}/checkpoints/$SLURM_JOB_ID",
            "--start-seconds 0.1 --save-seconds 0.1 --report-every 0.3",
        ]
        return " ".join(trainer)

    def job(self, job_id: str) -> SlurmJob:
        """Slurm's own record of a job."""
        return next(job for job in self.gateway.jobs(finished=True) if job.id == job_id)

    def states(self, *job_ids: str) -> dict[str, str]:
        """Slurm's states of these jobs."""
        return {job.id: job.state for job in self.gateway.jobs(finished=True) if job.id in job_ids}

    def wait_states(self, state: str, *job_ids: str, timeout_s: float = 180) -> None:
        """Wait until all of these jobs are in `state`."""
        wait_for(
            lambda: set(self.states(*job_ids).values()) == {state},
            timeout_s,
            f"jobs {job_ids} to be {state}",
            details=lambda: f"{self.states(*job_ids)}\n{self.tail()}",
        )

    def wait_completed(self, *job_ids: str, timeout_s: float = 180) -> None:
        """Wait until all of these jobs have completed, and the daemon has read what they said."""
        self.wait_states("COMPLETED", *job_ids, timeout_s=timeout_s)

        def missing() -> set[str]:
            bodies = [(job_id, report.body) for job_id, said in self.all_reports().items() for report in said]
            ended = {job_id for job_id, body in bodies if isinstance(body, Ended) and body.outcome == "completed"}
            return set(job_ids) - ended

        wait_for(lambda: not missing(), 120, f"the last reports of {job_ids}", details=self.tail)

    def tail(self) -> str:
        """The end of the daemon's log, and of the jobs' output."""
        outputs = "".join(f"--- {path.name}\n{path.read_text()[-800:]}" for path in sorted(self.folder.glob("*.out")))
        return (self.log.read_text()[-4000:] if self.log.exists() else "no log") + "\n" + outputs

    def all_reports(self) -> dict[str, list[Report]]:
        """What each job has reported, from the daemon's store."""
        seen: dict[str, dict[tuple[int, int], Report]] = {}
        with contextlib.closing(open_store(self.store)) as store:
            for report in store.reports():
                seen.setdefault(report.job_id, {})[report.epoch, report.sequence] = report
        return {job_id: [said[key] for key in sorted(said)] for job_id, said in seen.items()}

    def reports(self, job_id: str) -> list[Report]:
        """What a job has reported."""
        return self.all_reports().get(job_id, [])

    def starts(self, job_id: str) -> list[tuple[str, int, float]]:
        """(GPU type, GPUs, restored progress) of each run, in order."""
        return [
            (body.gpu_type, sum(map(len, body.gpu_ids.values())), body.progress)
            for report in self.reports(job_id)
            if isinstance(body := report.body, Started)
        ]

    def places(self, job_id: str) -> dict[int, str]:
        """Epoch -> first node of each run."""
        return {
            report.epoch: min(report.body.gpu_ids)
            for report in self.reports(job_id)
            if isinstance(report.body, Started)
        }

    def assert_progress_kept(self, job_id: str, lost: float) -> None:
        """Each run began within `lost` of where the one before was last seen, and never at 0 again."""
        seen = 0.0
        for report in self.reports(job_id):
            body = report.body
            if isinstance(body, Started):
                assert body.progress >= seen - lost, (
                    f"epoch {report.epoch} began at {body.progress}, {seen} was reached"
                )
            if isinstance(body, Started | Observation):
                seen = max(seen, body.progress)

    def assert_no_run_twice(self, *job_ids: str) -> None:
        """Runs of a job have ascending epochs and do not overlap in time."""
        reports = self.all_reports()
        for job_id in job_ids:
            runs: dict[int, list[float]] = {}
            for report in reports.get(job_id, ()):
                runs.setdefault(report.epoch, []).append(report.time_s)
            ordered = [runs[epoch] for epoch in sorted(runs)]
            for earlier, later in itertools.pairwise(ordered):
                assert max(earlier) <= min(later), f"two runs of job {job_id} at once"

    def wait_round(self, after: int = 0, timeout_s: float = 120) -> int:
        """Wait for a round after number `after`; its number."""

        def newest() -> int:
            try:
                with contextlib.closing(open_store(self.store)) as store:
                    numbers = store.round_numbers()
            except Exception:
                return 0
            return numbers[-1] if numbers and numbers[-1] > after else 0

        return int(wait_for(newest, timeout_s, f"a round after {after}", details=self.tail))


def remove_node(slurm: LoopbackCluster, node: str) -> None:
    """Take a node out of slurm.conf and start slurmctld again, as an admin does."""
    slurm.kill_slurmd(node)
    lines = slurm.slurm_conf.read_text().splitlines()
    kept = [re.sub(rf"\b{node},|,{node}\b", "", line) for line in lines if not line.startswith(f"NodeName={node} ")]
    slurm.slurm_conf.write_text("\n".join(kept) + "\n")
    slurm.nodes = tuple(each for each in slurm.nodes if each.name != node)
    slurm.stop_slurmctld()
    slurm.start_slurmctld()
    slurm.command("scontrol", "reconfigure")


def wait_saved(slurm: LoopbackCluster) -> None:
    """Wait until slurmctld has saved all that it knows of its jobs now. Killed before, it forgets their newest starts and ends.

    It saves within five seconds of a change, on a busy disk far later, and a save under way may not have the newest change. An
    update that changes nothing lets it save, perhaps before the command returns.
    """
    job, *_ = slurm.command("squeue", "-h", "-o", "%A").stdout.split()
    file = slurm.folder / "state" / "job_state"
    for _ in range(2):
        asked_s = time.time()
        slurm.command("scontrol", "update", f"jobid={job}", "nice=0")
        wait_for(lambda: file.stat().st_mtime > asked_s, 120, "slurmctld to save its jobs")  # noqa: B023


def pause(seconds: float) -> None:
    """Let the cluster run for a while."""
    time.sleep(seconds)
