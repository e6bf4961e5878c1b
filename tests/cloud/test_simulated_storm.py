"""A thousand faults of providers in memory: two sites of one account, each in two places, beside an instance of nobody's.

tests/cloud/test_storm.py has the same on moto over HTTP, with fewer faults, since each takes seconds there.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.instances import PROTECTED, PROTECTED_PLACES
from penstock_scheduler.burst.manager.manager import BurstManager
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.provider import DescribedInstance, Kind, Listed, Machine
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.simulator.cloud import MemoryRunStore
from tests.cloud.conftest import SITE
from tests.cloud.faulty import Faulty, SimulatedFault
from tests.cloud.other_cloud import OtherSite
from tests.cloud.site import Watched
from tests.cloud.test_ownership import OTHER
from tests.cloud.test_storm import Killed, mortal

PLACES = {"near": 1.0, "far": 1.5}
"""Place -> price of an instance, US dollars an hour."""


class Flaky(Faulty):
    """A place that hides its instances now and then. `ended`: what it was asked to end."""

    hidden = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.ended: set[str] = set()

    def list(self, run: str | None = None) -> Listed:
        return self._shown(super().list(run))

    def known(self, ids: Collection[str]) -> Listed:
        return self._shown(super().known(ids))

    def terminate(self, ids: Sequence[str]) -> None:
        self.ended |= {*ids}
        super().terminate(ids)

    def _shown(self, found: Listed) -> Listed:
        if self.hidden < 1:
            return found
        self.hidden -= 1
        return []


class StormSite(OtherSite):
    """A site whose clock is the storm's, and whose daemon can be killed at each lasting step."""

    clock_s = 1.8e9

    @property
    def ahead_s(self) -> float:
        return StormSite.clock_s

    @ahead_s.setter
    def ahead_s(self, seconds: float) -> None:
        StormSite.clock_s = max(seconds, StormSite.clock_s)

    def now_s(self) -> float:
        return StormSite.clock_s

    def open(self) -> BurstManager:
        self.watch = None
        places: list[Any] = [
            Watched(self, each, lambda name: name in ("launch_gang", "terminate")) for each in self.providers
        ]
        store: Any = Watched(self, self.store, lambda name: name in ("save_cloud_run", "charge", "set_control"))
        nodes: Any = Watched(self, self, lambda name: name == "power_down")
        return BurstManager(Places(places), self.settings, store, self, nodes, random.Random(1), None, None)

    @property
    def places(self) -> list[Flaky]:
        return [each for each in self.providers if isinstance(each, Flaky)]

    def _alive(self) -> set[str]:
        owned = [each for place in self.places for each in place.running() if self.launched(each)]
        return {each.tags["node"] for each in owned}

    def launched(self, seen: DescribedInstance) -> bool:
        """Whether this site has launched an instance, whatever tags that has now."""
        return str(self.settings.site) in seen.id


