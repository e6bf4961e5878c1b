"""Options whose value is a list."""

from __future__ import annotations

from penstock_scheduler.errors import ConfigError


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
