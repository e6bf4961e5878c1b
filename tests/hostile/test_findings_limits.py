"""What a user gains by taking a running job away from Penstock: `scontrol update JobId=J Comment=x`, or `Requeue=0`.

With a limit of 2 GPUs a user held 8 after some seconds: each job got its GPUs from the elastic jobs of others, became a plain
job, kept its GPUs, and counted no more.
"""

from __future__ import annotations

import pytest

from penstock_scheduler.accounts.limits import LimitSettings, site_limits
from penstock_scheduler.model import Refusal
from tests.scheduler.builders import job
from tests.slurm_plugin.test_view import record, running, sort

LEFT = {"Comment=x": running(comment="x"), "Requeue=0": running(requeue=False)}


@pytest.mark.parametrize("change", LEFT)
def test_a_running_job_that_its_user_takes_away_is_known_with_its_gpus(change: str) -> None:
    taken = LEFT[change]
    (seen,) = sort(taken, sent=True, was_managed=True).refused
    assert seen.gpus == (taken.gpus_per_node or 0) * len(taken.nodes) > 0
    assert (seen.user, seen.account) == (taken.user, taken.account)


def test_a_job_that_penstock_never_sent_anywhere_does_not_count() -> None:
    assert [each.gpus for each in sort(LEFT["Requeue=0"], sent=False).refused] == [0]
    assert [each.gpus for each in sort(record("PENDING", requeue=False), sent=True).refused] == [0]


def test_gpus_that_a_user_took_away_count_against_the_limits() -> None:
    settings = LimitSettings(gpus_per_user=8, accounts={"maths": 4})
    taken = [
        Refusal("8", "", "ada", "", runs=True, account="maths", gpus=2),
        Refusal("9", "", "ada", "", runs=True, gpus=9),
    ]
    jobs = [job("1", account="maths"), job("2", user="bob", account="maths")]
    limits = {(limit.kind, limit.name): limit.gpus for limit in site_limits(settings, jobs, taken)}
    assert limits == {("user", "ada"): 0, ("user", "bob"): 8, ("account", "maths"): 2}
