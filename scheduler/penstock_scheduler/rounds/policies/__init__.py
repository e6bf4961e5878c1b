"""The registry of policies and stages. To add one, write a file or a package, and add one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ValidationError

from penstock_scheduler.api.ports import Policy, Stage
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies.budgets import WithBudgets
from penstock_scheduler.rounds.policies.cloud import WithCloud
from penstock_scheduler.rounds.policies.combined import Partitioned, Staged
from penstock_scheduler.rounds.policies.full_starts import WithFullStarts
from penstock_scheduler.rounds.policies.preempting import Preempting
from penstock_scheduler.rounds.policies.sia import ARTIFACT
from penstock_scheduler.rounds.policies.sia import PAPER as SIA_PAPER
from penstock_scheduler.rounds.policies.staying import Staying
from penstock_scheduler.rounds.policies.tuning import PAPER, REFERENCE
from penstock_scheduler.rounds.policies.turns import WithTurns


def registered(where: str) -> tuple[Callable[[Any], Any], type[BaseModel]]:
    """An entry of `REGISTRY` or `STAGES`: a class, and the settings model that its `__init__` declares for `settings`.

    Args:
        where: the module in this package and the class, such as `pollux.Pollux`.

    Raises:
        TypeError: the class does not declare its settings.
    """
    module, _, name = where.rpartition(".")
    policy = getattr(import_module(f"{__name__}.{module}"), name)
    settings = get_type_hints(policy.__init__).get("settings")
    if settings is None:
        raise TypeError(
            f"{where} does not declare its settings: write `def __init__(self, settings: MySettings) -> None`"
        )
    return policy, settings


REGISTRY: dict[str, tuple[Callable[[Any], Policy], type[BaseModel]]] = {
    "sia": registered("sia.Sia"),
    "pollux": registered("pollux.Pollux"),
    "gavel": registered("gavel.Gavel"),
    "gandiva": registered("gandiva.Gandiva"),
    "antman": registered("antman.Antman"),
    "fifo": registered("queues.Fifo"),
    "srtf": registered("queues.Srtf"),
    "las": registered("queues.Las"),
    "ftf": registered("queues.Ftf"),
    "slurm-backfill": registered("queues.SlurmBackfill"),
}
"""Name -> the policy's class, and the model of its settings."""

STAGES: dict[str, tuple[Callable[[Any], Stage], type[BaseModel]]] = {
    "proportional": registered("synergy.Proportional"),
    "synergy-tune": registered("synergy.SynergyTune"),
    "synergy-opt": registered("synergy.SynergyOpt"),
    "gandiva-share": registered("colocation.GandivaShare"),
    "antman-share": registered("colocation.AntmanShare"),
}
"""Name in `stages` -> the stage's class, and the model of its settings."""

PRESETS: dict[str, dict[str, Any]] = {
    "sia:artifact": ARTIFACT,
    "sia:paper": SIA_PAPER,
    "synergy-tune:paper": PAPER,
    "synergy-tune:reference": REFERENCE,
}
"""`NAME:PRESET` -> settings of the policy or stage `NAME` that differ from its defaults."""

Built = TypeVar("Built")


def policy_names() -> list[str]:
    """Names of the policies, with their presets."""
    return _names(REGISTRY)


def stage_names() -> list[str]:
    """Names of the stages, with their presets."""
    return _names(STAGES)


def _names(registry: Mapping[str, object]) -> list[str]:
    return sorted([*registry, *(preset for preset in PRESETS if preset.partition(":")[0] in registry)])


