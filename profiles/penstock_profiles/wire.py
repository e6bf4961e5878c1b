"""Messages between a training job and the daemon: reports, control messages, and the epoch of a run.

Both sides, and every transport between them, use these models, so a message means the same on each end. A *run* is one
start of a job; its *epoch* is a number that only grows over the job's life. The daemon assigns it in `ControlMessage`
before it lets the job start. If a run finds its epoch claimed already, because Slurm restarted the job alone, it takes
the next. Every report carries the run's epoch, so that reports of a superseded run on a node that did not answer can be
told from those of the present run. Slurm's own restart count can repeat after a crash of its controller, so it cannot
serve for this.

The usual transport is a folder that the daemon and the nodes share, the *spool*::

    SPOOL/JOB_ID/control.json             the daemon's control message to the job; replaced as a whole, never edited
    SPOOL/JOB_ID/reports/EPOCH.jsonl      the run's reports, one `Report` per line, only appended

A run claims its epoch by creating its reports file, which fails if the file exists.

`penstock profile run` has a private spool: the file with its `ProfileRequest` is next to the job's folder.
"""

from __future__ import annotations

import operator
import os
import re
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

VERSION: Literal[1] = 1
"""Version of the messages. It changes when a reader of the version before would misunderstand a message. A reader
refuses another version, with a message (`read`)."""

SPOOL_VARIABLE = "PENSTOCK_SPOOL"
"""Environment variable that names the spool folder inside jobs."""

URL_VARIABLE = "PENSTOCK_URL"
"""Environment variable with the addresses of penstockd's API, in jobs and for the command line; see `api_urls`."""

PROFILE_VARIABLE = "PENSTOCK_PROFILE"
"""Environment variable that names the file with the `ProfileRequest`, in the command that `penstock profile run` runs."""

MEASURING_VARIABLE = "PENSTOCK_MEASURING"
"""Environment variable that names a folder, in the command that `penstock profile sensitivity measure` runs. The run begins
from scratch, keeps its checkpoints there, and reports every few seconds."""

MEASURING_REPORT_S = 2.0
"""Longest time between two reports of such a run."""

PROFILE_JOB = "profile"
"""Job id under which a profiled command reports, in whichever Slurm job it runs."""

CPU = "cpu"
"""The GPU type of jobs that train on CPUs."""

EPOCH_FILE = re.compile(r"[0-9]{1,9}\.jsonl")
"""The name of a reports file. The job's user can make files of any name beside it."""

MAX_REPORT_BYTES = 64 * 1024
"""Longest line in a reports file. Readers skip longer ones: they are not reports of Penstock."""


def api_urls(text: str) -> tuple[str, ...]:
    """The addresses of penstockd's API in PENSTOCK_URL; several are separated by commas, one for each penstockd.

    Raises:
        ValueError: one is neither `https://HOST:PORT` nor `http://HOST:PORT` nor `unix:/PATH`.
    """
    urls = tuple(each.strip() for each in text.split(","))
    wrong = [each for each in urls if not re.fullmatch(r"(?i:https?)://[^\s/]+/?|unix:/\S+", each)]
    if wrong:
        raise ValueError(
            f"{URL_VARIABLE}={text}: {wrong[0]!r} is not https://HOST:PORT, http://HOST:PORT or unix:/PATH"
        )
    return urls


