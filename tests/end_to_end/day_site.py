"""A site that an admin sets up by the pages, word for word, beside a real Slurm, and what must hold there after every act."""

from __future__ import annotations

import getpass
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from penstock_loopback import LoopbackCluster, wait_for
from penstock_profiles.wire import Observation, Started
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.cli import make_app
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.base import ENDED
from tests.end_to_end.pages import blocks, run
from tests.end_to_end.site import Site

NODES = "t4:6x4,a100:3x4"
"""36 GPUs."""

PATIENCE_S, LATE_S = 20.0, 30.0
"""How long an ordinary job waits before GPUs are kept free for it; and how long rounds, stops and starts may take then."""

LOST = 5.0 * 14.4
"""Progress in five seconds of the fastest configuration: what a job that saves before it stops may seem to have lost."""

ELSEWHERE = re.compile(r"(apt-get|python3 -m venv|/opt/penstock/bin/pip|ln -sf|systemctl) ")
"""Commands of the pages for a machine of one's own (deploy/follow-install-page runs them); here penstockd is started itself."""

NONSENSE = re.compile(r"\b0\.00 of ,|\bof ,|\bNone\b|\bnan\b|\binf\b|\b1970-|Traceback")

TIMES = {"from_s", "to_s", "run_s", "submit_s", "start_s", "end_s", "time_s", "since_s"}
"""Keys of what has happened."""

SETTINGS = """conf = "{conf}"
checkpoint_wait_s = 10
start_patience_s = 20
plain_patience_s = {patience}
[daemon]
cluster = "slurm"
state_dir = "{state}"
round_s = 3.0
tick_s = 0.3
[safety]
grace_s = 15.0
[api]
socket = "{socket}"
"""
"""What the day has shorter, or elsewhere, than the page's file, which ends with section [slurm]."""


@dataclass(frozen=True, slots=True)
class Before:
    """The jobs before an act. `runs`: job -> its newest run's epoch; `jobs`: Slurm's records."""

    time_s: float
    runs: dict[str, int]
    jobs: dict[str, SlurmJob]


