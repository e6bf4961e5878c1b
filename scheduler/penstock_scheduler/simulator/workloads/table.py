"""Tables in files as DataFrames, read in chunks, with the number of the line in which each row begins.

A trace can be larger than memory, or not be a trace at all. So lines and jobs are counted while they are read. What is
too long or too many is an error with its line number before it is held in memory.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock_profiles.throughput import FloatArray

if TYPE_CHECKING:
    import pandas as pd

from collections.abc import Mapping
from dataclasses import dataclass

from penstock_scheduler.people.errors import ConfigError

MAX_LINE = 1024 * 1024
"""Characters in one line. A line of a trace has a few hundred; a file without line ends would be read whole."""

MAX_JOBS = 500_000
"""Jobs of one workload. 82,247 jobs were measured to take 60 MB, and a simulation is to stay within 1 GiB."""

CHUNK_ROWS = 20_000
CHUNK_CHARACTERS = 16 * 1024 * 1024
"""A chunk ends at the first of these two limits."""

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
Column = Sequence[Any] | FloatArray
"""A value for each row; a missing number is NaN or None."""

Columns = dict[str, Column]
Item = TypeVar("Item")
Other = TypeVar("Other")


class TableRows:
    """A chunk of a table while its columns are converted.

    The methods return one array entry per row. A row with a bad value is noted in `wrong` and is no longer `valid`;
    later conversions skip it, so that each row has one problem. Entries of rows that are not valid mean nothing.

    Args:
        file: the table's file.
        texts: text of each field, shape (rows, columns); the index is the line in which each row begins.
    """

    def __init__(self, file: Path, texts: pd.DataFrame) -> None:
        self.file, self.texts = file, texts
        self.lines: list[int] = texts.index.tolist()
        self.valid: BoolArray = np.ones(len(texts), dtype=np.bool_)
        self.wrong: dict[int, Wrong] = {}
        """Line -> problem."""
        self.left_out: Counter[str] = Counter()
        """Reason -> rows that are not wrong but not wanted."""

    def __len__(self) -> int:
        return len(self.lines)

    def raw(self, column: str) -> list[str]:
        """Texts of a column as they stand in the file; empty texts for a column that the table lacks."""
        texts: list[str] = self.texts[column].tolist() if column in self.texts else [""] * len(self)
        return texts

    def text(self, column: str, default: str = "") -> list[str]:
        """Texts of a column without spaces around them; `default` for empty ones."""
        return [text.strip() or default for text in self.raw(column)]

    def given(self, column: str) -> BoolArray:
        """Whether each row has a text in this column."""
        return np.array([bool(text) for text in self.text(column)], dtype=np.bool_)

    def number(
        self, column: str, least: float | None = None, above: float | None = None, where: BoolArray | None = None
    ) -> FloatArray:
        """Finite numbers, of at least `least` and above `above` where given; NaN for rows not valid or outside of
        `where`."""
        texts = self.raw(column)
        wanted = self.valid if where is None else self.valid & where
        values: FloatArray = np.full(len(self), np.nan)
        values[wanted] = _numbers([text for text, want in zip(texts, wanted.tolist(), strict=True) if want])
        good = np.isfinite(values)
        if least is not None:
            good &= values >= least
        if above is not None:
            good &= values > above
        bound = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
        self.reject(wanted & ~good, lambda row: f"{column}={texts[row]!r}", f"a number{bound}")
        return values

    def whole(self, column: str, least: int = 0, where: BoolArray | None = None) -> list[int]:
        """Whole numbers of at least `least`; `4.0` is one. 0 for rows that are not valid or outside of `where`."""
        values = self.number(column, least=least, where=where)
        known = np.where(np.isfinite(values), values, 0.0)
        texts = self.raw(column)
        fraction = known != np.floor(known)
        self.reject(fraction, lambda row: f"{column}={texts[row]!r}", f"a whole number of at least {least}")
        return [int(value) for value in known.tolist()]

    def each(self, texts: Sequence[str], read: Callable[[str], Item], default: Other) -> list[Item | Other]:
        """`read(text)` of each valid row, called once for equal texts; `default` for other rows. `read` may raise
        Wrong."""
        known: dict[str, Item | Wrong] = {}
        found: list[Item | Other] = [default] * len(self)
        for row in np.flatnonzero(self.valid).tolist():
            text = texts[row]
            if text not in known:
                try:
                    known[text] = read(text)
                except Wrong as wrong:
                    known[text] = wrong
            value = known[text]
            if isinstance(value, Wrong):
                self.mark(row, value)
            else:
                found[row] = value
        return found

    def reject(self, bad: BoolArray, found: Callable[[int], str], expected: str) -> None:
        """Note a problem of each valid row that is `bad`."""
        for row in np.flatnonzero(bad & self.valid).tolist():
            self.mark(row, Wrong(found(row), expected))

    def mark(self, row: int, wrong: Wrong) -> None:
        """Note the problem of one row."""
        self.wrong[self.lines[row]] = wrong
        self.valid[row] = False

    def leave_out(self, rows: BoolArray, reason: str) -> None:
        """Drop valid rows that are not wrong but not wanted, and count them."""
        dropped = rows & self.valid
        if count := int(dropped.sum()):
            self.left_out[reason] += count
            self.valid &= ~dropped


def _numbers(texts: list[str]) -> FloatArray:
    """The number in each text; NaN where there is none."""
    try:
        return np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return np.fromiter(map(_float, texts), np.float64, len(texts))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_frame(file: Path, columns: Sequence[str], convert: Callable[[TableRows], Columns]) -> pd.DataFrame:
    """A whole table as a DataFrame of the columns that `convert` makes; the index is the line of each row.

    Raises:
        BadInput: with up to 20 problems, each with its line.
    """
    import pandas as pd  # takes a second to load, and reading settings loads this module

    problems, parts = Problems(file), []
    for rows in read_chunks(file, columns):
        part = pd.DataFrame(convert(rows), index=pd.Index(rows.lines, name="line"))
        problems.add_all(rows.wrong)
        parts.append(part[rows.valid])
    problems.raise_if_any()
    return pd.concat(parts) if parts else pd.DataFrame(columns=list(columns))


def read_chunks(
    file: Path,
    columns: Sequence[str],
    header: bool = True,
    separator: str = ",",
    optional: Sequence[str] | None = None,
) -> Iterator[TableRows]:
    """The rows of a CSV file, plain or gzip, in chunks.

    Args:
        file: its first line names its columns, unless `header` is false: then they are `columns`.
        columns: columns that it must have.
        header: see `file`.
        separator: between fields. Unless it is a comma, nothing is quoted, and the last field takes the rest of the
            line.
        optional: columns that it may have beside `columns`; None: any.

    Raises:
        BadInput: the file cannot be read, lacks columns, or a row has more or fewer fields than there are columns.
    """
    import pandas as pd

    for names, lines, fields in _chunks(file, columns, header, separator, optional):
        by_column = zip(names, zip(*fields, strict=True), strict=True)
        texts = {name: np.array(column, dtype=object) for name, column in by_column}
        yield TableRows(file, pd.DataFrame(texts, pd.Index(lines, name="line"), copy=False))


def _chunks(
    file: Path, columns: Sequence[str], header: bool, separator: str, optional: Sequence[str] | None
) -> Iterator[tuple[list[str], list[int], list[list[str]]]]:
    """The columns' names, and the lines and the fields of the rows of each chunk."""
    try:
        with open_text(file) as text:
            characters = [0]
            rows = _split(file, bounded(file, text, characters), separator)
            names = list(columns)
            if header:
                _, names = next(rows, (0, []))
                names = [name.strip() for name in names]
                _check_columns(file, names, columns, optional)
            lines: list[int] = []
            chunk: list[list[str]] = []
            for line, fields in rows:
                if len(fields) != len(names):
                    if not fields or fields == [""]:
                        continue
                    fields = _joined(file, line, fields, names, separator)
                lines.append(line)
                chunk.append(fields)
                if len(chunk) == CHUNK_ROWS or characters[0] > CHUNK_CHARACTERS:
                    yield names, lines, chunk
                    lines, chunk, characters[0] = [], [], 0
            if chunk:
                yield names, lines, chunk
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None