def make_policy(choice: PolicyChoice | str, settings: Mapping[str, Any] | None = None) -> tuple[Policy, PolicyChoice]:
    """Build the chosen policy. Also returns the choice with all settings of its parts, defaults included.

    Args:
        choice: the choice, or the name of one policy without stages.
        settings: settings of that one policy; None: its defaults.

    Raises:
        ConfigError: a name is unknown, a setting is invalid, or a stage shares GPUs that the policy already shares.
    """
    if isinstance(choice, str):
        choice = PolicyChoice(name=choice, settings={choice: dict(settings or {})})
    else:
        assert not settings, "a choice has its own settings"
    choice.check()
    in_full: dict[str, dict[str, Any]] = {}

    def made(name: str) -> Policy:
        policy, in_full[name] = _make(name, REGISTRY, "policy", choice.settings_of(name))
        return WithTurns(WithFullStarts(WithCloud(policy))) if takes_turns(name) else WithCloud(policy)

    policy = made(choice.name)
    if choice.partitions:
        own = {partition: made(each.name) for partition, each in choice.partitions.items()}
        policy = Partitioned(policy, own, str(choice))
    policy = WithBudgets(policy)
    stages: list[Stage] = []
    for name in choice.stages:
        stage, in_full[name] = _make(name, STAGES, "stage", choice.settings_of(name))
        stages.append(stage)
    if sharing := [name for name in choice.stages if sharing_parts(choice.name) and sharing_parts(name)]:
        raise ConfigError(
            f"[policy] stages: {choice.name} shares GPUs itself, and would undo what {sharing[0]} decides; leave the stage out, "
            "or use it with a policy that does not share, such as sia"
        )
    if stages:
        policy = Staged(policy, stages, str(choice), tuple(choice.partitions))
    return Preempting(Staying(policy)), choice.model_copy(update={"settings": in_full})


def takes_turns(name: str) -> bool:
    """Whether the bound of `turns` holds under a policy.

    It does where the policy resizes running jobs. Where jobs get their whole request or nothing, a job that a turn gave
    its minimum would stay there, and GPUs would be idle. Presets decide as a paper or its code does.
    """
    return name in ("sia", "pollux")


def sharing_parts(choice: PolicyChoice | str) -> list[str]:
    """Policies and stages of a choice that let jobs share GPUs. They need a cluster with agents."""
    parts = (choice,) if isinstance(choice, str) else choice.parts
    registered: dict[str, tuple[Any, type[BaseModel]]] = {**REGISTRY, **STAGES}
    return [part for part in parts if getattr(registered[part.partition(":")[0]][0], "shares", False)]


def settings_model(name: str) -> type[BaseModel]:
    """The model of the settings of a policy or a stage. Raises ConfigError if the name is unknown."""
    base = name.partition(":")[0]
    found = REGISTRY.get(base) or STAGES.get(base)
    if found is None or (base != name and name not in PRESETS):
        names = ", ".join([*policy_names(), *stage_names()])
        raise ConfigError(f"unknown policy or stage {name!r}; the policies and stages are {names}")
    return found[1]


def _make(
    name: str,
    registry: Mapping[str, tuple[Callable[[Any], Built], type[BaseModel]]],
    kind: str,
    settings: Mapping[str, Any],
) -> tuple[Built, dict[str, Any]]:
    base = name.partition(":")[0]
    if base not in registry or (base != name and name not in PRESETS):
        raise ConfigError(_unknown(name, kind))
    build, model = registry[base]
    try:
        checked = model.model_validate(PRESETS.get(name, {}) | dict(settings))
    except ValidationError as error:
        raise ConfigError(f"[policy.{name}] " + "; ".join(describe_errors(error, model))) from None
    return build(checked), checked.model_dump(mode="json")


def _unknown(name: str, kind: str) -> str:
    base = name.partition(":")[0]
    if kind == "policy" and base in STAGES:
        return f"{name!r} is a stage, which refines a policy's plan: [policy] stages = [{name!r}]"
    if kind == "stage" and base in REGISTRY:
        return f"{name!r} is a policy, not a stage; the stages are {', '.join(stage_names())}"
    names, kinds = (policy_names(), "policies") if kind == "policy" else (stage_names(), "stages")
    return f"unknown {kind} {name!r}; the {kinds} are {', '.join(names)}"
