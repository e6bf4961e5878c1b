"""The policies, one file each, and the registry: a new policy is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model.wish import describe_errors
from penstock_scheduler.policies.fifo import Fifo, FifoSettings
from penstock_scheduler.policies.sia import ARTIFACT, Sia, SiaSettings
from penstock_scheduler.ports import Policy

REGISTRY: dict[str, tuple[Callable[[Any], Policy], type[BaseModel]]] = {
    "sia": (Sia, SiaSettings),
    "fifo": (Fifo, FifoSettings),
}
"""Name in the settings file -> how to build the policy from its settings, and what those are."""

PRESETS: dict[str, tuple[str, Mapping[str, Any]]] = {"sia:artifact": ("sia", ARTIFACT)}
"""Name that stands for a policy with some settings -> that policy, and what they are."""


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> tuple[Policy, dict[str, Any]]:
    """The policy or preset called `name`, and its settings in full. Raises ConfigError for a name or a setting that is wrong."""
    preset: Mapping[str, Any] = {}
    if name in PRESETS:
        name, preset = PRESETS[name]
    if name not in REGISTRY:
        raise ConfigError(f"unknown policy {name!r}; the policies are {', '.join(sorted([*REGISTRY, *PRESETS]))}")
    build, model = REGISTRY[name]
    try:
        checked = model.model_validate({**preset, **(settings or {})})
    except ValidationError as error:
        raise ConfigError(f"[policy.{name}] " + "; ".join(describe_errors(error, model))) from None
    return build(checked), checked.model_dump(mode="json")
