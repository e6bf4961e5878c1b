"""Errors of a loopback cluster. There is a subclass only where a caller acts differently."""

from collections.abc import Mapping

from penstock_scheduler.people.errors import PenstockError


class LoopbackError(PenstockError):
    """The loopback cluster cannot do what was asked. The message has the remedy."""


class NotRunning(LoopbackError):
    """No cluster runs in the folder: `down` has nothing to do, everything else needs `up` first."""


class PortInUse(LoopbackError):
    """Another process listens on a port that the cluster needs. Other ports may be free."""


class ProgramsMissing(LoopbackError):
    """Slurm, MUNGE or MariaDB is not installed. Tests skip.

    Attributes:
        packages: the Debian package of each missing program, by the program's name.
    """

    def __init__(self, packages: Mapping[str, str]) -> None:
        self.packages = dict(packages)
        super().__init__(
            f"not found on PATH nor in /usr/sbin: {', '.join(self.packages)}; "
            f"on Debian or Ubuntu: apt-get install {' '.join(sorted(set(self.packages.values())))}"
        )


class CommandFailed(LoopbackError):
    """A Slurm command ended with an exit status other than 0.

    Attributes:
        returncode: its exit status.
        stdout, stderr: what it printed.
    """

    def __init__(self, argv: tuple[str, ...], returncode: int, stdout: str, stderr: str) -> None:
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr
        super().__init__(f"`{' '.join(argv)}` ended with {returncode}: {(stderr or stdout).strip()}")
