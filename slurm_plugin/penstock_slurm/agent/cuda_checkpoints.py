"""Suspending by NVIDIA's driver: what a job has on its GPU moves to the host before Slurm freezes the job, and back
once Slurm has resumed it. The job's program knows nothing of it.

A call of the driver takes a second and more, and may hang. So a process of its own makes it
(`penstock_profiles.cuda_checkpoint`), and the agent's tick only looks whether that has ended. Such a helper ends what
it has begun even if the agent is killed, and the next agent's helper waits for it.

`cuda_checkpointed` of a job is in the saved state before a helper begins: from then on the driver may have locked the
process, so that its CUDA calls wait until it is restored. To restore a process that runs does nothing. So that is tried
as soon as the job runs, and until the driver says that the process runs.

Host memory that a process may still take before its cgroup's limit: what Slurm's `--mem` leaves it.

A checkpoint moves GPU memory into the process's own host memory. Beyond the limit, the kernel would end the job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from penstock_profiles.cuda_checkpoint import NO_DRIVER, NO_ROOM
from penstock_profiles.nvml import Sample
from penstock_slurm.agent.node_state import RETRY_S, NodeState
from penstock_slurm.agent.state import DepartingJob, LocalJob

log = logging.getLogger(__name__)

PYTHON = sys.executable
"""What helpers run. Jobs' users must be able to run it."""

SPARE_MB = 256
"""Host memory that must be left to a job beside what a checkpoint takes."""

GIVEN_UP_S = 2.0
"""How long a helper that was killed is waited for. One that hangs in the kernel does not end."""

LAST_S = 20.0
"""How long an agent that stops waits for its helpers."""


@dataclass(slots=True)
class Helper:
    """A process that asks the driver."""

    verb: Literal["suspend", "resume"]
    pids: tuple[int, ...]
    process: subprocess.Popen[str]
    began_s: float
    """By the clock that is never set back."""

    @property
    def age_s(self) -> float:
        """For how long it has been at work."""
        return time.monotonic() - self.began_s


def _group(pid: int) -> int:
    """The group of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return int(next(line for line in text.splitlines() if line.startswith("Gid:")).split()[1])


def _said(stderr: IO[str]) -> str:
    """What a helper has said that has ended. It ran as a user, who may have given the pipe to a process that lives on."""
    os.set_blocking(stderr.fileno(), False)
    try:
        return os.read(stderr.fileno(), 2**12).decode(errors="replace").strip()
    except BlockingIOError:
        return ""


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a helper. One that the agent may not kill is given up like one that hangs."""
    with contextlib.suppress(PermissionError):
        process.kill()


