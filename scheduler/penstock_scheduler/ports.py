"""The seams of the round loop: what a cluster, a clock, a store, a source of models and a trigger must offer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock_profiles.wire import Report
from penstock_scheduler.messages import Submission
from penstock_scheduler.model import (
    Action,
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
)
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.sharing.messages import Contained, XidSeen

SpecCheck = Callable[[JobSpec], None]
"""Raises BadJobSpec if a job spec cannot be served whatever the cluster does, such as an unknown model family."""


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
    """Refines a policy's plan: who shares a GPU, how much CPU and memory come with it. A policy's name may end in `+STAGE`."""

    @property
    def name(self) -> str:
        """The name in the settings file."""
        ...

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """A better plan for the same jobs: the same snapshot and plan give the same plan. Raises RoundFailed as `decide`."""
        ...


class Cluster(Protocol):
    """Something that runs jobs: Slurm, or the simulated cluster."""

    def observe(self) -> ClusterState:
        """What is there now. Raises ClusterAway if nobody answers."""
        ...

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """Bring each action one step nearer to its end state and say how far it is, in the order of `actions`.

        Returns soon: what takes time is asked for and reported as under way; the same action again goes on from there.
        A failure of one action is its outcome and does not stop the others. Raises ClusterAway if nobody answers.
        """
        ...

    def reports(self) -> Sequence[Report]:
        """What running jobs have reported since the last call."""
        ...


class Accounts(Protocol):
    """A cluster's own records of runs that are over."""

    def __call__(self, jobs: Collection[JobId], since_s: float) -> Sequence[EndedRun]:
        """Runs of these jobs that ended after `since_s`, as far as the records are there; none where it keeps none."""
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
    """Whether an instance may be launched for it: it is powered down, and nobody has asked for it."""
    up: bool
    """Whether its instance has joined the cluster and answers."""


class CloudNodes(Protocol):
    """The part of a cluster that a cloud fills."""

    @property
    def partition(self) -> str:
        """Where they are."""
        ...

    def nodes(self) -> tuple[CloudNode, ...]:
        """All of them, as the cluster's last look saw them."""
        ...

    def reason(self, job: JobId) -> str:
        """Why the cluster has not started a job, in its own words; empty: it does not say."""
        ...

    def jobs_on_instances(self) -> dict[JobId, tuple[str, ...]]:
        """Jobs that have started, or are about to, on nodes which are instances -> these nodes."""
        ...

    def job_of(self, number: str) -> JobId:
        """The job that the cluster calls so when it asks for nodes."""
        ...

    def power_down(self, nodes: Sequence[str]) -> None:
        """Tell the cluster that these have no instance any more; what ran there is queued again. Raises ClusterAway."""
        ...

    def refuse(self, job: JobId, text: str) -> None:
        """Put a job that came to these nodes unasked back into the queue, held, or else end it; and tell its user.

        Raises ClusterAway, but not if the cluster does not want it.
        """
        ...


class Agents(Protocol):
    """What lets jobs share GPUs: an agent on each node.

    An agent carries out its last order until it is told another, also while the daemon is away: it gives the packs their turns
    (`sharing.slices.turn`), holds jobs to their limits, and moves the compute of those beside a guaranteed job
    (`sharing.control.advance`). The GPUs of an order are reserved from the cluster as long as one of its jobs is there.
    """

    def sharing(self) -> SharingState:
        """What is carried out and what was seen, at the cluster's last look. Raises ClusterAway if nobody answers.

        An agent that does not answer is left out, and its node as if nobody shared there.
        """
        ...

    def share(self, groups: Sequence[SharedGpus]) -> None:
        """Let these share from now on, and nobody else: who is in none has its GPUs to itself.

        Called before the plan's actions are applied, on each tick with the whole plan, so that a job which starts finds its GPUs
        reserved. Returns soon. Raises ClusterAway if nobody answers.
        """
        ...


