"""`penstock man`: manual pages, written from the commands themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from penstock_scheduler import __version__


def man(
    context: typer.Context,
    out: Path = typer.Option(..., help="Folder to write into, such as /usr/local/share/man/man1."),
) -> None:
    """Write a manual page for each command."""
    out.mkdir(parents=True, exist_ok=True)
    pages = manual(context.find_root(), "penstock")
    for name, text in pages.items():
        (out / f"{name}.1").write_text(text, encoding="utf-8")
    typer.echo(f"{len(pages)} pages in {out}")


def manual(context: Any, name: str) -> dict[str, str]:
    """name -> page in man(7)'s macros, of a context's command and all below it that are not hidden.

    The context is of whichever click typer brings: its own or the one that is installed.
    """
    command = context.command
    own = getattr(command, "manual", None)
    if own is not None:  # a command that reads its words itself, such as submit
        title = f'.TH {name.upper()} 1 "" "Penstock {__version__}"'
        about = f"{_roff(name)} \\- {_roff(command.get_short_help_str(200))}"
        words = [_roff(line) for line in own.splitlines()]
        return {name: "\n".join([title, ".SH NAME", about, ".SH DESCRIPTION", ".nf", *words, ".fi"]) + "\n"}
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH {name.upper()} 1 "" "Penstock {__version__}"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        f".B {_roff(context.command_path)}",
        _roff(usage),
        ".SH DESCRIPTION",
        _roff(" ".join((command.help or "").split())),
    ]
    options = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if options:
        lines.append(".SH OPTIONS")
        for flags, text in options:
            lines += [".TP", f".B {_roff(flags)}", _roff(" ".join(text.split()))]
    below: dict[str, str] = {}
    if hasattr(command, "commands"):
        commands = {
            each: command.commands[each] for each in sorted(command.commands) if not command.commands[each].hidden
        }
        lines.append(".SH COMMANDS")
        for each, child in commands.items():
            lines += [".TP", f".B {_roff(each)}", _roff(child.get_short_help_str(200))]
            below |= manual(type(context)(child, info_name=each, parent=context), f"{name}-{each}")
    if name == "penstock":
        lines += [".SH EXIT STATUS", "See the page on the command line in Penstock's documentation."]
    return {name: "\n".join(lines) + "\n"} | below


def _roff(text: str) -> str:
    """A line of text that man(7) shows as it is."""
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"))
