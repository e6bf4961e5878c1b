"""A header's --nodes and --gpus-per-task hold under every policy."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import ReasonCode
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, snapshot
from tests.scheduler.policies.documented import NAME
from tests.scheduler.policies.test_properties import VARIANTS


@pytest.mark.parametrize(("name", "chosen"), [each for each in VARIANTS if each[0] != NAME])
@pytest.mark.parametrize(
    ("cluster", "asked", "fits", "words"),
    [
        ("t4:4x4", {"min_gpus": 8, "max_gpus": 8}, True, ""),
        ("t4:4x4", {"min_gpus": 8, "max_gpus": 8, "max_nodes": 2}, True, ""),
        ("t4:4x4", {"min_gpus": 8, "max_gpus": 8, "max_nodes": 1}, False, "have its GPUs on at most 1 node: lower"),
        ("t4:4x2", {"min_gpus": 4, "max_gpus": 8, "gpus_per_task": 2}, True, ""),
        ("t4:4x2", {"min_gpus": 4, "max_gpus": 8, "gpus_per_task": 4}, False, "with a multiple of 4 on each node: lower"),
        ("t4:4x3", {"min_gpus": 6, "max_gpus": 6, "gpus_per_task": 2}, False, "with a multiple of 2 on each node: lower"),
    ],
)  # fmt: skip
def test_no_policy_gives_a_job_nodes_that_its_header_does_not_allow(
    name: str, chosen: dict[str, object], cluster: str, asked: dict[str, object], fits: bool, words: str
) -> None:
    plan = make_policy(name, chosen)[0].decide(snapshot(cluster, [job("j", **asked)]))
    assert ("j" in plan.assignments) is fits, plan
    if not fits:
        assert plan.waiting["j"].code is ReasonCode.NEVER_FITS
        assert words in plan.waiting["j"].text
