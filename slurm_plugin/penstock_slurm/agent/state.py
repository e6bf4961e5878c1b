"""The state that an agent saves in a file on its node, so that it survives a restart."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobControl
from penstock_scheduler.api.agent_messages import REMEMBERED, Contained, NodeOrder, NumberedPack, State, XidSeen
from penstock_scheduler.model import JobId
from penstock_scheduler.rounds.sharing.control import ShareControl
from penstock_scheduler.rounds.sharing.node import Account, Group

log = logging.getLogger(__name__)

CONTROL = TypeAdapter(ShareControl)


@dataclass(slots=True)
class LocalJob:
    """What the agent has done with a job of its order, and what it has learned of it."""

    slurm_job: int
    """SLURM_JOB_ID."""
    state: State = "waiting"
    devices: tuple[int, ...] = ()
    """GPUs to which it is bound."""
    control: JobControl = field(default_factory=lambda: JobControl(number=0))
    """Last control message to the job."""
    asked_s: float = 0.0
    """When it was asked to move off its GPUs."""
    unconfirmed: bool = False
    """Whether Slurm was asked to suspend or resume the job and has not confirmed it."""
    retry_s: float = 0.0
    """When Slurm may be asked again after it refused."""
    off: bool = False
    """Whether the job, suspended, is off its GPUs: it has moved off them, or its processes were seen frozen."""
    frozen: bool = False
    """Whether the job, suspended, has been seen to stand still since then."""
    free_s: float = 0.0
    """If `off`: since when. Else, of a suspended job: when this is first checked."""
    moved_mb: float = 0.0
    """Host memory that its state takes while it is suspended, MB."""
    left_mb: float = 0.0
    """Memory on each of its GPUs that it held when it was last frozen, or holds now, MB."""
    held_out: tuple[JobId, ...] = ()
    """Jobs of the pack in which it must not run while the guaranteed job is there, since it did not keep to its
    share."""
    driven: bool = False
    """Whether the agent itself freezes and thaws it to hold it to its share: see `duty_cycles`."""
    driven_times: int = 0
    """How often that began."""
    driven_until_s: float = 0.0
    """When it is next tried without that; inf: it must first report."""
    stopped: bool = False
    """Whether the agent has frozen it for that, and has not thawed it. Slurm knows nothing of it."""
    stopped_s: float = 0.0
    """If `stopped`: since when."""
    frozen_s: float = 0.0
    """For how long the agent kept it frozen, without the present time and without the short pauses of a driven job, s."""
    resumed_s: float = 0.0
    """When it last began to use GPUs."""
    begun_s: float = math.inf
    """When it reported its first step; inf: it is still starting; 0: it reported none for so long that it counts as
    started."""
    mps: bool = False
    """Whether it is a client of NVIDIA's MPS."""
    most_mb: int = 0
    """Memory on each of its GPUs with which its tasks began and beyond which they cannot go, MB; 0: no such limit. See
    `limits`."""
    cuda_checkpointed: tuple[int, ...] | None = ()
    """Its processes that NVIDIA's driver may have locked or checkpointed, so that they must be restored when it runs;
    None: unknown. See `cuda_checkpoints`."""
    cuda_needs: tuple[str, float] = "", 0.0
    """What a checkpointed process had, and needs again: its GPU, by UUID, and memory of it, MB; "", 0: unknown."""
    no_cuda_checkpoint: str = ""
    """Why it is not checkpointed again, as the end of a sentence: the driver has failed."""
    anywhere: bool = False
    """Whether, suspended, it can continue on other GPUs."""
    refusals: int = 0
    """Time slices that it kept because its state, by its own account, would not fit into the host's memory."""
    alive: bool = False
    """Whether processes of it have been seen."""
    gone: bool = False
    """Whether it has ended, even if the order still names it."""
    memory_mb: int = 0
    """Most memory that it was seen to use on one GPU, MB."""
    rate: float = 0.0
    """Samples (or steps, if it does not count samples) per second when it runs alone; 0: unknown."""
    utilisation: float | None = None
    """Utilisation of its GPUs when it runs alone, in [0, 1]; None: unknown."""
    cgroup: int | None = None
    """Tells this run from a later one that holds GPUs in Slurm: see `DeviceCgroups.cgroup`. None: unknown."""
    why: str = ""
    """Why it is not what the order says, as a sentence; "": no reason."""
    told: set[str] = field(default_factory=set)
    """Causes for which it was contained, and `killed` if it was cancelled."""


@dataclass(slots=True)
class DepartingJob:
    """A job that the order no longer names and whose processes may still run."""

    uid: int
    devices: tuple[int, ...]
    frozen: bool
    """Whether Slurm has yet to resume it."""
    cuda_checkpointed: tuple[int, ...] | None = ()
    """As in `LocalJob`."""
    cuda_needs: tuple[str, float] = "", 0.0
    """As in `LocalJob`."""
    cgroup: int | None = None
    """As in `LocalJob`. None: no GPUs are opened to it."""


class SavedState(BaseModel):
    """All that an agent saves. Times are of the node's clock, s since 1970."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    history: str = Field(default_factory=lambda: secrets.token_hex(8))
    boot: str = ""
    """ID of the node's boot. No job outlives a boot."""
    order: NodeOrder | None = None
    groups: list[Group] = []
    account: Account = Account()
    jobs: dict[JobId, LocalJob] = {}
    departing: dict[int, DepartingJob] = {}
    """By SLURM_JOB_ID."""
    packs: list[NumberedPack] = []
    contained: list[Contained] = []
    xids: list[XidSeen] = []

    @field_validator("groups", mode="before")
    @classmethod
    def _controls_of_this_release(cls, groups: list[Any]) -> list[Any]:
        """Restart a search for a share that another release began; keep all else."""
        return [
            {key: value for key, value in group.items() if key != "control" or _of_this_release(value)}
            if isinstance(group, dict)
            else group
            for group in groups
        ]


def _of_this_release(control: Any) -> bool:
    """Whether a saved control survives reading and writing unchanged, so that its fields are those of this release."""
    try:
        return bool(CONTROL.dump_python(CONTROL.validate_python(control), mode="json") == control)
    except ValidationError:
        return False


def load(path: Path, boot: str) -> SavedState:
    """The state in the file. It is empty if the file is missing, cannot be read (which is logged) or is of another
    boot."""
    try:
        found = SavedState.model_validate_json(path.read_bytes(), extra="ignore")
        if found.boot == boot:
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValidationError) as error:
        log.warning("the agent starts without its saved state", extra={"text": f"{path}: {str(error)[:300]}"})
    return SavedState(boot=boot)


def next_number(numbered: Iterable[NumberedPack | Contained | XidSeen]) -> int:
    """Number of the next entry."""
    return max((each.number for each in numbered), default=0) + 1


class StateFile:
    """The file of the saved state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""

    def save(self, state: SavedState) -> None:
        """Write the state if it has changed. If the file cannot be written, this is logged and the agent goes on."""
        for numbered in (state.packs, state.contained, state.xids):
            del numbered[:-REMEMBERED]
        text = state.model_dump_json()
        if text == self._written:
            return
        try:
            write_whole(self._path, text, 0o600)
        except OSError as error:
            log.warning("the state is not saved", extra={"text": f"{self._path}: {error}"})
            return
        self._written = text
