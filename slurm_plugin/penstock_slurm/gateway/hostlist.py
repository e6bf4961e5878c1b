"""Slurm's host lists: `t4-[00-02,05],x` means t4-00, t4-01, t4-02, t4-05 and x."""

from __future__ import annotations

import math
import re
from itertools import product

_PART = re.compile(r"([^,\[\]]+|\[[^\[\]]*\])")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")

MOST = 100_000
"""Most names in a list. No Slurm has as many nodes."""

LONGEST = 255
"""Characters of a name that a list shortens."""


def expand(text: str) -> tuple[str, ...]:
    """The names, in the order of the text. "" and Slurm's `(null)`, `None assigned` and `N/A` give none.

    Raises:
        ValueError: the text is not a host list.
    """
    if text in {"", "(null)", "None assigned", "N/A"}:
        return ()
    found: list[str] = []
    for item in _split(text):
        found += _expand_item(item, text, MOST - len(found))
    return tuple(found)


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "[]":
            depth += 1 if letter == "[" else -1
        elif letter == "," and depth == 0:
            items.append(text[start:at])
            start = at + 1
        if depth not in (0, 1):
            break
    if depth != 0:
        raise ValueError(f"{text!r} is not a host list: brackets do not match")
    return [*items, text[start:]]


def _expand_item(item: str, text: str, most: int) -> list[str]:
    parts = _PART.findall(item)
    if not item or "".join(parts) != item:
        raise ValueError(f"{text!r} is not a host list: {item!r} is not a name")
    choices = [numbers(part[1:-1]) if part.startswith("[") else [part] for part in parts]
    if math.prod(map(len, choices)) > most:
        raise ValueError(f"{text[:100]!r} is not a host list: it has more than {MOST} names")
    if len(parts) > 1 and sum(max(map(len, each)) for each in choices) > LONGEST:
        raise ValueError(f"{text[:100]!r} is not a host list: a name has more than {LONGEST} characters")
    return ["".join(names) for names in product(*choices)]


def numbers(text: str) -> list[str]:
    """`00-02,05` -> 00, 01, 02, 05. The numbers have as many digits as the start of the range.

    Raises:
        ValueError: the text has another form, or more than MOST numbers.
    """
    found: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{text[:100]!r} is not a host list: {item[:100]!r} is not a number or a range of numbers")
        first, last = match.group(1), match.group(2) or match.group(1)
        count = int(last) - int(first) + 1
        if not 1 <= count <= MOST - len(found):
            raise ValueError(f"{text[:100]!r} is not a host list: the range {item[:100]!r} is backwards or too long")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


class HostLists(dict[str, tuple[str, ...]]):
    """Host lists that have been expanded, by their text: thousands of jobs have few different ones."""

    def __missing__(self, text: str) -> tuple[str, ...]:
        names = self[text] = expand(text)
        return names
