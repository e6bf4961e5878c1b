"""A copy of the database on another cluster ends and charges nothing of the one that lives."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock_scheduler.burst.deciding.ledger import CloudBudgets
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import Phase
from penstock_scheduler.simulator.cloud import MemoryRunStore
from tests.cloud.conftest import SITE
from tests.cloud.faulty import Faulty
from tests.cloud.other_cloud import OtherSite
from tests.cloud.test_generations import A10G, end, run_a_job


class Restored(OtherSite):
    """The same database on another machine."""

    home = "cluster c1 of head2"


def a_site(kind: type[OtherSite], store: MemoryRunStore, cloud: Faulty, share: Path) -> OtherSite:
    budget = CloudBudgets.model_validate({"site": {"usd_total": 10_000.0}})
    settings: Any = BurstSettings(
        site=UUID(SITE), name="penstock", share=share, by_default=True, wait="no-wait", budget=budget
    ).model_copy(update={"reconcile_s": 1.0})
    kept: Any = store
    return kind(settings, kept, cloud)


@pytest.fixture
def site(tmp_path: Path) -> OtherSite:
    return a_site(OtherSite, MemoryRunStore(), Faulty(SITE, [A10G], time.time), tmp_path / "share")


def restored(site: OtherSite, share: Path) -> OtherSite:
    (cloud,) = site.providers
    assert isinstance(cloud, Faulty)
    return a_site(Restored, copy.deepcopy(site.store), cloud, share)  # type: ignore[arg-type]


def test_a_copy_of_the_store_looks_only_and_says_so(site: OtherSite, tmp_path: Path) -> None:
    run_a_job(site, "7")
    other = restored(site, tmp_path / "other")
    lines = len(other.store.cloud_ledger())
    other.submit("9")
    other.ticks(5)
    assert len(site.alive()) == 1
    assert other.state.offers == ()
    assert len(other.store.cloud_ledger()) == lines
    assert "the store belongs to cluster c1 of head1, and this is cluster c1 of head2" in " ".join(other.state.troubles)
    site.crash()
    site.ticks(3)
    assert site.jobs["7"].phase is Phase.RUNNING
    assert site.state.troubles == ()


def test_the_end_of_protected_mode_takes_over_no_copied_store(site: OtherSite, tmp_path: Path) -> None:
    run_a_job(site, "7")
    other = restored(site, tmp_path / "other")
    other.tick()
    other.store.set_control(PROTECTED, "no permission")
    assert other.cloud.end_protection() == ("no permission",)
    other.ticks(3)
    assert "run `penstock cloud adopt`" in " ".join(other.state.troubles)
    assert len(site.alive()) == 1


def test_a_store_is_adopted_only_once_slurm_has_said_which_cluster_it_is(site: OtherSite, tmp_path: Path) -> None:
    run_a_job(site, "7")
    other = restored(site, tmp_path / "other")
    assert other.cloud.adopt() == ""
    other.ticks(2)
    assert "head2" in " ".join(other.state.troubles)


def test_a_restored_head_node_goes_on_after_one_command(site: OtherSite, tmp_path: Path) -> None:
    run_a_job(site, "7")
    other = restored(site, tmp_path / "other")
    other.jobs, other.on = dict(site.jobs), dict(site.on)
    other.ticks(3)
    assert [run.state for run in other.state.runs] == ["running"]
    assert other.cloud.adopt() == "cluster c1 of head1"
    other.ticks(3)
    assert other.state.troubles == ()
    assert other.cloud.adopt() == ""
    end(other, "7")
    assert other.alive() == []
    other.crash()
    other.ticks(2)
    assert other.state.troubles == ()
