"""The command `penstock`. Subcommands of other packages join through the entry point group `penstock.commands`.

Importing the modules of all commands takes seconds, so a command's module is imported only when the command is used. The list of
commands, in the help and for the shell's completion, reads the commands' summaries from their sources (see `summary`).
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
from penstock_scheduler.cli.summary import reflow, summary
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import guard

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = "penstock.commands"

OWN = {
    "list": "jobs:list_",
    **{name: f"jobs:{name}" for name in ("show", "explain", "history", "logs", "wait", "cancel", "hold", "release")},
    "efficiency": "efficiency:efficiency",
    **{name: f"usage:{name}" for name in ("usage", "cost")},
    **{name: f"cluster:{name}" for name in ("queue", "nodes", "rounds", "plan", "budget")},
    "top": "top:top",
    **{name: f"admin:{name}" for name in ("pause", "resume", "drain", "policy", "token")},
    "audit": "audit:audit",
    "leader": "leader:leader",
    "doctor": "doctor:doctor",
    "config": "config:config",
    "models": "models:models",
    "db": "db:db",
    "profile": "profile:profile",
    "sensitivity": "sensitivity:sensitivity",
    "simulate": "simulate:simulate_command",
    "whatif": "whatif:whatif",
    "workload": "workload:workload",
    "replay": "replay:replay",
    "solve": "solve:solve",
    "schema": "schema:schema",
    "man": "man:man",
}
"""Command -> its module in this package, and the function or the group of commands in it."""

PANELS = {
    "Jobs": (
        *("submit", "list", "show", "explain", "history", "logs", "wait", "cancel", "hold", "release"),
        *("efficiency", "usage", "cost"),
    ),
    "Cluster": ("queue", "nodes", "rounds", "plan", "top", "budget"),
    "Administration": (
        "doctor",
        "audit",
        "leader",
        "pause",
        "resume",
        "drain",
        "policy",
        "token",
        "models",
        "config",
        "db",
        "slurm",
        "cloud",
    ),
    "Measurements": ("profile", "sensitivity"),
    "Simulation and analysis": ("simulate", "whatif", "workload", "replay", "solve", "schema"),
    "Trying Penstock": ("demo", "playground", "loopback"),
}
"""Heading in the help -> the commands under it, in this order. All others follow under "Other commands"."""

HIDDEN = ("man",)
OPEN_ENDED = ("profile",)
"""Commands that run a program. All arguments after the program's name are the program's, even without `--`."""


class _Commands(MutableMapping[str, Any]):
    """Commands by name. Each is made when it is first used."""

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
    """All commands. A command is imported when it is first used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        joined = sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name)
        where = {name: f"{__name__}.{place}" for name, place in OWN.items()}
        where |= {entry.name: entry.value for entry in joined}
        order = [name for names in PANELS.values() for name in names]
        self.sources = {name: where[name] for name in sorted(where, key=lambda name: _rank(order, name))}
        """Command -> `package.module:name` of its function or group."""
        self.commands = _Commands({name: partial(_load, place) for name, place in self.sources.items()})

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
        """Within this context, the commands have only a name and a summary."""
        whole = self.commands
        self.commands = {
            name: whole[name]
            if (text := summary(where)) is None
            else TyperCommand(name, help=text, hidden=name in HIDDEN, rich_help_panel=_panel(name))
            for name, where in self.sources.items()
        }
        try:
            yield
        finally:
            self.commands = whole


def _rank(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _panel(name: str) -> str:
    return next((panel for panel, names in PANELS.items() if name in names), "Other commands")


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def _command(name: str, found: Any) -> Any:
    """The command for a function, or for a group of commands."""
    alone = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
        made = get_command(alone).commands[name]  # type: ignore[attr-defined]  # two or more make a group
    else:
        settings = {"allow_interspersed_args": False} if name in OPEN_ENDED else None
        alone.command(name, hidden=name in HIDDEN, context_settings=settings)(found)
        made = get_command(alone)
    for command in (made, *getattr(made, "commands", {}).values()):
        command.help = reflow(command.help or "") or None
    return made


def _version(show: bool) -> None:
    if show:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def make_app() -> typer.Typer:
    """The command line, with the subcommands of all installed packages."""
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        help="Penstock schedules deep-learning jobs on the GPUs of a Slurm cluster.",
        epilog="See `penstock COMMAND --help` for the options of a command.",
    )

    @app.callback()
    def penstock(
        version: bool = typer.Option(
            False, "--version", help="Show the version and exit.", callback=_version, is_eager=True
        ),
    ) -> None:
        pass

    return app


def main() -> int:
    """Entry point. Returns the exit status; docs/user/cli.md lists them."""
    guard()
    try:
        make_app()(prog_name="penstock")
    except PenstockError as error:
        typer.echo(f"penstock: {error}".replace("\n", "\n    "), err=True)
        return error.exit_status
    return 0
