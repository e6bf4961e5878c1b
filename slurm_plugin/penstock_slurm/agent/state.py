"""What an agent remembers: in memory while it runs, and in a file on the node for the one that starts after it."""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobControl
from penstock_scheduler.model import JobId
from penstock_scheduler.sharing.control import ShareControl
from penstock_scheduler.sharing.messages import Contained, NodeOrder, NumberedPack, State, XidSeen
from penstock_scheduler.sharing.node import Account, Group

log = logging.getLogger(__name__)

CONTROL = TypeAdapter(ShareControl)


@dataclass(slots=True)
class Hosted:
    """A job on the node, as the agent handles it."""

    number: int
    """SLURM_JOB_ID."""
    state: State = "waiting"
    devices: tuple[int, ...] = ()
    control: JobControl = field(default_factory=lambda: JobControl(number=0))
    """What it was told last."""
    asked_s: float = 0.0
    """When it was asked to suspend."""
    tried: bool = False
    """Whether Slurm was asked to suspend or resume it, and has not said what came of it."""
    retry_s: float = 0.0
    """When Slurm is asked again, which has refused."""
    off: bool = False
    """Whether, suspended, it counts as off its GPUs: it has moved off them, or was seen frozen."""
    free_s: float = 0.0
    """Since when that is so; before, when it is looked at at the earliest."""
    moved_mb: float = 0.0
    """What it holds of the host's memory while it is suspended."""
    left_mb: float = 0.0
    """What it held of each GPU when it was frozen last, or holds now, MB."""
    held_out: tuple[JobId, ...] = ()
    """The pack beside whose guaranteed job it stands still, since it did not keep to its share; (): none."""
    resumed_s: float = 0.0
    """When it last began to use GPUs."""
    begun_s: float = math.inf
    """When it told its first step; inf: it starts still. 0: it told none for so long that it is taken for one that tells none."""
    mps: bool = False
    """Whether it goes through NVIDIA's MPS."""
    anywhere: bool = False
    """Whether, suspended, it may go on on other GPUs."""
    refusals: int = 0
    """Slices that it kept since its state, as it says itself, would not fit into the host's memory."""
    alive: bool = False
    """Whether processes of it have been seen."""
    gone: bool = False
    """Whether it has ended, though the order does not know yet."""
    memory_mb: int = 0
    """Most that it was seen to use of one GPU."""
    rate: float = 0.0
    """Samples (or, if it does not count those, steps) a second alone; 0: not known."""
    utilisation: float | None = None
    """Part of its GPUs that it uses alone."""
    cgroup: int | None = None
    """Tells its run from a later one to whose processes Slurm has given GPUs: see `DeviceCgroups.cgroup`. None: not known."""
    why: str = ""
    told: set[str] = field(default_factory=set)
    """Causes for which it has been contained; `killed` if it was cancelled."""


@dataclass(slots=True)
class DepartingJob:
    """A job that the daemon does not name any more, but whose processes may live on."""

    uid: int
    devices: tuple[int, ...]
    frozen: bool
    """Whether Slurm has yet to let it go on."""
    cgroup: int | None = None
    """As that of `Hosted`. None: no GPUs are opened to it."""


class Remembered(BaseModel):
    """All of it. Times are of the node's clock, s since 1970."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    history: str = Field(default_factory=lambda: secrets.token_hex(8))
    boot: str = ""
    """Of the node: no job outlives one."""
    order: NodeOrder | None = None
    groups: list[Group] = []
    account: Account = Account()
    hosted: dict[JobId, Hosted] = {}
    leaving: dict[int, DepartingJob] = {}
    """By SLURM_JOB_ID."""
    packs: list[NumberedPack] = []
    contained: list[Contained] = []
    xids: list[XidSeen] = []

    @field_validator("groups", mode="before")
    @classmethod
    def _controls_of_this_release(cls, groups: list[Any]) -> list[Any]:
        """A search for a share that another release has begun is begun anew; all else stays."""
        return [
            {key: value for key, value in group.items() if key != "control" or _of_this_release(value)}
            if isinstance(group, dict)
            else group
            for group in groups
        ]


def _of_this_release(control: Any) -> bool:
    """Whether a saved control, read and written again, is what it was: no field of it is new, gone, or another thing now."""
    try:
        return bool(CONTROL.dump_python(CONTROL.validate_python(control), mode="json") == control)
    except ValidationError:
        return False


def load(path: Path, boot: str) -> Remembered:
    """What the file has; all new if it is of another boot, there is none, or none that can be read, which is logged."""
    try:
        found = Remembered.model_validate_json(path.read_bytes())
        if found.boot == boot:
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValidationError) as error:
        log.warning("the agent begins anew", extra={"text": f"{path}: {str(error)[:300]}"})
    return Remembered(boot=boot)


def save(path: Path, remembered: Remembered) -> None:
    """Raises OSError."""
    write_whole(path, remembered.model_dump_json(), 0o600)
