"""Which of Slurm's jobs Penstock manages, and why not the others that ask for it. Pure, as `view.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from penstock_scheduler.api.ports import SpecCheck
from penstock_scheduler.model import JobId, JobSpec, Refusal, parse_spec
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.base import ENDED, WAITING
from penstock_slurm.jobs.licences import wanted
from penstock_slurm.jobs.notes import TEXTS, node_choice, notes, request
from penstock_slurm.jobs.states import HOLDING
from penstock_slurm.observe.node_parts import mixes

KEPT = (
    "it shares GPUs, which only Penstock allocates, so Penstock manages it as before until it ends or is stopped, although its "
    "job spec or its permission to be requeued was taken away"
)


@dataclass(slots=True)
class SortedJobs:
    """Slurm's jobs, sorted into those that Penstock manages and others."""

    managed: dict[JobId, tuple[SlurmJob, JobSpec]] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    """Jobs that ask for Penstock and cannot be managed."""
    records: dict[JobId, SlurmJob] = field(default_factory=dict)
    """Slurm's records of the refused jobs."""
    kept: list[SlurmJob] = field(default_factory=list)
    """Managed jobs that would be refused if they had GPUs of their own in Slurm."""

    @property
    def messages(self) -> list[tuple[SlurmJob, str]]:
        """Messages to the users of these jobs."""
        refused = [(self.records[each.job], each.text) for each in self.refused]
        return [*refused, *((job, KEPT) for job in self.kept)]


def sort_jobs(
    jobs: Iterable[SlurmJob],
    partitions: Collection[str],
    *,
    adopt: Collection[str],
    cleared: Callable[[SlurmJob], bool],
    sent: Callable[[SlurmJob], bool],
    was_managed: Callable[[SlurmJob], bool],
    shares_by: Callable[[SlurmJob], JobSpec | None],
    check: SpecCheck,
) -> SortedJobs:
    """Which jobs Penstock manages.

    Args:
        jobs: Slurm's jobs.
        partitions: the managed partitions, that of the cloud included.
        adopt: whose jobs Penstock manages; see `[slurm] adopt`.
        cleared: tells whether Penstock has cleared the GRES of a job.
        sent: tells whether Penstock has sent a job to nodes before.
        was_managed: tells whether Penstock has managed a job without a job spec before.
        shares_by: returns the job spec of a job that runs without GPUs of its own in Slurm, or None. Such a job cannot become a
            plain job: Slurm would give its GPUs to another job beside it.
        check: raises BadJobSpec if a job spec can never be served.
    """
    found, ours = SortedJobs(), set(partitions)
    for job in jobs:
        if job.state in ENDED or not set(job.partition) & ours:
            continue
        try:
            spec = job_spec(job)
            if spec is None:
                expect_never_managed(job, managed=was_managed(job))
                continue
            if adopt and not sent(job):
                expect_adopted(job, adopt)
            expect_manageable(job, cleared=cleared(job), sent=sent)
            if job.held and job.required_nodes and job.restarts == 0 and not sent(job):
                raise BadJobSpec(
                    "it names its nodes (--nodelist), and Penstock would overwrite that; submit it with sbatch --adaptive on a "
                    "host with Penstock's plugin, or without --nodelist"
                )
            check(spec)
        except BadJobSpec as error:
            if (kept := shares_by(job)) is not None:
                found.managed[job.id] = job, kept
                found.kept.append(job)
                continue
            runs = False if job.state in WAITING else True if job.state in HOLDING else None
            found.refused.append(Refusal(job.id, job.name, job.user, str(error), runs))
            found.records[job.id] = job
            continue
        found.managed[job.id] = job, spec
    return found


def job_spec(job: SlurmJob) -> JobSpec | None:
    """The job spec, from admin_comment (which only the site can write) or else from the comment. Raises BadJobSpec."""
    ours = notes(job)
    told = ours is not None and SPEC_KEY not in ours  # a message to the user may quote a job spec, but is none
    spec = (None if told else _parsed(job.admin_comment)) or _parsed(job.comment)
    if spec is not None and spec.trial_group == "array" and job.array_job_id is not None:
        return spec.model_copy(update={"trial_group": f"array {job.array_job_id}"})
    return spec


@functools.lru_cache(maxsize=TEXTS)
def _parsed(text: str) -> JobSpec | None:
    """The job spec in a comment: the very object as before if the comment is the same. Raises BadJobSpec."""
    return parse_spec(text)


def expect_never_managed(job: SlurmJob, *, managed: bool) -> None:
    """Raise BadJobSpec if a job without a job spec had one before."""
    if managed:
        stays = "it stays pending until then" if job.state in WAITING else "it continues as a plain job"
        raise BadJobSpec(
            "its AdminComment or comment no longer has the job spec, so Penstock leaves it to Slurm; ask an admin to write the "
            f"job spec back (scontrol update AdminComment), or submit the job again; {stays}"
        )


def expect_adopted(job: SlurmJob, adopt: Collection[str]) -> None:
    """Raise BadJobSpec if the site does not let Penstock manage jobs of this user, account and partition."""
    of = {f"user:{job.user}", f"account:{job.account}", *(f"partition:{name}" for name in job.partition)}
    if of.isdisjoint(adopt):
        plain = "submit it again without adaptive flags" if job.state in WAITING else "it continues as a plain job"
        raise BadJobSpec(
            f"this site lets Penstock manage only jobs of {', '.join(sorted(adopt))}; {plain}, or ask an admin ([slurm] adopt)"
        )


def expect_manageable(job: SlurmJob, *, cleared: bool, sent: Callable[[SlurmJob], bool]) -> None:
    """Raise BadJobSpec if a job cannot be placed because of the way it was submitted, or of what Slurm says of it.

    The arguments are as in `sort_jobs`.
    """
    if job.unknown:
        said = ", ".join(map(str, job.unknown))
        raise BadJobSpec(
            f"Slurm says {said} of it, which this version of Penstock does not know, so Penstock leaves it alone; its admins run "
            "`penstock slurm check`"
        )
    if job.het_job_id is not None:
        raise BadJobSpec(
            "it is part of a heterogeneous job, which cannot be moved in parts; submit it as a job of its own"
        )
    asked = request(job)  # also raises if the note cannot be read, since a job is placed by it
    if job.exclusive and not asked.whole_nodes:
        raise BadJobSpec(
            "it requests whole nodes (--exclusive), but Penstock allocates GPUs; submit it without --exclusive"
        )
    if wanted(job.licenses) is None:
        raise BadJobSpec(
            f"it requests licences in a form that Penstock cannot read ({job.licenses}); name each one with its number, such as "
            "--licenses=matlab:1,ansys:2, or submit it without a job spec"
        )
    if mixes(job):
        raise BadJobSpec(
            "Slurm has started it on a host with several GPU types and does not show which types it has, so Penstock leaves it "
            "alone until it is requeued"
        )
    if job.gpu_type is not None and not sent(job):
        raise BadJobSpec(
            f"it requests GPUs of type {job.gpu_type} from Slurm, which cannot change that later; submit it with "
            f'--gres=gpu:1 and name the types in the job spec, such as "gpu_types": ["{job.gpu_type}"]'
        )
    if job.gpus_per_node is None and not cleared and not (job.state in WAITING and sent(job)):
        raise BadJobSpec("it requests no GPUs per node, so there is no number to change; submit it with --gres=gpu:1")
    node_choice(job)
    if not job.requeue:
        raise BadJobSpec("Slurm may not requeue it, so it cannot be moved; submit it with --requeue")