def _joined(file: Path, line: int, fields: list[str], names: Sequence[str], separator: str) -> list[str]:
    """The fields of a row that has another number of them than there are columns. Raises BadInput."""
    if separator != "," and len(fields) > len(names):
        return [*fields[: len(names) - 1], separator.join(fields[len(names) - 1 :])]
    found = f"{len(fields)} fields, {separator.join(fields)[:80]!r}"
    raise BadInput([InputProblem(str(file), line, found, f"{len(names)}: {separator.join(names)}")])


def _check_columns(file: Path, found: Sequence[str], columns: Sequence[str], optional: Sequence[str] | None) -> None:
    """Raise BadInput unless all `columns` are there, none twice, and no other than `optional`."""
    missing = [name for name in columns if name not in found]
    unknown = [name for name in found if optional is not None and name not in (*columns, *optional)]
    twice = [name for name in found if found.count(name) > 1]
    if missing:
        what = f"the columns {','.join(found)[:200] or '(none)'} without {', '.join(missing)}"
        raise BadInput([InputProblem(str(file), 1, what, f"at least {','.join(columns)}")])
    if unknown:
        expected = f"only {','.join((*columns, *(optional or ())))}"
        raise BadInput([InputProblem(str(file), 1, f"the column {unknown[0]!r}", expected)])
    if twice:
        raise BadInput([InputProblem(str(file), 1, f"the column {twice[0]!r} twice", "each column once")])


