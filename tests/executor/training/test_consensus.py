"""What the processes of a run agree on."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.environment import Ranks
from penstock_executor.training.consensus import COST_CHECKED_EVERY, LONGEST_STRIDE, Consensus, Vote, stride_of
from penstock_executor.training.processes import Group


def test_a_single_process_gets_its_own_vote_once():
    consensus = Consensus(Group(Ranks()))
    assert consensus.result() is None
    vote = Vote(local_sqr=2.5, stop=True, total_batch=64, atomic_batch=32)
    consensus.cast(vote, None)
    assert consensus.result() == (vote, None)
    assert consensus.result() is None


@pytest.mark.parametrize("flag", ["stop", "suspend", "save", "superseded", "move_out"])
def test_a_request_is_urgent_and_a_measurement_is_not(flag: str):
    assert Vote(**{flag: True}).urgent
    assert not Vote(1.0, 1.0, total_batch=64, atomic_batch=32, measure_every=2, vote_every=4).urgent


@pytest.mark.parametrize(("step_s", "stride"), [(10.0, 1), (0.5, 1), (0.115, 4), (0.05, 8), (0.001, 16)])
def test_votes_are_half_a_second_apart_and_some_are_in_the_steps_that_check_the_cost(step_s: float, stride: int):
    assert stride_of(step_s) == stride <= LONGEST_STRIDE
    assert COST_CHECKED_EVERY % stride == 0
