"""Job specs at the edge of what is good, and what their users read."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock_scheduler.model import Adaptivity, Burst, JobSpec, parse_spec, validate_spec
from penstock_scheduler.model.flags import Flag, Syntax
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import BadJobSpec


@pytest.mark.parametrize(
    "fields",
    [
        {"min_gpus": 1, "max_gpus": 1},
        {"min_gpus": 8, "max_gpus": 8},
        {"max_gpus": 10**9},
        {"batch_size": 1},
        {"batch_size": 10**9, "max_batch_size": 10**9},
        {"batch_size": 64},
        {"max_batch_size": 64},
        {"runtime_s": 1e15},
        {"runtime_s": 0.001},
        {"data_size_bytes": 1},
        {"data_size_bytes": 2**63 - 1},
        {"adaptivity": "rigid", "min_gpus": 4, "max_gpus": 4},
        {"adaptivity": "strong-scaling", "min_gpus": 1, "max_gpus": 4},
        {"gpu_types": ["t4"]},
        {"excluded_gpu_types": ["t4"]},
        {"trial_group": "a"},
        {"burst": "never"},
        {"burst": "allowed", "burst_budget_usd": 5},
        {"burst": "only", "burst_budget_usd": 5},
        {"burst_budget_usd": 5},
        {"scale_unit": 4, "max_gpus": 4},
        {"scale_unit": 4, "min_gpus": 4, "max_gpus": 7},
        {"scale_unit": 3, "min_gpus": 2, "max_gpus": 5},
        {"scale_unit": {"t4": 8, "a100": 2}, "gpu_types": ["t4", "a100"], "max_gpus": 2},
        {"scale_unit": {"t4": 8}, "gpu_types": ["t4", "a100"], "max_gpus": 1},
        {"goodput_table": {"t4": {"1": 90}}},
        {"model_family": "ncf"},
    ],
    ids=json.dumps,
)
def test_what_is_just_good_is_taken(fields: dict[str, object]):
    validate_spec(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_gpus": 2, "max_gpus": 1}, "max_gpus=1 is less than min_gpus=2"),
        ({"max_gpus": 0}, "max_gpus=0: input should be greater than 0"),
        ({"max_gpus": 10**9 + 1}, "less than or equal to 1000000000"),
        ({"scale_unit": 10**9 + 1}, "less than or equal to 1000000000"),
        ({"runtime_s": 0}, "runtime_s=0: input should be greater than 0"),
        ({"runtime_s": 1.001e15}, "runtime_s"),
        ({"runtime_s": float("inf")}, "runtime_s=inf"),
        ({"burst_budget_usd": float("nan")}, "burst_budget_usd=nan"),
        ({"data_size_bytes": 0}, "data_size_bytes=0: input should be greater than 0"),
        ({"data_size_bytes": 2**63}, "data_size_bytes"),
        ({"batch_size": 2, "max_batch_size": 1}, "max_batch_size=1 is less than batch_size=2"),
        ({"adaptivity": "rigid", "max_gpus": 2}, "a rigid job has one GPU count, but min_gpus=1 and max_gpus=2"),
        ({"adaptivity": "fixed", "min_gpus": 1, "max_gpus": 2}, "a fixed job has one GPU count"),
        ({"gpu_types": []}, "gpu_types"),
        ({"excluded_gpu_types": []}, "excluded_gpu_types"),
        ({"trial_group": ""}, "trial_group"),
        ({"goodput_table": {}}, "goodput_table"),
        ({"goodput_table": {"t4": {"1": 0}}}, "goodput_table.t4.1=0: input should be greater than 0"),
        ({"scale_unit": 4, "max_gpus": 3}, "no count from min_gpus=1 to max_gpus=3 is a multiple of scale_unit=4"),
        ({"scale_unit": 4, "min_gpus": 5, "max_gpus": 7}, "no count from min_gpus=5 to max_gpus=7"),
        ({"scale_unit": {"t4": 8, "a100": 4}, "gpu_types": ["t4", "a100"], "max_gpus": 3}, "is a multiple of"),
        ({"gpus": 4}, "unknown key 'gpus'; the keys are adaptivity, batch_size, burst, "),
    ],
    ids=str,
)
def test_what_is_just_bad_is_refused_with_its_value(fields: dict[str, object], words: str):
    with pytest.raises(BadJobSpec) as error:
        validate_spec(fields)
    assert words in str(error.value)
    assert "\n" not in str(error.value), "Slurm shows one line"


def test_every_mistake_is_told_at_once():
    with pytest.raises(BadJobSpec) as error:
        validate_spec({"max_gpus": 0, "gpus": 1})
    assert str(error.value).startswith("max_gpus=0: input should be greater than 0; unknown key 'gpus'; the keys are ")


def test_a_contradiction_between_fields_is_told_in_its_own_words():
    with pytest.raises(BadJobSpec) as error:
        validate_spec({"batch_size": 2, "max_batch_size": 1})
    assert str(error.value) == "max_batch_size=1 is less than batch_size=2"


def test_a_long_comment_is_shown_by_its_beginning():
    text = '{"penstock": ' + "x" * 200
    with pytest.raises(BadJobSpec) as error:
        parse_spec(text)
    assert str(error.value) == (
        f"the comment is not JSON: Expecting value at character 13 of {text[:80]!r}; "
        'write it as {"penstock": {"max_gpus": 4}}, in single quotes for the shell'
    )


def test_a_list_that_names_us_is_not_a_job_spec():
    with pytest.raises(BadJobSpec, match="but not as a key of its object"):
        parse_spec('["penstock: 4"]')


def test_a_job_that_says_nothing_gets_one_gpu_of_any_type_and_may_be_moved_but_not_grow():
    spec = JobSpec()
    assert (spec.adaptivity, spec.min_gpus, spec.max_gpus, spec.scale_unit) == (Adaptivity.ADAPTIVE, 1, 1, 1)
    assert spec.preemptible
    assert not spec.grow_shrink
    assert spec.allows("t4", 1)
    assert not spec.allows("t4", 2)
    assert not spec.says_it_saves
    own = {
        "adaptivity",
        "min_gpus",
        "max_gpus",
        "gpus_per_task",
        "scale_unit",
        "preemptible",
        "grow_shrink",
        "checkpointable",
    }
    others = spec.model_dump(exclude=own)
    assert set(others.values()) == {None}


def test_a_spec_stays_as_its_user_wrote_it():
    with pytest.raises(ValidationError, match="frozen"):
        JobSpec().max_gpus = 2


@pytest.mark.parametrize(("gpus", "allowed"), [(3, False), (4, True), (6, False), (8, True), (9, False), (12, False)])
def test_a_count_is_allowed_from_the_fewest_to_the_most_in_multiples(gpus: int, allowed: bool):
    assert JobSpec(min_gpus=4, max_gpus=8, scale_unit=4).allows("t4", gpus) is allowed


def test_only_an_adaptive_job_may_change_its_batch_size():
    fixed = {mode: JobSpec(adaptivity=mode).fixed_batch for mode in Adaptivity}
    assert fixed == {"adaptive": False, "strong-scaling": True, "rigid": True, "fixed": True}


def test_the_flags_of_a_spec_are_those_of_the_documentation():
    flags = JobSpec.flags()
    assert flags["adaptivity"].bare_value == "adaptive", "--adaptive alone"
    assert flags["burst"].choices == tuple(Burst)
    assert flags["gpu_types"].help == "GPU types that the job can use, best first, or ^TYPE for any but these"
    assert flags["batch_size"].help == "total batch size that the script was written for"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    low: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Inner:
        if self.low == 13:
            raise ValueError("low=13 brings bad luck; choose 12")
        return self


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    one: Inner | None = None
    many: dict[str, Inner] = {}
    other: int = 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"two": 1}, "unknown key 'two'; the keys are many, one, other"),
        ({"one": {"lower": 1}}, "unknown key 'one.lower'; the keys are low"),
        ({"many": {"a": {"lower": 1}}}, "unknown key 'many.a.lower'; the keys are low"),
        ({"one": {"low": 0}}, "one.low=0: input should be greater than or equal to 1"),
        ({"one": {"low": 13}}, "one: low=13 brings bad luck; choose 12"),
        ({"other": "x"}, "other='x': input should be a valid integer, unable to parse string as an integer"),
        (4, "4: input should be a valid dictionary or instance of Outer"),
    ],
    ids=str,
)
def test_an_error_names_the_key_its_value_and_the_keys_of_its_own_table(fields: object, sentence: str):
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(fields)
    assert describe_errors(error.value, Outer) == [sentence]


@pytest.mark.parametrize(
    ("flag", "arginfo", "form"),
    [
        (Flag("a", Syntax.TYPES, "t4"), "LIST", "GPU types such as a100,t4, or ^t4 for all but t4"),
        (Flag("a", Syntax.UNITS, "4"), "N|LIST", "a whole number, or one for each type"),
        (Flag("a", Syntax.NAME, "x"), "NAME", "a name of at most 64 letters, digits and ._+-"),
        (Flag("a", Syntax.DOLLARS, "5"), "USD", "dollars, with or without cents"),
        (Flag("a", Syntax.SIZE, "5G"), "SIZE", "a whole number and K, M, G or T"),
        (
            Flag("a", Syntax.TIME, "30"),
            "TIME",
            "a time as --time takes it: minutes, hours:minutes:seconds or days-hours",
        ),
        (Flag("a", Syntax.TIME, "30", argument="SECONDS"), "SECONDS", None),
        (Flag("a", Syntax.COUNT, "3", bare_value="1"), "[N]", None),
        (Flag("when", Syntax.CHOICE, "x", choices=("x",)), "WHEN", None),
    ],
    ids=str,
)
def test_a_flag_shows_what_it_takes(flag: Flag, arginfo: str, form: str | None):
    assert flag.arginfo == arginfo
    assert flag.has_arg == (1 if flag.bare_value is None else 2)
    assert form is None or flag.form == form
