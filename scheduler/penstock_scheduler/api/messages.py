"""The bodies of requests and answers of penstockd's HTTP API, version 1. docs/user/api.md lists the endpoints.
Times are in seconds since 1970. The name of any other quantity ends with its unit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from penstock_scheduler.api.estimate_messages import JobEstimate, NewJobs
from penstock_scheduler.model import JobSpec, Suspension, host_of
from penstock_scheduler.model.policy_choice import PolicyChoice

DEFAULT_SOCKET = Path("/run/penstock/api.sock")
"""Where penstockd serves the API, unless `[api] socket` says otherwise."""

MAX_BODY_BYTES = 2 * 1024 * 1024
"""Most bytes in the body of one request."""
MAX_SCRIPT_BYTES = 1024 * 1024
MAX_REPORTS = 500
"""Most reports in one request."""
MAX_WAIT_S = 60.0
MAX_PAGE = 500
"""Most rows in one page."""
MAX_LOG_BYTES = 256 * 1024
"""Most bytes of a job's output in one answer."""

Role = Literal["user", "operator", "admin", "job"]
"""`user`: own jobs. `operator`: all jobs. `admin`: all jobs, settings and tokens. `job`: only the reports of one job."""

Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:@/+-]{1,200}$")]
_Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@+-]{1,100}$")]
_Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,1000}$")]
_Path = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]{0,1000}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,100}$")]
_Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]{0,10000}$")]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Problem(Body):
    """Why a request was not carried out. Every answer other than 2xx has one under the key `error`."""

    code: str
    """For programs: it stays the same when the message changes."""
    message: str
    """For people: what is wrong, where, and what to do."""


class ErrorAnswer(Body):
    """The body of every answer other than 2xx."""

    error: Problem


class Owner(Body):
    """What a job belongs to outside Slurm, such as a task of Airflow. An owner has at most one job that has not ended."""

    name: Key
    """Stays the same over all tries of a task."""
    generation: Key
    """Tries of one generation share a job. Another generation is to run anew, for example after the task was cleared."""
    attempt: NonNegativeInt = Field(le=2**62)
    """Grows with each try, over all generations, so that a late request of an earlier try does nothing."""
    lease_s: PositiveFloat | None = None
    """The job is cancelled if nobody renews its lease for this long, in seconds while penstockd runs. None: never."""


class OwnerView(Owner):
    """An owner and its newest try."""

    job: str | None = None
    """None: penstockd stopped while the job was submitted."""
    key: Key | None = None
    former: str | None = None
    """The job that the newest one replaces."""
    given_up: bool = False
    """Whether the newest job was cancelled for the owner itself, so that its next try submits another one."""


class Submission(Body):
    """A job to submit. It runs as the user that submits it."""

    key: Key | None = None
    """Idempotency key: all submissions of a user with the same key are the same job. None: each request is a new job."""
    owner: Owner | None = None
    """Needs a key, which is another one for each try."""
    name: _Line | None = None
    script: str | None = Field(default=None, max_length=MAX_SCRIPT_BYTES)
    """A batch script that begins with #!. Its #SBATCH lines apply, but the fields of this body take precedence."""
    command: tuple[_Value, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """A program and its arguments, instead of a script."""
    spec: JobSpec = JobSpec()
    partition: _Identifier | None = None
    account: _Identifier | None = None
    qos: _Identifier | None = None
    time_limit_s: PositiveFloat | None = Field(default=None, le=366 * 86400)
    cpus_per_task: PositiveInt | None = Field(default=None, le=10_000)
    memory_mb: PositiveInt | None = Field(default=None, le=2**40)
    working_directory: _Path | None = None
    """Absolute path; None: the user's home directory."""
    output: _Path | None = None
    """File for standard output and standard error, with Slurm's patterns (%j); None: Slurm's default."""
    environment: dict[_Name, _Value] = Field(default={}, max_length=1000)
    """Variables to add to the job's environment."""
    dependency: _Identifier | None = Field(default=None, pattern=r"^[a-z]+:[0-9]+(:[0-9]+)*$")
    """As in sbatch's --dependency, such as afterok:12."""
    deadline_s: PositiveFloat | None = Field(default=None, le=2**33)
    """When Slurm ends the job, whether it is running or waiting."""
    container_image: _Line | None = None
    """As in sbatch's --container-image; needs pyxis."""

    @model_validator(mode="after")
    def _one_program(self) -> Submission:
        if (self.script is None) == (self.command is None):
            raise ValueError("give exactly one of script and command")
        if self.script is not None and not self.script.startswith("#!"):
            raise ValueError("the script must begin with #!, such as #!/bin/bash")
        if self.script is not None and "\0" in self.script:
            raise ValueError("the script contains a NUL character")
        if self.owner is not None and self.key is None:
            raise ValueError("a submission with an owner needs a key; use another one for each try")
        return self


_Features = Annotated[tuple[_Identifier, ...], Field(max_length=100)]
_Nodes = Annotated[tuple[_Identifier, ...], Field(max_length=100_000)]


class NodesOrder(Body):
    """The nodes on which a job may run, as `NodeChoice`. An empty field allows every node."""

    only: _Nodes = ()
    exclude: _Nodes = ()
    features: tuple[_Features, ...] = Field(default=(), max_length=100)
    """A node that has all features of one of these is allowed."""


class PlanOrder(Submission):
    """A job that is not submitted yet, as far as it is known: a `Submission` that may lack its program."""

    partition: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@+,-]{1,1000}$")] | None = None
    """As in sbatch's --partition; several are separated by commas."""
    reservation: _Identifier | None = None
    nodes: NodesOrder = NodesOrder()

    @model_validator(mode="after")
    def _one_program(self) -> PlanOrder:
        return self


