"""What a review found in the shares of users: jobs that keep all others from GPUs, most of which stay idle."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import NodeChoice
from penstock_scheduler.policies.turns import TURN_S
from tests.hostile.floods import ROUND_S, Flood, Lived
from tests.scheduler.builders import job

NODES = ("t4-00", "t4-01", "t4-02", "t4-03")
FOR_EVER = 1e9


def test_one_small_job_on_each_node_does_not_block_jobs_of_a_whole_node() -> None:
    """One user holds 4 of 32 GPUs, each on a node of her choice; 28 are idle."""
    small = [
        Lived(job(f"small-{node}", user="mallory", max_gpus=1, nodes=NodeChoice(only=frozenset([node]))), FOR_EVER)
        for node in NODES
    ]
    whole = Lived(job("whole", user="bob", submit_s=60.0, min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    Flood("t4:4x8", [*small, whole], "sia").run(3600.0)
    assert whole.longest_wait_s <= TURN_S + 2 * ROUND_S
    assert sum(lived.stops for lived in small) == 1


@pytest.mark.parametrize("policy", ["las", "gavel", "ftf"])
@pytest.mark.parametrize("most", [1, 8])
def test_two_users_take_turns_where_one_needs_all_gpus(policy: str, most: int) -> None:
    """Neither a job of all GPUs nor one of a single GPU keeps the other waiting for ever, and neither is stopped all the time."""
    gang = Lived(job("gang", user="mallory", min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    small = Lived(job("small", user="bob", submit_s=60.0, max_gpus=most), FOR_EVER)
    Flood("t4:1x8", [gang, small], policy).run(4 * 3600.0)
    assert max(gang.longest_wait_s, small.longest_wait_s) <= 7200.0
    assert max(gang.stops, small.stops) <= 4 * 3600.0 / TURN_S


def test_aging_bounds_the_wait_for_all_gpus() -> None:
    """Under sia: see docs/developer/sia.md#aging."""
    gang = Lived(job("gang", user="bob", submit_s=60.0, min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    small = Lived(job("small", user="mallory", max_gpus=1), FOR_EVER)
    Flood("t4:1x8", [small, gang], "sia").run(3 * 3600.0)
    assert gang.attained_gpu_s > 0
