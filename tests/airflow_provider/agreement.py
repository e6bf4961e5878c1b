"""Whether Airflow's tasks and Slurm's records of their jobs tell the same story.

A job is known by the key of its submission, which names DAG, run, task and try. A job has one record for each time it ran,
because Slurm may requeue it. A task shows the end of the newest job of its run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "REQUEUED"}
)


@dataclass(frozen=True)
class Ran:
    """One record of Slurm's accounting: one run of a job."""

    job: str
    key: str
    """As in `airflow_provider_penstock.ownership`: what it belongs to, then its number, which grows with each try."""
    state: str
    start_s: float
    """Infinite if the job never started."""
    end_s: float
    """Infinite if it has not ended."""

    @property
    def owner(self) -> str:
        """The task of a DAG run, by names."""
        return self.key.rpartition(":")[0]

    @property
    def attempt(self) -> int:
        return int(self.key.rpartition(":")[2])


@dataclass(frozen=True)
class Shown:
    """What Airflow shows of a task that has ended."""

    state: str
    job: str | None
    """The id in its XCom; None: there is none."""
    excuse: str
    """Why it may have failed although its job completed, such as that a user marked it; empty: there is no such reason."""


def with_noted_ends(records: Iterable[Ran], ends: Mapping[tuple[str, str], Iterable[float]]) -> list[Ran]:
    """The records, and what the runs themselves noted: a slurmctld that was killed may have forgotten it.

    Args:
        records: those of Slurm's accounting.
        ends: (job, owner) -> when its runs completed, by their own notes.
    """
    found = list(records)
    for (job, owner), times in ends.items():
        own = [ran for ran in found if (ran.job, ran.owner) == (job, owner)]
        for end_s in times:
            its = next((ran for ran in own if ran.start_s <= end_s <= ran.end_s + 1), None)
            if its is None and own:  # the accounting does not have this run
                found.append(replace(own[0], state="COMPLETED", start_s=end_s, end_s=end_s))
            elif its is not None and its.state != "COMPLETED":
                found[found.index(its)] = replace(its, state="COMPLETED", end_s=end_s)
    return found


def disagreements(shown: Mapping[str, Shown], records: Iterable[Ran]) -> list[str]:
    """A sentence for each thing that is wrong.

    Args:
        shown: by owner, the tasks that Airflow has. Those of deleted DAG runs are missing.
        records: all that Slurm has of the jobs of these tasks and of those of deleted runs.
    """
    found = []
    of_owners: dict[str, list[Ran]] = {owner: [] for owner in shown}
    for ran in records:
        of_owners.setdefault(ran.owner, []).append(ran)
    for owner, runs in of_owners.items():
        runs.sort(key=lambda ran: (ran.start_s, ran.attempt))
        found += [f"{owner}: {text}" for text in _wrong_by_themselves(runs)]
        if owner in shown:
            found += [f"{owner}: {text}" for text in _wrong_beside(shown[owner], runs)]
    return found


def _wrong_by_themselves(runs: Sequence[Ran]) -> list[str]:
    jobs_of: dict[str, set[str]] = {}
    for ran in runs:
        jobs_of.setdefault(ran.key, set()).add(ran.job)
    found = [f"{key} is the key of {sorted(jobs)}" for key, jobs in jobs_of.items() if len(jobs) > 1]
    found += [f"nobody owns {ran}" for ran in runs if ran.state not in ENDED]
    started = [ran for ran in runs if ran.start_s != float("inf")]
    return found + [f"{a} and {b} ran at once" for a, b in itertools.pairwise(started) if a.end_s > b.start_s]


def _wrong_beside(shown: Shown, runs: Sequence[Ran]) -> list[str]:
    newest = max(runs, key=lambda ran: (ran.attempt, ran.end_s), default=None)
    if shown.state == "success":
        if newest is None or newest.state != "COMPLETED":
            return [f"shows success, and its newest job is {newest}"]
        return [] if shown.job == newest.job else [f"shows job {shown.job}, and its newest job is {newest}"]
    if shown.state != "failed":
        return [f"is {shown.state}, and everything has ended"]
    if (newest is None or newest.state == "COMPLETED") and not shown.excuse:
        return [f"shows failure, and its newest job is {newest}"]
    return []
