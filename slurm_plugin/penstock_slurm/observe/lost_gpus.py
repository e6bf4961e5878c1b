"""Managed jobs that Slurm has started without their GPUs.

Slurm 22.05.8 does that once after it requeued a job while one of its nodes was silent, and on a node that has not registered
since slurmctld started. Such a run is stopped at once and starts again, then with its GPUs. If the program found no GPUs and
failed before that, its job is requeued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from penstock_scheduler.model import JobId, Stop, StopCode
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmReader, SlurmWriter
from penstock_slurm.jobs.holds import mark

log = logging.getLogger(__name__)

CHECKS = 20
"""Most jobs, in one observation, whose GPUs are requested from Slurm: about 5 ms each."""

FRESH_S = 900.0
"""Slurm is asked about a first run if it began no longer ago than this: not about every job of the cluster when penstockd
starts."""

MOST_RESTARTS = 1000
"""Restarts after which a job that fails without its GPUs is not requeued again, in case Slurm always starts it so."""

Run = tuple[JobId, int]
"""A job, and the restarts of the run."""


class LostGpus:
    """Remembers which runs were checked, so that each one is checked once."""

    def __init__(self, reader: SlurmReader, writer: SlurmWriter, spool: Spool) -> None:
        self._reader, self._writer, self._spool = reader, writer, spool
        self._lacks: dict[Run, bool] = {}
        """Whether Slurm has started a run without its GPUs, as far as that was checked."""
        self._brought_back: dict[JobId, Stop] = {}
        """Why jobs were requeued since the last `stop`."""

    def check(self, jobs: Iterable[SlurmJob], known: Collection[JobId], now_s: float, *, counts_gpus: bool) -> None:
        """Check runs of known jobs. Fresh runs and those of requeued jobs are checked in detail, a few at a time.

        Args:
            jobs: jobs that run or have ended.
            known: the jobs whose runs are checked.
            counts_gpus: whether `SlurmJob.gpus_counted` has the GPUs of a running job.
        """
        asked = 0
        for job in jobs:
            if job.state not in ("RUNNING", "FAILED") or job.id not in known or not job.gpus_per_node:
                continue
            run = job.id, job.restarts
            fresh = not counts_gpus and now_s - (job.start_s or 0.0) < FRESH_S
            if run in self._lacks:
                pass
            elif counts_gpus and not job.gpus_counted.get("", 0):
                self._lacks[run] = True
            elif (job.restarts or fresh) and (job.state == "FAILED" or asked < CHECKS):
                asked += 1
                try:
                    self._lacks[run] = self._reader.gpus_held(job.id) == 0
                except SlurmError as error:
                    log.info("cannot read the GPUs of a job", extra={"job": job.id, "text": str(error)})
            if job.state == "FAILED" and self._lacks.get(run):
                self._bring_back(job)

    def lacks(self, job: SlurmJob) -> bool:
        """Whether a job runs without its GPUs."""
        return job.state == "RUNNING" and self._lacks.get((job.id, job.restarts), False)

    def forget(self, matters: Callable[[JobId, int], bool]) -> None:
        """Forget all runs but these."""
        self._lacks = {run: lacks for run, lacks in self._lacks.items() if matters(*run)}

    def stop(self, jobs: Iterable[SlurmJob], silent: Collection[str]) -> dict[JobId, Stop]:
        """Stop runs without their GPUs at once, except on nodes that do not respond. A round starts them again.

        Returns why, for each job that is stopped now, or was requeued since the last call.
        """
        stopped, self._brought_back = self._brought_back, {}
        for job in jobs:
            if not self.lacks(job) or not set(silent).isdisjoint(job.nodes):
                continue
            try:
                mark(self._spool, job, job.restarts + 1)
                self._writer.requeue_hold(job.id)
            except SlurmError as error:
                log.warning("cannot stop a job without its GPUs", extra={"job": job.id, "text": str(error)})
                continue
            text = (
                "Slurm started it without its GPUs; it will start again. Slurm may go on counting GPUs of its nodes as "
                "used until `scontrol reconfigure`"
            )
            log.warning("job stopped", extra={"job": job.id, "nodes": ",".join(job.nodes), "text": text})
            stopped[job.id] = Stop(StopCode.NO_GPUS, text)
        return stopped

    def _bring_back(self, job: SlurmJob) -> None:
        """Requeue a job that failed because Slurm had started it without its GPUs."""
        if not job.requeue or job.restarts >= MOST_RESTARTS:
            return
        try:
            mark(self._spool, job, job.restarts + 1)
            self._writer.bring_back(job.id)
        except SlurmError as error:
            log.warning("cannot requeue a job that failed without its GPUs", extra={"job": job.id, "text": str(error)})
            return
        text = "Slurm started it without its GPUs, and it failed; it will start again"
        log.warning("job requeued", extra={"job": job.id, "nodes": ",".join(job.nodes), "text": text})
        self._brought_back[job.id] = Stop(StopCode.NO_GPUS, text)