class AllocationView(Body):
    """GPUs that a job holds."""

    gpu_type: str
    gpus: int
    nodes: dict[str, int]
    """Node -> GPUs of the job on it."""


class ResultView(Body):
    """A result that a trial of a hyperparameter search reported."""

    metric: float
    """Higher is better."""
    progress: float
    """Samples at that time; 0: not reported."""
    ran_s: float
    """How long the job had run by then, over all its runs."""


class OutputFiles(Body):
    """Where a job writes its output: paths on its nodes."""

    stdout: str
    stderr: str
    """The same file as `stdout`, unless the user chose another one."""
    uid: int
    """The number of the job's user. A file is shown only if it belongs to this user."""


class JobView(Body):
    """A job."""

    id: str
    version: NonNegativeInt
    """Grows with each change of the job. The parameter `since` is compared with it."""
    name: str
    user: str
    account: str = ""
    state: Literal["queued", "starting", "running", "stopping", "ended"]
    ended: str = ""
    """Slurm's state of a job that has ended, such as COMPLETED, FAILED or CANCELLED; `UNKNOWN` if Slurm has forgotten it."""
    exit_code: int | None = None
    ended_text: str = ""
    """Why the job ended and what to do, for example if it ran out of memory; empty: the state says it all."""
    submit_s: float
    start_s: float | None = None
    """When the job first held GPUs."""
    end_s: float | None = None
    restarts: int = 0
    partition: str = ""
    """The partition to which the job was submitted; empty: not known."""
    spec: JobSpec
    key: str | None = None
    allocation: AllocationView | None = None
    reason: str = ""
    """Code of the newest round's reason; `explain` has the reason as a sentence."""
    stopped: str = ""
    """Why a run of the job was last stopped, as code and sentence; empty: none was."""
    note: str = ""
    """What keeps the job from being placed besides GPUs, such as a hold, with the remedy; empty: nothing."""
    note_s: float | None = None  # since when that is so, as far as penstockd has seen it
    suspended: Suspension | None = None  # it holds GPUs and stands still, or is driven by its agent
    progress: float | None = None
    """Samples so far, from the newest report."""
    cannot_save: str = ""
    """Why its last checkpoint could not be written, if it could not."""
    total: float | None = None
    """Samples after which the job is complete; None: not known."""
    gpu_seconds: dict[str, float] = {}
    """GPU type -> GPU-seconds that the job has held so far."""
    result: ResultView | None = None
    """The newest result that the job reported."""
    output: OutputFiles | None = None
    """Where the job writes its output, from its start on; None: it has not started, or has no output files."""
    estimate: JobEstimate | None = None
    """When it is expected to start and end; None: this has not been estimated yet, or it has ended."""


class JobPage(Body):
    """A page of jobs, newest first."""

    jobs: list[JobView]
    next: str | None = None
    """Value of `after` for the next page; None: this is the last page."""
    daemon_silent_since_s: float | None = None  # when the API last heard of penstockd; None: penstockd is there


class RefusedJob(Body):
    """A job in Slurm that asks for Penstock and that Penstock cannot manage. It waits until its job spec is corrected."""

    id: str
    name: str
    user: str
    text: str
    """What is wrong with its job spec."""


