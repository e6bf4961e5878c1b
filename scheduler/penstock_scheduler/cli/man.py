"""`penstock man`: writes manual pages from the help of the commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from penstock_scheduler import __version__


def man(
    context: typer.Context,
    out: Path = typer.Option(..., help="Directory to write to, such as /usr/local/share/man/man1."),
) -> None:
    """Write a manual page for each command."""
    out.mkdir(parents=True, exist_ok=True)
    pages = manual(context.find_root(), "penstock")
    for name, text in pages.items():
        (out / f"{name}.1").write_text(text, encoding="utf-8")
    typer.echo(f"Wrote {len(pages)} pages to {out}")


def manual(context: Any, name: str) -> dict[str, str]:
    """Name -> page, in the macros of man(7), of a context's command and of all visible commands below it.

    The context comes from the copy of click that typer uses, which may differ from the installed one.
    """
    command = context.command
    own = getattr(command, "manual", None)
    if own is not None:  # a command that reads its arguments itself, such as submit
        title = f'.TH {name.upper()} 1 "" "Penstock {__version__}"'
        about = f"{_roff(name)} \\- {_roff(command.get_short_help_str(200))}"
        text = [_roff(line) for line in own.splitlines()]
        return {name: "\n".join([title, ".SH NAME", about, ".SH DESCRIPTION", ".nf", *text, ".fi"]) + "\n"}
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH {name.upper()} 1 "" "Penstock {__version__}"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        f".B {_roff(context.command_path)}",
        _roff(usage),
        ".SH DESCRIPTION",
        "\n.PP\n".join(_roff(" ".join(text.split())) for text in (command.help or "").split("\n\n")),
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
    """A line of text, escaped for man(7)."""
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"))
