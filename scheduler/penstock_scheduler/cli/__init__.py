"""The command `penstock`. Subcommands of other packages join through the entry point group `penstock.commands`.

A command's module is imported when the command is asked for: all of them together take seconds. A list of the commands, in the
help or for the shell's completion, reads what each says of itself from its source (`summary`).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from penstock_scheduler import __version__
from penstock_scheduler.cli.summary import summary
from penstock_scheduler.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = "penstock.commands"

OWN = {
    "list": "jobs:list_",
    **{name: f"jobs:{name}" for name in ("show", "explain", "logs", "wait", "cancel", "efficiency", "cost")},
    **{
        name: f"site:{name}"
        for name in (
            "queue",
            "nodes",
            "rounds",
            "plan",
            "pause",
            "resume",
            "drain",
            "budget",
            "doctor",
            "policy",
            "token",
        )
    },
    "top": "top:top",
    "profile": "profile:profile",
    "simulate": "simulate:simulate_command",
    "whatif": "whatif:whatif",
    "replay": "replay:replay",
    "solve": "solve:solve",
    "schema": "schema:schema",
    "man": "man:man",
    "workload": "workload:workload",
    "sensitivity": "sensitivity:sensitivity",
    "config": "config:config",
    "db": "db:db",
}
"""Command -> the module here, and the function or group of commands in it."""

HIDDEN = ("man",)
OPEN_ENDED = ("profile",)
"""What follows the program's name is the program's, also without --."""


class _Commands(MutableMapping[str, Any]):
    """Commands by name, each made when it is asked for."""

    def __init__(self, sources: dict[str, Callable[[], Any]]) -> None:
        self._sources = sources
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, self._sources[name]())
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._sources[name] = lambda: command
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._sources[name]
        self._made.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class _Group(TyperGroup):
    """All commands, none of them imported yet."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        joined = sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name)
        self._where = {name: f"{__name__}.{where}" for name, where in OWN.items()}
        self._where |= {entry.name: entry.value for entry in joined}
        self.commands = _Commands({name: partial(_load, where) for name, where in self._where.items()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._summarised():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        with self._summarised():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _summarised(self) -> Iterator[None]:
        """Meanwhile the commands are only what a list of them shows."""
        whole = self.commands
        self.commands = {
            name: whole[name]
            if (text := summary(where)) is None
            else TyperCommand(name, help=text, hidden=name in HIDDEN)
            for name, where in self._where.items()
        }
        try:
            yield
        finally:
            self.commands = whole


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def _command(name: str, found: Any) -> Any:
    """The command of a function, or of a group of commands."""
    alone = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
        return get_command(alone).commands[name]  # type: ignore[attr-defined]  # two or more make a group
    settings = {"allow_interspersed_args": False} if name in OPEN_ENDED else None
    alone.command(name, hidden=name in HIDDEN, context_settings=settings)(found)
    return get_command(alone)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def make_app() -> typer.Typer:
    """The whole command line, with the subcommands that are installed."""
    app = typer.Typer(
        cls=_Group, no_args_is_help=True, help="Penstock meters deep-learning jobs to GPUs, beside Slurm."
    )

    @app.callback()
    def penstock(
        version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
    ) -> None:
        pass

    return app


def main() -> int:
    """Entry point. Exit status: see docs/user/cli.md."""
    try:
        make_app()(prog_name="penstock")
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        return error.exit_status
    return 0
