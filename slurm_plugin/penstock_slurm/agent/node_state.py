"""All that the parts of an agent know of their node: the saved state, recent observations, and look-ups in both."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from penstock_scheduler.api.agent_messages import Lack, OrderedGroup, OrderedJob
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent.observed import Observed
from penstock_slurm.agent.processes import Processes
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.agent.state import LocalJob, SavedState, StateFile, load

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Pause before a request that Slurm has refused is repeated."""


class Slurm(Protocol):
    """The agent's requests to Slurm; `penstock_slurm.gateway.CliGateway` implements them. The methods raise SlurmError."""

    def suspend(self, job_id: str) -> None:
        """Freeze a running job."""
        ...

    def resume(self, job_id: str) -> None:
        """Resume a frozen job."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job for good."""
        ...


class NodeState:
    """The state of one node's agent.

    Args:
        node: Slurm's name of the node.
        settings: the agent's settings.
        folder: where the state is saved.
        boot: ID of the node's boot.
        processes: the processes of the node's jobs.
        memory_mb: the node's memory, MB.
    """

    def __init__(
        self, node: str, settings: AgentSettings, folder: Path, boot: str, processes: Processes, memory_mb: int
    ) -> None:
        self.node, self.settings, self.processes = node, settings, processes
        self.host_mb = settings.host_memory_mb if settings.host_memory_mb is not None else memory_mb // 2
        """Host memory that the state of suspended jobs may take, MB."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = StateFile(folder / "state.json")
        self.saved: SavedState = load(folder / "state.json", boot)
        self.now_s = 0.0
        self.living: dict[int, list[int]] = {}
        """SLURM_JOB_ID -> processes that live."""
        self.gpu_memory_mb: dict[str, int] = {}
        """Memory of one GPU by GPU type, MB."""
        self.lacks: dict[Lack, str] = {}
        """What the node lacks, each with a sentence."""
        self._observed: dict[JobId, Observed] = {}
        self._failed: dict[tuple[str, JobId | None], str] = {}
        """What failed last and why, as logged: a failure that is repeated in each tick is logged once."""

    def save(self) -> None:
        """Write the saved state if it has changed."""
        self._file.save(self.saved)

    @contextlib.contextmanager
    def guard(self, what: str, job: JobId | None = None) -> Iterator[None]:
        """Keep a failure away from all that does not depend on what failed, so that no other job stays frozen for it.

        Args:
            what: what is tried, as the end of the sentence that "the agent cannot" begins.
            job: the job that it concerns. Its `why` then says what failed.
        """
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.strerror:
                text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            if self._failed.get((what, job)) != text:
                log.warning("failed", extra={"what": what, "job": job or "", "text": text}, exc_info=True)
            self._failed[what, job] = text
            if job is not None and job in self.jobs:
                self.jobs[job].why = f"the agent of its node cannot {what}: {text}"
        else:
            self._failed.pop((what, job), None)

    # Jobs and groups.

    @property
    def jobs(self) -> dict[JobId, LocalJob]:
        """What the agent has done with each job of the order."""
        return self.saved.jobs

    @property
    def ordered_jobs(self) -> tuple[OrderedJob, ...]:
        """The jobs of the order."""
        return self.saved.order.jobs if self.saved.order is not None else ()

    @property
    def ordered_groups(self) -> tuple[OrderedGroup, ...]:
        """The groups of the order."""
        return self.saved.order.groups if self.saved.order is not None else ()

    def ordered_job(self, job: JobId) -> OrderedJob | None:
        """The order for a job."""
        return next((each for each in self.ordered_jobs if each.job == job), None)

    def ordered_group(self, job: JobId) -> OrderedGroup | None:
        """The group that the order has a job in."""
        return next((each for each in self.ordered_groups if job in each.shared.jobs), None)

    def ordered_pack(self, job: JobId) -> Pack | None:
        """The pack that the order has a job in, with those of its jobs that are not here yet or stand still."""
        return next((pack for each in self.ordered_groups for pack in each.shared.packs if job in pack.jobs), None)

    def observed(self, job: JobId) -> Observed:
        """What was observed of a job lately."""
        return self._observed.setdefault(job, Observed())

    def forget_observed(self, job: JobId) -> None:
        """Drop what was observed of a job."""
        self._observed.pop(job, None)

    def forget_memory(self) -> None:
        """Drop the GPU memory that jobs were last seen to use."""
        for observed in self._observed.values():
            observed.used_mb = None

    def sharing_jobs(self) -> list[OrderedJob]:
        """Jobs that are bound to GPUs which they do not hold in Slurm."""
        return [job for job in self.ordered_jobs if self.jobs[job.job].devices and not job.own_devices]

    # Processes.

    def users(self) -> dict[int, int]:
        """SLURM_JOB_ID -> user, for all jobs that may have processes here."""
        return {number: departing.uid for number, departing in self.saved.departing.items()} | {
            job.slurm_job: job.uid for job in self.ordered_jobs
        }

    def scan_processes(self) -> None:
        """Find the processes that live."""
        self.living = self.processes.scan(self.users())

    def glance_at_processes(self) -> None:
        """Find the processes that are new: see `Processes.glance`."""
        self.living = self.processes.glance(self.users())

    def is_frozen(self, slurm_job: int) -> bool:
        """Whether some process of a Slurm job is frozen: Slurm has begun to freeze it, or has not resumed it all."""
        return any(self._frozen(slurm_job))

    def stands_still(self, slurm_job: int) -> bool:
        """Whether all processes of a Slurm job are frozen. One that goes on may use a GPU."""
        return all(self._frozen(slurm_job))

    def _frozen(self, slurm_job: int) -> list[bool]:
        """Whether each living process of a Slurm job is frozen."""
        found = {pid: self.processes.state(pid) for pid in self.living.get(slurm_job, [])}
        return [self.processes.is_frozen(pid, state) for pid, state in found.items() if state is not None]

    # The clock.

    def retry_at_s(self) -> float:
        """When Slurm may be asked again after it refused."""
        return self.now_s + RETRY_S

    def set_back(self) -> None:
        """After the node's clock was set back: move times that lie in the future, so that they hold nothing up."""
        now_s = self.now_s
        for local in self.jobs.values():
            local.asked_s, local.resumed_s = min(local.asked_s, now_s), min(local.resumed_s, now_s)
            local.retry_s = min(local.retry_s, self.retry_at_s())
            local.free_s = min(local.free_s, now_s + self.settings.freeze_s)
            local.begun_s = min(local.begun_s, now_s) if local.begun_s < math.inf else math.inf
        for observed in self._observed.values():
            observed.set_back(now_s)
