"""What the daemon and the agents of the nodes say to each other, as files in the spool that they share.

::

    SPOOL/agents/NODE/order.json      the daemon's word to the agent; replaced whole
    SPOOL/agents/NODE/status.json     the agent's to the daemon; replaced whole
    SPOOL/agents/NODE/taken.json      what the daemon has taken of that, for the one that starts after it; replaced whole

An agent carries out the last order that it has read, also while the file or the daemon is away, and after its own
restart. A status is news as long as its time is: a daemon takes an agent for away whose status is older than `AWAY_S`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from penstock_profiles.wire import Message
from penstock_scheduler.model import JobId, JobUse, Pack, PackSeen, SharedGpus

AWAY_S = 15.0
"""An agent writes a status every 5 s at least."""

MAX_BYTES = 4 * 1024 * 1024
"""A longer order or status is none of ours."""

REMEMBERED = 256
"""Packs seen, containments and XIDs of which an agent's status has the newest."""

State = Literal["waiting", "running", "suspending", "suspended"]

Lack = Literal["no-plugin", "old-plugin", "no-mps", "no-devices"]
"""What a node lacks: the SPANK plugin that Slurm is to load, one of the agent's release, the MPS control daemon that
the settings name, or a way to open GPUs to jobs to which Slurm's device cgroups deny them."""


class OrderedJob(Message):
    """A job of ours on this node, or on its way to it."""

    job: JobId
    slurm_job: PositiveInt
    """SLURM_JOB_ID."""
    uid: NonNegativeInt
    gpus: PositiveInt
    """That it uses on this node."""
    kind: str = ""
    """See `JobUse.kind`; "": the job itself."""
    running: bool = False
    """Whether Slurm has started it. Before that it gets no turn; its tasks then wait for the file `devices`."""
    own_devices: tuple[NonNegativeInt, ...] = ()
    """GPUs that it holds by Slurm itself: it is bound to these, and needs no file."""


class OrderedGroup(Message):
    """One `SharedGpus`, and the GPUs that are reserved for it."""

    shared: SharedGpus
    devices: tuple[NonNegativeInt, ...]
    """Indexes as Slurm counts them. As long as they are fewer than `shared.gpus`, the agent gives out these alone."""
    gpu_type: str = ""


class NodeOrder(Message):
    """All that an agent is to do."""

    version: Literal[1] = 1
    node: str
    number: NonNegativeInt
    """Grows with each change."""
    written_s: NonNegativeFloat
    """The daemon's clock, s since 1970."""
    groups: tuple[OrderedGroup, ...] = ()
    jobs: tuple[OrderedJob, ...] = ()
    """Those of the groups, and those with GPUs of their own, of which the agent tells the use."""


class CarriedGroup(Message):
    """A `SharedGpus` as it was ordered, with what runs of it now."""

    shared: SharedGpus
    running: tuple[Pack, ...] = ()
    share: float = Field(default=1.0, ge=0, le=1)
    """Compute share now of those beside a guaranteed job."""


class CarriedJob(Message):
    """A job of the order."""

    job: JobId
    state: State
    """`waiting`: Slurm has not started it, or it has had no turn yet. `running`: it may use its GPUs. `suspending`: it
    was asked to leave them. `suspended`: Slurm has frozen it."""
    devices: tuple[NonNegativeInt, ...] = ()
    use: JobUse
    mps: bool = False
    """Whether it goes through NVIDIA's MPS: then it is never suspended."""
    why: str = ""
    """What stands against what was ordered, in words; "": nothing."""


class NumberedPack(Message):
    """A `PackSeen` with its number."""

    number: NonNegativeInt
    seen: PackSeen


class Contained(Message):
    """A job that did what it must not, and what was done about it."""

    number: NonNegativeInt
    job: JobId
    time_s: NonNegativeFloat
    cause: Literal["no-answer", "no-freeze", "died", "memory", "lies", "share"]
    text: str
    """For its user, in a sentence."""
    killed: bool
    """Whether it was cancelled; otherwise it was frozen, limited or left, as the text says."""


class XidSeen(Message):
    """An error that NVIDIA's driver logged."""

    number: NonNegativeInt
    time_s: NonNegativeFloat
    device: NonNegativeInt
    xid: int


class NodeStatus(Message):
    """All that an agent knows. What is numbered a daemon takes once: numbers grow within one `history`."""

    version: Literal[1] = 1
    node: str
    order: NonNegativeInt
    """Number of the order that is carried out; 0: none."""
    time_s: NonNegativeFloat
    """The node's clock, s since 1970."""
    history: str
    """Of an agent that lost its state, another one."""
    release: str = ""
    """Penstock's, that the agent is of; "": it does not say."""
    lacks: tuple[Lack, ...] = ()
    groups: tuple[CarriedGroup, ...] = ()
    jobs: tuple[CarriedJob, ...] = ()
    packs: tuple[NumberedPack, ...] = ()
    contained: tuple[Contained, ...] = ()
    xids: tuple[XidSeen, ...] = ()
    gpu_memory_mb: dict[str, int] = Field(default_factory=dict)
    """Of one GPU by type, where NVML tells; a type is absent that nobody knows."""
    links: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """How well each two GPUs are connected, by index, as `Nvml.links` tells it; empty: nobody knows."""


class Taken(Message):
    """The newest of each kind that the daemon has taken of what an agent numbers; 0: none."""

    history: str
    """Of that agent."""
    packs: NonNegativeInt = 0
    contained: NonNegativeInt = 0
    xids: NonNegativeInt = 0


def agent_folder(spool: Path, node: str) -> Path:
    """Folder of one node's agent in the spool. Raises ValueError if the name could lead out of it."""
    if not node or node.startswith(".") or not all(c.isalnum() or c in "_.-" for c in node):
        raise ValueError(f"node {node!r} is no name of a host; expected letters, digits, '_', '.' and '-'")
    return spool / "agents" / node


def order_file(spool: Path, node: str) -> Path:
    """Where the daemon leaves its order."""
    return agent_folder(spool, node) / "order.json"


def status_file(spool: Path, node: str) -> Path:
    """Where the agent tells what it does."""
    return agent_folder(spool, node) / "status.json"


def taken_file(spool: Path, node: str) -> Path:
    """Where the daemon keeps what it has taken of the agent's status."""
    return agent_folder(spool, node) / "taken.json"
