"""Jobs that leave shared GPUs, and jobs that come in their place."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Limit, Pack, SharedGpus
from penstock_scheduler.sharing.slices import next_packs
from tests.scheduler.builders import job
from tests.slurm_plugin.test_cluster import pending

from .site import Site, bound, carried, group, placeholder


@pytest.mark.parametrize("own", [False, True], ids=["cleared", "with GPUs of Slurm's"])
@pytest.mark.parametrize(("host", "guest"), [("7", "8"), ("8", "7")])
def test_a_guest_that_leaves_runs_on_beside_its_host_until_it_has_left(
    site: Site, host: str, guest: str, own: bool
) -> None:
    """As it was, with the same limits and the same promise, also in the look before it is asked to leave."""
    site.commands.indexes = {host: (0,), "20": (0,)}
    packed = SharedGpus("n0", 1, (Pack((host, guest), 1, 0, host, (Limit(), Limit(memory_mb=4000))),), 10.0)
    here = carried(host, 0), carried(guest, 0)
    hosts, others = bound(host, 1 if own else None), () if own else (placeholder("20"),)
    site.told(*here)
    site.look(hosts, bound(guest), others=others, used=1)
    site.agents.share([packed])
    before = site.order()
    assert [(each.shared, each.devices) for each in before.groups] == [(packed, (0,))]
    site.told(*here, order=before.number, groups=[(packed, packed.packs)])
    for leaves in (False, True, True):
        site.look(hosts, bound(guest, leaves=leaves), others=others, used=1)
        site.agents.share([])
        assert site.order().groups == before.groups
        assert host not in site.agents.misplaced
    site.look(hosts, others=others, used=1)
    site.agents.share([])
    assert [each.shared.jobs for each in site.order().groups] == ([] if own else [(host,)])


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
def test_one_that_leaves_while_it_is_suspended_saves_next_but_for_who_is_not_suspended_for_it(
    site: Site, spec: dict[str, object], promised: bool, first: str
) -> None:
    """8 is to leave 7's GPU. 7 has had far more of it, and runs on where it is promised its speed, stays, or matters more."""
    site.commands.indexes = {"20": (0,)}
    shared = group("7", "8")
    if promised:
        shared = SharedGpus("n0", 1, (Pack(("7", "8"), guaranteed="7"),))
    ran = [Pack(("7",), guaranteed="7" if promised else None)]
    orders = []
    for _ in range(3):
        site.told(carried("7", 0), carried("8", 0, state="suspended"), groups=[(shared, ran)])
        site.look(bound("7", **spec), bound("8", leaves=True), others=(placeholder("20"),), used=1)
        site.agents.share([])
        (ordered,) = site.order().groups
        shared, orders = ordered.shared, [*orders, ordered]
        served = {pack: 100.0 if pack.jobs == ("7",) else 0.0 for pack in shared.packs}
        ran = [pack for pack in shared.packs if pack.jobs == ("7",)]
        assert [pack.jobs for pack in next_packs(shared.packs, served, 1, ran)] == [(first,)]
    assert orders == orders[:1] * 3, "an agent begins no new slice at each look"


def test_who_comes_in_the_place_of_one_that_leaves_waits_for_it(site: Site) -> None:
    """7 is to be packed with 9 instead of 8, or with 6, which takes turns with both: then 6 goes on taking turns."""
    site.commands.indexes = {"20": (0,)}
    packed = Pack(("7", "8"))
    before = SharedGpus("n0", 1, (packed, Pack(("6",))))
    site.told(carried("6", 0, state="suspended"), carried("7", 0), carried("8", 0), groups=[(before, [packed])])
    found = bound("6"), bound("7"), bound("8", leaves=True)
    new = job("9"), pending("gpu", id="9", number=9)
    site.look(*found, new, others=(placeholder("20"),), used=1)
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
    site.look(*leave, bound("9"), others=(placeholder("20"),), used=1)
    site.agents.share([group("9")])
    (ordered,) = site.order().groups
    assert [pack.jobs for pack in next_packs(ordered.shared.packs, dict.fromkeys(ordered.shared.packs, 0.0), 1)] == [
        ("7", "8")
    ]


def test_one_that_is_about_to_be_asked_to_leave_makes_nobody_else_start_anew(site: Site) -> None:
    """The plan has 7 and 9 on the GPU, and says nothing of 6, which is there, too, and came before them."""
    site.commands.indexes = {"20": (0,)}
    site.told(*(carried(number, 0) for number in "679"))
    site.look(*(bound(number) for number in "679"), others=(placeholder("20"),), used=1)
    site.agents.share([group("7", "9")])
    assert site.agents.misplaced == {"6"}
