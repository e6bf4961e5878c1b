"""Rows of a table in a file, one at a time, with the number of the line that each stands in.

A trace can be larger than memory, or not be a trace at all. So lines and jobs are counted as they are read, and what is too
long or too many is an error with its line number, before it is held.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.simulator.workloads.workload import Wrong

MAX_LINE = 1024 * 1024
"""Characters. A line of a trace has some hundred; a file without line ends would be read whole."""

MAX_JOBS = 500_000
"""Jobs of one workload: measured, 82,247 of them take 60 MB, and a simulation is to stay within 1 GiB."""

MAX_PROBLEMS = 20
"""Problems that are listed before reading stops."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an input file, and where."""

    file: str
    line: int | None
    """Counted from 1; None: the file as a whole."""
    found: str
    expected: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}: found {self.found}; expected {self.expected}"


class BadInput(ConfigError):
    """A workload or a table of measurements cannot be used: tell its owner, and run nothing."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Row:
    """One row: its fields by column. The methods raise Wrong, naming the column and what it holds."""

    __slots__ = ("fields", "file", "line")

    def __init__(self, file: Path, line: int, fields: dict[str, str]) -> None:
        self.file, self.line, self.fields = file, line, fields

    def text(self, column: str, default: str = "") -> str:
        """What stands there, without spaces around it; `default` where nothing does."""
        return self.fields.get(column, "").strip() or default

    def number(self, column: str, least: float | None = None, above: float | None = None) -> float:
        """A finite number, of at least `least` and above `above` where given."""
        text = self.fields.get(column, "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and (least is None or value >= least) and (above is None or value > above):
            return value
        bound = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
        raise Wrong(f"{column}={text!r}", f"a number{bound}")

    def whole(self, column: str, least: int = 0) -> int:
        """A whole number of at least `least`; `4.0` is one."""
        value = self.number(column, least=least)
        if value != int(value):
            raise Wrong(f"{column}={self.fields[column]!r}", f"a whole number of at least {least}")
        return int(value)

    def optional(self, column: str, read: Callable[[str], Item]) -> Item | None:
        """`read(column)`, or None where nothing stands."""
        return read(column) if self.text(column) else None


class Problems:
    """Problems of one file as they are found."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        self._found: list[Problem] = []

    def add(self, line: int | None, wrong: Wrong) -> None:
        """Note one. Raises BadInput when it is the last that is listed."""
        self._found.append(Problem(self._file, line, wrong.found, wrong.expected))
        if len(self._found) == MAX_PROBLEMS:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises BadInput with all that was noted."""
        if self._found:
            raise BadInput(self._found)


def read_rows(
    file: Path,
    columns: Sequence[str],
    header: bool = True,
    separator: str = ",",
    optional: Sequence[str] | None = None,
) -> Iterator[Row]:
    """The rows of a CSV file, plain or gzip, as they are read.

    Args:
        file: its first line names its columns, unless `header` is false: then they are `columns`.
        columns: those that it must have.
        header: see `file`.
        separator: between fields. Where it is not a comma, nothing is quoted, and the last field takes what is left.
        optional: what else may stand there; None: anything.

    Raises:
        BadInput: the file cannot be read, has no such columns, or a row has more or fewer fields than there are columns.
    """
    try:
        with open_text(file) as lines:
            rows = _split(file, bounded(file, lines), separator)
            names = list(columns)
            if header:
                _, names = next(rows, (0, []))
                names = [name.strip() for name in names]
                _check_columns(file, names, columns, optional)
            for line, fields in rows:
                if not fields or fields == [""]:
                    continue
                if separator != "," and len(fields) > len(names):
                    fields = [*fields[: len(names) - 1], separator.join(fields[len(names) - 1 :])]
                if len(fields) != len(names):
                    found = f"{len(fields)} fields, {separator.join(fields)[:80]!r}"
                    raise BadInput([Problem(str(file), line, found, f"{len(names)}: {separator.join(names)}")])
                yield Row(file, line, dict(zip(names, fields, strict=True)))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None


def _check_columns(file: Path, found: Sequence[str], columns: Sequence[str], optional: Sequence[str] | None) -> None:
    """Raise BadInput unless all `columns` are there, none twice, and no other than `optional`."""
    missing = [name for name in columns if name not in found]
    unknown = [name for name in found if optional is not None and name not in (*columns, *optional)]
    twice = [name for name in found if found.count(name) > 1]
    if missing:
        what = f"the columns {','.join(found)[:200] or '(none)'} without {', '.join(missing)}"
        raise BadInput([Problem(str(file), 1, what, f"at least {','.join(columns)}")])
    if unknown:
        expected = f"only {','.join((*columns, *(optional or ())))}"
        raise BadInput([Problem(str(file), 1, f"the column {unknown[0]!r}", expected)])
    if twice:
        raise BadInput([Problem(str(file), 1, f"the column {twice[0]!r} twice", "each column once")])


def open_text(file: Path) -> IO[str]:
    """The file's text, unpacked if its first bytes are gzip's. Raises OSError."""
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-8-sig", newline="")


def unreadable(file: Path, error: Exception) -> BadInput:
    """What to say of a file that cannot be opened, unpacked or decoded."""
    found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BadInput([Problem(str(file), None, found, "a file in UTF-8, plain or gzip")])


def bounded(file: Path, lines: IO[str]) -> Iterator[str]:
    """The lines, none longer than `MAX_LINE`. Raises BadInput."""
    number = 0
    while line := lines.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith("\n"):
            found = f"a line of more than {MAX_LINE} characters"
            raise BadInput([Problem(str(file), number, found, "a table with one job in each line")])
        yield line


def _split(file: Path, lines: Iterable[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """The line in which each row begins, and its fields."""
    if separator != ",":
        yield from ((number, line.rstrip("\r\n").split(separator)) for number, line in enumerate(lines, start=1))
        return
    rows, line = csv.reader(lines, strict=True), 1
    try:
        for fields in rows:
            yield line, fields
            line = rows.line_num + 1
    except csv.Error as error:
        expected = 'a field with commas or line ends in double quotes, and "" for one of those'
        raise BadInput([Problem(str(file), line, str(error), expected)]) from None
