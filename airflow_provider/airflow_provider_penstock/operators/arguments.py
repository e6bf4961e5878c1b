"""Checks an operator's arguments when the DAG is read, where a mistake is an import error with the remedy.

Templates and results of other tasks have no value yet. Penstock checks them when the task runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from pathlib import PurePath
from typing import Any

from airflow_provider_penstock.exceptions import PenstockRefused

SHORTEST_LEASE = timedelta(minutes=10)
"""A task that waits for a job renews the lease once a minute, and its triggerer may have to restart in between."""
FILES = (".sh", ".sbatch")
"""Endings of files that `script` may name."""
_PLAIN = (int, float, bytes, PurePath, type(None))


def is_template(given: object) -> bool:
    """Whether a text gets its value when the task runs."""
    return isinstance(given, str) and ("{{" in given or "{%" in given)


def check_all(*checks: Callable[[], object]) -> None:
    """Run all checks. Raises one error with the text of each that fails."""
    mistakes: list[Exception] = []
    for check in checks:
        try:
            check()
        except (ValueError, PenstockRefused) as error:
            mistakes.append(error)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise ValueError("; ".join(map(str, mistakes)))


def check_program(script: Any, command: Any, *, is_needed: bool) -> None:
    """Raise ValueError unless there is one program, as a script or as a list of words."""
    if script is not None and command is not None:
        raise ValueError("script and command are two programs; leave one of them out")
    if script is None and command is None and is_needed:
        raise ValueError(
            "the job has no program: give command, as in command=['python3', 'train.py'], or script, as in script='train.sbatch'"
        )
    if (
        isinstance(script, str)
        and not is_template(script)
        and not script.endswith(FILES)
        and not script.startswith("#!")
    ):
        raise ValueError(
            f"script begins with {script[:30]!r}; let it begin with #!, such as #!/bin/bash, or name a file *.sh or *.sbatch"
        )
    if isinstance(command, str) and not is_template(command):
        raise ValueError(f"command={command!r} is a text; write a list of its words: command={_words(command)}")
    if isinstance(command, list | tuple):
        _check_words(command)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quotation without an end
        return text.split()


def _check_words(command: Sequence[Any]) -> None:
    if not command:
        raise ValueError("command has no words; begin it with the name of a program")
    check_all(*(partial(_check_word, number, word) for number, word in enumerate(command)))


def _check_word(number: int, word: Any) -> None:
    if isinstance(word, _PLAIN):
        remedy = "leave it out" if word is None else f"write {str(word)!r}"
        raise ValueError(f"command[{number}]={word!r} is no text; {remedy}")


def check_lease(lease: Any) -> None:
    """Raise ValueError unless a lease is None or a time that outlasts the restart of a triggerer."""
    if isinstance(lease, int | float):
        raise ValueError(f"lease={lease!r} is a number; write lease=timedelta(seconds={lease!r})")
    if lease is not None and not isinstance(lease, timedelta):
        raise ValueError(f"lease={lease!r} is no timedelta; write, for example, lease=timedelta(days=3)")
    if lease is not None and lease < SHORTEST_LEASE:
        raise ValueError(f"lease={lease} is shorter than {SHORTEST_LEASE}, in which a triggerer may have to restart")


def exit_codes(given: int | Collection[int] | None) -> list[int]:
    """The exit codes of `skip_on_exit_code`. Raises ValueError for anything but numbers."""
    codes = [] if given is None else [given] if isinstance(given, int | str) else [*given]
    for code in codes:
        if not isinstance(code, int):
            raise ValueError(f"skip_on_exit_code={given!r} has {code!r}; write numbers, as in skip_on_exit_code=[3]")
    return codes


def check_intervals(poll_interval_s: Any, log_interval_s: Any) -> None:
    """Raise ValueError unless both are seconds; the second may be 0."""
    each = (("poll_interval_s", poll_interval_s, 0.01), ("log_interval_s", log_interval_s, 0))
    check_all(*(partial(_check_interval, *given) for given in each))


def _check_interval(name: str, value: Any, least: float) -> None:
    if not isinstance(value, int | float) or value < least:
        raise ValueError(f"{name}={value!r} is no number of seconds of at least {least}")
