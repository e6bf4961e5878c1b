"""Runs commands in this process, against a service of the tests' own."""

from __future__ import annotations

from typer.testing import CliRunner

from penstock_scheduler.cli import make_app


def penstock(api, *words: str, who: str | None = None):
    """The command's result, as root over the socket or as somebody with a token."""
    place = {"PENSTOCK_URL": api.url, "PENSTOCK_TOKEN": api.tokens[who]} if who else {"PENSTOCK_URL": api.socket}
    return run(*words, **place)


def run(*words: object, **environment: str):
    """The result of a command that asks no service, or the one in `environment`."""
    return CliRunner().invoke(make_app(), [str(word) for word in words], env={"COLUMNS": "120"} | environment)
