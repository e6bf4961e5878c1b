"""The job's end of the channel to the agent of its node: a duty cycle between steps, a memory limit, and suspending.

Each process of the job has a `Channel` and calls `step_done` after each optimiser step. That reads the agent's control
message if it has changed, pauses as the duty cycle demands, and reports the steps (`penstock_profiles.node_channel`).
After AntMan (OSDI '20), which does this in the framework: at a compute share p, a step of d seconds is followed by a
pause of d (1 - p) / p. Without an agent, a step only costs a reading of the clock.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from penstock_executor.environment import Environment
from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import (
    MAX_RANKS,
    MAX_STATUS_BYTES,
    JobControl,
    JobStatus,
    bound_devices,
    control_path,
    statuses_dir,
)
from penstock_profiles.wire import read

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Time between two polls of the control message, and the longest sleep. A poll is one `stat`."""

STATUS_S = 0.5
"""Time between two statuses if nothing has changed."""

MOST_CREDIT_S = 0.1
"""Most time by which a pause that was too long shortens the next ones."""

FORMER_RUN_S = 30.0
"""A request that was older than this when the process began was made to an earlier run. An agent that is there may ask before the
process begins, and writes anew what it still wants."""


class Channel:
    """One process's channel.

    Args:
        folder: the agent's folder.
        number: SLURM_JOB_ID.
        rank: number of the process among the job's processes on this node.
        suspends: whether the process acts on `request`.
        anywhere: whether the suspended process can continue on other GPUs.
        devices: CUDA_VISIBLE_DEVICES.
        limit_memory: sets a memory limit, MB, before the next step; 0: no limit. None: there is no GPU.
        memory_mb: memory that the process holds on its GPU now, MB. None: there is no GPU.
        finish: waits until the GPU has done its work. Without it, a step ends before its work does.
        urgent: whether a pause must end now, because the process has something else to do.
        most_pause_s: longest pause after a step. Processes that exchange messages only in steps must make some.
        utilisation: utilisation of its GPU alone, in [0, 1]; None: unknown.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        rank: int = 0,
        *,
        suspends: bool = True,
        anywhere: bool = True,
        devices: str = "",
        limit_memory: Callable[[int], None] | None = None,
        memory_mb: Callable[[], float] | None = None,
        finish: Callable[[], None] | None = None,
        urgent: Callable[[], bool] | None = None,
        most_pause_s: float = math.inf,
        utilisation: float | None = None,
    ) -> None:
        self.urgent = urgent
        self._most_pause_s = most_pause_s
        self._control_path = control_path(folder, number)
        self._status_path = statuses_dir(folder, number) / f"{rank}.json"
        self._limit_memory, self._memory_mb, self._finish = limit_memory, memory_mb, finish
        self._control = JobControl(number=0)
        self._stamp: tuple[int, int, int] | None = None
        self._limit_mb = 0
        self._status = JobStatus(
            pid=os.getpid(),
            time_s=0.0,
            suspends=suspends,
            anywhere=anywhere,
            devices=devices,
            utilisation=utilisation,
        )
        self._over: str | None = None
        """The last request that the process has carried out, and that has ended."""
        self._process_began_s = _process_began_s()
        self._steps, self._seconds, self._squares, self._samples = 0, 0.0, 0.0, 0.0
        self._polled_s = self._written_s = -math.inf
        self._debt_s = 0.0
        """Pause that is still due, s; negative: the pauses were too long."""
        self._begun_s = time.monotonic()

    @property
    def compute(self) -> float:
        """Share of the time in which the job may train, by the last control message."""
        return self._control.compute

    @property
    def request(self) -> str | None:
        """The agent's request to move off the GPUs; None: there is none, or the process has done so.

        A request that is over counts no more, even if it still stands: who resumed the process was not its agent, which
        may be gone.
        """
        request = self._control.suspend
        return request if self._status.suspends and request not in (self._status.suspended, self._over) else None

    def step_done(self, samples: float = 0.0, active_s: float | None = None) -> None:
        """End an optimiser step, and pause as the duty cycle demands. Never raises.

        Args:
            samples: samples of the step, of the whole job.
            active_s: duration of the step after `finish`, s; None: all since the last step or `begin`.
        """
        if active_s is None:
            self.finish()
            active_s = time.monotonic() - self._begun_s
        self.count(1, active_s, samples)
        self.poll()
        self._pause(active_s)
        self.begin()

    def finish(self) -> None:
        """Under a duty cycle, wait until the GPU has done its work. Otherwise a step would seem to end before its work
        does."""
        if self._control.compute < 1 and self._finish is not None:
            self._finish()

    def begin(self) -> None:
        """Begin the next step now. The time since the last one does not belong to it."""
        self._begun_s = time.monotonic()

    def count(self, steps: int, each_s: float, samples: float = 0.0) -> None:
        """Count `steps` steps of `each_s` seconds each, with `samples` samples in total."""
        self._steps += steps
        self._seconds += steps * each_s
        self._squares += steps * each_s**2
        self._samples += samples

    def poll(self) -> None:
        """Read the control message if it has changed, and write the status if it is due."""
        now_s = time.monotonic()
        if now_s - self._polled_s < POLL_S:
            return
        self._polled_s = now_s
        changed = self._read()
        if changed and self._control.memory_mb != self._limit_mb:
            self._limit_mb = self._control.memory_mb
            if self._limit_memory is not None:
                self._limit_memory(self._limit_mb)
        if changed or now_s - self._written_s >= STATUS_S:
            self._write_status()

    def suspended(self, request: str, moved_mb: float = 0.0, left_mb: float = 0.0) -> None:
        """Report that the process stands still, moved off its GPUs."""
        self._status = self._status.model_copy(update={"suspended": request, "moved_mb": moved_mb, "left_mb": left_mb})
        self._write_status()

    def wants(self, request: str) -> bool:
        """Whether the agent still makes this request."""
        self._polled_s = -math.inf
        self.poll()
        return self._control.suspend == request

    def resumed(self) -> None:
        """Report that the process trains again."""
        self._over = self._status.suspended
        self._status = self._status.model_copy(update={"suspended": None, "moved_mb": 0.0, "left_mb": 0.0})
        self._debt_s = 0.0
        self._write_status()
        self.begin()

    def _pause(self, active_s: float) -> None:
        began_s = time.monotonic()
        while self.request is None and not (self.urgent is not None and self.urgent()):
            share = self._control.compute
            if share >= 1:
                break
            owed_s = math.inf if share == 0 else self._debt_s + active_s * (1 / share - 1)
            left_s = min(owed_s, self._most_pause_s) - (time.monotonic() - began_s)
            if left_s <= 0:
                self._debt_s = max(left_s, -MOST_CREDIT_S)
                return
            time.sleep(min(left_s, POLL_S))
            self.poll()
        self._debt_s = 0.0

    def _read(self) -> bool:
        """Read the control message. Returns whether it has changed."""
        try:
            status = self._control_path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return False
            control = read(JobControl, self._control_path.read_bytes()[:MAX_STATUS_BYTES])
        except FileNotFoundError:
            # An agent keeps its message in place. It removes it when it lets go of the job.
            if self._stamp is None:
                return False
            control, stamp = JobControl(number=0), None
        except (OSError, ValueError) as error:
            log.debug("the control message of the node's agent cannot be read: %s", error)
            return False
        if stamp is not None and stamp[0] / 1e9 < self._process_began_s - FORMER_RUN_S:
            self._over = control.suspend  # of an earlier run, by an agent that is gone
        self._control, self._stamp = control, stamp
        return True

    def _write_status(self) -> None:
        self._written_s = time.monotonic()
        if self._stamp is None:
            return  # there is no agent
        self._status = self._status.model_copy(
            update={
                "number": self._control.number,
                "time_s": time.time(),
                "compute": self._control.compute,
                "steps": self._steps,
                "seconds": self._seconds,
                "squares": self._squares,
                "samples": self._samples,
                "memory_mb": self._memory_mb() if self._memory_mb is not None else 0.0,
            }
        )
        try:
            write_whole(self._status_path, self._status.model_dump_json())
        except OSError as error:
            log.debug("the status for the node's agent cannot be written: %s", error)


def _process_began_s() -> float:
    """When this process began, s since 1970; 0: unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")


def open_channel(
    environment: Environment,
    rank: int = 0,
    *,
    suspends: bool = True,
    anywhere: bool = True,
    limit_memory: Callable[[int], None] | None = None,
    memory_mb: Callable[[], float] | None = None,
    finish: Callable[[], None] | None = None,
    most_pause_s: float = math.inf,
    utilisation: float | None = None,
) -> Channel | None:
    """Open the channel of this process. Returns None outside Slurm. See `Channel` for the arguments."""
    number = environment.job_id
    if environment.run_dir is None or number is None or not number.isdigit() or rank >= MAX_RANKS:
        return None
    return Channel(
        environment.run_dir,
        int(number),
        rank,
        suspends=suspends,
        anywhere=anywhere,
        devices=environment.visible_devices,
        limit_memory=limit_memory,
        memory_mb=memory_mb,
        finish=finish,
        most_pause_s=most_pause_s,
        utilisation=utilisation,
    )


def devices_of_job(environment: Environment) -> tuple[int, ...]:
    """GPUs of this node to which the agent has bound the job; (): it has not."""
    number = environment.job_id
    if environment.run_dir is None or number is None or not number.isdigit():
        return ()
    return bound_devices(environment.run_dir, int(number))
