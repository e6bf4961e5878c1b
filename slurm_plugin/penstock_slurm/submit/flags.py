"""The adaptive flags outside sbatch: which there are, and how their values become fields of the job spec.

`spank/flags.c` and `lua/penstock.lua` read the same values; the tests compare the three readers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock_scheduler.model import Adaptivity, JobSpec
from penstock_scheduler.model.flags import Flag, Syntax
from penstock_scheduler.model.spec import validate_spec
from penstock_scheduler.people.errors import PenstockError

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
_COUNT = r"[1-9][0-9]{0,8}"
_LONGEST_LIST = 1024
_UNDER_60 = r"[0-5]?[0-9]"
_TIME = rf"[0-9]{{1,6}}(?::{_UNDER_60}){{0,2}}|[0-9]{{1,6}}-(?:[01]?[0-9]|2[0-3])(?::{_UNDER_60}){{0,2}}"


class BadFlag(PenstockError):
    """A command line that sbatch would refuse."""


@functools.cache
def flags() -> dict[str, Flag]:
    """All flags by name, in the order of the job spec's fields."""
    return {flag.name: flag for flag in JobSpec.flags().values()}


@functools.cache
def _fields() -> dict[str, str]:
    """The field of the job spec that each flag sets, by the flag's name."""
    return {flag.name: field for field, flag in JobSpec.flags().items()}


def read(flag: Flag, text: str) -> dict[str, Any]:
    """The fields of the job spec that a flag with the value `text` sets.

    Raises:
        BadFlag: the value does not have the flag's form.
    """
    value = _choice(flag, text) if flag.choices else _READERS[flag.syntax](text)
    if value is None:
        raise BadFlag(f"--{flag.name}={text}: give {flag.form}, such as --{flag.name}={flag.example}")
    field = _fields()[flag.name]
    if flag.syntax is Syntax.SWITCH:
        return {field: not JobSpec.model_fields[field].default} if value == "yes" else {}
    if flag.syntax is Syntax.TYPES:
        return {"excluded_gpu_types" if text.startswith("^") else "gpu_types": value}
    return {field: value}


def spec_of(given: Mapping[str, str]) -> JobSpec:
    """The job spec of these flags, name -> value. job_submit.lua makes the same one, and checks it against the site too.

    Raises:
        BadFlag: a value is malformed, or flags are missing.
        BadJobSpec: the flags contradict each other.
    """
    if "adaptive" not in given:
        raise BadFlag(f"--{sorted(given)[0]} needs --adaptive")
    fields: dict[str, Any] = {}
    for name, text in given.items():
        fields |= read(flags()[name], text)
    if fields["adaptivity"] == Adaptivity.RIGID:
        fields.setdefault("max_gpus", fields.get("min_gpus"))
        fields.setdefault("min_gpus", fields["max_gpus"])
    if fields.get("max_gpus") is None:
        raise BadFlag("--adaptive needs the most GPUs that the job can use, such as --max-gpus=8")
    return validate_spec(fields)


def _choice(flag: Flag, text: str) -> str | None:
    return text if text in flag.choices else None


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(_COUNT, text) else None


def _name(text: str) -> str | None:
    return text if re.fullmatch(_NAME, text) else None


def _types(text: str) -> list[str] | None:
    form = rf"\^{_NAME}(,\^{_NAME})*|{_NAME}(,{_NAME})*"
    return text.replace("^", "").split(",") if len(text) <= _LONGEST_LIST and re.fullmatch(form, text) else None


def _units(text: str) -> int | dict[str, int] | None:
    if (one := _count(text)) is not None:
        return one
    if len(text) > _LONGEST_LIST or not re.fullmatch(rf"{_NAME}={_COUNT}(,{_NAME}={_COUNT})*", text):
        return None
    pairs = [item.split("=") for item in text.split(",")]
    return {name: int(number) for name, number in pairs} if len({name for name, _ in pairs}) == len(pairs) else None


def _dollars(text: str) -> float | None:
    return float(text) if re.fullmatch(r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,2})?", text) else None


def _size(text: str) -> int | None:
    return (
        int(text[:-1]) * 1024 ** (1 + "KMGT".index(text[-1])) if re.fullmatch(r"[1-9][0-9]{0,5}[KMGT]", text) else None
    )


def time_s(text: str) -> int | None:
    """Seconds of a time as sbatch's --time takes it; None if the text is not a time, or 0."""
    if not re.fullmatch(_TIME, text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:  # hours first; else minutes
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


_READERS: dict[Syntax, Callable[[str], Any]] = {
    Syntax.COUNT: _count,
    Syntax.TYPES: _types,
    Syntax.UNITS: _units,
    Syntax.NAME: _name,
    Syntax.DOLLARS: _dollars,
    Syntax.SIZE: _size,
    Syntax.TIME: time_s,
}
"""The readers of flags without choices. None: the text does not have the flag's form."""
