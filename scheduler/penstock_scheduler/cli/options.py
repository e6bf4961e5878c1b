"""Options that take a list."""

from __future__ import annotations

import typer

from penstock_scheduler.people.errors import ConfigError

POLICIES = typer.Option(
    None,
    help="Policies, such as sia,fifo. Default: the policy of --config, or else sia. For stages, or a policy for each "
    "partition, name a settings file: sia,mine.toml. The first is compared with the others.",
)
STAGE = typer.Option(
    [],
    "--stage",
    help="A stage that refines the plans of the policies given by name, such as synergy-tune. Repeatable.",
)


def numbers(option: str, text: str) -> dict[str, float]:
    """The value `name=number,...` of an option. Raises ConfigError."""
    found = {}
    for part in split(text):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"{option}: {part!r} is not NAME=NUMBER") from None
    return found


def split(text: str) -> list[str]:
    """The parts of a text between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
