"""The policies and stages, one file each, and the registry: a new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model.spec import describe_errors
from penstock_scheduler.policies.antman import Antman, AntmanSettings
from penstock_scheduler.policies.budgets import WithBudgets
from penstock_scheduler.policies.cloud import WithCloud
from penstock_scheduler.policies.colocation import (
    AntmanShare,
    AntmanShareSettings,
    GandivaShare,
    GandivaShareSettings,
)
from penstock_scheduler.policies.gandiva import Gandiva, GandivaSettings
from penstock_scheduler.policies.gavel import Gavel, GavelSettings
from penstock_scheduler.policies.partitioned import Partitioned
from penstock_scheduler.policies.pollux import Pollux, PolluxSettings
from penstock_scheduler.policies.queues import (
    Fifo,
    Ftf,
    FtfSettings,
    Las,
    LasSettings,
    QueueSettings,
    SlurmBackfill,
    SlurmBackfillSettings,
    Srtf,
)
from penstock_scheduler.policies.sia import ARTIFACT, Sia, SiaSettings
from penstock_scheduler.policies.staged import Staged
from penstock_scheduler.policies.synergy import (
    OptSettings,
    Proportional,
    ProportionalSettings,
    SynergyOpt,
    SynergyTune,
)
from penstock_scheduler.policies.tuning import PAPER, REFERENCE, TuneSettings
from penstock_scheduler.ports import Policy, Stage

REGISTRY: dict[str, tuple[Callable[[Any], Policy], type[BaseModel]]] = {
    "sia": (Sia, SiaSettings),
    "pollux": (Pollux, PolluxSettings),
    "gavel": (Gavel, GavelSettings),
    "gandiva": (Gandiva, GandivaSettings),
    "antman": (Antman, AntmanSettings),
    "fifo": (Fifo, QueueSettings),
    "srtf": (Srtf, QueueSettings),
    "las": (Las, LasSettings),
    "ftf": (Ftf, FtfSettings),
    "slurm-backfill": (SlurmBackfill, SlurmBackfillSettings),
}
"""Name in the settings file -> how to build the policy from its settings, and what those are."""

STAGES: dict[str, tuple[Callable[[Any], Stage], type[BaseModel]]] = {
    "proportional": (Proportional, ProportionalSettings),
    "synergy-tune": (SynergyTune, TuneSettings),
    "synergy-opt": (SynergyOpt, OptSettings),
    "gandiva-share": (GandivaShare, GandivaShareSettings),
    "antman-share": (AntmanShare, AntmanShareSettings),
}
"""Name behind a `+` -> how to build the stage from its settings, and what those are."""

PRESETS: dict[str, dict[str, Any]] = {
    "sia:artifact": ARTIFACT,
    "synergy-tune:paper": PAPER,
    "synergy-tune:reference": REFERENCE,
}
"""Names for a policy or a stage with settings of its own: `NAME:PRESET`."""

Built = TypeVar("Built")


def policy_names() -> list[str]:
    """Names of policies that can decide alone, presets among them; any stages can stand behind each, after a `+`."""
    return _names(REGISTRY)


def _names(registry: Mapping[str, object]) -> list[str]:
    return sorted([*registry, *(preset for preset in PRESETS if preset.partition(":")[0] in registry)])


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> tuple[Policy, dict[str, Any]]:
    """The policy called `name`, and its settings in full.

    A name such as `sia+synergy-tune` is a policy with stages behind it, `sia debug=fifo` one with another for the partition
    debug; the settings of such are those of each part, by its name.

    Raises:
        ConfigError: a name or a setting that is wrong.
    """
    rest, own, behind = _read(name)
    of_part = _by_part(name, settings or {})
    in_full: dict[str, Any] = {}

    def made(part: str) -> Policy:
        policy, in_full[part] = _make(part, REGISTRY, "policies", of_part[part])
        return WithCloud(policy)

    policy = made(rest)
    # With the presets, which are no part of the policies' own names: settings are recorded by them.
    called = " ".join([rest, *(f"{partition}={part}" for partition, part in own.items())])
    if own:
        policy = Partitioned(policy, {partition: made(part) for partition, part in own.items()}, called)
    policy = WithBudgets(policy)
    stages: list[Stage] = []
    for part in behind:
        stage, in_full[part] = _make(part, STAGES, "stages", of_part[part])
        stages.append(stage)
    if stages:
        policy = Staged(policy, stages, "+".join([called, *behind]), tuple(own))
    return policy, in_full if own or stages else in_full[rest]


def sharing_parts(name: str) -> list[str]:
    """The parts of a policy's name that let jobs share GPUs, and so need a cluster with agents."""
    registered: dict[str, tuple[Any, type[BaseModel]]] = {**REGISTRY, **STAGES}
    return [part for part in parts_of(name) if getattr(registered[part.partition(":")[0]][0], "shares", False)]


