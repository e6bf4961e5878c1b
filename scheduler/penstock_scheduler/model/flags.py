"""Flags of sbatch that set the fields of the job spec.

`model/spec.py` declares a `Flag` beside a field. `script/generate` writes the SPANK plugin's table, the Lua table and the
documentation's tables from these declarations, and `penstock submit` reads them directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CPU_SLOT = "cpu"
"""The GPU type of a CPU slot: a share of a node, or an instance, without a GPU, for jobs that need CPUs alone."""


class Syntax(StrEnum):
    """How the value of a flag is written.

    Each syntax has three readers, which accept the same values: `spank/flags.c` before submission, `lua/penstock.lua` inside
    slurmctld, and `penstock_slurm/submit/flags.py`.
    """

    CHOICE = "choice"
    """One of the flag's `choices`."""
    COUNT = "count"
    """A whole number."""
    TYPES = "types"
    """GPU types, as `a100,t4` or `^t4,^rtx`: the value of `gpu_types` or of `excluded_gpu_types`."""
    UNITS = "units"
    """A whole number, or one for each GPU type: `a100=2,rtx=8`."""
    NAME = "name"
    """Letters, digits and `._+-`: nothing that JSON or Lua would have to quote."""
    SWITCH = "switch"
    """No value. The flag sets a boolean field to the opposite of its default; its environment variable is `yes` or `no`."""
    DOLLARS = "dollars"
    """Dollars, with or without cents."""
    SIZE = "size"
    """A whole number and a binary unit, K, M, G or T; in bytes."""
    TIME = "time"
    """A time as sbatch's `--time` takes it; in seconds."""


_ARGUMENTS = {
    Syntax.COUNT: "N",
    Syntax.TYPES: "LIST",
    Syntax.UNITS: "N|LIST",
    Syntax.NAME: "NAME",
    Syntax.DOLLARS: "USD",
    Syntax.SIZE: "SIZE",
    Syntax.TIME: "TIME",
}

_FORMS = {
    Syntax.COUNT: "a whole number from 1 to 999999999",
    Syntax.TYPES: "GPU types such as a100,t4, or ^t4 for all but t4",
    Syntax.UNITS: "a whole number, or one for each type",
    Syntax.NAME: "a name of at most 64 letters, digits and ._+-",
    Syntax.DOLLARS: "dollars, with or without cents",
    Syntax.SIZE: "a whole number and K, M, G or T",
    Syntax.TIME: "a time as --time takes it: minutes, hours:minutes:seconds or days-hours",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of sbatch that sets one field of the job spec."""

    name: str
    """The flag without its dashes: `max-gpus`."""
    syntax: Syntax
    example: str
    """A valid value, for the documentation."""
    help: str = ""
    """What `sbatch --help` prints. Empty: the first sentence of the field's description."""
    argument: str = ""
    """What `sbatch --help` prints after `=`. Empty: the default of the syntax."""
    choices: tuple[str, ...] = ()
    """The values of a CHOICE; those of a SWITCH are yes and no."""
    bare_value: str | None = None
    """The value when the flag is given without one; None if it needs one."""
    notes: str = ""
    """Markdown that the table of docs/user/flags.md adds; links are relative to that page."""

    def __post_init__(self) -> None:
        if self.syntax is Syntax.CHOICE and not self.choices:
            raise ValueError(f"--{self.name}: name its choices")
        if self.syntax is Syntax.SWITCH:
            object.__setattr__(self, "choices", ("yes", "no"))
            object.__setattr__(self, "bare_value", "yes")

    @property
    def variable(self) -> str:
        """The environment variable that stands for the flag."""
        return "PENSTOCK_" + self.name.upper().replace("-", "_")

    @property
    def has_arg(self) -> int:
        """Whether a value follows, as getopt counts: 0 never, 1 always, 2 optionally."""
        if self.syntax is Syntax.SWITCH:
            return 0
        return 1 if self.bare_value is None else 2

    @property
    def arginfo(self) -> str:
        """What `sbatch --help` prints after `=`; empty for a flag without a value."""
        if self.syntax is Syntax.SWITCH:
            return ""
        argument = self.argument or _ARGUMENTS.get(self.syntax) or self.name.upper()
        return f"[{argument}]" if self.has_arg == 2 else argument

    @property
    def form(self) -> str:
        """A description of valid values, for messages: `never, allowed or only`."""
        if self.choices:
            return ", ".join(self.choices[:-1]) + f" or {self.choices[-1]}"
        return _FORMS[self.syntax]


def summary(description: str) -> str:
    """The first sentence of a description, as command-line help writes it: without a capital and a full stop."""
    sentence = description.split(". ")[0].removesuffix(".")
    return sentence if sentence[:2].isupper() else sentence[:1].lower() + sentence[1:]
