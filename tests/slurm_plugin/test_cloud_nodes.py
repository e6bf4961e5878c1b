"""Jobs that were submitted to cloud nodes directly. The test with a real Slurm is in tests/cloud/test_slurm.py."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from penstock_scheduler.model import Stop
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import (
    CliGateway,
    ControllerAway,
    JobGone,
    Refused,
    SlurmError,
    SlurmJob,
    SlurmNode,
    Write,
)
from penstock_slurm.observe.cloud_nodes import SlurmCloudNodes
from tests.slurm_plugin.test_notes_and_plain_jobs import SEEN, noted

JOB = dataclasses.replace(SEEN, admin_comment=noted())


class OneJob:
    """Slurm's answers about one job, and a record of the requests."""

    def __init__(self, **errors: SlurmError) -> None:
        self.errors, self.asked, self.comment = errors, list[str](), ""

    def __getattr__(self, name: str) -> Any:
        def ask(job: str | list[str], text: str = "") -> None:
            self.asked.append(name)
            if name in self.errors:
                raise self.errors[name]
            self.comment = text or self.comment

        return ask


def refuse(slurm: OneJob, folder: Path | None = None) -> dict[str, Stop]:
    with tempfile.TemporaryDirectory() as spool:
        return _refuse(slurm, Spool(folder or Path(spool)))


def _refuse(slurm: OneJob, spool: Spool) -> dict[str, Stop]:
    nodes = SlurmCloudNodes("burst", cast(CliGateway, slurm), spool)
    nodes.saw((), [JOB])
    nodes.refuse(JOB.id, "it asks for cloud nodes itself")
    return nodes.take_stops()


DISABLED = Refused("Requested operation is presently disabled", command="scontrol")


def test_a_job_that_may_be_queued_again_is_and_its_spec_stays() -> None:
    slurm = OneJob()
    refuse(slurm)
    assert slurm.asked == ["requeue_hold", "hold", "set_admin_comment"]
    assert json.loads(slurm.comment) == {"penstock": {"max_gpus": 2}, "penstock_says": "it asks for cloud nodes itself"}


def test_a_job_that_may_not_be_queued_again_is_told_and_cancelled() -> None:
    slurm = OneJob(requeue_hold=DISABLED)
    assert refuse(slurm)[JOB.id].text == (
        "it asks for cloud nodes itself; Slurm cannot requeue it, so it was cancelled"
    )
    assert slurm.asked == ["requeue_hold", "set_admin_comment", "cancel"]
    assert json.loads(slurm.comment)["penstock_says"] == "cancelled: it asks for cloud nodes itself"


def test_whatever_slurm_refuses_the_site_goes_on() -> None:
    refuse(OneJob(requeue_hold=DISABLED, set_admin_comment=DISABLED, cancel=DISABLED))


def test_a_controller_that_is_away_is_asked_again() -> None:
    with pytest.raises(ClusterAway):
        refuse(OneJob(requeue_hold=ControllerAway("", command="scontrol")))


def node(name: str, *state: str) -> SlurmNode:
    return SlurmNode(name, {"a10g": 1}, {}, frozenset(state), ("burst",), 4, 0, 8000, 0)


def test_what_may_be_filled_and_what_is_up(tmp_path: Path) -> None:
    """Cloud nodes exist once an instance has joined. Gateways always exist, and are free unless they have a cloud runner."""
    nodes = SlurmCloudNodes("burst", cast(CliGateway, OneJob()), Spool(tmp_path))
    seen = {
        "down": ("IDLE", "CLOUD", "POWERED_DOWN"),
        "boots": ("ALLOCATED", "CLOUD", "POWERING_UP"),
        "joined": ("ALLOCATED", "CLOUD"),
        "gateway": ("IDLE",),
        "gateway-used": ("ALLOCATED",),
        "gateway-drained": ("IDLE", "DRAIN"),
        "gateway-silent": ("IDLE", "NOT_RESPONDING"),
    }
    nodes.saw([node(name, *state) for name, state in seen.items()], ())
    assert [each.name for each in nodes.nodes() if each.free] == ["down", "gateway"]
    assert [each.name for each in nodes.nodes() if each.up] == ["joined", "gateway", "gateway-used", "gateway-drained"]


def test_a_node_is_up_once_slurm_has_begun_its_job_which_is_up_to_half_a_minute_after_it_has_joined(
    tmp_path: Path,
) -> None:
    """Slurm before 23.02 cannot start a job on site that it took from a node while the job was CONFIGURING."""
    nodes = SlurmCloudNodes("burst", cast(CliGateway, OneJob()), Spool(tmp_path))
    for state, up in (("CONFIGURING", False), ("RUNNING", True)):
        nodes.saw([node("cloud", "ALLOCATED", "CLOUD")], [dataclasses.replace(JOB, state=state, nodes=("cloud",))])
        assert [each.up for each in nodes.nodes()] == [up]