class Message(BaseModel):
    """Base of all messages: frozen, with finite numbers, and without unknown fields, so that a typo fails at the
    sender. `read` makes a message of what another program has sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


AnyModel = TypeVar("AnyModel", bound=BaseModel)


class UnknownVersion(ValueError):
    """A message is of a version that this program does not read."""


def read(model: type[AnyModel], text: bytes | str) -> AnyModel:
    """A message that another program has sent, from its JSON.

    During an upgrade, the sender may be of another release. Fields that this release does not know are left out: a
    release adds only fields without which a message means the same to the release before. Otherwise, it gives the
    message a new version. Releases of before 24 November 2026 refuse fields that they do not know; so the fields about
    giving up nodes are left out of a message in which they say nothing (`exclude_if`).

    Raises:
        UnknownVersion: the message has another version.
        ValueError: the text is no such message.
    """
    try:
        return model.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        known = model.model_fields.get("version")
        if known is not None and any(each["loc"] == ("version",) for each in error.errors(include_url=False)):
            raise UnknownVersion(
                f"it is a message of another version than {known.default}, which is all that this release of Penstock "
                "reads; upgrade the older one of sender and reader (docs: Maintenance, Upgrade without a stop)"
            ) from None
        raise


class Started(Message):
    """A run has started."""

    kind: Literal["started"] = "started"
    gpu_type: str
    gpu_ids: dict[str, tuple[int, ...]]
    """Node name -> indices of the GPUs that the run uses there."""
    progress: NonNegativeFloat = 0.0
    """Progress restored from the checkpoint, in samples of the initial batch size; 0 on a fresh start."""
    total: PositiveFloat | None = None
    """Progress at which the job is done, if known."""
    answers_requests: bool = True
    """Whether this run reads control requests. A run that does not is stopped by Slurm's signals alone."""
    usr2: Literal["batch", "steps"] | None = None
    """Which processes handle SIGUSR2 by reading the request: that of the batch script, or all processes of the job's
    steps. The daemon sends the signal with each request. It sends it to no other run, since an unhandled signal ends
    the run."""
    survives_losing_nodes: bool = False
    """Whether this run continues when Slurm takes whole nodes from it. The first node is never taken."""
    gives_up_nodes: bool = Field(default=False, exclude_if=operator.not_)
    """Whether this run serves requests with `keep_nodes`: it leaves nodes before Slurm takes them."""
    left_nodes: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    """Nodes that the runs before it have left for good, in this run of Slurm's."""
    restarts: NonNegativeInt | None = Field(default=None, exclude_if=lambda value: value is None)
    """The job's restarts in Slurm: `left_nodes` are those of that run of Slurm's. None unless it `gives_up_nodes`."""
    versions: dict[str, str] = {}
    """Software that the speed depends on: name -> version. Empty: unknown."""


class Observation(Message):
    """What a run measured over `steps` optimiser steps on one allocation."""

    kind: Literal["observation"] = "observation"
    gpu_type: str
    nodes: PositiveInt
    gpus: PositiveInt
    gpus_per_replica: PositiveInt = 1
    """Processes, each with a GPU, that hold one replica of the model together. `gpus` is a multiple of it."""
    atomic_batch: PositiveInt
    """Samples per replica, usually one GPU, in one micro-step."""
    accumulation_steps: NonNegativeInt = 0
    """Micro-steps whose gradients are added up before the last one of a step."""
    steps: PositiveInt
    """Number of optimiser steps that the means below cover."""
    step_time_s: PositiveFloat
    """Mean wall-clock time of one optimiser step. Under `penstock profile run` it is the median, which outliers do not
    move."""
    sync_time_s: NonNegativeFloat | None = None
    """Mean part of `step_time_s` spent in gradient synchronisation that compute does not hide; None: not measured."""
    grad_sqr: NonNegativeFloat | None = None
    """Estimate of the squared norm of the true gradient, at the initial batch size."""
    grad_var: NonNegativeFloat | None = None
    """Estimate of the trace of the gradient's covariance, at the initial batch size."""
    goodput: NonNegativeFloat | None = None
    """Progress per second, in samples of the initial batch size."""
    memory_mb: NonNegativeFloat | None = None
    """Peak memory of the run on one GPU (on a CPU: on the host), MiB; None: not measured."""
    utilisation: NonNegativeFloat | None = Field(default=None, le=1)
    """Share of the time in which the GPUs were busy, by NVML on the node of the first process; None: not sampled."""
    device_memory_mb: NonNegativeFloat | None = None
    """Peak memory in use on one of these GPUs, by all processes and the driver, MiB; None: not sampled."""
    progress: NonNegativeFloat
    """Progress so far over all runs, in samples of the initial batch size."""

    @model_validator(mode="after")
    def _whole_replicas(self) -> Self:
        if self.gpus % self.gpus_per_replica:
            raise ValueError(f"gpus={self.gpus} is not a multiple of gpus_per_replica={self.gpus_per_replica}")
        return self

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.gpus // self.gpus_per_replica

    @property
    def samples(self) -> int:
        """Samples of an optimiser step in which all replicas have equally many."""
        return self.replicas * self.atomic_batch * (self.accumulation_steps + 1)

    @property
    def samples_per_s(self) -> float:
        """Throughput, samples/s."""
        return self.samples / self.step_time_s


class BatchTrial(Message):
    """Under `penstock profile run`: a batch size is about to be tried, or did not fit into memory.

    The report comes before the trial, so that it tells at which size a run has died.
    """

    kind: Literal["trial"] = "trial"
    atomic_batch: PositiveInt
    out_of_memory: bool = False


