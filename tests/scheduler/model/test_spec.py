import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import Adaptivity, JobSpec, parse_spec
from penstock_scheduler.people.errors import BadJobSpec


def comment(**fields: object) -> str:
    return json.dumps({"penstock": fields})


def test_a_spec_travels_as_json_in_a_comment_beside_the_sites_own_keys():
    text = json.dumps({"ticket": 7, "penstock": {"min_gpus": 2, "max_gpus": 8, "gpu_types": ["a100", "t4"]}})
    assert parse_spec(text) == JobSpec(min_gpus=2, max_gpus=8, gpu_types=("a100", "t4"))


@pytest.mark.parametrize("text", ["", "see the penstock docs", '{"ticket": 7}', "{not json", '{"penstock_says": "no"}'])
def test_comments_that_do_not_mean_us_have_no_spec(text):
    assert parse_spec(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'penstock': {'max_gpus': 4}}", ["not JSON", "character 1", "single quotes for the shell"]),
        ('{"penstock": {"max_gpus": 4}', ["not JSON"]),
        ('{"other": {"penstock": {"max_gpus": 4}}}', ["not as a key"]),
        (comment(max_gpus=2, min_gpus=4), ["max_gpus=2 is less than min_gpus=4", "raise max_gpus or lower min_gpus"]),
        (comment(max_gpu=2), ["unknown key 'max_gpu'", "min_gpus", "max_gpus"]),
        (comment(max_gpus="many"), ["max_gpus='many'", "integer"]),
        (comment(max_gpus=0), ["max_gpus=0", "greater than 0"]),
        (comment(adaptivity="rigid", max_gpus=4), ["a rigid job has one GPU count", "set both"]),
        (comment(adaptivity="elastic"), ["adaptivity='elastic'", "strong-scaling"]),
        (comment(batch_size=64, max_batch_size=32), ["max_batch_size=32 is less than batch_size=64"]),
        (comment(goodput_table={"t4": {"1": 5}}, model_family="ncf"), ["not both"]),
        (comment(gpu_types=[]), ["gpu_types"]),
        (comment(gpu_types=["a100"], excluded_gpu_types=["t4"]), ["not both"]),
        (comment(scale_unit=4, min_gpus=5, max_gpus=7), ["is a multiple of scale_unit=4", "make max_gpus a multiple"]),
        (comment(scale_unit={"t4": 4}, gpu_types=["t4"], max_gpus=3), ["is a multiple of scale_unit={'t4': 4}"]),
        (comment(scale_unit=0, max_gpus=3), ["scale_unit", "greater than 0"]),
        (comment(burst="never", burst_budget_usd=5), ["burst_budget_usd is for jobs that may burst"]),
        (comment(goodput_table={"t4": {}}), ["goodput_table", "t4", "at least 1"]),
        (comment(batch_size=10**20), ["batch_size", "1000000000"]),
        (comment(runtime_s=1e300), ["runtime_s", "1000000000000000"]),
        (comment(gpu_class="best"), ["gpu_class='best'", "opportunistic"]),
        (json.dumps({"penstock": 4}), ["4"]),
    ],
)
def test_a_bad_spec_says_what_and_the_remedy(text, words):
    with pytest.raises(BadJobSpec) as error:
        parse_spec(text)
    for word in words:
        assert word in str(error.value)


def test_what_a_spec_allows():
    some = JobSpec(min_gpus=2, max_gpus=16, gpu_types=("a100", "rtx"), scale_unit={"rtx": 8})
    assert some.allows("a100", 2)
    assert some.allows("rtx", 8)
    assert not some.allows("rtx", 4)
    assert not some.allows("t4", 8)
    assert not some.allows("a100", 1)
    others = JobSpec(max_gpus=16, excluded_gpu_types=("t4",), scale_unit=4)
    assert others.allows("a100", 12)
    assert not others.allows("a100", 2)
    assert not others.allows("t4", 4)


def test_a_unit_of_some_types_leaves_the_others_free():
    """No multiple of 8 up to 4, but a type that is not named has unit 1."""
    assert JobSpec(max_gpus=4, scale_unit={"t4": 8}).allows("a100", 4)


@given(
    st.builds(
        JobSpec,
        adaptivity=st.sampled_from([Adaptivity.ADAPTIVE, Adaptivity.STRONG_SCALING]),
        min_gpus=st.integers(1, 8),
        max_gpus=st.integers(8, 64),
        gpu_types=st.none() | st.lists(st.sampled_from(["t4", "a100"]), min_size=1).map(tuple),
        restart_cost_s=st.none() | st.floats(0.1, 1e6),
    )
)
def test_round_trip(spec):
    assert parse_spec(json.dumps({"penstock": spec.model_dump(mode="json", exclude_none=True)})) == spec


@given(st.text())
def test_no_comment_raises_anything_else(text):
    for candidate in (text, '{"penstock": ' + text, json.dumps({"penstock": text})):
        try:
            parse_spec(candidate)
        except BadJobSpec:
            continue
