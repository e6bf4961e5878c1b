"""Partitions with policies of their own: parts are apart, nothing is promised twice, and the name says it all."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.limits import LimitSettings, site_limits
from penstock_scheduler.model import GpuLimit, Phase
from penstock_scheduler.policies import make_policy
from penstock_scheduler.settings import parse_settings
from tests.scheduler.builders import job, nodes_from_spec, on, snapshot


def two_parts(*jobs, limits=()):
    """t4-00 in `all` alone, t4-01 in `all` and `debug`."""
    first, second = nodes_from_spec("t4:2x4")
    second = dataclasses.replace(second, partitions=("all", "debug"))
    return dataclasses.replace(snapshot((first, second), list(jobs)), limits=tuple(limits))


def given(plan):
    return {name: each.placement.nodes for name, each in plan.assignments.items()}


def test_each_partition_has_its_nodes_and_its_policy():
    """fifo gives the older job of debug all that it wants and lets the younger wait; sia shares t4-00 between two."""
    debug = {"partitions": ("debug", "all"), "min_gpus": 4, "max_gpus": 4, "adaptivity": "rigid"}
    rest = {"partitions": ("all", "debug"), "max_gpus": 4}
    seen = two_parts(
        job("old", submit_s=1, **debug), job("young", submit_s=2, **debug), job("a", **rest), job("b", **rest)
    )
    policy, full = make_policy("sia debug=fifo")
    plan = policy.decide(seen)
    assert given(plan) == {"old": ("t4-01",), "a": ("t4-00",), "b": ("t4-00",)}
    assert set(plan.waiting) == {"young"}
    assert set(full) == {"sia", "fifo"}
    again, _ = make_policy(policy.name, full)
    assert given(again.decide(seen)) == given(plan), "what is recorded decides the same again"


def test_what_a_job_holds_outside_of_its_part_is_promised_to_nobody_else():
    """A job of `all` holds 3 GPUs of debug's node from before: one is left for debug."""
    held = {"phase": Phase.RUNNING, "allocation": on("t4", t4_01=3), "restarts": 0, "preemptible": False}
    seen = two_parts(
        job("there", min_gpus=3, max_gpus=3, partitions=("all", "debug"), **held),
        *(job(name, max_gpus=1, partitions=("debug", "all"), submit_s=at) for at, name in enumerate("de")),
    )
    plan = make_policy("sia debug=fifo")[0].decide(seen)
    assert {name: str(each.placement) for name, each in plan.assignments.items()} == {
        "there": "t4 t4-01:3",
        "d": "t4 t4-01:1",
    }


def test_a_limit_holds_over_all_parts():
    """ada may have 5 GPUs: 4 of debug, so 1 of the rest."""
    seen = two_parts(
        job("d", min_gpus=4, max_gpus=4, partitions=("debug", "all")),
        job("r", max_gpus=4, partitions=("all", "debug")),
        limits=[GpuLimit("user", "ada", 5)],
    )
    plan = make_policy("sia debug=fifo")[0].decide(seen)
    assert plan.assignments["d"].placement.gpus == 4
    assert plan.assignments["r"].placement.gpus == 1


@pytest.mark.parametrize("policy", ["sia", "fifo", "gavel"])
def test_a_partition_has_a_limit_of_its_own(policy):
    """Three GPUs for what was submitted to debug, wherever it runs."""
    jobs = [job(name, max_gpus=1, partitions=("debug", "all")) for name in "abcd"]
    jobs.append(job("other", max_gpus=1, partitions=("all", "debug")))
    limits = site_limits(LimitSettings.model_validate({"partitions": {"debug": {"gpus": 3}}}), jobs)
    assert [str(limit) for limit in limits] == ["the limit of 3 GPUs for partition debug"]
    plan = make_policy(policy)[0].decide(two_parts(*jobs, limits=limits))
    assert len(plan.assignments.keys() & set("abcd")) == 3
    assert "other" in plan.assignments


def test_names_that_say_nothing_are_refused():
    with pytest.raises(ConfigError, match="'fifo' behind the first policy is no PARTITION=POLICY"):
        make_policy("sia fifo")
    with pytest.raises(ConfigError, match="unknown policy 'nonsense'"):
        make_policy("sia debug=nonsense")


def test_settings_are_found_by_part():
    text = '[daemon]\npolicy = "sia debug=fifo+synergy-tune"\n[policy.sia]\ngap = 0.01\n'
    settings = parse_settings(text, "here")
    found = settings.policy("sia debug=fifo+synergy-tune")
    assert found == {"sia": {"gap": 0.01}, "fifo": {}, "synergy-tune": {}}
    policy, full = make_policy("sia debug=fifo+synergy-tune", found)
    assert full["sia"]["gap"] == 0.01
    assert policy.name == "sia debug=fifo+synergy-tune"
