"""What is wrong with an input file, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_scheduler.people.errors import ConfigError

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
