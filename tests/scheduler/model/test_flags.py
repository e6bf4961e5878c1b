"""What follows from the declaration of a flag."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.flags import Flag, Syntax


def test_each_flag_and_each_variable_stands_for_one_field() -> None:
    flags = JobSpec.flags()
    assert len({flag.name for flag in flags.values()}) == len(flags)
    assert len({flag.variable for flag in flags.values()}) == len(flags)
    assert next(iter(flags)) == "adaptivity", "penstock.c takes the first flag for --adaptive"
    assert "excluded_gpu_types" not in flags, "--gpu-types sets it too"


def test_every_field_says_what_it_is_for() -> None:
    without = [name for name, field in JobSpec.model_fields.items() if not (field.description or "").endswith(".")]
    assert not without, "the documentation, the operator and --help show the description, whole sentences"


def test_the_help_of_a_flag_is_its_own_or_the_first_sentence_of_the_field() -> None:
    flags = JobSpec.flags()
    assert flags["max_gpus"].help == "most GPUs that the job can use"
    assert flags["preemptible"].help == "never stop, move or resize the job once it runs"
    assert all(flag.help and not flag.help.endswith(".") for flag in flags.values())


@pytest.mark.parametrize(
    ("flag", "has_arg", "arginfo", "form"),
    [
        (Flag("a-b", Syntax.COUNT, example="2"), 1, "N", "a whole number from 1 to 999999999"),
        (Flag("a-b", Syntax.SWITCH, example="yes"), 0, "", "yes or no"),
        (Flag("a-b", Syntax.CHOICE, example="x", argument="X", choices=("x", "y", "z")), 1, "X", "x, y or z"),
        (Flag("a-b", Syntax.CHOICE, example="x", choices=("x", "y"), bare_value="x"), 2, "[A-B]", "x or y"),
    ],
)
def test_a_flag_says_how_it_is_given(flag: Flag, has_arg: int, arginfo: str, form: str) -> None:
    assert (flag.has_arg, flag.arginfo, flag.form, flag.variable) == (has_arg, arginfo, form, "PENSTOCK_A_B")


def test_a_choice_needs_its_choices() -> None:
    with pytest.raises(ValueError, match="--mode: name its choices"):
        Flag("mode", Syntax.CHOICE, example="x")
