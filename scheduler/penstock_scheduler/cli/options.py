"""Options of several commands: lists, and a time from and to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

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


def check_prices(prices: Mapping[str, float], gpu_types: Iterable[str]) -> None:
    """Raises ConfigError: a GPU type has no price."""
    if unknown := sorted(set(gpu_types) - set(prices)):
        raise ConfigError(
            f"no price of a GPU-hour is known for {', '.join(unknown)}: give --prices {unknown[0]}=PRICE too, or leave out "
            "--prices"
        )


def split(text: str) -> list[str]:
    """The parts of a text between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


FROM = typer.Option(
    None, "--from", metavar="TIME", help="The first time that counts, such as 2026-11-01; by default the beginning."
)
TO = typer.Option(None, "--to", metavar="TIME", help="The first time that does not count any more; by default now.")


def span_s(from_: str | None, to: str | None) -> tuple[float | None, float | None]:
    """The values of `--from` and `--to`, s since 1970; None: not given. Raises ConfigError."""
    begin_s, end_s = _time_s("--from", from_), _time_s("--to", to)
    if begin_s is not None and end_s is not None and begin_s >= end_s:
        raise ConfigError(f"--from={from_} is not before --to={to}")
    return begin_s, end_s


def _time_s(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}={text}: give a date or a time, such as 2026-11-01 or 2026-11-01T12:30") from None
