"""What penstockd and its clients say to each other over HTTP: the bodies of the API, version 1.

Fields are only ever added. Times are seconds since 1970, sizes in the unit that the name says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from penstock_scheduler.model import JobSpec, Period

MAX_BODY_BYTES = 2 * 1024 * 1024
"""Of one request."""
MAX_SCRIPT_BYTES = 1024 * 1024
MAX_REPORTS = 500
"""In one request."""
MAX_WAIT_S = 60.0
MAX_PAGE = 500
MAX_LOG_BYTES = 256 * 1024
"""In one answer."""

Role = Literal["user", "operator", "admin", "job"]
"""`user`: own jobs. `operator`: all jobs. `admin`: settings and tokens, too. `job`: the reports of one job, nothing else."""

Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:@/+-]{1,200}$")]
_Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@+-]{1,100}$")]
_Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,1000}$")]
_Path = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]{0,1000}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,100}$")]
_Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]{0,10000}$")]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Problem(Body):
    """What every answer other than 2xx holds, under the key `error`."""

    code: str
    """For programs; stable."""
    message: str
    """For people: what, where and the remedy."""


class ErrorAnswer(Body):
    """The body of every answer other than 2xx."""

    error: Problem


class Submission(Body):
    """A job to submit. It runs as the user who submits it."""

    key: Key | None = None
    """Idempotency key: the same key of the same user is the same job, for ever. None: each request is a new job."""
    name: _Line | None = None
    script: str | None = Field(default=None, max_length=MAX_SCRIPT_BYTES)
    """A batch script that begins with #!; its #SBATCH lines count, but what is named here wins."""
    command: tuple[_Value, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Instead of a script: a program and its arguments."""
    spec: JobSpec = JobSpec()
    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    time_limit_s: PositiveFloat | None = Field(default=None, le=366 * 86400)
    cpus_per_task: PositiveInt | None = Field(default=None, le=10_000)
    memory_mb: PositiveInt | None = Field(default=None, le=2**40)
    working_directory: _Path | None = None
    """Absolute; None: the user's home."""
    output: _Path | None = None
    """File for both of the job's outputs, with Slurm's patterns (%j); None: Slurm's default in the working directory."""
    environment: dict[_Name, _Value] = Field(default={}, max_length=1000)
    """Added to the job's environment."""
    dependency: _Word | None = Field(default=None, pattern=r"^[a-z]+:[0-9]+(:[0-9]+)*$")
    """As in sbatch, such as afterok:12."""
    deadline_s: PositiveFloat | None = Field(default=None, le=2**33)
    """When Slurm ends it, waiting or not."""
    container_image: _Line | None = None
    """As in sbatch's --container-image, where the site has pyxis."""

    @model_validator(mode="after")
    def _one_program(self) -> Submission:
        if (self.script is None) == (self.command is None):
            raise ValueError("give either script or command")
        if self.script is not None and not self.script.startswith("#!"):
            raise ValueError("the script must begin with #!, such as #!/bin/bash")
        if self.script is not None and "\0" in self.script:
            raise ValueError("the script has a NUL character")
        return self


class AllocationView(Body):
    """GPUs that a job holds."""

    gpu_type: str
    gpus: int
    nodes: dict[str, int]
    """Node -> GPUs there."""


class ResultView(Body):
    """What a trial of a search has reached."""

    metric: float
    """The higher the better."""
    progress: float
    """Samples, as it reported; 0: not told."""
    ran_s: float
    """For how long it had run by then."""


class JobView(Body):
    """A job."""

    id: str
    version: NonNegativeInt
    """Grows with each change: what `since` compares with."""
    name: str
    user: str
    account: str = ""
    state: Literal["queued", "starting", "running", "stopping", "ended"]
    ended: str = ""
    """Slurm's word once it has ended, such as COMPLETED, FAILED, CANCELLED; `UNKNOWN` if Slurm had forgotten it."""
    exit_code: int | None = None
    ended_text: str = ""
    """What its user should know of that end, with the remedy, as of a job that outgrew its memory; empty: nothing more."""
    submit_s: float
    start_s: float | None = None
    """When it first held GPUs."""
    end_s: float | None = None
    restarts: int = 0
    spec: JobSpec
    key: str | None = None
    allocation: AllocationView | None = None
    reason: str = ""
    """Code of why it has what it has, see `explain`."""
    progress: float | None = None
    """Samples so far, as it last reported."""
    total: float | None = None
    """Samples at which it is done, if it knows."""
    gpu_seconds: dict[str, float] = {}
    """GPU type -> GPU-seconds held so far."""
    result: ResultView | None = None
    """The newest that it has reported."""


class JobPage(Body):
    """Some jobs, newest first."""

    jobs: list[JobView]
    next: str | None = None
    """`after` of the next page; None: this is the last one."""


class ConfigurationView(Body):
    """A configuration that a job could have, by its model."""

    gpu_type: str
    nodes: int
    gpus: int
    goodput: float
    """The job's own unit per second (samples/s)."""
    price: float | None = None
    """What the GPUs cost in the round's prices."""


class ShareOption(Body):
    """CPUs and memory of a node that a job could have, and what they are worth to it."""

    cpus: int
    memory_mb: int
    """0: the cluster does not give out memory."""
    speed: float
    """Times as fast as with its GPUs' part of the node."""


class ShareView(Body):
    """CPUs and memory that come with a job's GPUs, on each of its nodes."""

    cpus: int
    memory_mb: int
    part_cpus: int
    """What its GPUs' part of the node would be."""
    part_memory_mb: int
    profile: str = ""
    """The profile that tells what they are worth to the job; empty: none does."""
    speed: float = 1.0
    """Times as fast as with that part, by the profile."""
    sensitivity: list[ShareOption] = []


class ExplanationView(Body):
    """Why a job has what it has, by the newest round that saw it."""

    job: JobView
    round: int | None = None
    decided_s: float | None = None
    code: str
    text: str
    """In a sentence."""
    words: list[str] = []
    """All of it in words, a line each, as `penstock explain` says it."""
    needs: str = ""
    """The least that it would need."""
    estimated_start_s: float | None = None
    goodput: float | None = None
    prices: dict[str, float] = {}
    """Of the round, by GPU type."""
    restart_cost_s: float | None = None
    configurations: list[ConfigurationView] = []
    """What the job's spec and the cluster allow."""
    limits: list[str] = []
    """Limits that cover the job, in words."""
    share: ShareView | None = None
    """CPUs and memory that the round gives it; None: the policy does not give them out, or it waits."""


class Forecast(Body):
    """What a submission would get if it were submitted now."""

    would: Literal["start", "wait", "never"]
    code: str
    text: str
    needs: str = ""
    allocation: AllocationView | None = None
    goodput: float | None = None
    price: float | None = None
    """Of its GPUs in the prices of that round, in the solver's unit."""
    estimated_start_s: float | None = None
    displaced: int = 0
    """Other jobs that this round would treat differently."""
    words: list[str] = []
    """All of it in sentences, as `penstock submit --dry-run` says it."""


class ReportBatch(Body):
    """Reports of one job, oldest first, in the form of `penstock schema report`."""

    reports: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_REPORTS)


