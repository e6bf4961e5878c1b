"""What becomes of jobs that came to cloud nodes by themselves. The test with a real Slurm is in tests/cloud/test_slurm.py."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import pytest

from penstock_scheduler.errors import ClusterAway
from penstock_slurm.cloud_nodes import SlurmCloudNodes
from penstock_slurm.gateway import CliGateway, ControllerAway, Refused, SlurmError
from tests.slurm_plugin.test_notes_and_plain_jobs import SEEN, noted

JOB = dataclasses.replace(SEEN, admin_comment=noted())


class OneJob:
    """Slurm's answers about one job, and what was asked."""

    def __init__(self, **errors: SlurmError) -> None:
        self.errors, self.asked, self.comment = errors, list[str](), ""

    def __getattr__(self, name: str) -> Any:
        def ask(job: str, text: str = "") -> None:
            self.asked.append(name)
            if name in self.errors:
                raise self.errors[name]
            self.comment = text or self.comment

        return ask


def refuse(slurm: OneJob) -> None:
    nodes = SlurmCloudNodes("burst", cast(CliGateway, slurm))
    nodes.saw((), [JOB])
    nodes.refuse(JOB.id, "it asks for cloud nodes itself")


DISABLED = Refused("Requested operation is presently disabled", command="scontrol")


def test_a_job_that_may_be_queued_again_is_and_its_wish_stays() -> None:
    slurm = OneJob()
    refuse(slurm)
    assert slurm.asked == ["requeue_hold", "hold", "set_admin_comment"]
    assert json.loads(slurm.comment) == {"penstock": {"max_gpus": 2}, "penstock_says": "it asks for cloud nodes itself"}


def test_a_job_that_may_not_be_queued_again_is_told_and_cancelled() -> None:
    slurm = OneJob(requeue_hold=DISABLED)
    refuse(slurm)
    assert slurm.asked == ["requeue_hold", "set_admin_comment", "cancel"]
    assert json.loads(slurm.comment)["penstock_says"] == "cancelled: it asks for cloud nodes itself"


def test_whatever_slurm_refuses_the_site_goes_on() -> None:
    refuse(OneJob(requeue_hold=DISABLED, set_admin_comment=DISABLED, cancel=DISABLED))


def test_a_controller_that_is_away_is_asked_again() -> None:
    with pytest.raises(ClusterAway):
        refuse(OneJob(requeue_hold=ControllerAway("", command="scontrol")))
