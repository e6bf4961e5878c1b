"""Reads catalogues: TOML files of named entries, which come with Penstock or which a site adds in the same format."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Entry = TypeVar("Entry", bound=BaseModel)

DATA = Path(__file__).with_name("data")
"""Folder of Penstock's own catalogues."""


class CatalogueError(ValueError):
    """A catalogue file cannot be used; the message names the file, the field and the value."""


def read_catalogue(
    path: Path, entry: type[Entry], described_in: str, nested: Mapping[int, Sequence[str]] | None = None
) -> dict[str, Entry]:
    """Entries of a file by name, in the file's order.

    Args:
        path: a TOML file with one table per entry.
        entry: model of each table.
        described_in: the file whose top describes each field, for the remedy in messages.
        nested: depth of a table inside an entry -> its fields. The message about an unknown field lists them.

    Raises:
        CatalogueError: the file is missing, is not TOML, or has a field that is unknown, missing or out of range.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"catalogue {path} cannot be read: {error}") from error
    known = {1: list(entry.model_fields), **(nested or {})}
    entries = {}
    for name, table in tables.items():
        try:
            entries[name] = entry.model_validate(table)
        except ValidationError as error:
            raise CatalogueError(f"catalogue {path}: {_describe(name, error, described_in, known)}") from error
    return entries


def unknown(what: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Message about an unknown name. It lists the known names, and the closest matches among them and `also`."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), {*names, *also})
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"unknown {what} {name!r}; known are {', '.join(names)}{hint}"


def _describe(name: str, error: ValidationError, described_in: str, known: Mapping[int, Sequence[str]]) -> str:
    """The first error in an entry: field, value and remedy."""
    first = error.errors()[0]
    field = ".".join([name, *map(str, first["loc"])])
    value = "" if isinstance(first["input"], dict) else f"={first['input']!r}"
    remedy = f"each field is described at the top of Penstock's own {described_in}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        remedy = f"known here are {', '.join(known[len(first['loc'])])}"
    return f"{field}{value}: {first['msg']}; {remedy}"
