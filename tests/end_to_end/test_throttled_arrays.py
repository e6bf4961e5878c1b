"""Arrays that may run few elements at once (`--array=1-100%2`): the others wait for these, and get nothing in any plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]

BEGUN = "i=$SLURM_ARRAY_TASK_ID; echo >>begun-$i; until [ -e end-$i ]; do sleep 0.1; done"


def spec(gpus: int) -> str:
    return "--comment=" + json.dumps({"penstock": {"min_gpus": gpus, "max_gpus": gpus, "preemptible": False}})


OURS = ("--requeue", "--gres=gpu:1", "--output=/dev/null")


class Array:
    """An array whose elements end when they are told to."""

    def __init__(self, site: Site, which: str, *options: str) -> None:
        self.site = site
        self.id = site.sbatch(*OURS, spec(1), *options, f"--chdir={site.folder}", f"--array={which}", f"--wrap={BEGUN}")

    def __getitem__(self, index: int) -> str:
        return f"{self.id}_{index}"

    def end(self, index: int) -> None:
        (self.site.folder / f"end-{index}").touch()
        self.site.wait_states("COMPLETED", self[index])

    def begun(self, index: int) -> int:
        file = self.site.folder / f"begun-{index}"
        return len(file.read_text()) if file.exists() else 0

    def throttle(self, limit: int) -> None:
        words = ("scontrol", "update", f"JobId={self.id}", f"ArrayTaskThrottle={limit}")
        self.site.slurm.command(*words, check=False)  # it complains about elements that have ended
        assert self.site.gateway.array_limit(self[2]) == (limit or None)

    def planned(self) -> list[set[int]]:
        """The elements to which each round gave GPUs."""
        with contextlib.closing(open_store(self.site.store)) as store:
            plans = [store.round(number).plan for number in store.round_numbers()]
        mark = f"{self.id}_"
        return [{int(job.removeprefix(mark)) for job in plan.assignments if job.startswith(mark)} for plan in plans]


@pytest.mark.parametrize(
    "held", [pytest.param(True, id="held", marks=pytest.mark.long), pytest.param(False, id="not-held")]
)
def test_elements_beyond_the_limit_of_their_array_hold_no_gpus_of_others(
    make_loopback: MakeLoopback, make_site: MakeSite, held: bool
) -> None:
    """On four GPUs, an array of single GPUs, one at a time, leaves three to a later job."""
    site = make_site(make_loopback("t4:1x4"))
    site.start()
    hold = ["--hold"] if held else []
    array = Array(site, "1-6%1", *hold)
    site.wait_states("RUNNING", array[1])
    other = site.sbatch("--hold", *OURS, spec(3), "--wrap=sleep 3600")
    site.wait_states("RUNNING", other)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        said = penstock.explain(array[2])
        assert "its array runs at most 1 at a time" in str(said)
        assert "its array runs at most 1 at a time" in str([job for job in penstock.jobs() if job.id == array[2]])
        array.end(1)
        site.wait_states("RUNNING", array[2])
        assert max(map(len, array.planned())) == 1

        site.slurm.command("scancel", other)
        array.throttle(3)
        site.wait_states("RUNNING", array[2], array[3], array[4])
        array.throttle(1)  # what runs, goes on
        number = site.wait_round()
        site.slurm.command("scontrol", "requeue", array[2])
        array.end(4)
        site.wait_round(after=number + 2)
        assert site.states(array[2], array[3], array[5]) == {
            array[2]: "PENDING",
            array[3]: "RUNNING",
            array[5]: "PENDING",
        }
        array.end(3)
        site.wait_states("RUNNING", array[2])
        wait_for(lambda: array.begun(2) == 2, 120, "an element that has run before to go first")
        assert array.begun(5) == 0
        array.throttle(0)
        site.wait_states("RUNNING", array[2], array[5], array[6])
        for index in (2, 5, 6):
            array.end(index)
        assert [array.begun(index) for index in range(1, 7)] == [1, 2, 1, 1, 1, 1]
        wait_for(
            lambda: not [job for job in penstock.jobs() if job.state != "ended"], 120, "the end", details=site.tail
        )
        assert penstock.ready().status == "ok"
