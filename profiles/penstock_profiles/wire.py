"""What a training job and the scheduler say to each other: reports, control, and the epoch of a run.

Both sides, and every transport between them, use these models, so a message means the same on each end. A *run* is one
start of a job; its *epoch* is a number that only grows over the job's life. The daemon gives it out in `ControlMessage`
before it lets the job start, and a job that finds an epoch already claimed (Slurm restarted it alone) takes the next.
Everything that a run says carries its epoch, so that a run left behind on a silent node is told from the present one:
Slurm's own restart count can repeat after a controller crash and cannot do that.

The first transport is a folder that the daemon and the nodes share, the *spool*::

    SPOOL/JOB_ID/control.json             the daemon's word to the job; replaced whole, never edited
    SPOOL/JOB_ID/reports/EPOCH.jsonl      the run's reports, one `Report` a line, only appended

A run claims its epoch by creating its reports file, which fails if the file is there.

`penstock profile` has a private spool of its own: beside the job's folder lies the file with its `ProfileRequest`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

VERSION: Literal[1] = 1
"""Version of the messages. A reader refuses a newer one and says so."""

SPOOL_VARIABLE = "PENSTOCK_SPOOL"
"""Environment variable that names the spool folder inside jobs."""

PROFILE_VARIABLE = "PENSTOCK_PROFILE"
"""Environment variable that names the file with the `ProfileRequest`, in the command that `penstock profile` runs."""

MEASURING_VARIABLE = "PENSTOCK_MEASURING"
"""Environment variable that names a folder, in the command that `penstock sensitivity measure` runs: the run begins anew, keeps
its checkpoints there, and reports every few seconds."""

MEASURING_REPORT_S = 2.0
"""The longest time between two reports of such a run."""

PROFILE_JOB = "profile"
"""Job under which that command reports, whatever job of Slurm's it runs in."""

CPU = "cpu"
"""The GPU type that is none: training on the processor."""

MAX_REPORT_BYTES = 64 * 1024
"""A longer line in a reports file is not a report of ours: readers skip it."""


class Message(BaseModel):
    """Base of all messages: frozen, finite, and strict about unknown fields, so that a typo is an error at the sender."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Started(Message):
    """A run has begun, or begun again, and this is where."""

    kind: Literal["started"] = "started"
    gpu_type: str
    gpu_ids: dict[str, tuple[int, ...]]
    """Node name -> indices of the GPUs that the run uses there."""
    progress: NonNegativeFloat = 0.0
    """Progress restored from the checkpoint, in samples of the initial batch size; 0 on a fresh start."""
    total: PositiveFloat | None = None
    """Progress at which the job is done, if it knows."""
    answers_requests: bool = True
    """Whether this run reads control requests. A run that does not is stopped by Slurm's signals alone."""
    usr2: Literal["batch", "steps"] | None = None
    """Where a handler for SIGUSR2 is in place, which looks for the request: in the process of the batch script, or in every
    process of the job's steps. The daemon sends the signal with each request, and to no other run: unhandled, it ends one."""
    survives_losing_nodes: bool = False
    """Whether this run goes on when Slurm takes whole nodes from it, its first node never among them."""
    versions: dict[str, str] = {}
    """Software that its speed depends on: name -> version. Empty: not told."""


