"""Jobs that leave shared GPUs, and jobs that replace them."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Limit, Pack, SharedGpus
from penstock_scheduler.rounds.sharing.slices import next_packs
from tests.scheduler.builders import job
from tests.slurm_plugin.test_cluster import pending

from .site import Site, bound, carried, group, placeholder


@pytest.mark.parametrize("own", [False, True], ids=["cleared", "with GPUs from Slurm"])
@pytest.mark.parametrize(("resident", "joining"), [("7", "8"), ("8", "7")])
def test_a_departing_job_continues_beside_the_other_job_until_it_has_left(
    site: Site, resident: str, joining: str, own: bool
) -> None:
    """The pack stays unchanged, with the same limits and guarantee, also in the observation before the request to leave."""
    site.commands.indexes = {resident: (0,), "20": (0,)}
    packed = SharedGpus("n0", 1, (Pack((resident, joining), 1, 0, resident, (Limit(), Limit(memory_mb=4000))),), 10.0)
    here = carried(resident, 0), carried(joining, 0)
    residents, others = bound(resident, 1 if own else None), () if own else (placeholder("20"),)
    site.told(*here)
    site.observe(residents, bound(joining), others=others, used=1)
    site.agents.share([packed])
    before = site.order()
    assert [(each.shared, each.devices) for each in before.groups] == [(packed, (0,))]
    site.told(*here, order=before.number, groups=[(packed, packed.packs)])
    for leaves in (False, True, True):
        site.observe(residents, bound(joining, leaves=leaves), others=others, used=1)
        site.agents.share([])
        assert site.order().groups == before.groups
        assert resident not in site.agents.misplaced
    site.observe(residents, others=others, used=1)
    site.agents.share([])
    assert [each.shared.jobs for each in site.order().groups] == ([] if own else [(resident,)])


@pytest.mark.parametrize(
    ("spec", "promised", "first"),
    [
        ({}, False, "8"),
        ({}, True, "7"),
        ({"preemptible": False}, False, "7"),
        ({"adaptivity": "fixed"}, False, "7"),
        ({"gpu_class": "guaranteed"}, False, "7"),
    ],
)
def test_a_suspended_departing_job_saves_next_unless_that_would_suspend_a_protected_job(
    site: Site, spec: dict[str, object], promised: bool, first: str
) -> None:
    """8 departs from 7's GPU. 7 has had much more time, but continues if it is guaranteed, not preemptible, or of higher
    priority."""
    site.commands.indexes = {"20": (0,)}
    shared = group("7", "8")
    if promised:
        shared = SharedGpus("n0", 1, (Pack(("7", "8"), guaranteed="7"),))
    ran = [Pack(("7",), guaranteed="7" if promised else None)]
    orders = []
    for _ in range(3):
        site.told(carried("7", 0), carried("8", 0, state="suspended"), groups=[(shared, ran)])
        site.observe(bound("7", **spec), bound("8", leaves=True), others=(placeholder("20"),), used=1)
        site.agents.share([])
        (ordered,) = site.order().groups
        shared, orders = ordered.shared, [*orders, ordered]
        served = {pack: 100.0 if pack.jobs == ("7",) else 0.0 for pack in shared.packs}
        ran = [pack for pack in shared.packs if pack.jobs == ("7",)]
        assert [pack.jobs for pack in next_packs(shared.packs, served, 1, ran)] == [(first,)]
    assert orders == orders[:1] * 3, "an agent does not begin a new slice in each observation"


def test_who_comes_in_the_place_of_one_that_leaves_waits_for_it(site: Site) -> None:
    """7 is to be packed with 9 instead of 8, or with 6, which has its own time slices. Then 6 keeps its time slices."""
    site.commands.indexes = {"20": (0,)}
    packed = Pack(("7", "8"))
    before = SharedGpus("n0", 1, (packed, Pack(("6",))))
    site.told(carried("6", 0, state="suspended"), carried("7", 0), carried("8", 0), groups=[(before, [packed])])
    found = bound("6"), bound("7"), bound("8", leaves=True)
    new = job("9"), pending("gpu", id="9", number=9)
    site.observe(*found, new, others=(placeholder("20"),), used=1)
    site.agents.share([SharedGpus("n0", 1, (Pack(("7", "9")), Pack(("6",))))])
    assert [each.shared for each in site.order().groups] == [before]
    assert [each.job for each in site.order().jobs] == ["6", "7", "8", "9"]
    site.agents.share([SharedGpus("n0", 1, (Pack(("7", "6")),))])
    assert [each.shared for each in site.order().groups] == [before]


def test_two_that_leave_together_run_on_together(site: Site) -> None:
    site.commands.indexes = {"20": (0,)}
    before = SharedGpus("n0", 1, (Pack(("7", "8")), Pack(("9",))))
    site.told(carried("7", 0), carried("8", 0), carried("9", 0, state="suspended"), groups=[(before, before.packs[:1])])
    leave = bound("7", leaves=True), bound("8", leaves=True)
    site.observe(*leave, bound("9"), others=(placeholder("20"),), used=1)
    site.agents.share([group("9")])
    (ordered,) = site.order().groups
    assert [pack.jobs for pack in next_packs(ordered.shared.packs, dict.fromkeys(ordered.shared.packs, 0.0), 1)] == [
        ("7", "8")
    ]


def test_a_job_that_is_about_to_depart_restarts_no_other_job(site: Site) -> None:
    """The plan has 7 and 9 on the GPU, and does not name 6, which is there, too, and came before them."""
    site.commands.indexes = {"20": (0,)}
    site.told(*(carried(number, 0) for number in "679"))
    site.observe(*(bound(number) for number in "679"), others=(placeholder("20"),), used=1)
    site.agents.share([group("7", "9")])
    assert site.agents.misplaced == {"6"}