class Checkpointed(Message):
    """A checkpoint is complete on disk. `request` names the control request that it answers, if any."""

    kind: Literal["checkpointed"] = "checkpointed"
    request: str | None = None
    progress: NonNegativeFloat
    seconds: NonNegativeFloat
    """Wall-clock time that saving took."""


LONGEST_TEXT = 500
"""Characters of the reason in a `SaveFailed`."""


class SaveFailed(Message):
    """A checkpoint could not be written, and the run goes on. `request` names the control request that asked for it, if any."""

    kind: Literal["save_failed"] = "save_failed"
    request: str | None = None
    text: str
    """Why."""


class Suspended(Message):
    """The run has moved its state off the GPUs and stands still. It may now be frozen (`scontrol suspend`)."""

    kind: Literal["suspended"] = "suspended"
    request: str | None = None
    """The control request that it answers; None: SIGTSTP asked for it."""
    moved_bytes: NonNegativeInt
    """Moved to the host's memory: by all processes or, if SIGTSTP asked for it, by the first."""
    left_bytes: NonNegativeInt
    """Still held on the GPUs by the framework's allocator, of the same processes. The driver's context is not
    counted."""
    seconds: NonNegativeFloat


class Resumed(Message):
    """The run continues after a suspension."""

    kind: Literal["resumed"] = "resumed"
    seconds: NonNegativeFloat
    """Wall-clock time that moving the state back took."""


class Result(Message):
    """The metric that a trial of a search has reached. The policy and the search compare trials by it."""

    kind: Literal["result"] = "result"
    metric: float
    """Higher is better. For a loss, it is the negative of the loss."""
    progress: NonNegativeFloat
    """Progress at which it was reached, over all runs, in samples of the initial batch size; 0: unknown."""


class Ended(Message):
    """The run is about to exit."""

    kind: Literal["ended"] = "ended"
    outcome: Literal["completed", "stopped", "superseded", "failed"]
    """`stopped`: the run was asked to stop and saved. `superseded`: a later run exists, so this one wrote nothing
    more."""
    progress: NonNegativeFloat
    text: str = ""


Body = Annotated[
    Started | Observation | BatchTrial | Checkpointed | SaveFailed | Suspended | Resumed | Result | Ended,
    Field(discriminator="kind"),
]


class Report(Message):
    """One report from a run to the daemon."""

    version: Literal[1] = VERSION
    job_id: str
    epoch: NonNegativeInt
    sequence: NonNegativeInt
    """0, 1, 2, … within the epoch, so that a reader can drop reports that it has read before."""
    time_s: NonNegativeFloat
    """The node's clock, s since 1970."""
    body: Body


class Request(Message):
    """The daemon's request to the present run. Repeating it with the same `id` has no further effect."""

    id: str
    kind: Literal["checkpoint", "suspend"] = "checkpoint"
    """`checkpoint`: save now, report `Checkpointed`, and continue. The daemon stops the run later.

    `suspend`: after the present step, move off the GPUs, report `Suspended`, and stand still until SIGCONT or until the
    request is withdrawn. The daemon freezes the job only after that report, because Slurm 22.05 freezes it 2.0 s after
    SIGTSTP even if it has not moved out."""
    asked_s: NonNegativeFloat
    """The daemon's clock, s since 1970."""
    keep_nodes: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    """Nodes on which to begin anew after the checkpoint, without the others, which Slurm takes then; (): on none. Only
    a run that `gives_up_nodes` is asked, and the first node stays."""


