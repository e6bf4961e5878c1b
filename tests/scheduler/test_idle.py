"""Since when GPUs are idle, by observations of the cluster."""

from __future__ import annotations

from penstock_scheduler.model import Job, Pack, Phase, SharedGpus
from penstock_scheduler.rounds.idle import idle_since
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import job, on


def _grows(gpus: int = 1, **more: object) -> Job:
    return job("a", phase=Phase.RUNNING, allocation=on("t4", t4_00=gpus), grow_shrink=True, **more)  # type: ignore[arg-type]


def _has(gpus: int, phase: Phase = Phase.RUNNING, **more: object) -> Job:
    return job("b", phase=phase, allocation=on("t4", t4_00=gpus), **more)  # type: ignore[arg-type]


def test_the_gpu_that_came_free_last_is_taken_first():
    """Of three idle since 10, 20 and 30 two are taken at 40; at 50 both are free again, and count from then."""
    nodes = nodes_from_spec("t4:2x4")
    assert idle_since({}, nodes, [_grows()], (), 10.0) == {"t4-00": (10.0, 10.0, 10.0)}, (
        "on the other is nobody who grows"
    )
    known = idle_since({"t4-00": (10.0, 20.0, 30.0)}, nodes, [_grows(), _has(2)], (), 40.0)
    assert known == {"t4-00": (10.0,)}
    assert idle_since(known, nodes, [_grows()], (), 50.0) == {"t4-00": (10.0, 50.0, 50.0)}
    assert idle_since(known, nodes, [_has(2)], (), 50.0) == {}, "the job that grows has gone"


def test_gpus_to_which_a_job_is_on_its_way_are_not_idle():
    nodes = nodes_from_spec("t4:1x4")
    going = _has(1, Phase.STOPPING, target=on("t4", t4_00=2))
    assert idle_since({}, nodes, [_grows(), going], (), 10.0) == {"t4-00": (10.0,)}


def test_gpus_that_jobs_share_count_once():
    nodes = nodes_from_spec("t4:1x4")
    group = SharedGpus("t4-00", 2, (Pack(("b",), 2), Pack(("c",), 2)))
    others = [_has(2), job("c", phase=Phase.RUNNING, allocation=on("t4", t4_00=2))]
    assert idle_since({}, nodes, [_grows(), *others], (group,), 10.0) == {"t4-00": (10.0,)}