class RefusedReport(Body):
    """A report that was not taken."""

    index: int
    message: str


class ReportReceipt(Body):
    """What became of a batch. What is accepted is on disk."""

    accepted: int
    duplicates: int
    """Seen before: sending again is safe."""
    refused: list[RefusedReport] = []
    """Do not send them again."""
    epoch: int = 0
    """The job's present one: a run that does not see the spool learns its own from it."""


class LogPart(Body):
    """A part of a job's output."""

    offset: int
    """Where the part begins, bytes."""
    next: int
    """`offset` for what comes after it."""
    size: int
    text: str
    """Bytes that are not UTF-8 are replaced."""
    ended: bool
    """Whether the job has ended, so that nothing comes after `size`."""


class RoundSummary(Body):
    """A round in numbers."""

    round: int
    time_s: float
    policy: str
    jobs: int
    placed: int
    waiting: int
    seconds: dict[str, float]
    """By phase: observe, decide."""
    gap: float | None = None
    prices: dict[str, float] = {}


class RoundPage(Body):
    """Some rounds, newest first."""

    rounds: list[RoundSummary]
    next: int | None = None
    """`before` of the next page."""


class Decision(Body):
    """What a round gave a job."""

    job: str
    allocation: AllocationView | None = None
    code: str
    text: str
    goodput: float | None = None


class RoundView(Body):
    """A round and its decisions; a user sees those of own jobs."""

    summary: RoundSummary
    decisions: list[Decision]


class OutcomeView(Body):
    """What became of an action."""

    time_s: float
    round: int
    job: str
    action: str
    progress: str
    text: str = ""
    allocation: AllocationView | None = None


class History(Body):
    """What happened to a job."""

    job: str
    outcomes: list[OutcomeView]
    observations: list[dict[str, Any]]
    """The newest reports of kind observation, as they came."""
    results: list[dict[str, Any]] = []
    """The newest reports of kind result, likewise."""


class NodeView(Body):
    """A node."""

    name: str
    gpu_type: str
    gpus: int
    given: int
    """GPUs that Penstock's jobs hold."""
    others: int
    """GPUs that other jobs hold."""
    usable: bool
    state: str
    reservation: str = ""


