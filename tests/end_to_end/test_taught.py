"""Twelve jobs of the demo on a real Slurm, twice: the second time, the first has taught penstockd how fast they are."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest

from penstock_loopback.demo.jobs import DemoJob
from penstock_loopback.demo.site import DemoSite
from penstock_profiles.families import load_families
from penstock_scheduler.store.sql import open_store

SPEC = "t4:2x4,rtx:1x8,a100:1x8"
FAMILIES = load_families()
ARRIVALS_S = 60.0
LIMIT_S = 420.0


@dataclass(frozen=True, slots=True)
class Untold(DemoJob):
    """A job whose job spec does not say how fast it is."""

    def spec_fields(self) -> dict[str, Any]:
        """The batch sizes, as a user knows them."""
        family = FAMILIES[self.family]
        return self.spec | {"batch_size": family.initial_batch, "max_batch_size": family.max_batch}


def untold(name: str, family: str, t4_hours: float) -> Untold:
    return Untold(name, family, t4_hours, {"min_gpus": 1, "max_gpus": 8}, ("t4", 1, 1))


KINDS = (
    ("cifar", "resnet18-cifar10", 0.2),
    ("bert", "bert-squad", 0.2),
    ("speech", "deepspeech2", 0.1),
    ("yolo", "yolov3", 0.06),
)
JOBS = tuple(untold(f"{name}-{number}", family, t4_hours) for number in range(3) for name, family, t4_hours in KINDS)
"""Each trains for some minutes on one T4, in real time."""


def run(site: DemoSite, first: int) -> dict[str, float]:
    """Submit the twelve jobs over a minute, wait until they have ended, and return each one's completion time, s."""
    begun_s, before = site.next_round_s(), len(site.jobs)
    for number, job in enumerate(JOBS):
        time.sleep(max(begun_s + number * ARRIVALS_S / len(JOBS) - time.time(), 0.0))
        site.submit(untold(f"{job.name}-{first}", job.family, job.t4_hours), FAMILIES)
    while site.ended < before + len(JOBS):
        assert time.time() < begun_s + LIMIT_S, {job.name: job.state for job in site.records.values()}
        assert not site.daemon_died, (site.folder / "penstockd.log").read_text()[-3000:]
        time.sleep(0.5)
        site.observe()
    assert site.completed
    mine = list(site.jobs)[before:]
    return {job: (site.records[job].end_s or 0.0) - site.submitted_s[job] for job in mine}


@pytest.mark.slurm
@pytest.mark.long  # each run takes two minutes
def test_the_second_run_of_the_same_jobs_is_shorter_because_the_first_has_taught_it(tmp_path, loopback):
    """No job is told how fast it is; names, batch sizes and reports are all that penstockd has.

    When this was written, the second run was 14 and 19 % shorter, and 1 % longer without `recall_models`.
    """
    site = DemoSite(tmp_path, SPEC, penstock=True, time_scale=1.0, recall_models=True)
    try:
        site.up()
        first = run(site, 1)
        second = run(site, 2)
    finally:
        site.down()
    views = {view.id: view for _, view in open_store(site.state).jobs()}
    moves = [fmean(views[job].restarts for job in each) for each in (first, second)]
    times_s = [fmean(each.values()) for each in (first, second)]
    print(
        json.dumps({"average_s": times_s, "longest_s": [max(first.values()), max(second.values())], "restarts": moves})
    )
    assert times_s[1] < 0.95 * times_s[0]
    assert moves[1] < moves[0]