class DaySite(Site):
    """The site. Jobs are a user's who knows no variable of Penstock's."""

    def __init__(self, slurm: LoopbackCluster, folder: Path) -> None:
        super().__init__(slurm, folder)
        self.config = folder / "etc" / "penstock.toml"
        self.adaptive: list[str] = []
        """The jobs that train all day."""
        self.ordinary: list[str] = []
        """The jobs without a job spec that run all day."""
        self.waited: list[str] = []
        """Ordinary jobs that came when no GPU was free."""
        units = folder / "units"
        units.mkdir()
        self._paths = {
            "/etc/penstock": str(self.config.parent),
            "/var/spool/penstock": str(self.spool),
            "/etc/systemd/system": str(units),
            '"gpu"': '"all"',
        }
        config = f"--config {self.config}"
        install = f"{config} --prefix {folder}/lib --schedule systemd --schedule-dir {units}"
        self._options = dict.fromkeys(("check", "sync", "unit", "uninstall"), config) | {"install": install}

    # --- by the pages

    def admin(self, line: str, *, fails: bool = False) -> str:
        """What a command of an admin prints. The paths of the pages become this site's."""
        for path, here in self._paths.items():
            line = line.replace(path, here)
        line = re.sub(r"\bNAME\b", getpass.getuser(), line)
        line = re.sub(r"\bpenstock slurm (\w+)", lambda found: f"{found[0]} {self._options[found[1]]}", line)
        environment = self.slurm.environment()
        if line.startswith("penstock ") and " slurm " not in line:
            environment |= {"PENSTOCK_URL": self.url}
        done = run(line, self.folder, environment)
        assert (done.returncode != 0) == fails, f"`{line}` ended with {done.returncode}: {done.stdout[-1500:]}"
        return done.stdout

    def install(self) -> str:
        """Follow docs/admin/install.md."""
        commands = 0
        for line in blocks("docs/admin/install.md", "# as root, on the host of slurmctld, in a clone")[0]:
            if ELSEWHERE.match(line):
                continue
            told = self.admin(line)
            commands += 1
            if line.startswith("printf "):
                paths = {"state": self.state, "socket": self.state / "api.sock", "conf": self.slurm.slurm_conf}
                more = SETTINGS.format(patience=PATIENCE_S, **paths)
                self.config.write_text(self.config.read_text() + more)
            if "--check" in line:
                assert "settings: ok" in told, told
        unit = (self.folder / "units" / "penstockd.service").read_text()
        assert f"--config {self.config}" in unit, unit
        self.start()
        for line in blocks("docs/admin/install.md", "# as a user")[0]:
            if line == "penstock doctor":
                wait_for(lambda: not self.unhealthy(), 60, "doctor to be content", details=self.unhealthy)
            else:
                self.admin(line)
        return f"{commands} commands; penstockd serves"

    def install_plugin(self) -> str:
        """Follow docs/admin/sbatch-plugin.md."""
        told = ""
        page = "docs/admin/sbatch-plugin.md"
        for line in blocks(page, "# as root")[0]:
            if not ELSEWHERE.match(line):
                told = self.admin(line)
                assert "FAILED" not in told, f"{line}: {told}"
        assert "its report reaches penstockd" in told, told
        for line in blocks(page, "# as a user")[0]:
            self.admin(line)
        return "every line of `check --submit` is ok"

    def write_settings(self) -> None:
        """The page has written them."""

    # --- as a user

    def sbatch(self, *arguments: str) -> str:
        """Submit as a user who has exported nothing; the job's id."""
        return self.slurm.command("sbatch", "--parsable", *arguments, timeout_s=120).stdout.strip()

    def train(self, gpus: int, work_s: float = 1e7) -> str:
        """Submit a training job with the executor's reports."""
        words = ("--adaptive", "--checkpointable", f"--max-gpus={gpus}", f"--output={self.folder}/%j.out")
        return self.sbatch(*words, f"--wrap={self.trainer(work_s)} --report-every 2")

    def plain(self, gpus: int, seconds: float, *flags: str) -> str:
        """Submit an ordinary job."""
        return self.sbatch(f"--gres=gpu:{gpus}", "--output=/dev/null", *flags, f"--wrap=exec sleep {seconds}")

    @property
    def url(self) -> str:
        """PENSTOCK_URL of this site."""
        return f"unix:{self.state / 'api.sock'}"

    def penstock(self, *words: str) -> str:
        """What a command prints, whatever its exit status."""
        environment = {"PENSTOCK_URL": self.url} | self.slurm.environment()
        return CliRunner().invoke(make_app(), list(words), env=environment).output

    # --- what is seen

    def jobs(self) -> dict[str, SlurmJob]:
        """Slurm's records by id."""
        return {job.id: job for job in self.gateway.jobs(finished=True)}

    def newest_runs(self) -> dict[str, int]:
        """Job -> epoch of its newest run that has reported."""
        return {
            job: max((report.epoch for report in said if isinstance(report.body, Started)), default=0)
            for job, said in self.all_reports().items()
        }

    def before(self) -> Before:
        """The jobs now."""
        return Before(time.time(), self.newest_runs(), self.jobs())

    def health(self) -> Health:
        """What penstockd says of itself."""
        with Client(self.url) as penstock:
            return penstock.ready()

    def unhealthy(self) -> str:
        """What `penstock doctor` does not call ok; empty: all is ok."""
        lines = self.penstock("doctor").splitlines()
        return "; ".join(" ".join(line.split()) for line in lines if re.search(r"\b(WARNING|FAILED)\b|Error", line))

    def wait_doctor(self, words: str, timeout_s: float = 90) -> str:
        """Wait until doctor says these words about what is wrong."""
        wait_for(lambda: words in self.unhealthy(), timeout_s, f"doctor to say {words!r}", details=self.unhealthy)
        return self.unhealthy()

    def moved(self, before: Before) -> list[str]:
        """Training jobs that do not hold what they held, or run again."""
        now = self.jobs()
        return [job for job in self.adaptive if _held(now.get(job)) != _held(before.jobs.get(job))]

    # --- what must hold

    def wrong(self, before: Before) -> list[str]:
        """Everything that is wrong after an act that began at `before`."""
        found = self._ordinary(before)
        wait_for(lambda: not self.unhealthy(), 90, "doctor to be content after the act", details=self.unhealthy)
        return [*found, *self._lost(before), *self._without_reason(before), *self._overtaken(), *self._nonsense()]

    def _ordinary(self, before: Before) -> list[str]:
        now = self.jobs()
        return [
            f"ordinary job {job} was {_held(before.jobs[job])} and is {_held(now.get(job))}"
            for job in self.ordinary
            if job in before.jobs and _held(now.get(job)) != _held(before.jobs[job])
        ]

    def _lost(self, before: Before) -> list[str]:
        found = []
        for job, said in self.all_reports().items():
            reached = 0.0
            for report in said:
                body = report.body
                if (
                    isinstance(body, Started)
                    and report.epoch > before.runs.get(job, 0)
                    and body.progress < reached - LOST
                ):
                    found.append(f"job {job}, run {report.epoch}, began at {body.progress:.0f} of {reached:.0f}")
                if isinstance(body, Started | Observation):
                    reached = max(reached, body.progress)
        return found

    def _without_reason(self, before: Before) -> list[str]:
        """Training jobs that were stopped and whose history has no reason."""
        runs = self.newest_runs()
        found = []
        with Client(self.url) as penstock:
            for job in self.moved(before):
                if before.runs.get(job, 0) == 0 or runs.get(job, 0) == before.runs[job]:
                    continue  # its first run, or none after it yet
                outcomes = penstock.history(job).outcomes
                told = [each.stop for each in outcomes if each.stop and each.time_s >= before.time_s - 10]
                spans = [each for each in penstock.allocations(job) if (each.to_s or 0) >= before.time_s - 10]
                told += [each.end_text or each.end for each in spans if each.end not in ("", "unknown")]
                if not told:
                    found.append(f"job {job} runs again, and its history does not say why")
        return found

    def _overtaken(self) -> list[str]:
        """Ordinary jobs that wait, or waited, for longer than `PATIENCE_S` while a later adaptive job started."""
        jobs = self.jobs()
        found = []
        for ordinary in (jobs[each] for each in (*self.ordinary, *self.waited) if each in jobs):
            until_s = ordinary.start_s if ordinary.state != "PENDING" and ordinary.start_s else time.time()
            due_s = ordinary.submit_s + PATIENCE_S + LATE_S
            found += [
                f"adaptive job {job.id} of {job.submit_s - ordinary.submit_s:.0f} s later overtook ordinary job {ordinary.id}"
                for job in jobs.values()
                if '"penstock"' in job.admin_comment
                and job.restarts == 0
                and job.submit_s > ordinary.submit_s
                and job.state != "PENDING"
                and due_s < (job.start_s or 0) < until_s
            ]
        return found

    def _nonsense(self) -> list[str]:
        texts = [self.penstock("list", "--all"), self.penstock("list", "--waiting")]
        texts += [self.penstock(word, job) for word in ("show", "history") for job in self.adaptive]
        found = [line.strip() for text in texts for line in text.splitlines() if NONSENSE.search(line)]
        now_s = time.time() + 5.0
        with Client(self.url) as penstock:
            told = [view.model_dump(exclude={"estimate", "spec"}) for view in penstock.jobs()]
            told += [each.model_dump(exclude={"estimate"}) for each in penstock.queue()]
            for job in self.adaptive:
                told += [each.model_dump() for each in penstock.allocations(job)]
                told += [each.model_dump() for each in penstock.history(job).outcomes]
        for each in told:
            late = {key: each[key] for key in TIMES & each.keys() if each[key] is not None and each[key] > now_s}
            if late:
                found.append(
                    f"job {each.get('job', each.get('id'))} has times in the future: {late}, it is {now_s - 5:.0f}"
                )
        return found


def _held(job: SlurmJob | None) -> tuple[object, ...]:
    return () if job is None else (job.state, job.start_s, job.restarts, job.nodes)


def over(site: DaySite, *jobs: str) -> bool:
    """Whether all of these jobs have ended."""
    known = site.jobs()
    return all(job not in known or known[job].state in ENDED for job in jobs)


def remove_store(site: DaySite) -> None:
    """`rm penstock.db*`."""
    for file in site.state.glob("penstock.db*"):
        file.unlink()


def copy_of(path: Path) -> Path:
    """A copy beside a file."""
    return Path(shutil.copy(path, path.with_name(f"{path.name}.before")))