class ClusterView(Body):
    """The cluster in numbers."""

    observed_s: float | None
    round: int | None
    policy: str
    paused: bool
    gpus: dict[str, int]
    """GPU type -> all GPUs."""
    given: dict[str, int]
    others: dict[str, int]
    unusable: dict[str, int]
    jobs: dict[str, int]
    """State -> jobs, of all users."""
    prices: dict[str, float]


class PolicyView(Body):
    """A policy that could decide."""

    name: str
    active: bool
    settings: dict[str, Any]
    """With which it decides, or its defaults."""


class PolicyChoice(Body):
    """Which policy decides from the next round on."""

    name: str
    settings: dict[str, Any] = {}
    """Those that differ from the defaults."""


class PolicyChange(Body):
    """The policy that decides from the next round on."""

    name: str
    settings: dict[str, Any]


class Pause(Body):
    """Whether rounds are decided."""

    paused: bool


Drained = Literal["node", "gpu-type", "partition"]


class DrainOrder(Body):
    """What adaptive jobs are to leave, and get no more; other jobs are Slurm's to keep away."""

    kind: Drained
    name: _Word
    why: str = Field(default="", max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")


class Drain(DrainOrder):
    """Something that is drained."""

    by: str
    since_s: float

    @property
    def what(self) -> tuple[str, str]:
        """What makes it one: two drains of the same are one."""
        return self.kind, self.name

    def covers(self, node: str, gpu_type: str, partitions: tuple[str, ...]) -> bool:
        """Whether a node is drained by it."""
        return {
            "node": self.name == node,
            "gpu-type": self.name == gpu_type,
            "partition": self.name in partitions,
        }[self.kind]


class Identity(Body):
    """Who asks, as the daemon sees it."""

    user: str
    uid: int | None
    role: Role
    job: str | None = None
    by: Literal["socket", "munge", "token"]


class TokenOrder(Body):
    """A token to be made."""

    user: _Word
    role: Role = "user"
    job: str | None = None
    """For role `job`: whose reports it is for."""
    expires_s: PositiveFloat | None = None
    """None: in 30 days."""
    note: str = Field(default="", max_length=200)

    @model_validator(mode="after")
    def _job_token(self) -> TokenOrder:
        if (self.role == "job") != (self.job is not None):
            raise ValueError("role 'job' and the field job go together")
        return self


class TokenView(Body):
    """A token, without its secret."""

    id: str
    user: str
    role: Role
    job: str | None
    created_s: float
    expires_s: float
    revoked: bool
    note: str


class NewToken(Body):
    """A token with its secret, which is shown once."""

    token: str
    view: TokenView


class AuditLine(Body):
    """Something that changed state, or was refused."""

    id: int
    time_s: float
    user: str
    role: str
    action: str
    target: str
    allowed: bool
    text: str


class AuditPage(Body):
    """Some of the audit log, newest first."""

    lines: list[AuditLine]
    next: int | None = None


class LedgerLine(Body):
    """An entry of the budget ledger."""

    id: int
    key: str
    time_s: float
    account: str
    user: str
    job: str
    kind: Literal["gpu-seconds", "cloud-gpu-seconds", "committed", "usd"]
    """`gpu-seconds`: of the site; `committed`: the most that a run in the cloud may cost, written before it is ordered; `usd`:
    what it did cost; `cloud-gpu-seconds`: of its instances, from launch to end."""
    amount: float
    text: str


class LedgerPage(Body):
    """Some of the ledger, newest first."""

    lines: list[LedgerLine]
    next: int | None = None


class BudgetView(Body):
    """What an account may use in the present period, and has used."""

    account: str
    """Whose; empty: the whole site's."""
    period: Period
    since_s: float
    """When the period began."""
    ends_s: float | None = None
    soft_gpu_hours: float | None = None
    hard_gpu_hours: float | None = None
    used_gpu_hours: float
    """Of jobs that ended in the period, and so far of those that have not ended."""
    soft_usd: float | None = None
    hard_usd: float | None = None
    used_usd: float


class ProfileList(Body):
    """Stored profiles of the user's jobs, each in the form of `penstock_profiles.profiles.Profile`."""

    profiles: list[dict[str, Any]]


class Health(Body):
    """Whether the daemon lives and can do its work."""

    status: Literal["ok", "not-ready"]
    version: str
    round: int | None = None
    observed_age_s: NonNegativeFloat | None = None
    problems: list[str] = []
    counters: dict[str, int] = {}
    """Since the daemon started: requests, reports accepted, refused and so on."""