class ConfigurationView(Body):
    """A configuration that a job could have, with the goodput that its model predicts."""

    gpu_type: str
    nodes: int
    gpus: int
    goodput: float
    """In samples per second of this job."""
    price: float | None = None
    """Price of the GPUs, in the unit of the policy's objective."""


class ShareOption(Body):
    """CPUs and memory on a node that a job could have, and how fast it would be with them."""

    cpus: int
    memory_mb: int
    """0: the cluster does not allocate memory."""
    speed: float
    """Relative to the speed with the proportional share."""


class ShareView(Body):
    """CPUs and memory that a job has on each of its nodes.

    A job's proportional share of a node is the part of the CPUs and memory that its GPUs are of the node's GPUs.
    """

    cpus: int
    memory_mb: int
    part_cpus: int
    """The proportional share."""
    part_memory_mb: int
    profile: str = ""
    """Sensitivity profile that the speeds come from; empty: there is none."""
    speed: float = 1.0
    """Relative to the speed with the proportional share, by the profile."""
    sensitivity: list[ShareOption] = []


class ExplanationView(Body):
    """Why a job has what it has, by the newest round that considered it."""

    job: JobView
    round: int | None = None
    decided_s: float | None = None
    code: str
    text: str
    """The reason, in a sentence."""
    lines: list[str] = []
    """The whole explanation in sentences, as `penstock explain` prints it."""
    needs: str = ""
    """The least that the job needs to start."""
    estimated_start_s: float | None = None
    goodput: float | None = None
    prices: dict[str, float] = {}
    """GPU type -> its price in the round."""
    restart_cost_s: float | None = None
    configurations: list[ConfigurationView] = []
    """Configurations that the job spec and the cluster allow."""
    limits: list[str] = []
    """Limits that apply to the job, each as a sentence."""
    share: ShareView | None = None
    """CPUs and memory that the round allocates; None: the policy allocates none, or the job waits."""


class Forecast(Body):
    """What a job would get if it were submitted now."""

    would: Literal["start", "wait", "never"]
    code: str
    text: str
    needs: str = ""
    allocation: AllocationView | None = None
    goodput: float | None = None
    price: float | None = None
    """Price of its GPUs, in the unit of the policy's objective."""
    estimated_start_s: float | None = None
    displaced: int = 0
    """Number of other jobs whose allocation would differ."""
    lines: list[str] = []
    """The whole forecast in sentences, as `penstock submit --dry-run` prints it."""


class ReportBatch(Body):
    """Reports of one job, oldest first. `penstock config schema report` prints the schema of a report."""

    reports: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_REPORTS)


class RefusedReport(Body):
    """A report that was refused. Sending it again does not help."""

    index: int
    message: str


class ReportReceipt(Body):
    """The result of sending a batch of reports."""

    accepted: int
    """New reports. They are on disk."""
    duplicates: int
    """Reports that were on disk before."""
    refused: list[RefusedReport] = []
    epoch: int = 0
    """The job's present epoch. A run without access to the spool learns its epoch from it."""


class LogPart(Body):
    """A part of a job's output."""

    offset: int
    """Byte at which the part begins."""
    next: int
    """Value of `offset` for the next part."""
    whole: int
    """Byte after the part's last line that is complete, or that a carriage return ends; `offset` if there is none."""
    size: int
    """Bytes in the file."""
    text: str
    """The text, with bytes that are not UTF-8 replaced."""
    ended: bool
    """Whether the job has ended and this is the last part."""
    note: str = ""
    """Why there is no text yet, for example because the file is not there; empty: nothing is wrong."""


class RoundSummary(Body):
    """A round in numbers."""

    round: int
    time_s: float
    policy: str
    jobs: int
    placed: int
    waiting: int
    seconds: dict[str, float]
    """Phase (observe, decide) -> seconds that it took."""
    gap: float | None = None
    """Bound on how far the plan is from the best plan, as a share; None: the policy solves no problem."""
    prices: dict[str, float] = {}


class RoundPage(Body):
    """A page of rounds, newest first."""

    rounds: list[RoundSummary]
    next: int | None = None
    """Value of `before` for the next page; None: this is the last page."""


class Decision(Body):
    """What a round decided about a job."""

    job: str
    allocation: AllocationView | None = None
    code: str
    text: str
    goodput: float | None = None


class RoundView(Body):
    """A round and its decisions. Users see the decisions about their own jobs."""

    summary: RoundSummary
    decisions: list[Decision]
    refused: list[str] = []
    """Why the plan gate refused the round's first plan; empty: it did not."""
    would_stop: dict[str, str] = {}
    """Job -> why the refused plan would have stopped it, of the jobs that the caller may see."""


