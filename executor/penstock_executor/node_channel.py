"""The job's end of the channel to the agent of its node: a duty cycle between steps, a memory limit, and suspending.

Each process of the job has one. After each optimiser step it calls `step_done`, which reads the agent's word when that has
changed, waits as long as the duty cycle wants, and tells how the steps go (`penstock_profiles.node_channel`). After AntMan (OSDI
'20), where this is in the framework: at a compute share p a step of d seconds is followed by a pause of d (1 - p) / p. Where no
agent listens, a step costs a look at the clock.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

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

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two looks at the agent's word, and the longest sleep: a look is one `stat`."""

TELL_S = 0.5
"""Between two status files, where nothing special has happened."""

MOST_CREDIT_S = 0.1
"""A sleep that came out too long is taken off the next ones, up to this."""


class Channel:
    """See the module.

    Args:
        folder: the agent's.
        number: SLURM_JOB_ID.
        rank: place among the job's processes on this node.
        suspends: whether `request` is listened to.
        anywhere: whether the process, suspended, can go on on any other GPUs.
        devices: CUDA_VISIBLE_DEVICES.
        limit_memory: carries out a limit of so many MB, 0 for none, before the next step; None: there is no GPU to limit.
        memory_mb: what is held on the GPU now; None: nothing.
        finish: waits until the GPU has done what it was given; without it a step is over before its work is.
        urgent: whether a pause is to end now, since the process has something else to do.
        most_pause_s: longest pause after a step. Processes that exchange what they have heard only in steps must make some.
        utilisation: part of its GPU that it uses alone, where it knows.
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
        self._steps, self._seconds, self._squares, self._samples = 0, 0.0, 0.0, 0.0
        self._looked_s = self._told_s = -math.inf
        self._debt_s = 0.0
        """Pause that is still owed; negative: that was too much."""
        self._begun_s = time.monotonic()

    @property
    def compute(self) -> float:
        """Part of the time in which the job may train, by the agent's last word."""
        return self._control.compute

    @property
    def request(self) -> str | None:
        """The agent's job spec that the job moves off its GPUs; None: it has none, or the job has said that it has done so."""
        spec = self._control.suspend
        return spec if self._status.suspends and spec != self._status.suspended else None

    def step_done(self, samples: float = 0.0, active_s: float | None = None) -> None:
        """One optimiser step is over, of so many samples of the whole job. Waits as the duty cycle wants; never raises.

        `active_s` is how long it took, after `finish`; None: all since the last one, or `begin`.
        """
        if active_s is None:
            self.finish()
            active_s = time.monotonic() - self._begun_s
        self.count(1, active_s, samples)
        self.look()
        self._pause(active_s)
        self.begin()

    def finish(self) -> None:
        """Under a duty cycle, wait until the GPU has done what it was given: else a step seems over before its work is."""
        if self._control.compute < 1 and self._finish is not None:
            self._finish()

    def begin(self) -> None:
        """The next step begins now: what was between is none of it."""
        self._begun_s = time.monotonic()

    def count(self, steps: int, each_s: float, samples: float = 0.0) -> None:
        """So many steps were made, of `each_s` seconds, and of so many samples all together."""
        self._steps += steps
        self._seconds += steps * each_s
        self._squares += steps * each_s**2
        self._samples += samples

    def look(self) -> None:
        """Read the agent's word if it has changed, and tell how it goes if it is time."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        changed = self._read()
        if changed and self._control.memory_mb != self._limit_mb:
            self._limit_mb = self._control.memory_mb
            if self._limit_memory is not None:
                self._limit_memory(self._limit_mb)
        if changed or now_s - self._told_s >= TELL_S:
            self._tell()

    def suspended(self, request: str, moved_mb: float = 0.0, left_mb: float = 0.0) -> None:
        """Say that the process stands still, moved off its GPUs."""
        self._status = self._status.model_copy(update={"suspended": request, "moved_mb": moved_mb, "left_mb": left_mb})
        self._tell()

    def wants(self, request: str) -> bool:
        """Whether the agent still job specs it."""
        self._looked_s = -math.inf
        self.look()
        return self._control.suspend == request

    def resumed(self) -> None:
        """Say that the process trains on."""
        self._status = self._status.model_copy(update={"suspended": None, "moved_mb": 0.0, "left_mb": 0.0})
        self._debt_s = 0.0
        self._tell()
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
            time.sleep(min(left_s, LOOK_S))
            self.look()
        self._debt_s = 0.0

    def _read(self) -> bool:
        """Whether the control is another one now."""
        try:
            status = self._control_path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return False
            control = JobControl.model_validate_json(self._control_path.read_bytes()[:MAX_STATUS_BYTES])
        except FileNotFoundError:
            # An agent leaves its word in place: one that takes it away has nothing to say any more.
            if self._stamp is None:
                return False
            control, stamp = JobControl(number=0), None
        except (OSError, ValidationError) as error:
            log.debug("the node's agent is not understood: %s", error)
            return False
        self._control, self._stamp = control, stamp
        return True

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        if self._stamp is None:
            return  # nobody listens
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
            log.debug("the node's agent cannot be told: %s", error)


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
    """The channel of this process; None outside Slurm. See `Channel` for the arguments."""
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
    """The GPUs of this node to which the agent has bound the job; () if it has not."""
    number = environment.job_id
    if environment.run_dir is None or number is None or not number.isdigit():
        return ()
    return bound_devices(environment.run_dir, int(number))