def open_text(file: Path) -> IO[str]:
    """The file's text, unpacked if its first bytes are gzip's. Raises OSError."""
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-8-sig", newline="")


def unreadable(file: Path, error: Exception) -> BadInput:
    """The error for a file that cannot be opened, unpacked or decoded."""
    found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BadInput([InputProblem(str(file), None, found, "a file in UTF-8, plain or gzip")])


def bounded(file: Path, lines: IO[str], characters: list[int]) -> Iterator[str]:
    """The lines, none longer than `MAX_LINE`; `characters[0]` counts what was read. Raises BadInput."""
    number = 0
    while line := lines.readline(MAX_LINE):
        number += 1
        characters[0] += len(line)
        if len(line) == MAX_LINE and not line.endswith("\n"):
            found = f"a line of more than {MAX_LINE} characters"
            raise BadInput([InputProblem(str(file), number, found, "a table with one job in each line")])
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
        raise BadInput([InputProblem(str(file), line, str(error), expected)]) from None


MAX_PROBLEMS = 20
"""Problems that are listed before reading stops."""


class Wrong(ValueError):
    """A bad value, as two halves of a sentence: what was found, and what is expected instead."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"{found}; expected {expected}")
        self.found, self.expected = found, expected


@dataclass(frozen=True, slots=True)
class InputProblem:
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
    """A workload or a table of measurements cannot be used. Nothing runs."""

    def __init__(self, problems: Sequence[InputProblem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Problems:
    """Problems of one file as they are found."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        self._found: list[InputProblem] = []

    def add(self, line: int | None, wrong: Wrong) -> None:
        """Note a problem. Raises BadInput when `MAX_PROBLEMS` are noted."""
        self._found.append(InputProblem(self._file, line, wrong.found, wrong.expected))
        if len(self._found) == MAX_PROBLEMS:
            self.raise_if_any()

    def add_all(self, wrong: Mapping[int, Wrong]) -> None:
        """Note the problems of these lines, in their order. Raises BadInput when `MAX_PROBLEMS` are noted."""
        for line in sorted(wrong):
            self.add(line, wrong[line])

    def raise_if_any(self) -> None:
        """Raise BadInput with all problems that were noted."""
        if self._found:
            raise BadInput(self._found)