class Observation(Message):
    """What a run measured over `steps` optimiser steps on one allocation."""

    kind: Literal["observation"] = "observation"
    gpu_type: str
    nodes: PositiveInt
    gpus: PositiveInt
    gpus_per_replica: PositiveInt = 1
    """Processes, each with a GPU, that hold one copy of the model together: `gpus` is a multiple of it."""
    atomic_batch: PositiveInt
    """Samples per replica, which mostly is a GPU, in one micro-step."""
    accumulation_steps: NonNegativeInt = 0
    """Micro-steps whose gradients are added up before the last one of a step."""
    steps: PositiveInt
    """Optimiser steps that the means below cover."""
    step_time_s: PositiveFloat
    """Mean wall-clock time of one optimiser step; under `penstock profile` the median, which one slow step does not move."""
    sync_time_s: NonNegativeFloat | None = None
    """Mean part of `step_time_s` spent in gradient synchronisation that compute does not hide; None: not measured."""
    grad_sqr: NonNegativeFloat | None = None
    """Estimate of the squared norm of the true gradient, at the initial batch size."""
    grad_var: NonNegativeFloat | None = None
    """Estimate of the trace of the gradient's covariance, at the initial batch size."""
    goodput: NonNegativeFloat | None = None
    """Samples/s of the initial batch size's worth of progress."""
    memory_mb: NonNegativeFloat | None = None
    """Most memory that it took on one GPU (on a CPU, of the host), MiB; None: not measured."""
    utilisation: NonNegativeFloat | None = Field(default=None, le=1)
    """Share of the time in which the GPUs were busy, as NVML samples it on the node of the first process; None: not sampled."""
    device_memory_mb: NonNegativeFloat | None = None
    """Most memory in use on one of these GPUs, all processes and the driver counted, MiB; None: not sampled."""
    progress: NonNegativeFloat
    """Progress so far over all runs, in samples of the initial batch size."""

    @model_validator(mode="after")
    def _whole_replicas(self) -> Self:
        if self.gpus % self.gpus_per_replica:
            raise ValueError(f"gpus={self.gpus} are no whole replicas of gpus_per_replica={self.gpus_per_replica}")
        return self

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.gpus // self.gpus_per_replica

    @property
    def samples(self) -> int:
        """Of an optimiser step, where all replicas have as many."""
        return self.replicas * self.atomic_batch * (self.accumulation_steps + 1)

    @property
    def samples_per_s(self) -> float:
        """Throughput, samples/s."""
        return self.samples / self.step_time_s


class BatchTrial(Message):
    """Under `penstock profile`: a batch is tried now, so that a run that dies has said at which; or, it did not fit."""

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


class Suspended(Message):
    """The run has moved its state off the GPUs and stands still: now it may be frozen (`scontrol suspend`)."""

    kind: Literal["suspended"] = "suspended"
    request: str | None = None
    """The control request that it answers; None: SIGTSTP asked for it."""
    moved_bytes: NonNegativeInt
    """To the host's memory: of all processes, or where SIGTSTP asked, of the first."""
    left_bytes: NonNegativeInt
    """Still held on the GPUs by the framework's allocator, likewise; the driver's own context comes on top."""
    seconds: NonNegativeFloat


class Resumed(Message):
    """The run trains on where it stood still."""

    kind: Literal["resumed"] = "resumed"
    seconds: NonNegativeFloat
    """That moving its state back took."""


class Result(Message):
    """What a trial of a search has reached: the policy, and a study that searches, compare it with the others'."""

    kind: Literal["result"] = "result"
    metric: float
    """The higher the better: of a loss, its negative."""
    progress: NonNegativeFloat
    """Progress that it was reached at, over all runs, in samples of the initial batch size; 0: not told."""


class Ended(Message):
    """The run is about to exit."""

    kind: Literal["ended"] = "ended"
    outcome: Literal["completed", "stopped", "superseded", "failed"]
    """`stopped`: asked to stop and saved; `superseded`: a later epoch exists, so this run wrote nothing more."""
    progress: NonNegativeFloat
    text: str = ""


Body = Annotated[
    Started | Observation | BatchTrial | Checkpointed | Suspended | Resumed | Result | Ended,
    Field(discriminator="kind"),
]


class Report(Message):
    """One line from a run to the daemon."""

    version: Literal[1] = VERSION
    job_id: str
    epoch: NonNegativeInt
    sequence: NonNegativeInt
    """0, 1, 2, … within the epoch: a reader can drop a line that it has seen."""
    time_s: NonNegativeFloat
    """The node's clock, s since 1970."""
    body: Body


