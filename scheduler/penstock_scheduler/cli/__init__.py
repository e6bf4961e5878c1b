"""The command `penstock`. Subcommands of other packages join through the entry point group `penstock.commands`.

Importing the modules of all commands takes seconds, so a command's module is imported only when the command is used. The list of
commands, in the help and for the shell's completion, reads the commands' summaries from their sources (see `summary`). The help
is plain text, because rich takes as long to import as Python, typer and the client's own modules together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import DefaultPlaceholder

from penstock_scheduler import __version__
from penstock_scheduler.cli.summary import reflow, summary
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import guard

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = "penstock.commands"

OWN: dict[str, str] = {
    "list": "jobs:list_",
    **{name: f"jobs:{name}" for name in ("show", "explain", "history", "logs", "wait", "cancel", "hold", "release")},
    "usage": "usage:usage",
    **{name: f"cluster:{name}" for name in ("nodes", "plan")},
    "rounds list": "cluster:rounds",
    **{f"rounds {name}": f"admin:{name}" for name in ("pause", "resume")},
    "rounds replay": "replay:replay",
    "rounds solve": "solve:solve",
    "top": "top:top",
    **{name: f"admin:{name}" for name in ("drain", "policy", "token")},
    "audit": "admin:audit",
    "leader": "leader:leader",
    "doctor": "doctor:doctor",
    **{f"config {name}": f"config:{name}" for name in ("check", "reference", "schema")},
    "models": "models:models",
    "db": "db:db",
    "profile run": "profile:profile",
    "profile sensitivity": "sensitivity:sensitivity",
    "simulate run": "simulate:simulate_command",
    "simulate whatif": "whatif:whatif",
    "simulate workload": "workload:workload",
    "try": "try_script:try_script",
    "man": "man:man",
}
"""Command -> its module in this package, and the function or the group of commands in it."""

GROUPS = {
    "rounds": "List, pause and resume the rounds; decide a saved round again, offline.",
    "config": "Check and describe the daemon's settings file, and print JSON Schemas.",
    "profile": "Measure a job's program: its speed on a GPU, and how CPU and memory affect it.",
    "simulate": "Simulate jobs on another cluster or under other policies, from a workload or from recorded history.",
}
"""First word of several commands in `OWN` -> its help."""

TOOLS = ("demo", "playground", "loopback")
"""Commands of the package penstock-loopback (loopback/pyproject.toml), which sites do not install."""

PANELS = {
    "Jobs": (
        *("submit", "list", "show", "explain", "history", "logs", "wait", "cancel", "hold", "release"),
        "usage",
    ),
    "Cluster": ("nodes", "rounds", "plan", "top"),
    "Administration": (
        *("doctor", "audit", "leader", "drain", "policy", "token", "models", "config", "db", "slurm", "cloud"),
    ),
    "Measurement and simulation": ("try", "observe", "profile", "simulate"),
    "Trying Penstock": TOOLS,
}
"""Heading in the help -> the commands under it, in this order. All others follow under "Other commands"."""

HIDDEN = ("man",)
OPEN_ENDED = (f"{__name__}.profile:profile", f"{__name__}.try_script:try_script")
"""Places of commands that run a program. All arguments after the program's name are the program's, even without `--`."""


class _Commands(MutableMapping[str, Any]):
    """Commands by name. Each is made when it is first used."""

    def __init__(self, sources: dict[str, Callable[[], Any]]) -> None:
        self._sources = sources
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._sources[name]()
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


class _Listing(TyperGroup):
    """A group whose help has the first paragraph of each command's help, under the headings of `PANELS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            if not command.hidden:
                heading = _panel(name) if ctx.parent is None else "Commands"
                panels.setdefault(heading, []).append((name, (command.help or "").partition("\n\n")[0]))
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class _Group(_Listing):
    """Commands by their places in the sources. A command is imported when it is first used."""

    def __init__(self, sources: dict[str, str] | None = None, **attributes: Any) -> None:
        super().__init__(**attributes)
        if sources is None:
            sources = {name: f"{__name__}.{place}" for name, place in OWN.items()}
            sources |= {entry.name: entry.value for entry in sorted(entry_points(group=COMMANDS), key=_name)}
        self.sources = sources
        """Command -> `package.module:name` of its function or group. A command of a group has two words."""
        order = [name for names in PANELS.values() for name in names]
        names = sorted(dict.fromkeys(name.partition(" ")[0] for name in sources), key=lambda name: _rank(order, name))
        self.commands = _Commands({name: partial(self._load, name) for name in names})

    def _load(self, name: str) -> Any:
        if name in self.sources:
            return _command(name, self.sources[name])
        return _Group(
            {each.partition(" ")[2]: place for each, place in self.sources.items() if each.startswith(f"{name} ")},
            name=name,
            help=GROUPS[name],
            no_args_is_help=True,
            rich_markup_mode=None,
        )

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.parent is None and args[0] in TOOLS and args[0] not in self.commands:
            ctx.fail(
                f"{args[0]} is a command of the package penstock-loopback, which is not installed here. Developers and people "
                "who try Penstock use it, from a clone: script/demo and script/test install it there, and `pip install "
                "./loopback` into another environment that has Penstock."
            )
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option in self.get_params(ctx):  # --help, --version, and typer's own two about completion
            option.default = False  # with typer's None, typer imports pydantic to check it
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with self._summarised():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        with self._summarised():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _summarised(self) -> Iterator[None]:
        """Within this context, the commands have only a name and a summary."""
        whole = self.commands
        self.commands = {name: self._brief(name, whole) for name in whole}
        try:
            yield
        finally:
            self.commands = whole

    def _brief(self, name: str, whole: Mapping[str, Any]) -> Any:
        text = summary(self.sources[name]) if name in self.sources else GROUPS[name]
        return whole[name] if text is None else TyperCommand(name, help=text, hidden=name in HIDDEN)


def _name(entry: EntryPoint) -> str:
    return entry.name


def _rank(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _panel(name: str) -> str:
    return next((panel for panel, names in PANELS.items() if name in names), "Other commands")


def _command(name: str, where: str) -> Any:
    """The command for a function, or for a group of commands, at `package.module:name`."""
    module, _, attribute = where.partition(":")
    found = getattr(import_module(module), attribute)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        own = isinstance(found.info.cls, DefaultPlaceholder)  # `submit` has a class of its own
        alone.add_typer(found, name=name, cls=_Listing if own else found.info.cls)
        made = get_command(alone).commands[name]  # type: ignore[attr-defined]  # two or more make a group
    else:
        settings = {"allow_interspersed_args": False} if where in OPEN_ENDED else None
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
        rich_markup_mode=None,
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