class ControlMessage(Message):
    """The daemon's present message to a job."""

    version: Literal[1] = VERSION
    job_id: str
    epoch: NonNegativeInt
    """Epoch of the newest run that the daemon has started."""
    round: NonNegativeInt
    """Round whose plan it belongs to."""
    gpu_type: str | None = None
    nodes: PositiveInt | None = None
    gpus: PositiveInt | None = None
    cpus: PositiveInt | None = None
    """CPUs on each node that come with the GPUs; None: as many as the job requested."""
    memory_mb: PositiveInt | None = None
    """Memory on each node, MB as Slurm counts them; None: as much as the job requested."""
    request: Request | None = None
    moved_s: NonNegativeFloat | None = None
    """When the daemon decided to move the job, s since 1970; None once the next run has begun, or if it does not
    move."""
    pauses_s: tuple[NonNegativeFloat, ...] = ()
    """Seconds from such a decision to the next run's `Started`, for the last few moves, the newest last."""
    submitted_s: NonNegativeFloat | None = None
    """When the user submitted the job, s since 1970. Slurm's own record changes with each requeue."""
    submitted_to: str | None = None
    """Partition to which the user submitted the job. Slurm's own record has the partition to which it was sent."""
    submitted_limit_s: PositiveFloat | None = None
    """The job's time limit before its first move, s. Slurm's own record has what was left of it at the last move."""
    slurm_job: str | None = None
    """SLURM_JOB_ID of the run if the job has another id, as elements of arrays do (`12_3`)."""
    time_limit_s: NonNegativeFloat | None = None
    """What is left of the job's time limit, for the run after `time_limit_restarts` restarts; None: the submitted
    limit."""
    time_limit_restarts: NonNegativeInt | None = None
    holds: NonNegativeInt | None = None
    """The job's restarts in Slurm up to which its holds are the daemon's own, between its runs. Later holds, and those of
    a job without this number, are somebody else's."""
    released: NonNegativeInt | None = None
    """The job's restarts in Slurm when it released the daemon's last own hold. A killed slurmctld may show that hold again."""
    asked_types: tuple[str, ...] = ()
    """GPU types that the job has asked Slurm for so far, where that binds it to hosts with all of them."""
    holding: NonNegativeInt | None = None
    """The job's restarts in Slurm when the daemon last sent a hold to a job that Slurm might start at the same moment. If
    it came too late, the hold of that run is the daemon's own; None once that is known."""
    shares: bool = False
    """Whether the job may hold no GPUs in Slurm. Then the agent of its node binds it to shared GPUs, or did so before,
    and Slurm may not have allocated GPUs of its own to it again."""


class ProfileRequest(Message):
    """The request of `penstock profile run` to the command that it runs."""

    version: Literal[1] = VERSION
    gpu_type: str
    """`CPU` to use no GPU."""
    min_batch: PositiveInt | None = None
    """Smallest batch to measure, in samples on one GPU; None: the script's."""
    max_batch: PositiveInt | None = None
    """Largest batch to measure; None: the script's, or if it has none, up to the memory limit."""
    seconds: PositiveFloat
    """Wall-clock time that measuring may take, from the first step."""


def job_folder(spool: Path, job_id: str) -> Path:
    """Folder of one job in the spool. Raises ValueError if `job_id` could lead out of it."""
    if not job_id or not all(c.isalnum() or c in "_+-" for c in job_id):
        raise ValueError(f"job id {job_id!r} is not a Slurm job id; use only letters, digits, '_', '+' and '-'")
    return spool / job_id


def control_file(spool: Path, job_id: str) -> Path:
    """The daemon's control message to a job."""
    return job_folder(spool, job_id) / "control.json"


def reports_folder(spool: Path, job_id: str) -> Path:
    """Folder for the reports of all runs of a job."""
    return job_folder(spool, job_id) / "reports"


def reports_file(spool: Path, job_id: str, epoch: int) -> Path:
    """The reports of one run of a job."""
    return reports_folder(spool, job_id) / f"{epoch}.jsonl"


def left_file(spool: Path, job_id: str, restarts: int, node: str) -> Path:
    """An empty file by which the launcher on a node says that all processes there have ended, and that it ends now.

    Args:
        spool: its folder.
        job_id: of the job.
        restarts: the job's restarts in Slurm.
        node: Slurm's name of it.
    """
    return reports_folder(spool, job_id) / f"left-{restarts}-{node}"


def inbox_folder(spool: Path) -> Path:
    """Folder in which each run leaves an empty file with the name of its job after it has reported. The daemon takes
    these files away and reads the reports of those jobs, so it need not search all jobs for news."""
    return spool / "inbox"


MOST_CLAIMED = 10_000
"""Most files of a reports folder that count as epochs. A job makes one for each run, and its user may make millions."""


def claimed_epochs(spool: Path, job_id: str) -> list[int]:
    """Epochs that runs of the job have claimed, ascending; empty if there are none, or if the folder cannot be read: its user
    may have mounted something there. A run whose epoch is claimed already takes the next. Of more than `MOST_CLAIMED` files, as
    many are looked at."""
    try:
        with os.scandir(reports_folder(spool, job_id)) as entries:
            names = [entry.name for entry in islice(entries, MOST_CLAIMED)]
    except OSError:
        return []
    return sorted(int(name[:-6]) for name in names if EPOCH_FILE.fullmatch(name))