class Request(Message):
    """Something that the daemon asks of the present run. Asking twice with the same `id` is asking once."""

    id: str
    kind: Literal["checkpoint", "suspend"] = "checkpoint"
    """`checkpoint`: save now, say `Checkpointed`, and train on; the daemon stops the run when it chooses.

    `suspend`: after the step move off the GPUs, say `Suspended`, and stand still until SIGCONT or until the request is withdrawn.
    Only then does the daemon freeze the job: Slurm 22.05 does that 2.0 s after SIGTSTP, moved out or not."""
    asked_s: NonNegativeFloat
    """The daemon's clock, s since 1970."""


class ControlMessage(Message):
    """The daemon's word to a job, as it stands now."""

    version: Literal[1] = VERSION
    job_id: str
    epoch: NonNegativeInt
    """Epoch of the newest run that the daemon has started."""
    round: NonNegativeInt
    """Round whose plan this follows."""
    gpu_type: str | None = None
    nodes: PositiveInt | None = None
    gpus: PositiveInt | None = None
    cpus: PositiveInt | None = None
    """CPUs on each node that come with the GPUs; None: as many as the job itself asked for."""
    memory_mb: PositiveInt | None = None
    """Memory on each node, MB as Slurm counts them; None: as much as the job itself asked for."""
    request: Request | None = None
    moved_s: NonNegativeFloat | None = None
    """When the daemon decided to move the job, until its next run has begun there, s since 1970; None: it is not on its way."""
    pauses_s: tuple[NonNegativeFloat, ...] = ()
    """From that decision to the next run's `Started`, for the last few moves, the newest last."""
    submitted_s: NonNegativeFloat | None = None
    """When the user submitted the job, s since 1970. Slurm's own record of it begins anew with each requeue."""
    submitted_to: str | None = None
    """The partition that the user submitted it to. In Slurm's record it is the one where the job was sent."""
    slurm_job: str | None = None
    """SLURM_JOB_ID of the run, where the job's name is another: that of an array's element, `12_3`."""
    time_limit_s: NonNegativeFloat | None = None
    """What is left of the job's time limit for the run after `time_limit_restarts` restarts; None: the limit as submitted."""
    time_limit_restarts: NonNegativeInt | None = None
    shares: bool = False
    """Whether it may hold no GPUs by Slurm: it was sent to GPUs to which the agent of its node binds it, or was there before and
    Slurm may not have given it its own again."""


class ProfileRequest(Message):
    """What `penstock profile` asks of the command that it runs."""

    version: Literal[1] = VERSION
    gpu_type: str
    """`CPU` if no GPU is to be used."""
    min_batch: PositiveInt | None = None
    """Smallest batch to measure, samples on one GPU; None: the script's."""
    max_batch: PositiveInt | None = None
    """Largest; None: the script's, and if it has none, up to the memory limit."""
    seconds: PositiveFloat
    """Wall-clock time that measuring may take, from the first step."""


def job_folder(spool: Path, job_id: str) -> Path:
    """Folder of one job in the spool. Raises ValueError if `job_id` could lead out of it."""
    if not job_id or not all(c.isalnum() or c in "_+-" for c in job_id):
        raise ValueError(f"job id {job_id!r} is not one of Slurm's; expected letters, digits, '_', '+' and '-'")
    return spool / job_id


def control_file(spool: Path, job_id: str) -> Path:
    """Where the daemon leaves its word for a job."""
    return job_folder(spool, job_id) / "control.json"


def reports_folder(spool: Path, job_id: str) -> Path:
    """Where the runs of a job leave their reports."""
    return job_folder(spool, job_id) / "reports"


def reports_file(spool: Path, job_id: str, epoch: int) -> Path:
    """Where one run of a job leaves its reports."""
    return reports_folder(spool, job_id) / f"{epoch}.jsonl"


def claimed_epochs(spool: Path, job_id: str) -> list[int]:
    """Epochs that runs of the job have claimed, ascending; empty if none."""
    try:
        names = os.listdir(reports_folder(spool, job_id))
    except FileNotFoundError:
        return []
    return sorted(int(name[:-6]) for name in names if name.endswith(".jsonl") and name[:-6].isdigit())