def overlaid(name: str, settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for the policy `name` with `more` on top, part by part. Raises ConfigError."""
    _, own, behind = _read(name)
    if not own and not behind:
        return {**settings, **more}
    below, above = _by_part(name, settings), _by_part(name, more)
    return {part: {**below[part], **above[part]} for part in below}


def parts_of(name: str) -> list[str]:
    """The policies and stages that a name is made of: of `sia debug=fifo+synergy-tune` sia, fifo and synergy-tune."""
    words = name.replace("+", " ").split()
    return list(dict.fromkeys(word.partition("=")[2] or word for word in words))


def _read(name: str) -> tuple[str, dict[str, str], list[str]]:
    """The policy, those of partitions of their own, and the stages that a name says. Raises ConfigError."""
    first, *behind = (part.split() for part in name.split("+"))
    if not first:
        raise ConfigError(f"policy {name!r} names no policy that decides; the policies are {', '.join(policy_names())}")
    rest, *words = first
    if rest.partition(":")[0] in STAGES:
        raise ConfigError(f"{rest!r} refines the plan of a policy: write it behind one, such as sia+{rest}")
    if "=" in rest:
        raise ConfigError(
            f"policy {name!r} begins with {rest!r}, so there is no policy for the other partitions: name it first, such as "
            f"'sia {rest}'"
        )
    own: dict[str, str] = {}
    for word in words:
        partition, _, policy = word.partition("=")
        if not (partition and policy):
            raise ConfigError(
                f"policy: {word!r} behind the first policy is no PARTITION=POLICY, such as debug=fifo, for a partition of its own"
            )
        if partition in own:
            raise ConfigError(f"policy {name!r} gives the partition {partition} two policies; leave one of them out")
        own[partition] = policy
    for stage in behind:
        if len(stage) != 1:
            raise ConfigError(
                f"policy {name!r}: behind each + stands one stage, and nothing behind the stages, such as "
                f"'sia debug=fifo+synergy-tune'; the stages are {', '.join(_names(STAGES))}"
            )
    return rest, own, [stage for (stage,) in behind]


def _by_part(name: str, settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The settings of each part, by its name. Those of a preset may stand under its policy's name, if that is no part itself."""
    _, own, behind = _read(name)
    parts = parts_of(name)
    if not own and not behind:
        return {parts[0]: settings}
    bases = {part: part.partition(":")[0] for part in parts}
    for key, table in settings.items():
        if key not in (*bases, *bases.values()):
            raise ConfigError(f"policy {name!r} has no part {key!r}; its settings are by part: {', '.join(parts)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"policy {name!r}: {key} is a part, so its settings are a table, such as {key}.KEY=VALUE")
    return {
        part: {**(settings.get(base, {}) if base not in parts else {}), **settings.get(part, {})}
        for part, base in bases.items()
    }


def settings_model(name: str) -> type[BaseModel]:
    """What the settings of a policy or a stage may be. Raises ConfigError if there is none of that name."""
    base = name.partition(":")[0]
    found = REGISTRY.get(base) or STAGES.get(base)
    if found is None or (base != name and name not in PRESETS):
        names = ", ".join([*_names(REGISTRY), *_names(STAGES)])
        raise ConfigError(f"there is no policy or stage {name!r}; there are {names}")
    return found[1]


def _make(
    name: str,
    registry: Mapping[str, tuple[Callable[[Any], Built], type[BaseModel]]],
    kind: str,
    settings: Mapping[str, Any],
) -> tuple[Built, dict[str, Any]]:
    base = name.partition(":")[0]
    if base not in registry or (base != name and name not in PRESETS):
        what = "stage" if kind == "stages" else "policy"
        raise ConfigError(f"unknown {what} {name!r}; the {kind} are {', '.join(_names(registry))}")
    build, model = registry[base]
    try:
        checked = model.model_validate(PRESETS.get(name, {}) | dict(settings))
    except ValidationError as error:
        raise ConfigError(f"[policy.{name}] " + "; ".join(describe_errors(error, model))) from None
    return build(checked), checked.model_dump(mode="json")
