"""What a flag's value means, said a third time and in another way than flags.c and penstock.lua: the tests' own measure."""

from __future__ import annotations

import random
import re
from typing import Any

FAMILIES = ("bert-squad", "ncf")
TYPES = ("a100", "rtx", "t4")

NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
COUNT = r"[1-9][0-9]{0,8}"
SIX = r"[0-5]?[0-9]"

FORMS = {
    "adaptive": r"adaptive|strong-scaling|rigid",
    "min-gpus": COUNT,
    "max-gpus": COUNT,
    "gpu-types": rf"(?=.{{1,1024}}\Z)({NAME}(,{NAME})*|\^{NAME}(,\^{NAME})*)",
    "batch-size": COUNT,
    "max-batch-size": COUNT,
    "scale-unit": rf"{COUNT}|(?=.{{1,1024}}\Z){NAME}={COUNT}(,{NAME}={COUNT})*",
    "model-family": NAME,
    "sensitivity": NAME,
    "gpu-class": r"guaranteed|opportunistic",
    "non-preemptible": r"yes|no",
    "burst": r"never|allowed|only",
    "burst-budget": r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,2})?",
    "data-size": r"[1-9][0-9]{0,5}[KMGT]",
    "checkpoint-every": rf"(?=.*[1-9])([0-9]{{1,6}}(:{SIX}){{0,2}}|[0-9]{{1,6}}-([01]?[0-9]|2[0-3])(:{SIX}){{0,2}})",
    "grow-shrink": r"yes|no",
    "trial-group": NAME,
    "estimator": r"training|throughput|latency|table",
}
FORMS["runtime"] = FORMS["checkpoint-every"]

EXAMPLES = {
    "adaptive": ["adaptive", "strong-scaling", "rigid"],
    "gpu-types": ["a100,t4", "^t4", "^t4,^rtx", "rtx"],
    "scale-unit": ["4", "a100=2,rtx=8", "t4=1"],
    "model-family": [*FAMILIES],
    "sensitivity": ["resnet18", "a.b_c+d"],
    "gpu-class": ["guaranteed", "opportunistic"],
    "non-preemptible": ["yes", "no"],
    "grow-shrink": ["yes", "no"],
    "burst": ["never", "allowed", "only"],
    "burst-budget": ["12", "12.50", "0.05", "007.5"],
    "data-size": ["500G", "1K", "999999T", "12M"],
    "checkpoint-every": ["30", "1:30", "8:00:00", "1-2", "1-02:03", "2-23:59:59"],
    "runtime": ["600", "12:30:00", "7-0"],
    "trial-group": ["lr-search", "a.b_c+d"],
    "estimator": ["training", "throughput", "latency", "table"],
}

ALPHABET = "0123456789" * 2 + "abtgTKMGP^^,,==..::--+_ \"'{}[]\\/%\n\x01\x7fé\u202e"


def good(flag: str, value: str) -> bool:
    """Whether the value has the flag's form."""
    return re.fullmatch(FORMS[flag], value, re.DOTALL) is not None


def fields(flag: str, value: str) -> dict[str, Any]:
    """The fields of the job spec that a good value stands for."""
    if flag == "adaptive":
        return {"adaptivity": value}
    if flag == "gpu-types":
        names = value.split(",")
        return {"excluded_gpu_types": [n[1:] for n in names]} if value.startswith("^") else {"gpu_types": names}
    if flag == "scale-unit":
        return {"scale_unit": int(value) if value.isdigit() else {k: int(v) for k, v in _pairs(value)}}
    if flag == "non-preemptible":
        return {"preemptible": value == "no"}
    if flag == "grow-shrink":
        return {"grow_shrink": value == "yes"}
    if flag == "burst-budget":
        return {"burst_budget_usd": float(value)}
    if flag == "data-size":
        return {"data_size_bytes": int(value[:-1]) * 1024 ** (1 + "KMGT".index(value[-1]))}
    if flag in ("checkpoint-every", "runtime"):
        return {flag.replace("-", "_") + "_s": seconds(value)}
    key = flag.replace("-", "_")
    return {key: int(value) if FORMS[flag] == COUNT else value}


def _pairs(value: str) -> list[tuple[str, str]]:
    return [(name, count) for name, _, count in (item.partition("=") for item in value.split(","))]


def seconds(value: str) -> int:
    """As man sbatch says of --time."""
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
    return rng.choice(EXAMPLES.get(flag) or [str(rng.choice([1, 2, 8, 64, 4096, 999_999_999]))])


def fuzzed(flag: str, rng: random.Random) -> str:
    """A value that is good, nearly good, or rubbish; never with the signs that separate cases."""
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
