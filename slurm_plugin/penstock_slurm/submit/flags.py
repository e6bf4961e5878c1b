"""The adaptive flags outside sbatch: their table, which is the plugin's own (`spank/flags.def`), and what values mean.

penstock.lua reads the same values inside slurmctld; the tests hold the three readers against each other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_scheduler.errors import PenstockError
from penstock_scheduler.model import Adaptivity, JobSpec
from penstock_scheduler.model.spec import validate_spec
from penstock_slurm.install.sources import source

_ENTRY = re.compile(r"^(KIND|FLAG)\((.*)\)$", re.MULTILINE)
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\w+)')

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
_COUNT = r"[1-9][0-9]{0,8}"
_LONGEST_LIST = 1024
_UNDER_60 = r"[0-5]?[0-9]"
_TIME = rf"[0-9]{{1,6}}(?::{_UNDER_60}){{0,2}}|[0-9]{{1,6}}-(?:[01]?[0-9]|2[0-3])(?::{_UNDER_60}){{0,2}}"


class BadFlag(PenstockError):
    """A flag that sbatch would refuse."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One line of the table."""

    name: str
    arginfo: str
    usage: str
    has_arg: int
    """0 none, 1 required, 2 optional."""
    kind: str
    example: str
    absent: str | None
    form: str

    @property
    def variable(self) -> str:
        """The environment variable that stands for it."""
        return "PENSTOCK_" + self.name.upper().replace("-", "_")


@functools.cache
def flags() -> dict[str, Flag]:
    """All flags by name, in the plugin's order."""
    forms: dict[str, str] = {}
    found: dict[str, Flag] = {}
    for entry, text in _ENTRY.findall((source("spank") / "flags.def").read_text(encoding="utf-8")):
        words = [quoted or ("" if bare == "NULL" else bare) for quoted, bare in _WORD.findall(text)]
        if entry == "KIND":
            forms[words[0]] = words[1]
        else:
            name, arginfo, usage, has_arg, kind, example, absent = words
            found[name] = Flag(name, arginfo, usage, int(has_arg), kind, example, absent or None, forms[kind])
    return found


def read(flag: Flag, text: str) -> dict[str, Any]:
    """The fields of the job spec that a value stands for. Raises BadFlag, with the remedy, if it is not of the flag's form."""
    value = _READERS[flag.kind](text)
    if value is None:
        raise BadFlag(f"--{flag.name}={text}: give {flag.form}, such as --{flag.name}={flag.example}")
    if flag.kind == "SWITCH":
        return {_FIELDS[flag.name]: flag.name != "non-preemptible"} if value else {}
    if flag.kind == "TYPES":
        return {"excluded_gpu_types" if text.startswith("^") else "gpu_types": value}
    return {_FIELDS[flag.name]: value}


def spec_of(given: Mapping[str, str]) -> JobSpec:
    """The job spec of these flags, name -> value, as job_submit.lua makes it but for what only the site knows.

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
        raise BadFlag("--adaptive needs the most GPUs that the job can use: --max-gpus=8")
    return validate_spec(fields)


_FIELDS = {
    "adaptive": "adaptivity",
    "non-preemptible": "preemptible",
    "burst-budget": "burst_budget_usd",
    "data-size": "data_size_bytes",
    "checkpoint-every": "checkpoint_every_s",
    "runtime": "runtime_s",
} | {
    name: name.replace("-", "_")
    for name in (
        *("min-gpus", "max-gpus", "batch-size", "max-batch-size", "scale-unit", "model-family", "sensitivity"),
        *("gpu-class", "burst", "grow-shrink", "trial-group", "estimator"),
    )
}


def _words(*words: str) -> Callable[[str], str | None]:
    return lambda text: text if text in words else None


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
    """Seconds of a time as --time has it; None if it is none, or 0."""
    if not re.fullmatch(_TIME, text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:  # hours first; else minutes
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


_READERS: dict[str, Callable[[str], Any]] = {
    "MODE": _words("adaptive", "strong-scaling", "rigid"),
    "COUNT": _count,
    "TYPES": _types,
    "UNITS": _units,
    "NAME": _name,
    "CLASS": _words("guaranteed", "opportunistic"),
    "SWITCH": lambda text: {"yes": True, "no": False}.get(text),
    "BURST": _words("never", "allowed", "only"),
    "DOLLARS": _dollars,
    "SIZE": _size,
    "TIME": time_s,
    "ESTIMATOR": _words("training", "throughput", "latency", "table"),
}
