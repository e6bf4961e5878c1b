"""The seams of the round loop: the protocols of a cluster, a clock, a store, a source of models and a trigger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from penstock_profiles.wire import Report
from penstock_scheduler.api.agent_messages import Contained, XidSeen
from penstock_scheduler.api.messages import OutputFiles, Submission
from penstock_scheduler.model import (
    Action,
    BudgetLine,
    CloudAction,
    CloudState,
    ClusterState,
    EndedRun,
    Job,
    JobFacts,
    JobId,
    JobSpec,
    Outcome,
    Plan,
    SharedGpus,
    SharingState,
    Snapshot,
    Stop,
)
from penstock_scheduler.model.records import RoundRecord

SpecCheck = Callable[[JobSpec], None]
"""Raises BadJobSpec if a job spec can never be served, for example if its model family is unknown."""


class Policy(Protocol):
    """Decides a round. Being in the registry enrols a policy in the property tests and the simulator."""

    @property
    def name(self) -> str:
        """The name in the settings file."""
        ...

    def decide(self, snapshot: Snapshot) -> Plan:
        """The plan for this snapshot: the same snapshot gives the same plan, whatever the time or the machine.

        Raises:
            RoundFailed: no usable plan; the cluster keeps what it has.
        """
        ...


class Stage(Protocol):
    """Refines a policy's plan: which jobs share GPUs, and how much CPU and memory come with them."""

    @property
    def name(self) -> str:
        """The name in the settings file."""
        ...

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """A better plan for the same jobs: the same snapshot and plan give the same plan. Raises RoundFailed as `decide`."""
        ...


