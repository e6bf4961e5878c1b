"""Elements of an array go in the order of their numbers, as in Slurm."""

from __future__ import annotations

import pytest

from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, snapshot
from tests.scheduler.policies.documented import NAME
from tests.scheduler.policies.test_properties import VARIANTS

OTHERS = (NAME, "pollux")
"""CONTRIBUTING's example, and a search that finds GPUs for any two of equal jobs."""


@pytest.mark.parametrize(("name", "chosen"), [each for each in VARIANTS if each[0] not in OTHERS])
def test_the_first_elements_of_an_array_start_first(name: str, chosen: dict[str, object]) -> None:
    jobs = [job(f"7_{element}", submit_s=100.0, max_gpus=1) for element in range(1, 13)]
    plan = make_policy(name, chosen)[0].decide(snapshot("t4:1x2", jobs))
    assert set(plan.assignments) == {"7_1", "7_2"}