class OutcomeView(Body):
    """The progress of an action of a round."""

    time_s: float
    round: int
    job: str
    action: str
    progress: str
    text: str = ""
    stop: str = ""
    """Why the run is stopped, as code and sentence; empty: the action stops none."""
    allocation: AllocationView | None = None


class History(Body):
    """What happened to a job."""

    job: str
    outcomes: list[OutcomeView]
    observations: list[dict[str, Any]]
    """The newest reports of kind `observation`, as the job sent them."""
    results: list[dict[str, Any]] = []
    """The newest reports of kind `result`, as the job sent them."""


class NodeJob(Body):
    """A job of Penstock's on a node."""

    job: str
    user: str
    gpus: int
    gpu_ids: list[int] | None = None
    """Indices of these GPUs, as Slurm counts them; None: not known."""
    shared: bool = False
    """Whether it shares them with other jobs."""


class NodeView(Body):
    """A node."""

    name: str
    gpu_type: str
    gpus: int
    allocated: int
    """GPUs that Penstock's jobs hold."""
    others: int
    """GPUs that other jobs hold."""
    out_of_reach: int = 0
    """Free GPUs that no job can have, because jobs outside Penstock hold the CPUs or memory beside them."""
    may_start: bool
    """Whether new work may be placed here."""
    leave: str = ""
    """Why its jobs are asked to leave: `drain` or `penstock-drain`; empty: they stay."""
    state: str
    reservation: str = ""
    boot_s: float = 0.0
    """About how long it takes until a job can run here, s, because the node is powered down or boots; 0: it is awake."""
    note: str = ""
    """A remark for people about the node, as a sentence without its subject."""
    jobs: list[NodeJob] = []
    """Penstock's jobs that hold GPUs here, of those that the caller may see."""

    @property
    def free(self) -> int:
        """GPUs that no job holds and that new work may get."""
        return max(self.gpus - self.allocated - self.others - self.out_of_reach, 0) if self.may_start else 0


class ClusterView(Body):
    """The cluster in numbers."""

    observed_s: float | None
    round: int | None
    policy: str
    paused: bool
    gpus: dict[str, int]
    """GPU type -> all GPUs."""
    allocated: dict[str, int]
    """GPU type -> GPUs that Penstock's jobs hold."""
    others: dict[str, int]
    """GPU type -> GPUs that other jobs hold."""
    unusable: dict[str, int]
    """GPU type -> GPUs on nodes that are drained or out of service, and free GPUs that lack CPUs or memory."""
    jobs: dict[str, int]
    """State -> number of jobs of all users."""
    prices: dict[str, float]
    """GPU type -> its price in the newest round."""
    new_jobs: list[NewJobs] = []
    """When jobs that are submitted now are expected to start, for the numbers of GPUs that jobs need most often."""
    daemon_silent_since_s: float | None = None  # when the API last heard of penstockd; None: penstockd is there


class PolicyView(PolicyChoice):
    """A policy that is installed, or that decides, with its settings: those in force if it is active, else its defaults."""

    active: bool


class ApprovalView(Body):
    """An approval of the stops of a refused round."""

    round: int
    jobs: list[str]
    by: str
    until_s: float


class Pause(Body):
    """Whether rounds are paused."""

    paused: bool


class CloudResumed(Body):
    """Why the cloud launched nothing until an admin resumed it; no reasons: it did."""

    reasons: list[str]


class RunForgotten(Body):
    """A run in the cloud that an admin has closed, and its job."""

    run: str
    job: str


Drained = Literal["node", "gpu-type", "partition"]


class DrainOrder(Body):
    """GPUs that adaptive jobs are no longer allocated. Slurm still allocates them to other jobs."""

    kind: Drained
    name: _Identifier
    why: str = Field(default="", max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")


class Drain(DrainOrder):
    """A drain in force."""

    by: str
    since_s: float

    @property
    def what(self) -> tuple[str, str]:
        """Identity of a drain: kind and name."""
        return self.kind, self.name

    def covers(self, node: str, gpu_type: str, partitions: tuple[str, ...]) -> bool:
        """Whether the drain applies to a node."""
        return {
            "node": self.name in (node, host_of(node)),
            "gpu-type": self.name == gpu_type,
            "partition": self.name in partitions,
        }[self.kind]


class ProfileList(Body):
    """The stored profiles of a user's jobs. See `penstock_profiles.profiles.Profile` for the fields of each."""

    profiles: list[dict[str, Any]]