def test_gateways_stay_and_a_refusal_to_power_down_is_not_slurms_absence(tmp_path: Path) -> None:
    slurm = OneJob(power_down=DISABLED)
    nodes = SlurmCloudNodes("burst", cast(CliGateway, slurm), Spool(tmp_path))
    nodes.saw([node("cloud", "IDLE", "CLOUD"), node("gateway", "IDLE")], [JOB])
    nodes.power_down(["gateway"])
    assert slurm.asked == []
    nodes.power_down(["cloud", "gateway"])
    assert slurm.asked == ["power_down"]
    slurm.errors["power_down"] = ControllerAway("", command="scontrol")
    with pytest.raises(ClusterAway):
        nodes.power_down(["cloud"])


class Booting(OneJob):
    """Slurm boots a cloud node for the job."""

    def __init__(self, folder: Path, **errors: SlurmError) -> None:
        super().__init__(**errors)
        self.spool = Spool(folder)
        self.nodes = SlurmCloudNodes("burst", cast(CliGateway, self), self.spool)
        self.sees(JOB)

    def sees(self, job: SlurmJob) -> None:
        job = dataclasses.replace(job, state="CONFIGURING", nodes=("cloud",))
        self.nodes.saw(
            [node("cloud", "ALLOCATED", "CLOUD", "POWERING_UP", "NOT_RESPONDING"), node("site", "IDLE")], [job]
        )

    def write(self, writes: list[Write]) -> list[SlurmError | None]:
        self.asked += [each.kind for each in writes]
        return [self.errors.get(each.kind) for each in writes]


def test_a_job_is_held_where_it_is_when_the_nodes_that_boot_for_it_are_given_up(tmp_path: Path) -> None:
    """Slurm requeues it then. It would start without GPUs if Penstock did, and at once if it were not held."""
    slurm = Booting(tmp_path)
    slurm.nodes.power_down(["cloud"])
    assert slurm.asked == ["hold", "power_down"]
    control = slurm.spool.control(JOB.id)
    assert control is not None
    assert (control.holds, control.holding) == (JOB.restarts + 1, JOB.restarts), "the hold is Penstock's own"
    slurm.sees(dataclasses.replace(JOB, priority=0))
    slurm.nodes.power_down(["cloud"])
    assert slurm.asked == ["hold", "power_down", "power_down"], "it is held already"


def test_a_job_that_may_not_be_requeued_outlives_its_nodes_boot(tmp_path: Path) -> None:
    slurm = Booting(tmp_path)
    slurm.sees(dataclasses.replace(JOB, requeue=False))
    slurm.nodes.power_down(["cloud"])
    assert slurm.asked == ["split", "hold", "power_down"], "Slurm may requeue it first"


@pytest.mark.parametrize("error", [DISABLED, JobGone("Invalid job id", command="scontrol")])
def test_nodes_are_given_up_also_if_their_job_cannot_be_held(tmp_path: Path, error: SlurmError) -> None:
    slurm = Booting(tmp_path, hold=error)
    slurm.nodes.power_down(["cloud"])
    assert slurm.asked == ["hold", "power_down"]


def test_a_job_that_was_not_sent_there_is_held_while_the_nodes_boot(tmp_path: Path) -> None:
    slurm = Booting(tmp_path)
    for _ in range(2):
        slurm.nodes.refuse(JOB.id, "it asks for cloud nodes itself")
        assert slurm.asked == ["hold", "set_admin_comment"], "once"
        slurm.sees(dataclasses.replace(JOB, priority=0))
    slurm = Booting(tmp_path, set_admin_comment=JobGone("Invalid job id", command="scontrol"))
    slurm.nodes.refuse(JOB.id, "it asks for cloud nodes itself")
    slurm = Booting(tmp_path)
    slurm.sees(dataclasses.replace(JOB, requeue=False))
    slurm.nodes.refuse(JOB.id, "it asks for cloud nodes itself")
    assert slurm.asked[0] == "requeue_hold", "Slurm refuses that, and it is cancelled"


def test_slurms_number_of_an_array_element_names_its_job(tmp_path: Path) -> None:
    nodes = SlurmCloudNodes("burst", cast(CliGateway, OneJob()), Spool(tmp_path))
    nodes.saw((), [dataclasses.replace(JOB, id="12_3", number=14)])
    assert [nodes.job_of("14"), nodes.job_of("99")] == ["12_3", "99"]