class NodeEvents(Protocol):
    """What the agents on the nodes have noticed that concerns people rather than rounds. Each event is told once."""

    def take_contained(self) -> Sequence[Contained]:
        """Jobs that agents have slowed or ended since the last call."""
        ...

    def take_xids(self) -> Sequence[tuple[str, XidSeen]]:
        """Node and GPU error, for each error since the last call."""
        ...


class Burst(Protocol):
    """A cloud that jobs can leave for."""

    def observe(self, jobs: Sequence[Job]) -> CloudState:
        """What can be had, what runs there, and what may still be spent by these jobs. Raises ClusterAway if nobody answers."""
        ...

    def apply(self, actions: Sequence[CloudAction]) -> tuple[Outcome, ...]:
        """Bring each action one step nearer to its end state, as `Cluster.apply` does.

        A commitment is in the ledger before anything is ordered, so that an action which is repeated is not paid for twice.
        """
        ...

    def asks(self) -> Sequence[Action]:
        """What the cluster shall do for jobs that leave or come back, where they run on nodes of its own; after `observe`."""
        ...


class Clock(Protocol):
    """Time: the wall clock, or a simulated one that jumps."""

    def now_s(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed on this clock, or sooner when there is something to see."""
        ...


class Store(Protocol):
    """What must survive a crash, and the history. Every method raises StoreError when it cannot."""

    def last_round(self) -> RoundRecord | None:
        """The newest round that was saved whole."""
        ...

    def save_round(self, record: RoundRecord) -> None:
        """Keep a round. It is safe on disk when this returns."""
        ...

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append to the history of actions."""
        ...

    def add_reports(self, reports: Sequence[Report]) -> object:
        """Append to the history of reports; those that are there already may be left out."""
        ...


class ModelSource(Protocol):
    """Where the facts of a round's jobs come from."""

    def facts(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> dict[JobId, JobFacts]:
        """What is known now of each of these jobs on these GPU types; GPU-seconds are the loop's to add.

        A job about which nothing new is known keeps the same estimator object: by that, policies tell what has changed.
        """
        ...


class Trigger(Protocol):
    """When a round is due."""

    def due(self, now_s: float, state: ClusterState) -> bool:
        """Whether to decide now, given what was just observed. Called on every tick, in the order of time."""
        ...

    def decided(self, now_s: float, state: ClusterState) -> None:
        """A round was decided on this state: the next one is due by the trigger's own rule."""
        ...


@dataclass(frozen=True, slots=True)
class Fate:
    """How a job ended."""

    state: str
    """The cluster's word, such as COMPLETED."""
    exit_code: int | None
    end_s: float | None
    text: str = ""
    """What its user should know of that end, with the remedy; empty: nothing beyond the state."""


@dataclass(frozen=True, slots=True)
class Output:
    """A job's output file, and the uid that it must belong to before anybody reads it for that user."""

    file: Path
    uid: int


class Submitter(Protocol):
    """Submits jobs for users, and knows what a round does not ask. Every method raises ClusterAway if nobody answers."""

    def submit(self, order: Submission, user: str, uid: int) -> JobId:
        """Submit as that user, with the key where `find` finds it. Raises BadJobSpec with the cluster's word if it refuses."""
        ...

    def find(self, user: str, key: str) -> JobId | None:
        """The job that this user submitted with this key, whether or not it has ended; None if there is none."""
        ...

    def cancel(self, job: JobId) -> None:
        """End a job; one that has ended stays as it is."""
        ...

    def fates(self, jobs: Sequence[JobId]) -> dict[JobId, Fate | None]:
        """How these jobs ended; None: not yet. Jobs that the cluster has forgotten are not among them."""
        ...

    def output(self, job: JobId) -> Output | None:
        """Where a job writes; None: nobody knows."""
        ...

    def epoch(self, job: JobId) -> int | None:
        """The epoch of the job's present run; None: it has had none."""
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
