"""What a stop does when its job reports that it could not save."""

from __future__ import annotations

from dataclasses import replace

from penstock_scheduler.model import Outcome, Progress
from penstock_slurm.act.steps import Step, step
from penstock_slurm.observe.view import Spooled
from tests.slurm_plugin.test_steps import ASKED, CONTROL, MOVE, READS, SAVES, SETTINGS, running, under_way


def test_a_run_that_could_not_save_goes_on_and_is_asked_again_only_if_it_must_leave():
    """The next round knows it. If that stops the job all the same, a second failure does not hold it up."""
    spooled = Spooled(ASKED, READS, 3, failure="the disk is full", failures=1)
    found = step(MOVE, running(spooled=spooled), SETTINGS)
    withdrawn = CONTROL.model_copy(update={"request": None, "moved_s": None, "round": MOVE.round})
    assert found == Step(Outcome(MOVE, Progress.FAILED, "it could not save: the disk is full"), control=withdrawn)
    found = step(MOVE, running(spooled=replace(spooled, failures=2)), SETTINGS)
    message = "it could not save on 2 requests, and was stopped: the disk is full"
    told = ASKED.model_copy(update={"holds": 2})
    assert found == under_way(
        MOVE, "gets Slurm's signals to save, leaves its GPUs", SAVES, control=told, message=message
    )


def test_a_run_that_has_saved_after_all_is_stopped():
    found = step(MOVE, running(spooled=Spooled(ASKED, READS, 3, saved=True, failure="the disk was full")), SETTINGS)
    assert found == under_way(MOVE, "has saved, leaves its GPUs", SAVES, control=ASKED.model_copy(update={"holds": 2}))
