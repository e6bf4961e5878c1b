"""The files in the spool through which the daemon and the agents of the nodes talk to each other.

::

    SPOOL/agents/NODE/order.json      the daemon's order to the agent; replaced whole
    SPOOL/agents/NODE/status.json     the agent's status for the daemon; replaced whole
    SPOOL/agents/NODE/taken.json      what the daemon has taken from the status, for its next start; replaced whole

An agent carries out the last order that it has read, also while the file or the daemon is missing, and after its own
restart. A daemon considers an agent gone if its status is older than `AWAY_S`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from penstock_profiles.wire import Message
from penstock_scheduler.model import JobId, JobUse, Pack, PackSeen, SharedGpus

AWAY_S = 15.0
"""An agent writes a status at least every 5 s."""

MAX_BYTES = 4 * 1024 * 1024
"""Longer orders and statuses are ignored."""

REMEMBERED = 256
"""Number of newest measurements of packs, containments and XIDs in an agent's status."""

State = Literal["waiting", "running", "suspending", "suspended"]

Lack = Literal[
    "no-plugin",
    "old-plugin",
    "no-mps",
    "no-limiter",
    "no-devices",
    "no-nvml",
    "old-driver",
    "no-freezer",
    "strangers",
    "unknown",
]
"""What a node lacks: the SPANK plugin, a SPANK plugin of the agent's release, the MPS control daemon or the limiter that
the settings name, a way to open GPUs to jobs to which Slurm's device cgroups deny them, NVIDIA's management library
(NVML) on a node with GPUs of NVIDIA's, a driver of NVIDIA's that can checkpoint processes, or permission to freeze jobs.
`strangers`: processes of no job use GPUs that jobs share. `unknown`: the agent cannot find out, or a newer one lacks
what this release has no word for."""


class OrderedJob(Message):
    """A job of Penstock's that runs on this node, or will."""

    job: JobId
    slurm_job: PositiveInt
    """SLURM_JOB_ID."""
    uid: NonNegativeInt
    gpus: PositiveInt
    """Number of GPUs that it uses on this node."""
    kind: str = ""
    """See `JobUse.kind`; "": the job itself."""
    running: bool = False
    """Whether Slurm has started it. Until then it gets no time slice. Its tasks then wait for the file `devices`."""
    own_devices: tuple[NonNegativeInt, ...] = ()
    """GPUs that it holds in Slurm. Slurm binds it to these, so it needs no file."""


class OrderedGroup(Message):
    """A `SharedGpus` and the GPUs that are reserved for it."""

    shared: SharedGpus
    devices: tuple[NonNegativeInt, ...]
    """Slurm's indexes of the GPUs. While they are fewer than `shared.gpus`, the agent uses these alone."""
    gpu_type: str = ""


class NodeOrder(Message):
    """All that an agent has to do."""

    version: Literal[1] = 1
    node: str
    number: NonNegativeInt
    """Grows with each change."""
    written_s: NonNegativeFloat
    """The daemon's clock, s since 1970."""
    groups: tuple[OrderedGroup, ...] = ()
    jobs: tuple[OrderedJob, ...] = ()
    """The jobs of the groups, and jobs with GPUs of their own, which the agent only measures."""


class CarriedGroup(Message):
    """A `SharedGpus` as ordered, and which of its packs run now."""

    shared: SharedGpus
    running: tuple[Pack, ...] = ()
    share: float = Field(default=1.0, ge=0, le=1)
    """Present compute share of the jobs beside a guaranteed job."""