@runtime_checkable
class Explainer(Protocol):
    """A policy that can say more about a job than the reason in its plan. Optional."""

    def remarks(self, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
        """Sentences about a job that has GPUs in this plan, for `penstock explain`."""
        ...


class Cluster(Protocol):
    """Something that runs jobs: Slurm, or the simulated cluster."""

    def observe(self) -> ClusterState:
        """The present nodes and jobs. Raises ClusterAway if the cluster does not answer."""
        ...

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """Take each action one step further. Returns how far each one is, in the order of `actions`.

        The call returns soon. What takes time is requested and reported as under way; the same action again goes on from there.
        The failure of one action is its outcome and does not stop the others. Raises ClusterAway if the cluster does not answer
        and nothing was done.
        """
        ...

    def reports(self) -> Sequence[Report]:
        """What running jobs have reported since the last call."""
        ...


class Accounts(Protocol):
    """A cluster's own records of runs that have ended."""

    def __call__(self, jobs: Collection[JobId], since_s: float) -> Sequence[EndedRun]:
        """Runs of these jobs that ended after `since_s`, as far as the cluster has recorded them."""
        ...


@dataclass(frozen=True, slots=True)
class CloudNode:
    """A node of the cluster that exists only while a cloud has an instance for it."""

    name: str
    gpu_type: str
    gpus: int
    cpus: int
    memory_mb: int
    free: bool
    """Whether an instance may be launched for it: it is powered down and not requested."""
    up: bool
    """Whether its instance has joined the cluster and answers, and the cluster has begun the job there."""


class CloudNodes(Protocol):
    """The part of a cluster that a cloud fills."""

    @property
    def partition(self) -> str:
        """Name of the partition of these nodes."""
        ...

    def nodes(self) -> tuple[CloudNode, ...]:
        """All of these nodes, as of the last observation."""
        ...

    def cluster(self) -> str:
        """Which cluster this is: its name and its controller's host, or nothing. Raises ClusterAway."""
        ...

    def reason(self, job: JobId) -> str:
        """The cluster's own reason why a job has not started; empty: there is none."""
        ...

    def jobs_on_instances(self) -> dict[JobId, tuple[str, ...]]:
        """Jobs that have started or are about to start on nodes that are instances -> these nodes."""
        ...

    def job_of(self, number: str) -> JobId:
        """The job that the cluster calls by this number when it requests nodes."""
        ...

    def power_down(self, nodes: Sequence[str]) -> None:
        """Tell the cluster that these nodes have no instance any more. Raises ClusterAway.

        Their jobs are requeued, and held if the nodes had not booted yet.
        """
        ...

    def refuse(self, job: JobId, text: str) -> None:
        """Requeue and hold a job that came to these nodes without being sent, or else end it, and tell its user.

        A refusal by the cluster is logged. Raises ClusterAway.
        """
        ...


class Agents(Protocol):
    """What lets jobs share GPUs: an agent on each node.

    An agent carries out its last order until it gets another one, also while the daemon is away: it gives packs their time
    slices, holds jobs to their limits, and adjusts the speed of opportunistic jobs beside a guaranteed job. The GPUs of an
    order stay reserved while one of its jobs is there.
    """

    def sharing(self) -> SharingState:
        """What the agents carry out and have measured, as of the last observation. Raises ClusterAway.

        An agent that does not answer is left out, as if no jobs shared GPUs on its node.
        """
        ...

    def share(self, groups: Sequence[SharedGpus], actions: Sequence[Action]) -> None:
        """Let the jobs of these groups share GPUs from now on. Jobs in no group have their GPUs to themselves.

        Each tick calls this with the whole plan before it applies the plan's actions. A job that they start finds its GPUs
        reserved. Returns soon. Raises ClusterAway.
        """
        ...


@dataclass(frozen=True, slots=True)
class SilentAgent:
    """An agent that has stopped reporting, on a node that responds to the cluster."""

    node: str
    since_s: float
    """When it was last heard of, s since 1970."""
    suspended: tuple[JobId, ...]
    """Jobs that it has suspended, which nothing resumes meanwhile."""


class NodeEvents(Protocol):
    """Events on the nodes that concern people rather than rounds. Each event is returned once."""

    def silent(self) -> Sequence[SilentAgent]:
        """The agents that are silent now, in every call."""
        ...

    def take_contained(self) -> Sequence[Contained]:
        """Jobs that agents have slowed or ended since the last call."""
        ...

    def take_xids(self) -> Sequence[tuple[str, XidSeen]]:
        """Node and GPU error, for each error since the last call."""
        ...


class Burst(Protocol):
    """A cloud that jobs can burst to."""

    def observe(self, jobs: Sequence[Job]) -> CloudState:
        """The offers, the present runs, and what these jobs may still spend. Raises ClusterAway if the cloud does not answer."""
        ...

    def apply(self, actions: Sequence[CloudAction]) -> tuple[Outcome, ...]:
        """Take each action one step further, as `Cluster.apply` does.

        The ledger has the commitment before anything is ordered, so a repeated action is not paid for twice.
        """
        ...

    def asks(self) -> Sequence[Action]:
        """Actions for the cluster, for jobs that burst or come back on nodes of the cluster. To be called after `observe`."""
        ...

    def end_protection(self) -> tuple[str, ...]:
        """Launch again after protected mode. Returns why it was on; empty: it was not. May be called from any thread."""
        ...

    def adopt(self) -> str:
        """Make the store this cluster's own. Returns to which other one it belonged, or nothing. From any thread."""
        ...

    def accept_images(self) -> tuple[str, ...]:
        """Launch from the images that the settings mean now. Returns those that are new, with their places.

        May be called from any thread. Raises CloudRefuses.
        """
        ...

    def forget(self, run: str) -> JobId:
        """Close a run whose record cannot be read. Its commitment stays in the ledger. Returns its job.

        May be called from any thread. Raises NoSuchRun: no open run of that name has an unreadable record.
        """
        ...


class Clock(Protocol):
    """Time: the wall clock, or a simulated one that jumps."""

    def now_s(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed on this clock, or earlier if something happens."""
        ...


class Leadership(Protocol):
    """The right to write: to the cluster, the store, the spool and the cloud. Of several penstockd, one has it."""

    @property
    def number(self) -> int:
        """The fencing number of the present term. It grows with each term."""
        ...

    @property
    def fenced(self) -> bool:
        """Whether others may take over, so that each write must be checked; false: this process alone can have the right."""
        ...

    @property
    def lost(self) -> str:
        """Why the term is over, although this process did not give it up; empty: it is not."""
        ...

    def close(self, successor: str = "") -> None:
        """Hand over: begin no further write, wait for those under way, and give up the term.

        `successor` names who should lead next; empty: anybody.
        """
        ...

    def expect(self, to: str = "") -> float:
        """Until when writes are allowed, by `lease.boot_s`. Raises NotLeading if they are not, or not for long enough.

        `to` names what would be written to, in the message.
        """
        ...

    def write(self, to: str, what: str) -> AbstractContextManager[float]:
        """Surrounds a write, which is logged with the fencing number. It must end before the time that this
        gives, by `lease.boot_s`.

        A handover waits for writes that have begun.

        Args:
            to: where it goes: "slurm", "store", "spool" or "cloud".
            what: what is written, for the log.

        Raises:
            NotLeading: nothing may be written.
        """
        ...


class Store(Protocol):
    """What must survive a crash, and the recorded history. Every method raises StoreError if it fails."""

    def last_round(self) -> RoundRecord | None:
        """The newest saved round."""
        ...

    def save_round(self, record: RoundRecord) -> None:
        """Save a round. It is on disk when this returns."""
        ...

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append to the history of actions."""
        ...

    def add_reports(self, reports: Sequence[Report]) -> object:
        """Append to the history of reports. Reports that it already has may be left out."""
        ...


class ModelSource(Protocol):
    """The source of what is known about a round's jobs."""

    def facts(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> dict[JobId, JobFacts]:
        """What is known of each of these jobs on these GPU types. The round loop adds the GPU-seconds.

        A job without news keeps the same estimator object. Policies use that to find out what has changed.
        """
        ...


class SiteRules:
    """The site's rules for a round. This class has none; rules override its methods."""

    def on(self, snapshot: Snapshot) -> Snapshot:
        """Apply limits, budgets and drains to a snapshot before it is decided."""
        return snapshot

    def dollars(self, account: str, now_s: float) -> Sequence[BudgetLine]:
        """The budgets of dollars that apply to an account, with what is used of each by now.

        The loop asks right before each order to the cloud, since the round may have seen an older state.
        """
        return ()


class Annotator(Protocol):
    """Adds what has been learned to a snapshot, such as the newest results of jobs."""

    def on(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what is known."""
        ...


GpuSecondsByJob = Mapping[JobId, Mapping[str, float]]
"""Job -> GPU type -> GPU-seconds so far."""

NOT_COUNTED: GpuSecondsByJob = MappingProxyType({})


class RoundListener:
    """Listens to the round loop, in the loop's thread. Listeners override what concerns them."""

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
        """Each tick has observed the cluster, and has counted the GPU-seconds of the jobs that are there or have just ended."""

    def decided(self, record: RoundRecord) -> None:
        """A round is decided and saved; the loop has not acted on it yet."""

    def stopped(self, stops: Mapping[JobId, Stop]) -> None:
        """Jobs were stopped without a round. Their history has these stops."""


class Trigger(Protocol):
    """When a round is due."""

    def due(self, now_s: float, state: ClusterState) -> bool:
        """Whether to decide now, given what was just observed. Called on every tick, in order of time."""
        ...

    def decided(self, now_s: float, state: ClusterState) -> None:
        """A round was decided on this state."""
        ...


@dataclass(frozen=True, slots=True)
class Fate:
    """How a job ended."""

    state: str
    """The cluster's name of the final state, such as COMPLETED."""
    exit_code: int | None
    end_s: float | None
    start_s: float | None = None
    """When its last run began, s since 1970, if it ran and that is known."""
    text: str = ""
    """What its user should know about the end, with the remedy; empty: the state says it all."""
    submit_s: float | None = None
    """When the job that has ended so was first submitted, if only the cluster's accounts know of it: ids come again."""


@dataclass(frozen=True, slots=True)
class Unmanaged:
    """A job of the cluster that Penstock does not manage, or has not looked at yet."""

    user: str
    text: str
    """What it is, as a sentence without its subject, such as `is a plain job: ...`."""
    later: bool = False
    """Whether the next look at the cluster will find it."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Whose job an id is, by the cluster."""

    user: str
    uid: int
    restarts: int
    submit_s: float


class Submitter(Protocol):
    """Submits jobs for users and answers questions about single jobs. Every method raises ClusterAway."""

    def submit(self, order: Submission, user: str, uid: int) -> JobId:
        """Submit as this user, with the key where `find` finds it. The cluster has shown that job as this user's.

        Raises BadJobSpec with the cluster's reason if it refuses.
        """
        ...

    def owned(self, job: JobId) -> Owned | None:
        """Whose job this is now, asked of the cluster in this moment; None: it has no such job."""
        ...

    def find(self, user: str, key: str) -> JobId | None:
        """The job that this user submitted with this key, running or ended; None: there is none."""
        ...

    def cancel(self, job: JobId, user: str | None) -> None:
        """End a job. A job that has ended already stays as it is.

        Args:
            user: whose right it takes, so that the cluster itself refuses another user's job; None: the daemon's own.

        Raises:
            BadJobSpec: the cluster refuses, or this host does not know the user.
        """
        ...

    def hold(self, job: JobId, by: str, *, admin: bool) -> None:
        """Keep a job from being started until it is released. A job that runs goes on until it is stopped otherwise.

        Args:
            by: the user that asks for it.
            admin: whether only an admin may release it.
        """
        ...

    def release(self, job: JobId, *, admin: bool) -> None:
        """Let a held job start again, whether it was held by `hold` or in the cluster itself.

        Raises:
            BadJobSpec: it is held by an admin, and `admin` is false; or nobody holds it.
        """
        ...

    def fates(self, jobs: Sequence[JobId]) -> dict[JobId, Fate | None]:
        """How these jobs ended; None: not yet. Jobs that the cluster has forgotten are left out."""
        ...

    def unmanaged(self, job: JobId) -> Unmanaged | None:
        """What this id is to the cluster if it is no managed job's: a plain job, an array; None: the cluster has no such job."""
        ...

    def output(self, job: JobId, user: str) -> OutputFiles | None:
        """Where this user's job, which has started, writes its output; None: nowhere, or the cluster has forgotten the job."""
        ...

    def epoch(self, job: JobId) -> int | None:
        """The epoch of the job's present run; None: it has had none."""
        ...


class GpuIds(Protocol):
    """A cluster's record of which of a node's GPUs a job holds."""

    def __call__(self, job: JobId, /) -> Mapping[str, tuple[int, ...]]:
        """Node -> indices of the GPUs that the job holds there; empty: not known."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """What an entry point of `penstock.clusters` opens: a cluster, and the optional parts that it has."""

    cluster: Cluster
    accounts: Accounts | None = None
    """None: the cluster keeps no records of its own."""
    agents: Agents | None = None
    """None: jobs cannot share GPUs here."""
    node_events: NodeEvents | None = None
    """None: nothing on the nodes tells of failing GPUs or contained jobs."""
    submitter: Submitter | None = None
    """None: jobs cannot be submitted through the API."""
    cloud_nodes: CloudNodes | None = None
    """None: the cluster has no nodes that a cloud could fill."""
    spool: Path | None = None
    """The folder through which jobs report; None: they do not report through a folder."""
    gpu_ids: GpuIds | None = None
    """None: the cluster does not tell which of a node's GPUs a job holds."""
    resume: Callable[[Snapshot, Plan], None] | None = None
    """Shows a cluster, at the start, the last round that an earlier process decided."""
