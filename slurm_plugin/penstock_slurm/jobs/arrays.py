"""Arrays that may run few elements at once (`sbatch --array=1-100%2`): which elements wait for others of their array.

Slurm starts no element beyond the limit, so a plan must not give it GPUs. Slurm's reason for the wait does not tell: a hold hides
it. So the elements that run are counted against the limit (ArrayTaskThrottle), which Slurm tells for one array at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from penstock_scheduler.model import Job, JobId, Phase
from penstock_slurm.gateway import JobGone, SlurmError, SlurmJob, SlurmReader
from penstock_slurm.jobs.states import HOLDING

log = logging.getLogger(__name__)

NEW = 50
"""Most arrays that are asked about for the first time in one observation: about 5 ms each."""

AGAIN = 4
"""Most arrays that are asked about again in one observation, in turns."""


class Arrays:
    """The limits of arrays, as last read."""

    def __init__(self, reader: SlurmReader) -> None:
        self._reader = reader
        self._limits: dict[int, int | None] = {}
        """Array -> how many of its elements may run at once; None: any number. The one asked about longest ago comes first."""

    def beyond(
        self, records: Mapping[JobId, SlurmJob], jobs: Mapping[JobId, Job], listed: Iterable[SlurmJob]
    ) -> dict[JobId, str]:
        """Managed elements that have to wait for others of their array, and for what, as a sentence without its subject.

        An element that was sent to nodes goes before one that has run before, and that before the others, in their order.

        Args:
            records: the managed jobs that a round may place or stop.
            jobs: what the scheduler sees of these.
            listed: all jobs that Slurm lists.
        """
        waiting: dict[int, list[JobId]] = {}
        running: dict[int, set[JobId]] = {}
        for job_id, record in records.items():
            if (array := record.array_job_id) is None:
                continue
            job = jobs[job_id]
            if job.phase in (Phase.QUEUED, Phase.STARTING) and record.state not in HOLDING:
                waiting.setdefault(array, []).append(job_id)
            else:
                running.setdefault(array, set()).add(job_id)
        if not waiting:
            self._limits.clear()
            return {}
        for record in listed:
            if record.array_job_id in waiting and record.state in HOLDING:
                running.setdefault(record.array_job_id, set()).add(record.id)
        several = {array: ids for array, ids in waiting.items() if len(ids) + len(running.get(array, ())) > 1}
        self._ask({array: ids[0] for array, ids in several.items()})

        def order(job_id: JobId) -> tuple[bool, bool, int]:
            record = records[job_id]
            return jobs[job_id].allocation is None, record.restarts == 0, record.array_task_id or 0

        found: dict[JobId, str] = {}
        for array, ids in several.items():
            limit = self._limits.get(array, 1)
            if limit is None:
                continue
            text = f"waits for another element to end: its array runs at most {limit} at a time (ArrayTaskThrottle)"
            if array not in self._limits:
                text = "waits for Slurm to say how many elements of its array may run at once; until then, one may"
            left = max(limit - len(running.get(array, ())), 0)
            found |= dict.fromkeys(sorted(ids, key=order)[left:], text)
        return found

    def _ask(self, arrays: Mapping[int, JobId]) -> None:
        """Ask Slurm for the limits of these arrays, by one of their elements."""
        new = [array for array in arrays if array not in self._limits]
        self._limits = {array: limit for array, limit in self._limits.items() if array in arrays}
        for array in (*new[:NEW], *list(self._limits)[:AGAIN]):
            try:
                limit = self._reader.array_limit(arrays[array])
            except JobGone:
                continue
            except SlurmError as error:
                log.info("cannot ask for the limit of an array", extra={"job": arrays[array], "text": str(error)})
                return
            self._limits.pop(array, None)
            self._limits[array] = limit
