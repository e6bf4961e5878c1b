"""Notes about a job in its AdminComment, which only the site can write: JSON with some of these keys.

job_submit.lua writes ``penstock`` (the job spec), ``penstock_plain``, ``penstock_begin_s``, ``penstock_nodes``,
``penstock_request`` and ``penstock_spool``. The daemon writes ``penstock_says``, a message to the job's user, and
``penstock_shares``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from penstock_scheduler.model import NodeChoice
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.gateway import PlainShape, SlurmJob
from penstock_slurm.gateway.hostlist import expand
from penstock_slurm.gateway.node_states import UNLISTED

SAYS = "penstock_says"
"""Message to the job's user, for example why Penstock does not manage the job."""

SHARES = "penstock_shares"
"""On which node the job shares GPUs, how many, and with which jobs."""

PLAIN = "penstock_plain"
"""How the job would run if Slurm started it by itself; only where the site sets `plain_after_s`."""

BEGIN = "penstock_begin_s"
"""The user's --begin, s since 1970. The job's own begin time keeps it back for the daemon."""


NODES = "penstock_nodes"
"""The user's --nodelist, --exclude and --constraint, by these names, and --tmp as `tmp_mb`. Placing a job overwrites Slurm's own
record of its nodes."""

REQUEST = "penstock_request"
"""How the job's tasks, CPUs and memory follow its GPUs, by the names of `Request`'s fields."""

SPOOL = "penstock_spool"
"""Where job_submit.lua told the job to report; empty if it did not know. Absent where the user chose the place."""

MOST = 2**64
"""The largest number in a note. Slurm's own are smaller."""

TEXTS = 32_768
"""Comments whose meaning is remembered: each is looked at several times in every tick, and seldom changes."""

NODE_OPTIONS = ("nodelist", "exclude", "constraint")
"""sbatch's options that choose nodes."""


def notes(job: SlurmJob) -> dict[str, Any] | None:
    """The notes of Penstock, `{}` if they were removed; None: there are none, or the site itself uses the field."""
    return _notes(job.admin_comment)


@functools.lru_cache(maxsize=TEXTS)
def _notes(text: str) -> dict[str, Any] | None:
    """The notes in an AdminComment. Nobody changes the answer."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # a user may nest it a thousand deep
        return None
    ours = isinstance(document, dict) and (not document or document.keys() & {SPEC_KEY, SAYS, SHARES})
    return document if ours else None


def with_message(job: SlurmJob, text: str) -> str | None:
    """The job's AdminComment with a message to its user beside the other notes; None: there is nothing to write.

    There is nothing to write if the message is there already, or if the site itself uses the field.
    """
    return with_note(job, SAYS, text)


def with_note(job: SlurmJob, key: str, value: Any) -> str | None:
    """The job's AdminComment with one note changed; see `with_message`. A `value` of None removes the note."""
    ours = notes(job)
    if job.admin_comment and ours is None:
        return None
    kept = {name: note for name, note in (ours or {}).items() if name != key}
    if (ours or {}).get(key) == value:
        return None
    return json.dumps(kept | ({} if value is None else {key: value}))


def lacks_spool(job: SlurmJob, spool: Path) -> bool:
    """Whether job_submit.lua sent the reports of the job elsewhere than to this spool, or nowhere."""
    told: Any = (notes(job) or {}).get(SPOOL, str(spool))
    return bool(told != str(spool))


