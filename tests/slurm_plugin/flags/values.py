"""The meaning of each syntax of a flag's value, written independently of flags.c, penstock.lua and submit/flags.py."""

from __future__ import annotations

import random
import re
from typing import Any

from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.flags import Syntax

FAMILIES = ("bert-squad", "ncf")
TYPES = ("a100", "rtx", "t4")

NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
COUNT = r"[1-9][0-9]{0,8}"
SIX = r"[0-5]?[0-9]"

TIME = rf"(?=.*[1-9])([0-9]{{1,6}}(:{SIX}){{0,2}}|[0-9]{{1,6}}-([01]?[0-9]|2[0-3])(:{SIX}){{0,2}})"

SYNTAXES = {
    Syntax.COUNT: COUNT,
    Syntax.TYPES: rf"(?=.{{1,1024}}\Z)({NAME}(,{NAME})*|\^{NAME}(,\^{NAME})*)",
    Syntax.UNITS: rf"{COUNT}|(?=.{{1,1024}}\Z){NAME}={COUNT}(,{NAME}={COUNT})*",
    Syntax.NAME: NAME,
    Syntax.SWITCH: r"yes|no",
    Syntax.DOLLARS: r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,2})?",
    Syntax.SIZE: r"[1-9][0-9]{0,5}[KMGT]",
    Syntax.TIME: TIME,
}
FLAGS = {flag.name: (field, flag) for field, flag in JobSpec.flags().items()}
FORMS = {
    name: "|".join(flag.choices) if flag.syntax is Syntax.CHOICE else SYNTAXES[flag.syntax]
    for name, (_, flag) in FLAGS.items()
}
SWITCHES = {name: field for name, (field, flag) in FLAGS.items() if flag.syntax is Syntax.SWITCH}
"""Flags without a value -> their fields."""

EXAMPLES = {
    Syntax.TYPES: ["a100,t4", "^t4", "^t4,^rtx", "rtx"],
    Syntax.UNITS: ["4", "a100=2,rtx=8", "t4=1"],
    Syntax.NAME: ["resnet18", "lr-search", "a.b_c+d"],
    Syntax.SWITCH: ["yes", "no"],
    Syntax.DOLLARS: ["12", "12.50", "0.05", "007.5"],
    Syntax.SIZE: ["500G", "1K", "999999T", "12M"],
    Syntax.TIME: ["30", "1:30", "8:00:00", "1-2", "1-02:03", "2-23:59:59", "600", "7-0"],
}

ALPHABET = "0123456789" * 2 + "abtgTKMGP^^,,==..::--+_ \"'{}[]\\/%\n\x01\x7fé\u202e"


def good(flag: str, value: str) -> bool:
    """Whether the value has the flag's form."""
    return re.fullmatch(FORMS[flag], value, re.DOTALL) is not None


def fields(name: str, value: str) -> dict[str, Any]:
    """The fields of the job spec that a good value stands for."""
    field, flag = FLAGS[name]
    match flag.syntax:
        case Syntax.TYPES:
            names = value.split(",")
            return {"excluded_gpu_types": [n[1:] for n in names]} if value.startswith("^") else {"gpu_types": names}
        case Syntax.UNITS:
            return {field: int(value) if value.isdigit() else {k: int(v) for k, v in _pairs(value)}}
        case Syntax.SWITCH:
            return {field: (value == "yes") == (name != "non-preemptible")}
        case Syntax.DOLLARS:
            return {field: float(value)}
        case Syntax.SIZE:
            return {field: int(value[:-1]) * 1024 ** (1 + "KMGT".index(value[-1]))}
        case Syntax.TIME:
            return {field: seconds(value)}
        case Syntax.COUNT:
            return {field: int(value)}
        case _:
            return {field: value}


def _pairs(value: str) -> list[tuple[str, str]]:
    return [(name, count) for name, _, count in (item.partition("=") for item in value.split(","))]


def seconds(value: str) -> int:
    """Seconds, as sbatch's manual page describes --time."""
    days, dash, rest = value.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts = [0, parts[0], 0]
    elif len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, secs = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def example(flag: str, rng: random.Random) -> str:
    """A good value."""
    declared = FLAGS[flag][1]
    if flag == "model-family":
        return rng.choice(FAMILIES)
    counts = [str(count) for count in (1, 2, 8, 64, 4096, 999_999_999)]
    return rng.choice(declared.choices or EXAMPLES.get(declared.syntax, counts))


def fuzzed(flag: str, rng: random.Random) -> str:
    """A value that is good, nearly good, or bad; without the characters that separate cases."""
    kind = rng.random()
    if kind < 0.25:
        return example(flag, rng)
    if kind < 0.4:
        return "".join(rng.choices(ALPHABET, k=rng.choice([0, 1, 2, 3, 8, 70, 1100])))
    value = list(example(rng.choice([flag, flag, rng.choice(list(FORMS))]), rng))
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(value) + 1)
        what = rng.random()
        if what < 0.4:
            value.insert(at, rng.choice(ALPHABET))
        elif what < 0.7 and value:
            value[min(at, len(value) - 1)] = rng.choice(ALPHABET)
        elif what < 0.9 and value:
            del value[min(at, len(value) - 1)]
        else:
            value = value * rng.choice([2, 9])
    return "".join(value)
