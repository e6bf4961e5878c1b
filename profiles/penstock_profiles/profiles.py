"""Profiles: the measurements of `penstock profile run` for one job on one GPU type, each in a JSON file of a site's
folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from penstock_profiles.files import save_whole
from penstock_profiles.wire import Observation

_NAME = r"^[A-Za-z0-9_+][A-Za-z0-9_+.-]*$"


class ProfileError(ValueError):
    """A profile cannot be read, written or made; the message names the file, the field and the remedy."""


class Profile(BaseModel):
    """Step times of one job on one GPU type."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    job: str = Field(pattern=_NAME)
    """Name of the job or its model, chosen by the user."""
    gpu_type: str = Field(pattern=_NAME)
    """As in GRES; `cpu` for a job that used no GPU."""
    device: str | None = None
    """The product, such as `NVIDIA A100-SXM4-40GB`; None: unknown."""
    device_memory_mb: PositiveFloat | None = None
    """Total memory of the device, MiB."""
    measured_s: NonNegativeFloat
    """Time of the measurement, s since 1970."""
    versions: dict[str, str]
    """Software that the times depend on: name -> version."""
    ended: str
    """Why the measurement ended, for people to read."""
    too_large_batch: PositiveInt | None = None
    """Smallest atomic batch that did not fit into memory; None: all batches that were tried did fit."""
    observations: tuple[Observation, ...] = Field(min_length=1)
    """By ascending batch size."""


def default_folder(environ: Mapping[str, str]) -> Path:
    """The default folder for profiles: `penstock/profiles` in the user's XDG state folder."""
    state = environ.get("XDG_STATE_HOME") or ""
    # The XDG specification says that relative paths are ignored.
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "penstock" / "profiles"


def profile_file(folder: Path, job: str, gpu_type: str) -> Path:
    """The file of one profile.

    Raises:
        ProfileError: a name could lead out of `folder`.
    """
    for what, name in (("job name", job), ("GPU type", gpu_type)):
        if not re.fullmatch(_NAME, name):
            raise ProfileError(f"{what} {name!r} cannot name a file; use letters, digits, '_', '+', '.' and '-'")
    return folder / f"{job}@{gpu_type}.json"


def save_profile(profile: Profile, folder: Path) -> Path:
    """Save `profile` in `folder`, in place of an older one. The folder is made if necessary. Returns the file.

    Raises:
        ProfileError: it cannot be written; an older profile is unchanged.
    """
    path = profile_file(folder, profile.job, profile.gpu_type)
    try:
        save_whole(path, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
    except OSError as error:
        raise ProfileError(
            f"profile {path} cannot be written: {error.strerror}; free some space or choose a folder that you may write"
        ) from None
    return path


def load_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        ProfileError: the file is missing, is not JSON, has a newer version, or has a field that is unknown, missing or
            out of range.
    """
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileError(
            f"profile {path} cannot be read: {error.strerror}; measure it: penstock profile run"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        value = f"={first['input']!r}" if isinstance(first["input"], str | int | float) and field else ""
        remedy = "measure it again: penstock profile run"
        if first["loc"] == ("version",):
            remedy = "it is of another version of Penstock; update this one, or measure it again: penstock profile run"
        raise ProfileError(f"profile {path}: {field}{value}{': ' if field else ''}{first['msg']}; {remedy}") from None
