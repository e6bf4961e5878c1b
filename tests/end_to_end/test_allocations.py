"""What the API says that a job held, against Slurm's own record of nodes, GPUs and times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import ApiError, Client
from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.messages import DrainOrder
from penstock_slurm.gateway import CliGateway
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

GPUS = 2
WITHIN_S = 2.0
"""How far the end of a span may be from Slurm's record of it."""


def test_the_spans_of_a_job_are_slurms_record_of_it(make_loopback: MakeLoopback, make_site: Callable[..., Site]):
    """It moves twice, from node to node and back, and penstockd is killed while it runs for the second time."""
    site = make_site(make_loopback(f"t4:2x{GPUS}", accounting=True))
    site.start()
    job = site.submit(1000.0, max_gpus=GPUS, min_gpus=GPUS)
    slurm = CliGateway(conf=site.slurm.slurm_conf, timeout_s=60)
    indices: list[dict[str, tuple[int, ...]]] = []
    places: list[str] = []

    def spans() -> list[AllocationSpan]:
        with Client(f"unix:{site.state / 'api.sock'}") as penstock, contextlib.suppress(ApiError):  # not seen yet
            return list(penstock.allocations(job))
        return []

    def runs_again() -> None:
        """Wait until the job has its next run with known GPUs, and note what Slurm says of them."""

        def known() -> bool:
            open_ = [each for each in spans() if each.to_s is None]
            return len(open_) == 1 and open_[0].gpu_ids is not None and [*open_[0].nodes] not in [places[-1:]]

        wait_for(known, 150, "the job to run again", details=site.tail)
        indices.append(slurm.gpu_ids(job))
        places.append(min(spans()[-1].nodes))

    runs_again()
    wait_for(lambda: site.reports(job), 120, "its first report", details=site.tail)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        penstock.drain(DrainOrder(kind="node", name=places[0]))
    runs_again()
    site.kill()
    site.start()
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(penstock.nodes, 120, "the first observation", details=site.tail)
        penstock.end_drain("node", places[0])
        penstock.drain(DrainOrder(kind="node", name=places[1]))
    runs_again()
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        penstock.cancel(job)
        wait_for(lambda: penstock.job(job).state == "ended", 120, "its end", details=site.tail)

    wait_for(lambda: (found := spans()) and found[-1].to_s is not None, 120, "its last span to end", details=site.tail)
    mine = spans()
    assert [min(each.nodes) for each in mine] == places == [places[0], places[1], places[0]]
    assert [each.gpu_ids for each in mine] == indices
    assert [each.end for each in mine] == ["penstock-drain", "penstock-drain", "ended"]
    assert mine[2].end_text.startswith("CANCELLED")
    wait_for(lambda: len(slurm.runs([job], 0.0)) == 3, 120, "Slurm's accounting to have all runs", details=site.tail)
    for ours, theirs in zip(mine, sorted(slurm.runs([job], 0.0), key=lambda run: run.start_s), strict=True):
        assert (set(ours.nodes), ours.gpus) == (set(theirs.nodes), theirs.gpus)
        assert ours.exact
        assert ours.from_s == theirs.start_s
        assert ours.to_s == pytest.approx(theirs.end_s, abs=WITHIN_S)
