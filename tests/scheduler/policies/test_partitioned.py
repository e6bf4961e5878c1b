"""Partitions with policies of their own: parts are apart, nothing is promised twice, and the name says it all."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.accounts.limits import LimitSettings, site_limits
from penstock_scheduler.model import CloudRun, CloudState, GpuLimit, Offer, Phase
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import parse_settings
from tests.scheduler.builders import job, nodes_from_spec, on, snapshot, staged, table, with_facts

SIA_AND_FIFO = staged("sia", partitions={"debug": "fifo"})


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
    policy, full = make_policy(SIA_AND_FIFO)
    plan = policy.decide(seen)
    assert given(plan) == {"old": ("t4-01",), "a": ("t4-00",), "b": ("t4-00",)}
    assert set(plan.waiting) == {"young"}
    assert set(full.settings) == {"sia", "fifo"}
    again, _ = make_policy(full)
    assert given(again.decide(seen)) == given(plan), "what is recorded decides the same again"


def test_what_a_job_holds_outside_of_its_part_is_promised_to_no_other_job():
    """A job of `all` holds 3 GPUs of debug's node from before: one is left for debug."""
    held = {"phase": Phase.RUNNING, "allocation": on("t4", t4_01=3), "restarts": 0, "preemptible": False}
    seen = two_parts(
        job("there", min_gpus=3, max_gpus=3, partitions=("all", "debug"), **held),
        *(job(name, max_gpus=1, partitions=("debug", "all"), submit_s=at) for at, name in enumerate("de")),
    )
    plan = make_policy(SIA_AND_FIFO)[0].decide(seen)
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
    plan = make_policy(SIA_AND_FIFO)[0].decide(seen)
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
    ("choice", "words"),
    [
        (staged(""), "unknown policy ''; the policies are antman, fifo"),
        (staged("sia:"), "unknown policy 'sia:'"),
        (staged("synergy-tune"), "'synergy-tune' is a stage"),
        (staged("sia", "fifo"), "'fifo' is a policy, not a stage; the stages are antman-share"),
        (staged("sia", "synergy"), "unknown stage 'synergy'; the stages are antman-share"),
        (staged("sia", partitions={"debug": ""}), "unknown policy ''"),
        (staged("sia", partitions={"debug": "nonsense"}), "unknown policy 'nonsense'"),
    ],
)
def test_names_that_say_nothing_are_refused(choice, words):
    with pytest.raises(ConfigError, match=words):
        make_policy(choice)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy = 'sia'", "policy is a section"),
        ("[policy]\nnmae = 'sia'", "unknown key 'nmae'; the keys are name, stages, partitions"),
        ("[policy]\nname = 3", r"name=3.* \(line 2\)"),
        ("[policy]\nstages = 'synergy-tune'", r"stages=.* \(line 2\)"),
        ("[policy.partitions.debug]\nnmae = 'fifo'", "partitions.debug.name.*partitions.debug.nmae"),
        ("[policy.partitions]\ndebug = 'fifo'", "partitions.debug"),
        ("[policy.sai]\ngap = 1", "unknown policy or stage 'sai'"),
    ],
)
def test_a_section_that_is_wrong_is_refused_with_what_is_valid(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_settings(text, "here")


@pytest.mark.parametrize(
    "policy",
    [
        SIA_AND_FIFO,
        staged("fifo", partitions={"debug": "sia"}),
        staged("fifo", "synergy-tune", partitions={"debug": "gavel"}),
    ],
    ids=str,
)
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
    plan = make_policy(staged("fifo", partitions={"debug": "fifo"}))[0].decide(with_facts(seen, model=models))
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
    plan = make_policy(staged("sia", stage, partitions={"debug": "fifo"}))[0].decide(seen)
    assert given(plan)["r"] == ("t4-01",)
    assert given(plan)["d"][0] in {"t4-00", "t4-02"}
    assert plan.assignments["r"].placement.shares[0].cpus, "the stage has decided"


def test_settings_of_a_policy_and_of_its_preset_are_apart():
    text = '[policy.sia]\ngap = 0.01\n[policy."sia:artifact"]\ngap = 0.02\n[policy.partitions.debug]\nname = "sia:artifact"\n'
    _, full = make_policy(parse_settings(text, "here").policy)
    assert (full.settings["sia"]["gap"], full.settings["sia:artifact"]["gap"]) == (0.01, 0.02)
    assert full.settings["sia:artifact"]["variant"] == "artifact"
    assert full.settings["sia"]["variant"] == "penstock"
    assert make_policy(full)[1] == full, "what is recorded decides the same again"
    twice = staged("sia", partitions={"debug": "sia"}, sia={"gap": 0.01})
    assert make_policy(twice)[1].settings == {"sia": full.settings["sia"]}


def test_settings_are_laid_over_others_part_by_part():
    """[policy.sia] stays where an admin sets something else of it; a preset's may be called by the policy's name."""
    below = {"sia": {"gap": 0.01}, "fifo": {"backfill": "easy"}, "las": {}}
    merged = staged("sia", partitions={"debug": "fifo"}, sia={"fairness_p": -1.0}).over(below)
    assert merged.settings == {"sia": {"gap": 0.01, "fairness_p": -1.0}, "fifo": {"backfill": "easy"}}
    preset = staged("sia:artifact", partitions={"debug": "fifo"}, sia={"gap": 0.02}).over({})
    assert make_policy(preset)[1].settings["sia:artifact"]["gap"] == 0.02
    with pytest.raises(ConfigError, match="has no part 'las'; there are settings for each part: sia, fifo"):
        make_policy(staged("sia", partitions={"debug": "fifo"}, las={"gap": 0.02}))


def test_the_settings_file_says_policy_stages_and_partitions():
    text = """
        [policy]
        name = "sia"
        stages = ["synergy-tune"]
        [policy.sia]
        gap = 0.01
        [policy.las]
        backfill = "easy"
        [policy.partitions.debug]
        name = "fifo"
        """
    choice = parse_settings(text, "here").policy
    assert choice == staged(
        "sia", "synergy-tune", partitions={"debug": "fifo"}, sia={"gap": 0.01}, fifo={}, synergy_tune={}
    )
    policy, full = make_policy(choice)
    assert full.settings["sia"]["gap"] == 0.01
    assert "las" not in full.settings, "it does not decide"
    assert policy.name == str(choice) == "sia+synergy-tune (debug: fifo)"
    again = parse_settings("", "here")
    assert again.policy == PolicyChoice(name="sia", settings={"sia": {}})
