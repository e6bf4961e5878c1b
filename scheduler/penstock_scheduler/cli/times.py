"""The options `--from` and `--to`."""

from __future__ import annotations

import typer

from penstock_scheduler.accounts.usage import since_1970
from penstock_scheduler.people.errors import ConfigError

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
        return since_1970(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}={text}: give a date or a time, such as 2026-11-01 or 2026-11-01T12:30") from None