def plain_shape(job: SlurmJob) -> PlainShape | None:
    """The shape in which Slurm may start the job by itself. None if Slurm may not, or if the note cannot be read."""
    shape: Any = (notes(job) or {}).get(PLAIN)
    try:
        gpus = int(shape["gpus_per_node"])
        return PlainShape(str(shape["partition"]), int(shape["nodes"]), gpus, request(job).tasks_on(gpus))
    except (TypeError, KeyError, ValueError, OverflowError, BadJobSpec):  # int(inf) overflows
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """How tasks, CPUs and memory follow the number of GPUs that a job has on a node. From the header of its script."""

    tasks: int = 0
    """Tasks for every `gpus` GPUs; 0: one task on each node."""
    gpus: int = 1
    node_gpus: int = 1
    """A node with so many GPUs has `cpus` and `memory_mb`."""
    cpus: int = 0
    """CPUs of a task; 0: a task always has as many as the job itself asked for."""
    memory_mb: int = 0
    """MB; 0: as much as the job itself asked for."""
    whole_nodes: bool = False
    """Whether no other job runs on the job's nodes (--exclusive)."""

    def tasks_on(self, gpus: int) -> int | None:
        """Tasks on a node with so many GPUs, or None if the job has one on each node."""
        return max(gpus * self.tasks // self.gpus, 1) if self.tasks else None

    def cpus_per_task(self, gpus: int) -> int | None:
        """CPUs of a task on a node with so many GPUs, or None if the job keeps its own number."""
        return -(-gpus * self.cpus // self.node_gpus) if self.cpus else None

    def memory_mb_on(self, gpus: int) -> int | None:
        """Memory on a node with so many GPUs in MB, or None if the job keeps its own amount."""
        return -(-gpus * self.memory_mb // self.node_gpus) if self.memory_mb else None


def request(job: SlurmJob) -> Request:
    """Read the request of the script's header. Raises BadJobSpec if the note cannot be read."""
    found: Any = (notes(job) or {}).get(REQUEST, {})
    try:
        given = Request(**found)
        numbers = given.tasks, given.gpus, given.node_gpus, given.cpus, given.memory_mb
        if not all(type(number) is int and 0 <= number <= MOST for number in numbers) or not (
            given.gpus and given.node_gpus
        ):
            raise ValueError("a number is out of bounds, or no whole number")
        if not isinstance(given.whole_nodes, bool):
            raise ValueError("whole_nodes is neither true nor false")
        return given
    except (TypeError, ValueError) as error:
        raise BadJobSpec(
            f"its AdminComment has a note {REQUEST} that cannot be read ({error}); ask an admin to correct it, or submit it again"
        ) from None


def node_choice(job: SlurmJob) -> NodeChoice | None:
    """The nodes on which the job's user lets it run; None: all. Raises BadJobSpec if the note cannot be read."""
    chosen: Any = (notes(job) or {}).get(NODES)
    if chosen is None:
        return None
    try:
        return node_choice_of(*(str(chosen.get(name, "")) for name in NODE_OPTIONS))
    except (AttributeError, ValueError) as error:
        raise BadJobSpec(
            f"its AdminComment has a note {NODES} that cannot be read ({error}); ask an admin to correct it, or submit it again"
        ) from None


def least_tmp_mb(job: SlurmJob) -> int:
    """Temporary disk that each of the job's nodes must have, MB. Slurm does not count what other jobs use of it."""
    tmp_mb = ((notes(job) or {}).get(NODES) or {}).get("tmp_mb", 0)
    return tmp_mb if type(tmp_mb) is int else 0


@functools.lru_cache(maxsize=4096)
def node_choice_of(nodelist: str = "", exclude: str = "", constraint: str = "") -> NodeChoice | None:
    """The nodes that these values of sbatch's options allow; None: all. Raises ValueError.

    `constraint`: features joined by & or by |, as job_submit.lua checks. Slurm reads a comma as &.
    """
    alternatives = constraint.replace(",", "&").split("|") if constraint else []
    features = frozenset(frozenset(filter(None, each.split("&"))) for each in alternatives)
    found = NodeChoice(frozenset(expand(nodelist)), frozenset(expand(exclude)), features)
    return None if found == NodeChoice() else found


def waits_for(job: SlurmJob, now_s: float) -> str:
    """What a pending job waits for besides GPUs, as text; empty: nothing, it can be placed.

    A begin time counts only before the first start: Slurm gives one to each job that it requeues, and placing the job ends it.
    """
    if job.reason == UNLISTED:
        return "Slurm to list it again: its last answer lacked the job"
    if overdue(job, now_s):
        return "Slurm to end it at its deadline"
    if never_satisfied(job):
        return (
            f"its dependency {job.dependency}, which can never be satisfied (DependencyNeverSatisfied): cancel the job, or "
            "submit it again with another dependency"
        )
    if job.dependency:
        return f"its dependency {job.dependency}"
    written = notes(job)
    begin_s = (written or {}).get(BEGIN, 0) if written and SPEC_KEY in written else job.eligible_s or 0
    if job.restarts == 0 and isinstance(begin_s, int | float) and begin_s > now_s:
        return "the begin time that it was submitted with"
    return ""


def never_satisfied(job: SlurmJob) -> bool:
    """Whether a job depends on one that has failed. Slurm then shows a held job as held by an admin (JobHeldAdmin)."""
    return "(failed)" in job.dependency


def overdue(job: SlurmJob, now_s: float) -> bool:
    """Whether a job's deadline is over. Slurm ignores deadlines of held jobs: the job must be released to be ended."""
    return job.deadline_s is not None and now_s > job.deadline_s


def kept_by_begin(job: SlurmJob, now_s: float) -> bool:
    """Whether a begin time keeps a pending job back, after which Slurm starts it by itself."""
    return job.begins_later(now_s) and not job.held and plain_shape(job) is not None
