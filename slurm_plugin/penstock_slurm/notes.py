"""What is written about a job in its AdminComment, which only the site can write: JSON with some of these keys.

``penstock`` is the job spec and ``penstock_plain`` and ``penstock_begin_s`` are what else job_submit.lua has to hand on;
``penstock_says`` is the daemon's word to the job's user.
"""

from __future__ import annotations

import json
from typing import Any

from penstock_scheduler.model.spec import SPEC_KEY
from penstock_slurm.gateway import PlainShape, SlurmJob
from penstock_slurm.states import BURST_MARK

SAYS = "penstock_says"
"""Why Penstock leaves the job alone."""

SHARES = "penstock_shares"
"""On which node the job shares GPUs, how many, and with whom."""

PLAIN = "penstock_plain"
"""How the job would run if Slurm started it alone; only where the site set `plain_after_s`."""

BEGIN = "penstock_begin_s"
"""The --begin that its user gave, s since 1970: the job's own begin time is what keeps it back for the daemon."""


def notes(job: SlurmJob) -> dict[str, Any] | None:
    """What we, or job_submit.lua, wrote, `{}` where a note was taken away; None if nothing, or if the site uses the field."""
    try:
        document = json.loads(job.admin_comment)
    except ValueError:
        return None
    ours = isinstance(document, dict) and (not document or document.keys() & {SPEC_KEY, SAYS, SHARES, BURST_MARK})
    return document if ours else None


def with_word(job: SlurmJob, text: str) -> str | None:
    """The job's AdminComment with word for its user beside our other notes; None if there is nothing to write.

    That is so where the word is there already, and where the site itself uses the field.
    """
    return with_note(job, SAYS, text)


def with_note(job: SlurmJob, key: str, value: Any) -> str | None:
    """The same with any of our notes; a `value` of None takes it away."""
    ours = notes(job)
    if job.admin_comment and ours is None:
        return None
    kept = {name: note for name, note in (ours or {}).items() if name != key}
    if (ours or {}).get(key) == value:
        return None
    return json.dumps(kept | ({} if value is None else {key: value}))


def plain_shape(job: SlurmJob) -> PlainShape | None:
    """The shape in which Slurm may start the job alone; None if it may not, or its note is not readable."""
    shape: Any = (notes(job) or {}).get(PLAIN)
    try:
        return PlainShape(str(shape["partition"]), int(shape["nodes"]), int(shape["gpus_per_node"]))
    except (TypeError, KeyError, ValueError):
        return None


def waits_for(job: SlurmJob, now_s: float) -> str:
    """What a pending job waits for that only Slurm or the time brings, in words; empty: nothing, it can be placed.

    A begin time counts before the first start only: Slurm gives one to each job that it requeues, and place() ends it.
    """
    if overdue(job, now_s):
        return "Slurm to end it at its deadline"
    if job.dependency:
        return f"its dependency {job.dependency}"
    written = notes(job)
    begin_s = (written or {}).get(BEGIN, 0) if written and SPEC_KEY in written else job.eligible_s or 0
    if job.restarts == 0 and isinstance(begin_s, int | float) and begin_s > now_s:
        return "the begin time that it was submitted with"
    return ""


def overdue(job: SlurmJob, now_s: float) -> bool:
    """Whether a job's deadline is over. Slurm does not look at those of held jobs: it must be released to be ended."""
    return job.deadline_s is not None and now_s > job.deadline_s


def kept_by_begin(job: SlurmJob, now_s: float) -> bool:
    """Whether a pending job is kept back by a begin time, after which Slurm starts it alone."""
    return not job.held and plain_shape(job) is not None and (job.eligible_s or 0.0) > now_s