class CudaCheckpoints:
    """Has the driver suspend and resume jobs.

    Args:
        state: the node's state.
        sample: takes a sample of the GPUs by NVML, which says which processes are on which; None: no NVML, and nothing
            is checkpointed.
        folder: for the files by which a helper waits for another one of the same job.
    """

    def __init__(self, state: NodeState, sample: Callable[[], Sample] | None, folder: Path) -> None:
        self._state, self._sample, self._folder = state, sample, folder
        self._helpers: dict[int, Helper] = {}
        """SLURM_JOB_ID -> the helper at work."""
        self._away: dict[int, tuple[int, ...]] = {}
        """SLURM_JOB_ID -> its process whose GPU memory is on the host."""
        self._in_place: dict[int, str] = {}
        """SLURM_JOB_ID -> why its GPU memory stays where it is."""
        self._retry_s: dict[int, float] = {}
        """SLURM_JOB_ID -> when it is next tried to be restored, by the clock that is never set back."""
        self._failed: dict[int, str] = {}
        """SLURM_JOB_ID -> what its last helper failed with."""
        self._unknown: set[int] = set()
        """Jobs of which it is unknown whether they were checkpointed, and which are asked for the first time."""
        known = state.users()
        for path in folder.glob("checkpoint-*.lock"):
            if not any(path == self._lock(number) for number in known):
                path.unlink()

    @property
    def busy(self) -> bool:
        """Whether the driver is at work for some job."""
        return bool(self._helpers)

    def is_away(self, local: LocalJob) -> bool:
        """Whether the job's GPU memory is on the host."""
        return bool(local.cuda_checkpointed) and self._away.get(local.slurm_job) == local.cuda_checkpointed

    def in_place(self, local: LocalJob) -> str:
        """Why the job's GPU memory could not be moved, as the end of a sentence; "": it was, or there is none."""
        return self._in_place.get(local.slurm_job, "")

    # From the GPU to the host.

    def save(self, local: LocalJob) -> bool:
        """Move what a job has on its GPU to the host, if that is possible.

        Returns whether Slurm may freeze the job now; False: the driver is at work.
        """
        helper = self._helpers.get(local.slurm_job)
        if helper is not None:
            self._end(local.slurm_job, local, helper)
            if helper.verb == "resume":
                # What takes too long to be restored is frozen as it is, and goes on when it is resumed.
                busy = self._helpers.get(local.slurm_job) is helper
                return busy and helper.age_s > self._state.settings.suspend_wait_s
            return self.is_away(local)
        if self.is_away(local):
            return True
        found = self._candidate(local)
        if found is None:
            return True
        pid, local.cuda_needs = found
        local.cuda_checkpointed = (pid,)
        self._state.save()
        try:
            self._start("suspend", local.slurm_job, (pid,))
        except OSError as error:  # such as a Python that the job's user may not run
            local.cuda_checkpointed = ()
            local.no_cuda_checkpoint = self._in_place[local.slurm_job] = f"the agent cannot start its helper: {error}"
            log.warning("GPU memory not moved", extra={"slurm_job": local.slurm_job, "text": str(error)})
            return True
        return False

    def _candidate(self, local: LocalJob) -> tuple[int, tuple[str, float]] | None:
        """The job's process on a GPU, and what it has there; None: it has none, or cannot be checkpointed (see
        `in_place`)."""
        state, number = self._state, local.slurm_job
        self._in_place.pop(number, None)
        if self._sample is None or state.settings.cuda_checkpoint == "off" or state.is_frozen(number):
            return None
        state.scan_processes()
        ours = set(state.living.get(number, []))
        try:
            readings = self._sample().readings
        except Exception as error:  # an error of the driver must not stop time slices
            self._in_place[number] = f"NVML does not say what the job has there: {error}"
            return None
        found = [(reading.device, each) for reading in readings for each in reading.processes or () if each.pid in ours]
        if not found:
            return None
        if why := local.no_cuda_checkpoint or self._hindrance([(each.pid, each.used_mb) for _, each in found]):
            self._in_place[number] = why
            return None
        device, process = found[0]
        return process.pid, (device.uuid, process.used_mb or 0.0)

    @staticmethod
    def _hindrance(processes: list[tuple[int, float | None]]) -> str:
        """Why these processes of a job are not checkpointed; "": nothing hinders that."""
        if len(processes) > 1:
            # They may share GPU memory, or wait for each other. Then the driver hangs, or breaks them.
            return "it has several processes on GPUs or uses several GPUs"
        pid, needs_mb = processes[0]
        if needs_mb is None:
            return "NVML does not say how much that is"
        try:
            left_mb = room_mb(pid) - SPARE_MB
        except OSError:
            return "its process is ending"
        if needs_mb > left_mb:
            return f"it takes {needs_mb:.0f} MB, and Slurm lets the job have {max(left_mb, 0):.0f} MB more on the host"
        return ""

    # From the host to the GPU.

    def restore(self) -> None:
        """Restore the jobs that run, and forget those that have ended."""
        state = self._state
        there: dict[int, LocalJob | DepartingJob] = dict(state.saved.departing)
        there |= {local.slurm_job: local for local in state.jobs.values() if not local.gone}
        for number in self._helpers.keys() - there.keys():
            _kill(self._helpers.pop(number).process)  # it has nobody to ask about
        for known in (self._away, self._in_place, self._retry_s, self._failed):
            for number in known.keys() - there.keys():
                del known[number]
        for number, each in there.items():
            with state.guard(f"restore the GPU memory of Slurm's job {number}"):
                runs = each.state == "running" if isinstance(each, LocalJob) else not each.frozen
                if each.cuda_checkpointed is None and self._sample is None:
                    each.cuda_checkpointed = ()
                if runs and each.cuda_checkpointed != ():
                    self._restore(number, each)

    def _restore(self, number: int, job: LocalJob | DepartingJob) -> None:
        helper = self._helpers.get(number)
        if helper is not None:
            self._end(number, job, helper)
            if number in self._helpers and helper.verb == "resume" and helper.age_s > RETRY_S:
                self._tell(job, f"NVIDIA's driver has been restoring its GPU memory for {helper.age_s:.0f} s")
            return
        living = self._state.living.get(number, [])
        if not living or self._state.is_frozen(number) or time.monotonic() < self._retry_s.get(number, 0.0):
            return
        self._away.pop(number, None)
        if job.cuda_checkpointed is None:
            self._unknown.add(number)
        job.cuda_checkpointed = tuple(
            pid for pid in living if job.cuda_checkpointed is None or pid in job.cuda_checkpointed
        )
        if job.cuda_checkpointed:  # else it has ended
            self._retry_s[number] = time.monotonic() + RETRY_S
            self._start_restoring(number, job, job.cuda_checkpointed)

    def _start_restoring(self, number: int, job: LocalJob | DepartingJob, pids: tuple[int, ...]) -> None:
        """Start a helper that restores, if there is room: a restore without room would lose the process."""
        gpu, needs_mb = job.cuda_needs
        free_mb = self._free_mb(gpu)
        if free_mb is None:
            self._tell(job, "NVML does not say how much memory of its GPU is free")
        else:
            self._start("resume", number, pids, "--free", f"{free_mb:.0f}", "--needs", f"{needs_mb:.0f}")

    def _free_mb(self, gpu: str) -> float | None:
        """Free memory of a GPU, or the least of all if it is unknown which, MB; None: unknown."""
        if self._sample is None:
            return None
        try:
            readings = self._sample().readings
        except Exception as error:  # an error of the driver must not stop time slices
            log.debug("no sample of GPUs", extra={"text": str(error)})
            return None
        those = [each for each in readings if each.device.uuid == gpu] or readings
        return min((each.free_mb for each in those if each.free_mb is not None), default=None)

    # Helpers.

    def _start(self, verb: Literal["suspend", "resume"], number: int, pids: tuple[int, ...], *options: str) -> None:
        """Start a helper as the job's user: it reads what the job's processes tell it."""
        command = [PYTHON, "-m", "penstock_profiles.cuda_checkpoint", verb, *map(str, pids), *options]
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": self._state.users()[number], "group": _group(pids[0]), "extra_groups": ()}
        with self._lock(number).open("a") as lock:
            process = subprocess.Popen(
                [*command, "--lock", str(lock.fileno())],
                cwd="/",
                pass_fds=[lock.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                **user,
            )
        self._helpers[number] = Helper(verb, pids, process, time.monotonic())

    def _lock(self, number: int) -> Path:
        return self._folder / f"checkpoint-{number}.lock"

    def _end(self, number: int, job: LocalJob | DepartingJob, helper: Helper) -> None:
        """Note how a helper has ended, if it has. One that takes too long to suspend is killed."""
        process, limit_s = helper.process, self._state.settings.suspend_wait_s
        if process.poll() is None and helper.verb == "suspend" and helper.age_s > limit_s:
            _kill(process)
        given_up = helper.verb == "suspend" and helper.age_s > limit_s + GIVEN_UP_S
        if process.poll() is None and not given_up:
            return
        del self._helpers[number]
        if job.cuda_checkpointed != helper.pids:
            return  # it was of an earlier run of the job
        said = f"the driver did not do it within {limit_s:g} s"
        if process.returncode not in (None, -signal.SIGKILL) and process.stderr is not None:
            said = _said(process.stderr) or f"the helper ended with status {process.returncode}"
        facts = {"slurm_job": number, "verb": helper.verb, "seconds": round(helper.age_s, 2)}
        nothing = process.returncode == NO_DRIVER and number in self._unknown
        self._unknown.discard(number)
        if process.returncode == 0 or nothing:
            log.info("GPU memory moved", extra=facts)
            self._failed.pop(number, None)
            if helper.verb == "suspend":
                self._away[number] = helper.pids
            else:
                job.cuda_checkpointed = ()
                self._tell(job, "")
            return
        if self._failed.get(number) != said:  # what is repeated is logged once
            log.warning("GPU memory not moved", extra=facts | {"text": said})
        self._failed[number] = said
        if helper.verb == "resume":
            self._retry_s[number] = time.monotonic() + RETRY_S
            waits = process.returncode == NO_ROOM
            self._tell(job, said if waits else f"NVIDIA's driver has not restored its GPU memory: {said}")
            return
        if isinstance(job, LocalJob):
            job.no_cuda_checkpoint = said  # a second failure may break it
        if process.returncode in (1, NO_DRIVER):
            job.cuda_checkpointed = ()
        else:
            self._start_restoring(number, job, helper.pids)

    @staticmethod
    def _tell(job: LocalJob | DepartingJob, what: str) -> None:
        if isinstance(job, LocalJob):
            job.why = f"waits, because its GPU memory is on the host: {what}" if what else ""

    def close(self) -> None:
        """Wait for the helpers: a service manager may kill them after the agent."""
        end_s = time.monotonic() + LAST_S
        for helper in self._helpers.values():
            try:
                helper.process.wait(max(end_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                log.warning("a helper is still at work", extra={"verb": helper.verb, "pids": helper.pids})


MIB = 2**20
V1 = re.compile(r"^\d+:(?:[^:\n]*,)?memory(?:,[^:\n]*)?:(/.*)$", re.MULTILINE)
V2 = re.compile(r"^0::(/.*)$", re.MULTILINE)
FILES = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
"""Cached files, which the kernel drops first."""


def room_mb(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that the process may still take, MB; inf: no cgroup limits it. Raises OSError if the process is gone."""
    text = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
    room = math.inf
    if (v1 := V1.search(text)) is not None:
        room = _least(cgroups / "memory", v1[1], "memory.limit_in_bytes", "memory.usage_in_bytes")
    if (v2 := V2.search(text)) is not None:
        for mount in (cgroups, cgroups / "unified"):
            room = min(room, _least(mount, v2[1], "memory.max", "memory.current"))
    return room


def _least(mount: Path, cgroup: str, limit: str, usage: str) -> float:
    """The least room in a cgroup and those around it."""
    folder, room = Path(f"{mount}{cgroup}"), math.inf
    while folder != mount:
        limit_b, used_b = _number(folder / limit), _number(folder / usage)
        if limit_b is not None and used_b is not None:
            try:
                files = FILES.findall((folder / "memory.stat").read_text(encoding="ascii"))
            except OSError:
                files = []
            room = min(room, (limit_b - used_b + max(map(int, files), default=0)) / MIB)
        folder = folder.parent
    return room


def _number(path: Path) -> int | None:
    """The number in a file; None: there is none, or it says `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
