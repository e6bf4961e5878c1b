"""Options that are lists in one word."""

from __future__ import annotations

from penstock_scheduler.errors import ConfigError


def numbers(option: str, text: str) -> dict[str, float]:
    """`name=number,...`. Raises ConfigError."""
    found = {}
    for part in split(text):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"{option}: {part!r} is no NAME=NUMBER") from None
    return found


def split(names: str) -> list[str]:
    """The parts between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]
