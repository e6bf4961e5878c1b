"""What a user gains by taking a running job away from Penstock: `scontrol update JobId=J Comment=x`, or `Requeue=0`.

With a limit of 2 GPUs a user held 8 after some seconds: each job got its GPUs from the elastic jobs of others, became a plain
job, kept its GPUs, and counted no more. Limits of partitions, budgets, usage and turns did not count it either.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.wire import ControlMessage
from penstock_scheduler.accounts.limits import LimitSettings, PartitionRules, site_limits
from penstock_scheduler.accounts.rules import Budget, BudgetSettings, SchedulingRules
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.model import ClusterState, Hold, Phase, Placement, Refusal, Share, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.settings import SlurmSettings
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.loops import Told as ToldCluster
from tests.scheduler.loops import observing
from tests.scheduler.service.api import ADAS, BOBS, serving
from tests.slurm_plugin.test_cluster import Told, pending

CHANGES = {
    "Comment=x": {"comment": "x"},
    "Comment=wrong": {"comment": '{"penstock": {"max_gpus": 0}}'},
    "Requeue=0": {"requeue": False},
}
HERE = Placement("t4", "gpu", (Share("n0", 2),))


@pytest.fixture
def told() -> Told:
    return Told()


def slurm_cluster(told: Told, folder: Path) -> SlurmCluster:
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=folder / "spool")
    return SlurmCluster(told, told, Spool(folder / "spool"), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]


def taken_away(told: Told, cluster: SlurmCluster, change: str) -> ClusterState:
    """A job that Penstock has started runs, and then its user changes it."""
    mine = pending("gpu", account="maths")
    told.listed = [mine]
    cluster.observe()
    cluster.apply([Start("7", 1, HERE)])
    runs = dataclasses.replace(mine, state="RUNNING", nodes=("n0",), gpus_per_node=2, priority=9, start_s=10.0)
    told.listed = [runs]
    assert [each.phase for each in cluster.observe().jobs] == [Phase.RUNNING]
    told.listed = [dataclasses.replace(runs, **CHANGES[change])]  # type: ignore[arg-type]
    return cluster.observe()


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_that_its_user_takes_away_is_seen_with_its_gpus(told: Told, tmp_path: Path, change: str) -> None:
    state = taken_away(told, slurm_cluster(told, tmp_path), change)
    ((seen,), (refused,)) = state.unseen, state.refused
    assert (state.jobs, refused.job, refused.runs) == ((), "7", True)
    assert (seen.id, seen.user, seen.account, seen.allocation) == ("7", refused.user, "maths", HERE)
    assert seen.started_s == 10.0
    assert state.present == {"7": seen}
    assert state.holding == (seen,)
    again = slurm_cluster(told, tmp_path).observe()
    assert again.unseen == state.unseen, "another penstockd knows from the spool which jobs the first one has started"


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_that_penstock_never_sent_anywhere_does_not_count(told: Told, tmp_path: Path, change: str) -> None:
    plain = pending("gpu", state="RUNNING", nodes=("n0",), gpus_per_node=2, priority=9, start_s=10.0)
    told.listed = [dataclasses.replace(plain, **CHANGES[change])]  # type: ignore[arg-type]
    assert slurm_cluster(told, tmp_path).observe().unseen == ()


@pytest.mark.parametrize("change", CHANGES)
def test_it_counts_until_it_ends(told: Told, tmp_path: Path, change: str) -> None:
    cluster = slurm_cluster(told, tmp_path)
    taken_away(told, cluster, change)
    told.listed = [dataclasses.replace(told.listed[0], state="COMPLETING", end_s=20.0)]
    assert cluster.observe().unseen == ()


def test_its_gpus_count_against_every_limit_of_the_site() -> None:
    settings = LimitSettings(gpus_per_user=8, accounts={"maths": 4}, partitions={"gpu": PartitionRules(gpus=12)})
    held = {"phase": Phase.RUNNING, "partitions": ("gpu",)}
    taken = [
        job("8", account="maths", allocation=on("t4", n0=2), **held),
        job("9", allocation=on("t4", n1=8, n2=1), **held),
    ]
    jobs = [job("1", account="maths"), job("2", user="bob", account="maths")]
    limits = {(limit.kind, limit.name): limit.gpus for limit in site_limits(settings, jobs, taken)}
    assert limits == {("user", "ada"): 0, ("user", "bob"): 8, ("account", "maths"): 2, ("partition", "gpu"): 1}


def test_its_gpu_seconds_count_against_its_account_s_budget_as_before(tmp_path: Path) -> None:
    """2 GPUs for 30 s, of which 20 s as a job that its user took away, and a new penstockd after 10 s of them."""
    clock, store = SimulatedClock(), MemoryStore()
    mine = job("1", account="maths", phase=Phase.RUNNING, allocation=on("t4", n0=2), started_s=clock.now_s())
    taken = ClusterState((), (), (Refusal("1", "j", "ada", "", runs=True),), unseen=(mine,))
    for states in ([ClusterState((), (mine,)), ClusterState((), (mine,)), taken], [taken]):
        loop = observing(ToldCluster(list(states)), clock, store)
        for _ in states:
            loop.tick()
            clock.sleep(10.0)
    seen = store.last_round().snapshot
    assert (seen.jobs, seen.unseen, seen.attained) == ((), (mine,), {"1": {"t4": 60.0}})
    ledger = open_store(tmp_path, writer=True)
    budget = BudgetSettings(accounts={"maths": Budget(hard_gpu_hours=1.0)})
    rules = SchedulingRules(budget, LimitSettings(gpus_per_user=3), ledger, lambda view, limit: None)
    other = job("2", account="maths")
    known = dataclasses.replace(snapshot("t4:1x8", [other]), ended_gpu_s=seen.attained, unseen=(mine,))
    found = rules.on(known)
    ledger.close()
    assert [line.used_h for line in found.budgets] == [60 / 3600]
    assert [limit.gpus for limit in found.limits] == [1]


def test_its_end_is_charged_with_all_that_it_held(tmp_path: Path) -> None:
    refused = Refusal("1", "j", "ada", "its comment no longer has the job spec", runs=True)
    with serving(tmp_path) as api:
        state = ClusterState(api.board.state.nodes, (BOBS,), (refused,), unseen=(ADAS,))
        for seconds in (60.0, 120.0):
            api.board.observed(state, 78.0, {"1": {"t4": seconds}})
        with api.client("ada") as ada:
            view = ada.job("1")
            assert (view.state, view.reason, view.gpu_seconds) == ("running", "refused", {"t4": 120.0})
            api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 77.0)}, gpu_seconds={"1": {"t4": 130.0}})
            (line,) = ada.ledger().lines
    assert (line.job, line.amount) == ("1", 130.0)


@pytest.mark.parametrize("first", ["Comment=wrong", "Requeue=0"])
def test_a_job_that_was_plain_before_counts_however_its_user_takes_it_away(
    told: Told, tmp_path: Path, first: str
) -> None:
    """Submitted without a job spec, given one, started, refused for one observation, and then without a job spec again."""
    cluster = slurm_cluster(told, tmp_path)
    mine = pending("gpu")
    told.listed = [dataclasses.replace(mine, comment="")]
    assert cluster.observe().jobs == ()
    told.listed = [mine]
    cluster.observe()
    cluster.apply([Start("7", 1, HERE)])
    runs = dataclasses.replace(mine, state="RUNNING", nodes=("n0",), gpus_per_node=2, priority=9, start_s=10.0)
    for changes in ({}, CHANGES[first], CHANGES["Comment=x"]):
        told.listed = [dataclasses.replace(runs, **changes)]  # type: ignore[arg-type]
        state = cluster.observe()
    assert [each.allocation for each in state.unseen] == [HERE]


SHARED = ControlMessage(job_id="7", epoch=1, round=1, gpu_type="t4", nodes=1, gpus=1, shares=True, submitted_s=0.0)
"""The job runs on one GPU that the GPU reservation holds in Slurm."""


def sharing(told: Told, cluster: SlurmCluster, folder: Path, **fields: object) -> None:
    mine = pending("gpu", comment='{"penstock": {"max_gpus": 4, "gpu_class": "guaranteed"}}', submit_s=0.0)
    told.listed = [mine]
    cluster.observe()
    Spool(folder / "spool").tell(SHARED)
    known = {"state": "RUNNING", "nodes": ("n0",), "gpus_per_node": None, "priority": 9, "start_s": 10.0}
    told.listed = [dataclasses.replace(mine, **(known | fields))]  # type: ignore[arg-type]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_job_that_shares_gpus_stays_managed(told: Told, tmp_path: Path, change: str, state: str) -> None:
    """As a plain job it held no GPUs in Slurm: the other jobs on its GPU stayed suspended, and Slurm gave the GPU to others."""
    cluster = slurm_cluster(told, tmp_path)
    sharing(told, cluster, tmp_path, state=state)
    (before,) = slurm_cluster(told, tmp_path).observe().jobs
    told.listed = [dataclasses.replace(told.listed[0], **CHANGES[change])]  # type: ignore[arg-type]
    cluster = slurm_cluster(told, tmp_path)
    for _ in range(2):
        seen = cluster.observe()
        (mine,) = seen.jobs
        assert (seen.refused, seen.unseen) == ((), ())
        assert (mine.allocation, mine.movable) == (before.allocation, True)


@pytest.mark.parametrize("change", CHANGES)
def test_it_keeps_its_job_spec(told: Told, tmp_path: Path, change: str) -> None:
    spool = Spool(tmp_path / "spool")
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
    cluster = SlurmCluster(told, told, spool, SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]
    mine = pending("gpu", comment='{"penstock": {"max_gpus": 4, "gpu_class": "opportunistic"}}', submit_s=0.0)
    told.listed = [mine]
    cluster.observe()
    spool.tell(SHARED)
    runs = {"state": "RUNNING", "nodes": ("n0",), "gpus_per_node": None, "priority": 9, "start_s": 10.0}
    for changes in ({}, CHANGES[change], CHANGES[change]):
        told.listed = [dataclasses.replace(mine, **(runs | changes))]  # type: ignore[arg-type]
        (seen,) = cluster.observe().jobs
        assert (seen.spec.max_gpus, seen.spec.gpu_class) == (4, "opportunistic")


def test_it_can_be_stopped_although_its_user_forbade_that(told: Told, tmp_path: Path) -> None:
    cluster = slurm_cluster(told, tmp_path)
    sharing(told, cluster, tmp_path, requeue=False)
    cluster = slurm_cluster(told, tmp_path)
    cluster.observe()
    cluster.apply([Hold("7", 1)])
    assert [each.kind for each in told.written] == ["split", "requeue_hold"]
