"""The Slurm of this machine: its configuration in slurmctld, and its commands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.safety import children


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """Slurm's commands for the Slurm of `conf`. None: that of SLURM_CONF or the default."""

    conf: Path | None
    timeout_s: float = 15.0

    def run(self, *argv: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command, as another user if given. Variables of Slurm and Penstock are removed from its environment.

        Raises:
            PenstockError: the command is not installed, or gives no answer.
        """
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "PENSTOCK_")) or key == "SLURM_CONF"
        }
        if self.conf is not None:
            environment["SLURM_CONF"] = str(self.conf)
        account = None if user is None else children.account_of(user)
        try:
            path = children.program(argv[0])
            done = children.run([path, *argv[1:]], env=environment, timeout_s=self.timeout_s, account=account)
            return subprocess.CompletedProcess(argv, done.returncode, done.out, done.err)
        except children.CannotStart:
            raise PenstockError(f"{argv[0]} is not on PATH; install Slurm's commands (Debian: slurm-client)") from None
        except children.TookTooLong:
            raise PenstockError(f"{argv[0]} gave no answer in {self.timeout_s:g} s; does slurmctld run?") from None

    def config(self) -> dict[str, str]:
        """The configuration from `scontrol show config`, key -> value. "(null)" becomes "".

        Raises:
            PenstockError: slurmctld does not answer.
        """
        done = self.run("scontrol", "show", "config")
        if done.returncode != 0:
            raise PenstockError(f"scontrol show config: {(done.stderr or done.stdout).strip()}")
        pairs = re.findall(r"^(\S+)\s+= (.*)$", done.stdout, re.MULTILINE)
        return {key: "" if value.strip() == "(null)" else value.strip() for key, value in pairs}


def constrains_devices(config: Mapping[str, str]) -> bool:
    """Whether Slurm constrains devices. `SlurmCommands.config` includes cgroup.conf."""
    by_cgroup = "cgroup" in config.get("TaskPlugin", "task/cgroup")  # without it cgroup.conf has no effect
    return by_cgroup and config.get("ConstrainDevices", "no").lower() == "yes"


def allocates_memory(config: Mapping[str, str]) -> bool:
    """Whether Slurm allocates memory, as it does CPUs (SelectTypeParameters=CR_Core_Memory)."""
    return "MEMORY" in config.get("SelectTypeParameters", "").upper()


def admins(config: dict[str, str]) -> set[int]:
    """Root's user id and SlurmUser's, from `slurm(64030)`."""
    match = re.search(r"\((\d+)\)", config.get("SlurmUser", ""))
    return {0} | ({int(match.group(1))} if match else set())
