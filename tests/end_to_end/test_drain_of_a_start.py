"""A drain right after a move on a real Slurm: the new run has not reported yet, and it is not stopped a second time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.model import StopCode
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm


def test_a_drain_waits_for_the_first_report_of_a_job_that_has_just_grown(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Tried: a drain 11 s after a grow, while the run imported, cost two restarts, 69 s."""
    imports = tmp_path / "imports"
    site = make_site(make_loopback("t4:2x2"))
    others = [
        site.sbatch(f"--nodelist=t4-0{n}", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 3600") for n in (0, 1)
    ]
    site.wait_states("RUNNING", *others)
    site.start()
    rates = {"t4": RATES["t4"]}
    comment = json.dumps({"penstock": {"max_gpus": 2, "goodput_table": rates, "checkpointable": True}})
    script = f"while [ -e {imports} ]; do sleep 0.1; done; {site.trainer(100_000, rates)}"
    job = site.sbatch(
        *("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", f"--output={site.folder}/%j.out"),
        f"--wrap={script}",
    )
    wait_for(lambda: site.starts(job), 120, "its first report", details=site.tail)

    def said() -> str:
        with contextlib.closing(open_store(site.state)) as store:
            last = store.last_round()
        return last.plan.assignments[job].reason.text if last is not None else ""

    imports.touch()
    site.slurm.command("scancel", *others)
    wait_for(
        lambda: (site.job(job).state, site.job(job).gpus_per_node) == ("RUNNING", 2), 120, "growth", details=site.tail
    )
    grown = site.job(job)
    (node,) = grown.nodes
    site.slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a fan")
    wait_for(lambda: "its new run has not reported its first step" in said(), 120, "the reason", details=site.tail)
    number = site.wait_round()
    for _ in range(4):
        number = site.wait_round(after=number)
    now = site.job(job)
    assert (now.state, now.restarts, now.start_s, now.nodes) == ("RUNNING", 1, grown.start_s, (node,)), site.tail()
    imports.unlink()
    wait_for(lambda: site.job(job).state == "RUNNING" and site.job(job).nodes != (node,), 120, "the job to leave")
    wait_for(lambda: len(site.starts(job)) == 3, 120, "its third run", details=site.tail)
    assert [gpus for _, gpus, _ in site.starts(job)] == [1, 2, 2], "each run has reported"
    site.assert_progress_kept(job, lost=2.0)
    with contextlib.closing(open_store(site.state)) as store:
        stops = [line.stop for line in store.outcomes() if line.stop is not None]
    assert {stop.code for stop in stops} == {StopCode.GAIN, StopCode.DRAIN}
