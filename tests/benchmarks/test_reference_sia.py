"""`benchmarks/reference_sia`: translation between the records of Sia's authors and ours. Running it takes their repository."""

import numpy as np
import pytest
from benchmarks.reference_sia.driving import PerfectModel
from benchmarks.reference_sia.translation import Nodes, job_view

from penstock_profiles.families import load_families
from penstock_scheduler.model import JobSpec, Phase, Placement, Share
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.model_truth import FamilyModel
from penstock_scheduler.simulator.truth import ModelledJob, TimedJob

TYPES = {"aws": "t4", "dgx-ext": "a100"}
NODES = Nodes(nodes_from_spec("t4:3x4,a100:2x8"), TYPES)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("aws", [1]), Placement("t4", "all", (Share("t4-01", 1),))),
        (("dgx-ext", [0, 0, 0, 0]), Placement("a100", "all", (Share("a100-00", 4),))),
        (("aws", [0] * 4 + [2] * 4), Placement("t4", "all", (Share("t4-00", 4), Share("t4-02", 4)))),
    ],
)
def test_allocation_is_the_same_gpus_in_both_forms(theirs: tuple[str, list[int]], ours: Placement) -> None:
    assert NODES.placement(theirs) == ours
    assert NODES.allocation(ours) == theirs


def test_their_placer_may_begin_in_the_middle_and_split_a_job() -> None:
    """Six GPUs from node 2 on, and the rest on node 0: the order of their list does not matter to us."""
    found = NODES.placement(("aws", [2, 2, 2, 2, 0, 0]))
    assert found == Placement("t4", "all", (Share("t4-00", 2), Share("t4-02", 4)))


@pytest.mark.parametrize("nothing", [None, (None, ()), ("aws", [])])
def test_job_without_gpus_has_no_placement(nothing: tuple[str | None, list[int]] | None) -> None:
    assert NODES.placement(nothing) is None


def test_restarting_job_is_bound_for_where_it_is_so_that_no_round_moves_it() -> None:
    """Their policy keeps a job where it restarts, too (`preserve_ckpt_allocs`).

    Their countdown of a restart goes on to exist in a job that lost its GPUs meanwhile: it waits.
    """
    held = NODES.placement(("aws", [0, 0]))
    job = SimulatedJob("cifar10-0", "cifar10-0", JobSpec(max_gpus=8), TimedJob("t4", 1.0, 30.0, {}), 5.0, starts=3)
    queued, restarting, running = (
        job_view(job, None, restarting=True),
        job_view(job, held, restarting=True),
        job_view(job, held, restarting=False),
    )
    assert [view.phase for view in (queued, restarting, running)] == [Phase.QUEUED, Phase.STARTING, Phase.RUNNING]
    assert [view.bound_for for view in (queued, restarting, running)] == [None, held, None]
    assert running.running_on == held
    assert {view.restarts for view in (queued, restarting, running)} == {2}


def test_a_perfect_model_has_the_goodput_at_the_best_batch_size() -> None:
    """A job of the catalogue is as fast as its family's estimator says. Three GPUs on two nodes are no configuration."""
    family = load_families()["resnet18-cifar10"]
    model = PerfectModel(ModelledJob(FamilyModel("resnet18-cifar10", family), 1.0), 0)
    nodes, gpus = np.array([1, 1, 2, 2]), np.array([1, 4, 8, 3])
    expected = family.estimator().goodput("t4", nodes[:3], gpus[:3])
    found = model.goodput("t4", nodes, gpus)
    assert found[:3] == pytest.approx(expected, rel=0.02)
    assert found[3] == 0