class SimulatedStorm:
    """Random faults of places and daemons, on jobs that come, leave, run, are recalled and end."""

    def __init__(self, sites: list[StormSite], seed: int) -> None:
        self.sites, self.rng, self.happened = sites, random.Random(seed), Counter[str]()

    def rage(self, faults: int) -> None:
        rng = self.rng
        for number in range(faults):
            site = rng.choice(self.sites)
            job = str(number)
            site.submit(job, max_gpus=rng.choice([1, 1, 2]))
            try:
                kind = rng.choice(
                    ["refused", "lost", "lost", "denied", "hidden", "taken", "stripped", "recalled", "killed", "killed"]
                )
                self.happened[kind] += 1
                getattr(self, kind)(site, rng.choice(site.places))
                offers = [offer for offer in site.state.offers if offer.gpus == site.jobs[job].spec.max_gpus]
                if offers:
                    site.send(job, rng.choice(offers).id, usd=5.0)
                site.ticks(rng.randint(0, 6))
            except Killed:
                site.crash()
            for each in tuple(site.jobs):
                if rng.random() < 0.4:
                    site.finish(each)
            if rng.random() < 0.3:
                site.sleep(3700)
            if rng.random() < 0.5:
                site.store.set_control(PROTECTED, None)  # an admin has read the notice
                site.store.set_control(PROTECTED_PLACES, None)

    def refused(self, site: StormSite, place: Flaky) -> None:
        kind = self.rng.choice([Kind.CAPACITY, Kind.QUOTA, Kind.THROTTLED, Kind.CONFIG])
        place.faults.append(SimulatedFault("launch_gang", kind))

    def lost(self, site: StormSite, place: Flaky) -> None:
        method = self.rng.choice(["launch_gang", "launch_gang", "terminate", "list"])
        done, times = self.rng.random() < 0.5, self.rng.randint(1, 3)
        place.faults.append(SimulatedFault(method, Kind.LOST, done=done, times=times))

    def denied(self, site: StormSite, place: Flaky) -> None:
        place.faults.append(SimulatedFault("terminate", Kind.CONFIG, times=self.rng.randint(1, 3)))

    def hidden(self, site: StormSite, place: Flaky) -> None:
        place.hidden = self.rng.randint(1, 6)

    def mine(self, site: StormSite, place: Flaky) -> str | None:
        """An instance of one of the site's open runs that runs."""
        rows = [BurstRun.model_validate_json(row.record) for row in site.store.cloud_runs()]
        known = {slot.instance for run in rows for slot in run.slots}
        return self.rng.choice([each.id for each in place.running() if each.id in known] or [None])

    def taken(self, site: StormSite, place: Flaky) -> None:
        if (one := self.mine(site, place)) is not None:
            place.end(one)

    def stripped(self, site: StormSite, place: Flaky) -> None:
        if (one := self.mine(site, place)) is not None:
            seen = place.world[one]
            tags = {key: value for key, value in seen.tags.items() if key != "site"}
            place.world[one] = dataclasses.replace(seen, tags=tags)

    def recalled(self, site: StormSite, place: Flaky) -> None:
        if site.away:
            site.recall(self.rng.choice(site.away))

    def killed(self, site: StormSite, place: Flaky) -> None:
        mortal(site, self.rng.randint(0, 3), before=self.rng.random() < 0.5)

    def calm_down(self) -> None:
        for site in self.sites:
            for place in site.places:
                place.faults.clear()
                place.hidden = 0
            site.crash()
            site.store.set_control(PROTECTED, None)
            site.store.set_control(PROTECTED_PLACES, None)
            for job in tuple(site.jobs):
                site.finish(job)
            site.tick()
            site.until(lambda site=site: not site.state.runs, most=300)
            site.ticks(3)


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StormSite]:
    """Makes sites of one account, in two places."""
    monkeypatch.setattr("penstock_scheduler.burst.manager.places.APPEARS_S", 10.0)
    monkeypatch.setattr(StormSite, "clock_s", 1.8e9)
    world: dict[str, DescribedInstance] = {}

    def make(site: str) -> StormSite:
        given = {
            "site": site,
            "name": "lab",
            "share": tmp_path / site,
            "by_default": True,
            "wait": "no-wait",
            "budget": {"site": {"usd_total": 1e6}},
        }
        places = []
        for name, usd_per_h in PLACES.items():
            machine = Machine("g5.xlarge", "on-demand", "a10g", 1, 4, 16000, usd_per_h)
            places.append(Flaky(site, [machine], lambda: StormSite.clock_s, name=name, world=world))
        store: Any = MemoryRunStore()
        settings = CloudSettings.model_validate(given).model_copy(update={"reconcile_s": 1.0})
        return StormSite(settings, store, *places)

    return make


def test_an_instance_that_ends_while_the_daemon_is_dead_is_paid_for_from_its_launch(
    make_site: Callable[..., StormSite],
) -> None:
    """The daemon dies once it has noted the instance of an order. The next one placed the order again, and paid from then."""
    site = make_site(SITE)
    site.submit("7")
    site.tick()
    steps = mortal(site, 2, before=False)
    with pytest.raises(Killed):
        site.send("7", "g5.xlarge@near", usd=5.0)
    assert steps == ["save_cloud_run", "launch_gang", "save_cloud_run"]
    site.sleep(1800)
    near = site.places[0]
    near.end(near.running()[0].id)
    site.crash()
    site.tick()
    site.until(lambda: not site.state.runs)
    assert site.spent_usd() == pytest.approx(near.bill_usd(), abs=1e-6)
    assert site.spent_usd() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_after_1000_faults_nothing_is_ownerless_or_double_and_every_cent_is_in_the_ledger(
    make_site: Callable[..., StormSite], seed: int
) -> None:
    sites = [make_site(SITE), make_site(OTHER)]
    world = sites[0].places[0].world
    nobodys = DescribedInstance("i-stranger", "running", "g5.xlarge", "near", 1.8e9, None, {}, "near")
    world[nobodys.id] = nobodys
    storm = SimulatedStorm(sites, seed)
    storm.rage(1000)
    storm.calm_down()

    alive = [each.id for each in world.values() if not each.gone]
    assert alive == [nobodys.id], "no instance without an owner"
    for site in sites:
        asked = {id_ for place in site.places for id_ in place.ended}
        assert all(str(site.settings.site) in id_ for id_ in asked), "a stranger's instance was ended"
        launched = Counter((each.tags["run"], each.tags["node"]) for each in world.values() if site.launched(each))
        assert set(launched.values()) <= {1}, "launched twice"
        assert site.spent_usd() == pytest.approx(sum(place.bill_usd() for place in site.places), abs=1e-6)
        assert site.spent_usd() > 10
    assert min(storm.happened.values()) > 50
    assert {each.region for each in world.values()} == set(PLACES)