class CarriedJob(Message):
    """The state of a job of the order."""

    job: JobId
    state: State
    """`waiting`: Slurm has not started it, or it has had no time slice yet. `running`: it may use its GPUs.
    `suspending`: it was asked to leave them. `suspended`: Slurm has frozen it."""
    since_s: NonNegativeFloat = 0.0
    """When a job that is suspending or suspended was asked to leave its GPUs, or since when it is frozen, s since 1970; 0: not
    known, or it runs."""
    driven: bool = False
    """Whether the agent freezes and thaws it to hold it to its share. Its state is `running`."""
    frozen: bool = False
    """Whether the agent keeps a driven job frozen for more than some seconds."""
    frozen_s: NonNegativeFloat = 0.0
    """For how long it was frozen in this run, s, without the short pauses of a driven job."""
    devices: tuple[NonNegativeInt, ...] = ()
    use: JobUse
    mps: bool = False
    """Whether it is a client of NVIDIA's MPS, which is never suspended."""
    cuda_checkpointed: bool = False
    """Whether NVIDIA's driver may have its GPU memory on the host, so that only the agent can let it go on."""
    why: str = ""
    """Why it is not as ordered, as a sentence; "": it is."""


class NumberedPack(Message):
    """A `PackSeen` with its number."""

    number: NonNegativeInt
    seen: PackSeen


class Contained(Message):
    """A job that broke a rule of its node, and what the agent did about it."""

    number: NonNegativeInt
    job: JobId
    time_s: NonNegativeFloat
    cause: Literal["no-answer", "no-freeze", "died", "memory", "lies", "share"]
    text: str
    """A sentence for its user."""
    killed: bool
    """Whether it was cancelled. Otherwise it was frozen, limited or left, as the text says."""


class XidSeen(Message):
    """An error that NVIDIA's driver logged."""

    number: NonNegativeInt
    time_s: NonNegativeFloat
    device: NonNegativeInt
    xid: int


class NodeStatus(Message):
    """All that an agent knows. The daemon takes numbered entries once; their numbers grow within one `history`."""

    version: Literal[1] = 1
    node: str
    order: NonNegativeInt
    """Number of the order that is in force; 0: none."""
    time_s: NonNegativeFloat
    """The node's clock, s since 1970."""
    history: str
    """Changes if the agent loses its state."""
    release: str = ""
    """Penstock release of the agent; "": unknown."""
    lacks: tuple[Lack, ...] = ()
    groups: tuple[CarriedGroup, ...] = ()
    jobs: tuple[CarriedJob, ...] = ()
    packs: tuple[NumberedPack, ...] = ()
    contained: tuple[Contained, ...] = ()
    xids: tuple[XidSeen, ...] = ()
    gpu_memory_mb: dict[str, int] = Field(default_factory=dict)
    """Memory of one GPU by GPU type, MB, by NVML. Unknown types are absent."""
    links: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """How well each two GPUs are connected, by index, as in `Nvml.links`; empty: unknown."""

    @field_validator("lacks", mode="before")
    @classmethod
    def _known(cls, lacks: Any, info: ValidationInfo) -> Any:
        """Keep the status of a newer agent readable that lacks what this release has no word for."""
        if info.mode != "json" or not isinstance(lacks, list):
            return lacks
        return list(dict.fromkeys(each if each in get_args(Lack) else "unknown" for each in lacks))


class Taken(Message):
    """Numbers of the newest entries that the daemon has taken from an agent's status; 0: none."""

    history: str
    """The agent's `history`."""
    packs: NonNegativeInt = 0
    contained: NonNegativeInt = 0
    xids: NonNegativeInt = 0


def agents_folder(spool: Path) -> Path:
    """Folder of all nodes' agents in the spool."""
    return spool / "agents"


def agent_folder(spool: Path, node: str) -> Path:
    """Folder of one node's agent in the spool. Raises ValueError if the name could lead out of it."""
    if not node or node.startswith(".") or not all(c.isalnum() or c in "_.-" for c in node):
        raise ValueError(f"node {node!r} is not a host name; expected letters, digits, '_', '.' and '-'")
    return agents_folder(spool) / node


def order_file(spool: Path, node: str) -> Path:
    """File of the daemon's order."""
    return agent_folder(spool, node) / "order.json"


def status_file(spool: Path, node: str) -> Path:
    """File of the agent's status."""
    return agent_folder(spool, node) / "status.json"


def taken_file(spool: Path, node: str) -> Path:
    """File in which the daemon keeps what it has taken from the agent's status."""
    return agent_folder(spool, node) / "taken.json"
