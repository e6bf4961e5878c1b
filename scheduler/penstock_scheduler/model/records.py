"""What is kept of a round, and its JSON form."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from penstock_scheduler.model import JobId, Plan, Snapshot, Stop
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import PenstockError

FORMAT = 2
"""Version of the JSON form. A reader refuses a newer one. 2: `Node.usable` is `Node.may_start`."""


@dataclass(frozen=True, slots=True)
class StoppedThen:
    """Stops of one round that nobody asked for and that leave GPUs idle."""

    time_s: float
    jobs: int
    """Running jobs that were left with nothing."""
    gpus: int
    """Their GPUs that became idle."""


@dataclass(frozen=True, slots=True)
class GateRecord:
    """What the plan gate found in a round."""

    recent: tuple[StoppedThen, ...] = ()
    """Stops of the last minutes, this round's included, so that a restart does not forget them."""
    refused: tuple[str, ...] = ()
    """Why the first plan was refused, as sentences; empty: it was not."""
    stops: dict[JobId, Stop] = field(default_factory=dict)
    """The stops of the refused plan."""
    moved: tuple[JobId, ...] = ()
    """The jobs that accepted plans moved and that may not run again yet, this round's included."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One decided round: enough to decide it again offline, and to see what it led to."""

    snapshot: Snapshot
    policy: PolicyChoice
    """The policy that decided, with all settings."""
    plan: Plan
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by step: observe, decide."""
    gate: GateRecord = field(default_factory=GateRecord)
    stopping: dict[JobId, Stop] = field(default_factory=dict)
    """Why runs are stopped that earlier rounds had stopped, and that had not left their GPUs when this round was decided."""
    format: int = FORMAT


_ADAPTER = TypeAdapter(RoundRecord)


class UnreadableRound(PenstockError):
    """A saved round is damaged, or of another version."""


def dump_round(record: RoundRecord) -> bytes:
    """A round as JSON, in one line."""
    return _ADAPTER.dump_json(record)


def load_round(text: bytes | str, where: str) -> RoundRecord:
    """A round from its JSON. Raises UnreadableRound, which names `where` and what is wrong with it."""
    data = text.encode() if isinstance(text, str) else text
    try:
        record = _ADAPTER.validate_json(data.replace(b'"usable":', b'"may_start":'), extra="ignore")  # format 1
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(map(str, first["loc"])) or "the file"
        raise UnreadableRound(
            f"{where} is not a round that this version can read: {field_name}: {first['msg']}; "
            "take one from the daemon's store: penstock rounds replay ROUND --state FOLDER"
        ) from None
    if record.format > FORMAT:
        raise UnreadableRound(
            f"{where} has format {record.format}, and this version reads up to {FORMAT}; upgrade penstock"
        )
    return record
