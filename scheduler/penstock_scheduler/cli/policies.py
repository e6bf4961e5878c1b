"""How a command line names policies: by name, with stages, or by a settings file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock_scheduler.cli.options import split
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.settings import Settings, load_settings


def choice_of(policy: str, stages: Sequence[str] = (), settings: Settings | None = None) -> PolicyChoice:
    """The policy that `policy` names: either its name, or a settings file (`*.toml`) with a section [policy].

    Args:
        policy: the value of the option.
        stages: stages of a policy given by name.
        settings: settings of a policy given by name; None: its defaults.

    Raises:
        ConfigError: the file cannot be read, or is wrong. Names and settings are checked when the policy is made.
    """
    if policy.endswith(".toml"):
        return load_settings(Path(policy)).policy
    choice = PolicyChoice(name=policy, stages=tuple(stages))
    return choice.over(settings.policies) if settings is not None else choice


def choices_of(policies: str | None, stages: Sequence[str], config: Path | None) -> list[PolicyChoice]:
    """Several policies, separated by commas: see `choice_of`. All are checked.

    Args:
        policies: as on the command line; None: the policy that the settings file chooses, or `sia` without a file.
        stages: of policies given by name.
        config: a settings file with settings of the policies.

    Raises:
        ConfigError: a wrong name or setting; stages for the policy of a settings file.
    """
    from penstock_scheduler.rounds.policies import make_policy  # not above: it takes a solver's time to import

    settings = load_settings(config) if config is not None else None
    if policies is None and settings is not None:
        if stages:
            raise ConfigError(
                "--stage refines policies given by name: name them with --policy, or put stages into the file"
            )
        found = [settings.policy]
    else:
        found = [choice_of(each, stages, settings) for each in split("sia" if policies is None else policies)]
    if not found:
        raise ConfigError("--policy names no policy")
    for choice in found:
        make_policy(choice)
    labels = [str(choice) for choice in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"--policy names {twice} twice; leave one of them out")
    return found


def with_values(choice: PolicyChoice, values: Mapping[str, Any]) -> PolicyChoice:
    """The choice with these settings laid over its own.

    Args:
        choice: a policy, perhaps with stages.
        values: settings of the policy itself; or by policy or stage, such as `{"sia": {"gap": 0.01}}`.
    """
    known = {*choice.parts, *(part.partition(":")[0] for part in choice.parts)}
    settings = {part: dict(table) for part, table in choice.settings.items()}
    for key, value in values.items():
        if key in known and isinstance(value, dict):
            settings[key] = settings.get(key, {}) | value
        else:
            settings[choice.name] = settings.get(choice.name, {}) | {key: value}
    return choice.model_copy(update={"settings": settings})
