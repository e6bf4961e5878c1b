"""Jobs that Slurm does not start where they are sent hold no GPUs in a plan while they wait to be sent again."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_scheduler.model import Hold, Node, NodeChoice, Phase, Placement, Progress, Share, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.jobs.unstarted import MOST_S, Unstarted
from penstock_slurm.settings import SlurmSettings
from tests.scheduler.builders import job, on
from tests.slurm_plugin.test_cluster import Told, pending

HERE = on("t4", n0=1)
QUEUED = {"7": job("7")}
RUNNING = {"7": job("7", phase=Phase.RUNNING, allocation=on("t4", n0=1))}


def test_each_attempt_in_vain_doubles_the_wait_for_the_next() -> None:
    """A first failure may be of the place. From the second on: 60 s, 120 s, and so on, half an hour at most."""
    unstarted, now_s, waits = Unstarted(60.0), 1000.0, []
    for _ in range(9):
        unstarted.refused("7", HERE, "Slurm did not start it in 60 s: Resources", now_s)
        begun_s = now_s
        while unstarted.paused(QUEUED, (), now_s):
            now_s += 1.0
        waits.append(now_s - begun_s)
        now_s += 60.0
    assert waits == [0.0, 60.0, 120.0, 240.0, 480.0, 960.0, MOST_S, MOST_S, MOST_S]


def test_what_fails_at_each_tick_is_one_attempt() -> None:
    unstarted = Unstarted(60.0)
    for tick in range(60):
        unstarted.refused("7", HERE, "refused", 1000.0 + tick)
    assert not unstarted.paused(QUEUED, (), 1060.0)
    unstarted.refused("7", HERE, "refused", 1060.0)
    assert unstarted.paused(QUEUED, (), 1119.9)
    assert not unstarted.paused(QUEUED, (), 1120.0)


def test_another_attempt_within_the_time_counts_if_it_was_on_other_nodes() -> None:
    unstarted = Unstarted(60.0)
    unstarted.refused("7", HERE, "refused", 1000.0)
    assert tried(unstarted, there := nodes("n0", "n1", "n2"), 1001.0) == {"n0"}
    unstarted.refused("7", on("t4", n1=1), "refused", 1012.0)
    assert unstarted.paused(QUEUED, (), 1071.0)
    assert tried(unstarted, there, 1072.0) == {"n0", "n1"}


def test_a_job_that_ran_begins_anew_and_one_that_was_held_does_not() -> None:
    for jobs, others, again in ((RUNNING, (), True), ({}, (), True), ({}, ("7",), False)):
        unstarted = Unstarted(60.0)
        unstarted.refused("7", HERE, "refused", 1000.0)
        unstarted.refused("7", HERE, "refused", 1060.0)
        assert unstarted.paused(QUEUED, (), 1061.0)
        assert not unstarted.paused(jobs, others, 1062.0)
        assert bool(unstarted.paused(QUEUED, (), 1063.0)) is not again


def nodes(*names: str, **fields: object) -> tuple[Node, ...]:
    return tuple(Node(name, "t4", 4, ("all",), **fields) for name in names)  # type: ignore[arg-type]


def tried(unstarted: Unstarted, there: tuple[Node, ...], now_s: float, **fields: object) -> set[str]:
    """The nodes that a round may not give the job."""
    jobs = {"7": job("7", **fields)}  # type: ignore[arg-type]
    jobs |= unstarted.elsewhere(jobs, there, now_s)
    return {node.name for node in there if jobs["7"].nodes is not None and not jobs["7"].nodes.admits(node)}


def test_the_next_attempt_is_on_a_node_that_was_not_tried() -> None:
    unstarted, there = Unstarted(60.0), nodes("n0", "n1", "n2")
    assert tried(unstarted, there, 1000.0) == set()
    unstarted.refused("7", HERE, "refused", 1000.0)
    assert tried(unstarted, there, 1001.0) == {"n0"}
    assert tried(unstarted, there, 1121.0) == set(), "the others have had no room for two minutes: any node may do"
    unstarted.refused("7", on("t4", n1=1), "refused", 1100.0)
    assert tried(unstarted, there, 1160.0) == {"n0", "n1"}, "the pause is over, and the third node is left"
    unstarted.refused("7", on("t4", n2=1), "refused", 1300.0)
    assert tried(unstarted, there, 1301.0) == set(), "all were tried"


def test_nodes_that_lack_something_are_tried_one_after_the_other_without_a_wait() -> None:
    """At most ten of them. When none is left, the job waits longer and longer, and begins with the first one again."""
    unstarted, there = Unstarted(60.0), nodes(*(f"n{n}" for n in range(13)))
    now_s, seen = 1000.0, list[tuple[str, float]]()
    for _ in range(40):
        waits_s = 0.0
        while unstarted.paused(QUEUED, (), now_s):
            now_s, waits_s = now_s + 1.0, waits_s + 1.0
        left = [node.name for node in there if node.name not in tried(unstarted, there, now_s)]
        seen.append((left[0], waits_s))
        now_s += 12.0
        unstarted.refused("7", on("t4", **{left[0]: 1}), "Resources", now_s, nodes_lack=True)
        now_s += 48.0
    names = [name for name, _ in seen]
    assert names[:13] == [node.name for node in there]
    assert set(names[13:27]) == set(names[:13]), "all of them again"
    assert [waits_s for _, waits_s in seen[:10]] == [0.0] * 10
    assert max(waits_s for _, waits_s in seen[10:14]) > 0.0
    assert sum(waits_s > 0 for _, waits_s in seen) < 10


@pytest.mark.parametrize(
    ("others", "fields"),
    [
        (nodes("n1", may_start=False), {}),
        (nodes("n1", reservation="maintenance"), {}),
        (nodes("n1"), {"gpu_types": ["a100"]}),
        (nodes("n1"), {"nodes": NodeChoice(exclude=frozenset({"n1"}))}),
        (nodes("n1"), {"partitions": ("other",)}),
    ],
    ids=["down", "reserved", "type", "excluded", "partition"],
)
def test_a_job_without_other_nodes_is_sent_to_the_same_ones_again(
    others: tuple[Node, ...], fields: dict[str, object]
) -> None:
    unstarted = Unstarted(60.0)
    unstarted.refused("7", HERE, "refused", 1000.0)
    own = {"n1"} if "nodes" in fields else set()
    assert tried(unstarted, (*nodes("n0"), *others), 1001.0, **fields) == own


def test_as_many_other_nodes_are_needed_as_the_job_has() -> None:
    unstarted = Unstarted(60.0)
    unstarted.refused("7", on("t4", n0=4, n1=4), "refused", 1000.0)
    assert tried(unstarted, nodes("n0", "n1", "n2"), 1001.0) == set()
    assert tried(unstarted, nodes("n0", "n1", "n2", "n3"), 1001.0) == {"n0", "n1"}


class Stubborn(Told):
    """A Slurm that starts nothing, and a cluster on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clock = SimulatedClock(1000.0)
        spool = Spool(folder / "spool", alone=True)
        settings = SlurmSettings(partitions=("gpu",), spool_dir=spool.folder)
        self.cluster = SlurmCluster(self, self, spool, self.clock, settings, lambda spec: None)  # type: ignore[arg-type]
        self.listed = [pending("gpu", id="7", reason="JobHeldUser", restarts=0, uid=7)]

    def ticks(self, seconds: int) -> list[bool]:
        """In each second, whether a plan may give the job GPUs; while it may, the plan does, in rounds of a minute."""
        seen = []
        for _ in range(seconds):
            self.clock.sleep(1.0)
            state = self.cluster.observe()
            planned = [each.id for each in state.jobs] == ["7"]
            placement = Placement("t4", "gpu", (Share("n0", 1),))
            starts = [Start("7", int(self.clock.now_s() // 60), placement)] if planned else []
            self.outcomes = self.cluster.apply(starts)
            self.waiting = state.waiting
            seen.append(planned)
        return seen


def test_a_job_that_slurm_never_starts_leaves_its_gpus_to_others_ever_longer(tmp_path: Path) -> None:
    slurm = Stubborn(tmp_path)
    seen = slurm.ticks(7200)
    assert all(seen[:60]), "once more at once"
    assert sum(seen[3600:]) < 300, "a few minutes an hour"
    slurm.ticks(60)
    (waits,) = slurm.waiting
    assert waits.code == "waiting-cluster"
    assert "to be sent again, after" in waits.text
    assert not [each for each in slurm.outcomes if isinstance(each.action, Hold) or each.progress is Progress.FAILED]
