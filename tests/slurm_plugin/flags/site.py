"""A loopback Slurm on which `penstock slurm install` has run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from typer.testing import CliRunner, Result

from penstock_loopback import LoopbackCluster
from penstock_scheduler.model import JobSpec, parse_spec
from penstock_slurm.gateway import CliGateway, SlurmJob
from penstock_slurm.install.cli import app

NOBODY = 65534


SAVING = "will not be moved or resized before it has saved a checkpoint"


def other_messages(stderr: str) -> str:
    """What sbatch says besides what every adaptive job is told that may be moved and does not say that it saves."""
    return "".join(line for line in stderr.splitlines(keepends=True) if SAVING not in line)


class FlagSite:
    """Its cluster and settings file, and ways to submit as root or as another user."""

    def __init__(self, folder: Path, slurm: LoopbackCluster) -> None:
        self.folder = folder
        self.slurm = slurm
        self.config = folder / "penstock.toml"
        self.etc = slurm.slurm_conf.parent
        self.gateway = CliGateway(conf=slurm.slurm_conf, timeout_s=20)
        self.output = folder / "output"
        self.output.mkdir(exist_ok=True)
        self.output.chmod(0o1777)

    def penstock(self, *argv: str) -> Result:
        """`penstock slurm ...`."""
        return CliRunner().invoke(app, [argv[0], "--config", str(self.config), *argv[1:]])

    def settings(self, *lines: str) -> None:
        """Write the settings file."""
        text = ["[slurm]", "partitions = ['all', 't4']", f"conf = '{self.slurm.slurm_conf}'", *lines]
        self.config.write_text("\n".join(text) + "\n")

    def install(self, *options: str) -> None:
        """Attach Penstock and check it."""
        self.settings()
        done = self.penstock(
            *("install", "--apply", "--prefix", str(self.folder / "lib"), "--schedule", "cron"),
            *("--schedule-dir", str(self.folder / "cron"), *options),
        )
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a user."""
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "PENSTOCK_"))
        }
        return clean | self.slurm.environment() | more

    def run(
        self, *argv: str, user: int | None = None, timeout_s: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of a user of this site."""
        return subprocess.run(
            argv,
            env=self.environment(**environment),
            cwd=self.output,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # Slurm prints the input unchanged
            timeout=timeout_s,
            check=False,
        )

    def sbatch(
        self, *argv: str, user: int | None = None, script: str = "true", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """sbatch with these flags; the job's output is `job-ID.out`."""
        wrap = ["--wrap", script] if not any(each.startswith("/") for each in argv) else []
        return self.run("sbatch", "--parsable", "--output=job-%j.out", *wrap, *argv, user=user, **environment)

    def submit(self, *argv: str, user: int | None = None, script: str = "true", **environment: str) -> SlurmJob:
        """A job that is accepted with no message but that of saving."""
        done = self.sbatch(*argv, user=user, script=script, **environment)
        assert (done.returncode, other_messages(done.stderr)) == (0, ""), done.stderr
        return self.job(done.stdout.strip())

    def refusal(self, *argv: str, user: int | None = None, **environment: str) -> str:
        """The message to the user of a job that is refused."""
        done = self.sbatch(*argv, user=user, **environment)
        assert done.returncode != 0, f"{argv} was accepted as {done.stdout}"
        return done.stderr

    def job(self, job_id: str) -> SlurmJob:
        """Slurm's record."""
        return next(job for job in self.gateway.jobs(finished=True) if job.id == job_id)

    def spec(self, *argv: str, **environment: str) -> JobSpec:
        """The job spec of a job with these flags."""
        spec = parse_spec(self.submit(*argv, **environment).admin_comment)
        assert spec is not None
        return spec

    def text(self, job_id: str) -> str:
        """A job's output."""
        path = self.output / f"job-{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""
