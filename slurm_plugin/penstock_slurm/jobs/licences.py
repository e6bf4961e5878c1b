"""Jobs that ask for licences (`sbatch --licenses`): which of them wait until these are free.

A round does not count licences, which belong to no node. It sees only the jobs that can have theirs now. If it places more of
them than there are licences, Slurm starts the first ones, and the rest waits again. A running job that holds licences stays where
it is, since another job could take them between two runs.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping

from penstock_scheduler.model import Job, JobId, Phase
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmReader
from penstock_slurm.gateway.base import WAITING
from penstock_slurm.jobs.notes import TEXTS

log = logging.getLogger(__name__)

_ONE = re.compile(r"([^\s,;|:*()]+)(?::([0-9]{1,9}))?")


@functools.lru_cache(maxsize=TEXTS)
def wanted(text: str) -> Mapping[str, int] | None:
    """Licence -> how many, of `matlab:2,ansys@server`; None if it has another form, such as a choice `matlab|octave`."""
    found = Counter[str]()
    for word in re.split("[,;]", text) if text else ():
        match = _ONE.fullmatch(word)
        if match is None:
            return None
        found[match[1]] += int(match[2] or 1)
    return found


class Licences:
    """Asks Slurm for free licences, where some pending job wants any."""

    def __init__(self, reader: SlurmReader) -> None:
        self._reader = reader
        self.refused: set[JobId] = set()
        """Jobs that were sent to nodes, and that Slurm does not start for want of licences, although enough are free."""

    def lacking(self, records: Mapping[JobId, SlurmJob], jobs: Mapping[JobId, Job]) -> dict[JobId, str]:
        """Managed jobs that have to wait for licences, and for which, as a sentence without its subject.

        Args:
            records: the managed jobs that a round may place or stop.
            jobs: what the scheduler sees of these.
        """
        self.refused = set()
        want = {
            job_id: wanted(record.licenses) or {}
            for job_id, record in records.items()
            if record.licenses and record.state in WAITING
        }
        if not want:
            return {}
        sent = {job_id for job_id in want if jobs[job_id].phase is Phase.STARTING}
        try:
            free = self._reader.free_licences()
        except SlurmError as error:
            log.warning("cannot ask for licences", extra={"text": str(error)})
            return dict.fromkeys(want.keys() - sent, "waits for Slurm to say which licences are free")
        found = {}
        for job_id in sorted(want, key=lambda job_id: job_id not in sent):
            if job_id in sent and records[job_id].reason != "Licenses":
                free = {name: count - want[job_id].get(name, 0) for name, count in free.items()}
                continue
            short = [
                f"{name} ({free.get(name, 0)} of {n} free)" for name, n in want[job_id].items() if free.get(name, 0) < n
            ]
            if short:
                found[job_id] = f"waits for licences: {', '.join(short)}"
            elif job_id in sent:
                found[job_id] = f"waits for licences that are not free, as Slurm says ({records[job_id].licenses})"
                self.refused.add(job_id)
        return found
