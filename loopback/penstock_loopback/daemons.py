"""The daemons of a loopback cluster: starting, recording, watching and ending them."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock_loopback import machine, processes
from penstock_loopback.errors import LoopbackError, PortInUse
from penstock_loopback.processes import Process, wait_for

_children: list[subprocess.Popen[bytes]] = []
"""Daemons of all clusters that this process has started, kept to be reaped. They outlive the cluster objects."""


class Daemons:
    """The daemons of the cluster in `folder`, by name.

    They outlive this object and this process. `record` is called after each start, so that the processes can be found again.
    """

    def __init__(self, folder: Path, record: Callable[[], None]) -> None:
        self.processes: dict[str, Process] = {}
        self._folder = folder
        self._record = record

    @property
    def log_folder(self) -> Path:
        """The folder of the daemons' logs."""
        return self._folder / "log"

    def start(self, name: str, program: str, *argv: str, environment: Mapping[str, str]) -> None:
        """Start a daemon unless it runs. `environment` is added to this process's, without Slurm's variables."""
        if name in self.processes and processes.alive(self.processes[name]):
            return
        path = machine.program(program)
        assert path is not None, f"{program} was there when the cluster started"
        with (self.log_folder / f"{name}.err").open("ab") as log:
            child = subprocess.Popen(
                [path, *argv],
                env=outer_environment() | dict(environment) | {processes.MARK: str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C in the terminal is not for the daemons
            )
        _children.append(child)
        self.processes[name] = processes.identify(child.pid)
        self._record()

    def end(self, name: str, number: signal.Signals, timeout_s: float = 60) -> None:
        """Send a daemon a signal and wait until it has ended. Raises LoopbackError if it has not in time."""
        process = self.processes[name]
        processes.send(process, number)
        self.wait(lambda: not processes.alive(process), timeout_s, f"{name} has ended")
        reap()

    def alive(self) -> set[Process]:
        """The daemons that run."""
        return {process for process in self.processes.values() if processes.alive(process)}

    def dead(self) -> list[str]:
        """The names of daemons that should run but do not."""
        return [name for name, process in self.processes.items() if not processes.alive(process)]

    def check(self, *only: str) -> None:
        """Check that all daemons, or `only` those named, run.

        Raises:
            PortInUse: a daemon ended because its port is in use.
            LoopbackError: a daemon ended; the message has the end of its log.
        """
        for name in self.dead():
            if not only or name in only:
                lines = self.last_lines(name)
                if "Address already in use" in lines:
                    raise PortInUse(f"{name} found its port in use; the end of its log:\n{lines}")
                raise LoopbackError(f"{name} died; the end of its log, in {self.log_folder}:\n{lines}")

    def last_lines(self, name: str, count: int = 15) -> str:
        """The end of a daemon's log, indented."""
        for ending in (".err", ".log"):
            path = self.log_folder / f"{name}{ending}"
            if path.exists() and (lines := path.read_text(errors="replace").splitlines()):
                return "\n".join(f"  {line}" for line in lines[-count:])
        return "  (empty)"

    def wait(self, predicate: Callable[[], bool], timeout_s: float, what: str, daemon: str | None = None) -> None:
        """Wait until `predicate` is true. Raises LoopbackError after `timeout_s` seconds, or once `daemon` has ended."""

        def ready() -> bool:
            if daemon is not None:
                self.check(daemon)
            return predicate()

        try:
            wait_for(ready, timeout_s, what, poll_s=0.03, details=lambda: self.last_lines(daemon or "slurmctld"))
        except TimeoutError as error:
            raise LoopbackError(f"{error}\nthe logs are in {self.log_folder}") from None


def outer_environment() -> dict[str, str]:
    """This process's environment without Slurm's variables: those of a job, or options in SBATCH_*, would mislead commands."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "SCONTROL_", processes.MARK))
    }


def reap() -> None:
    """Reap the daemons that have ended."""
    _children[:] = [child for child in _children if child.poll() is None]


def listens(where: Path | int) -> bool:
    """Whether a process listens on a Unix socket or a local TCP port."""
    family, address = (socket.AF_INET, ("127.0.0.1", where)) if isinstance(where, int) else (socket.AF_UNIX, str(where))
    with socket.socket(family) as probe:
        probe.settimeout(1)
        return probe.connect_ex(address) == 0
