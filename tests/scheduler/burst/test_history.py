from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from penstock_scheduler.burst.manager.history import averages, by_script, histories
from penstock_scheduler.model.waiting import Averages
from tests.scheduler.builders import job


@dataclass(frozen=True)
class Ended:
    user: str = "ann"
    name: str = "train"
    ended: str = "COMPLETED"
    start_s: float | None = 1000.0
    end_s: float | None = 4600.0
    gpu_seconds: dict[str, float] = field(default_factory=lambda: {"t4": 7200.0})


def test_averages_begin_with_what_the_admin_says_and_move_to_what_is_true() -> None:
    """An hour on 2 GPUs beside a prior of 3 h on 4: (3 + 1) / 2 h and (4 + 2) / 2 GPUs."""
    found = averages([Ended()], Averages(1.0, 3.0, 4.0))
    assert (found.jobs, found.runtime_h, found.gpus) == pytest.approx((2.0, 2.0, 3.0))
    many = averages([Ended()] * 1000, Averages(1.0, 3.0, 4.0))
    assert (many.runtime_h, many.gpus) == pytest.approx((1.0, 2.0), rel=0.01)


@pytest.mark.parametrize(
    "other", [Ended(ended="FAILED"), Ended(start_s=None), Ended(end_s=1000.0), Ended(gpu_seconds={})]
)
def test_jobs_that_say_nothing_of_the_running_time_do_not_count(other: Ended) -> None:
    assert averages([other], Averages(1.0, 3.0, 4.0)) == Averages(1.0, 3.0, 4.0)


def test_a_history_is_of_the_same_user_and_script() -> None:
    past = [Ended(), Ended(end_s=2000.0), Ended(user="bob"), Ended(name="other"), Ended(ended="CANCELLED")]
    mine, another = (replace(job(number, user=user), name="train") for number, user in (("7", "ann"), ("8", "eve")))
    assert histories([mine, another], by_script(past)) == {"7": (3600.0, 1000.0)}
