"""Edits of Slurm's configuration files as text, line by line, and their undoing. This module reads no file."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LineEdit:
    """One line that became another. `before` is None if the line was added at the end."""

    before: str | None
    after: str


def set_key(text: str, key: str, value: str) -> tuple[str, list[LineEdit]]:
    """Set a key of slurm.conf, in its own line if it has one. Keys ignore case, and the last line counts."""
    lines = text.splitlines()
    pattern = re.compile(rf"\s*{re.escape(key)}\s*=", re.IGNORECASE)
    found = [index for index, line in enumerate(lines) if pattern.match(line)]
    if not found:
        return append_line(text, f"{key}={value}")
    before = lines[found[-1]]
    comment = before[before.index("#") :] if "#" in before else ""
    after = f"{key}={value} {comment}".rstrip()
    if before == after:
        return text, []
    lines[found[-1]] = after
    return "\n".join(lines) + "\n", [LineEdit(before, after)]


def append_line(text: str, line: str) -> tuple[str, list[LineEdit]]:
    """The text with one more line at its end."""
    return (text if not text or text.endswith("\n") else text + "\n") + line + "\n", [LineEdit(None, line)]


def set_plugin(text: str, library: str, run_dir: str | None) -> tuple[str, list[LineEdit]]:
    """plugstack.conf with a line for our plugin, which names the agents' folder.

    Args:
        text: the file's text.
        library: path of the plugin.
        run_dir: the value of `[agent]`; "" for the plugin's default; None without agents, where it does not matter.
    """
    argument = f"run_dir={run_dir}" if run_dir else ""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        words = line.split("#")[0].split()
        if words[1:2] != [library]:
            continue
        given = [word for word in words[2:] if word.startswith("run_dir=")]
        if run_dir is None or given == ([argument] if argument else []):
            return text, []
        after = " ".join([*(word for word in words if word not in given), *([argument] if argument else [])])
        lines[index] = after
        return "\n".join(lines) + "\n", [LineEdit(line, after)]
    return append_line(text, f"optional {library} {argument}".rstrip())


def our_libraries(text: str, run_dir: str | None) -> list[str]:
    """The files of our plugin in plugstack.conf; none if a line has another `run_dir` than `set_plugin` would write."""
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    libraries = sorted({words[1] for words in lines if len(words) > 1 and words[1].endswith("penstock.so")})
    return [] if any(set_plugin(text, library, run_dir)[1] for library in libraries) else libraries


def undo(text: str, edits: list[LineEdit]) -> tuple[str, list[LineEdit]]:
    """The text without the edits, and the edits whose line has been changed or removed since."""
    lines, lost = text.splitlines(), []
    for edit in reversed(edits):
        if edit.after not in lines:
            lost.append(edit)
            continue
        index = len(lines) - 1 - lines[::-1].index(edit.after)
        lines[index : index + 1] = [] if edit.before is None else [edit.before]
    return "".join(line + "\n" for line in lines), lost


def with_plugin(value: str, plugin: str) -> str:
    """A comma-separated list such as JobSubmitPlugins with one more."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    return ",".join(names if plugin in names else [*names, plugin])
