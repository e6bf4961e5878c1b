"""Partitions with policies of their own: parts are apart, nothing is promised twice, and the name says it all."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.limits import LimitSettings, site_limits
from penstock_scheduler.model import CloudRun, CloudState, GpuLimit, Offer, Phase
from penstock_scheduler.policies import make_policy, overlaid
from penstock_scheduler.settings import parse_settings
from tests.scheduler.builders import job, nodes_from_spec, on, snapshot, table, with_facts


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "names no policy that decides; the policies are antman, fifo"),
        ("+synergy-tune", "names no policy that decides"),
        ("sia+", "behind each \\+ stands one stage"),
        ("sia+synergy-tune debug=fifo", "nothing behind the stages"),
        ("sia+fifo", "unknown stage 'fifo'"),
        ("sia:", "unknown policy 'sia:'"),
        ("debug=fifo", "name it first, such as 'sia debug=fifo'"),
        ("debug=fifo old=las", "name it first"),
        ("sia fifo", "'fifo' behind the first policy is no PARTITION=POLICY"),
        ("sia debug=", "is no PARTITION=POLICY"),
        ("sia debug=a=b", "unknown policy 'a=b'"),
        ("sia debug=nonsense", "unknown policy 'nonsense'"),
        ("sia debug=fifo debug=las", "gives the partition debug two policies"),
    ],
)
def test_names_that_say_nothing_are_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        make_policy(name)


@pytest.mark.parametrize("policy", ["sia debug=fifo", "fifo debug=sia", "fifo debug=gavel+synergy-tune"])
def test_jobs_wait_while_the_partition_of_their_policy_is_down(policy):
    """No node is in it then, and the jobs are not everybody's."""
    nodes = tuple(dataclasses.replace(node, partitions=("all",)) for node in two_parts().nodes)
    jobs = job("d", max_gpus=1, partitions=("debug", "all")), job("r", max_gpus=1, partitions=("all", "debug"))
    plan = make_policy(policy)[0].decide(dataclasses.replace(two_parts(*jobs), nodes=nodes))
    assert set(plan.assignments) == {"r"}
    assert set(plan.waiting) == {"d"}


def test_jobs_of_a_partition_of_its_own_stay_out_of_the_cloud():
    """Both may leave at once, and one offer suits both: only the job of the rest does. One that is there stays there."""
    debug, rest = ("debug", "all"), ("all", "debug")
    jobs = [job(name, max_gpus=1, partitions=debug) for name in ("d", "there")]
    jobs += [job("only", max_gpus=1, partitions=debug, burst="only"), job("r", max_gpus=1, partitions=rest)]
    offer = Offer("g@b", "a10g", 1, 1, 1.0, count=8)
    cloud = CloudState((offer,), (CloudRun("there", offer, 0.0, 1.0),), by_default=True)
    nothing = tuple(dataclasses.replace(node, gpus_others=4) for node in two_parts().nodes)
    seen = dataclasses.replace(two_parts(*jobs), nodes=nothing, cloud=cloud)
    models = {name: table(t4={1: 1.0}, a10g={1: 1.0}) for name in ("d", "there", "only", "r")}
    plan = make_policy("fifo debug=fifo")[0].decide(with_facts(seen, model=models))
    assert set(plan.bursts) == {"there", "r"}
    assert set(plan.waiting) == {"d", "only"}


@pytest.mark.parametrize("stage", ["synergy-tune", "synergy-opt"])
def test_stages_put_no_job_on_nodes_of_another_part(stage):
    """Two nodes of debug and one of the rest, all in `all`; debug's are the fuller, so tighter, and one is the first."""
    nodes = [
        dataclasses.replace(node, partitions=("all", "debug") if number != 1 else ("all",), cpus=16, memory_mb=64_000)
        for number, node in enumerate(nodes_from_spec("t4:3x4"))
    ]
    nodes[0] = dataclasses.replace(nodes[0], gpus_others=3, cpus_others=12, memory_others_mb=48_000)
    jobs = [job("r", max_gpus=1, partitions=("all", "debug")), job("d", max_gpus=1, partitions=("debug", "all"))]
    seen = snapshot(tuple(nodes), jobs)
    name = f"sia debug=fifo+{stage}"
    plan = make_policy(name)[0].decide(seen)
    assert given(plan)["r"] == ("t4-01",)
    assert given(plan)["d"][0] in {"t4-00", "t4-02"}
    assert plan.assignments["r"].placement.shares[0].cpus, "the stage has decided"


def test_settings_of_a_policy_and_of_its_preset_are_apart():
    name = "sia debug=sia:artifact"
    settings = parse_settings('[policy.sia]\ngap = 0.01\n[policy."sia:artifact"]\ngap = 0.02\n', "here")
    policy, full = make_policy(name, settings.policy(name))
    assert (full["sia"]["gap"], full["sia:artifact"]["gap"]) == (0.01, 0.02)
    assert full["sia:artifact"]["max_job_gpus"] == 64
    assert full["sia"]["max_job_gpus"] != 64
    assert make_policy(policy.name, full)[1] == full, "what is recorded decides the same again"
    assert make_policy("sia debug=sia", {"sia": {"gap": 0.01}})[1]["sia"]["gap"] == 0.01


def test_settings_are_laid_over_others_part_by_part():
    """[policy.sia] stays where an admin sets something else of it; a preset's may be called by the policy's name."""
    below = {"sia": {"gap": 0.01}, "fifo": {"fit": "best"}}
    merged = overlaid("sia debug=fifo", below, {"sia": {"fairness_p": -1.0}})
    assert merged == {"sia": {"gap": 0.01, "fairness_p": -1.0}, "fifo": {"fit": "best"}}
    assert overlaid("sia", {"gap": 0.01}, {"fairness_p": -1.0}) == {"gap": 0.01, "fairness_p": -1.0}
    empty = {"sia:artifact": {}, "fifo": {}}
    given = overlaid("sia:artifact debug=fifo", empty, {"sia": {"gap": 0.02}})
    assert make_policy("sia:artifact debug=fifo", given)[1]["sia:artifact"]["gap"] == 0.02
    for wrong, words in (({"gap": 0.02}, "has no part 'gap'"), ({"sia": 3}, "sia is a part, so its settings are")):
        with pytest.raises(ConfigError, match=words):
            make_policy("sia debug=fifo", wrong)


def test_settings_are_found_by_part():
    text = '[daemon]\npolicy = "sia debug=fifo+synergy-tune"\n[policy.sia]\ngap = 0.01\n'
    settings = parse_settings(text, "here")
    found = settings.policy("sia debug=fifo+synergy-tune")
    assert found == {"sia": {"gap": 0.01}, "fifo": {}, "synergy-tune": {}}
    policy, full = make_policy("sia debug=fifo+synergy-tune", found)
    assert full["sia"]["gap"] == 0.01
    assert policy.name == "sia debug=fifo+synergy-tune"
