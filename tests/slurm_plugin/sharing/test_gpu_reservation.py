"""The placeholder jobs of a node's GPU reservation: cases worked by hand, and random histories of a Slurm that allocates the
lowest index first."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_slurm.gateway import UnreadableAnswer
from penstock_slurm.share import gpu_reservation
from penstock_slurm.share.gpu_reservation import (
    Changes,
    GpuReservations,
    Ground,
    Placeholder,
    Sharer,
    changes,
    held,
    stands,
    used,
)
from tests.slurm_plugin.test_cluster import pending

from .site import Commands


def placeholder(number: int, index: int | None = None, after: int | None = None) -> Placeholder:
    return Placeholder(str(number), "n", index, index is not None, after)


def cleared(number: int, *devices: int, stays: bool = True, gpus: int = 1) -> Sharer:
    return Sharer(number, gpus, own=False, devices=frozenset(devices), stays=stays)


def own(number: int, *devices: int, stays: bool = True, shares: bool = True) -> Sharer:
    return Sharer(number, len(devices), own=True, devices=frozenset(devices), stays=stays, shares=shares)


def test_as_many_holders_as_sharers_do_not_hold_themselves():
    """Two GPUs for three jobs. One job has one GPU from Slurm: one placeholder job, and standbys for the end of that job.

    Two of the four GPUs are free, so there are three standbys: whichever two Slurm starts first, the third gets the released
    GPU.
    """
    ground = Ground(gpus=4, free=2, wanted=2, sharers=(own(7, 1),))
    assert changes(ground) == Changes(submit=1, standbys={7: 3})
    assert not stands(ground)
    reserved = dataclasses.replace(
        ground, free=1, placeholders=(placeholder(20, 0), *(placeholder(n, after=7) for n in (21, 22, 23)))
    )
    assert changes(reserved) == Changes()
    assert stands(reserved)


def test_without_co_located_jobs_no_gpu_is_held():
    assert changes(Ground(gpus=4, free=3, wanted=0, sharers=(own(7, 0, shares=False),))) == Changes()
    left = Ground(
        gpus=4, free=2, wanted=0, placeholders=(placeholder(20, 0), placeholder(21), placeholder(22, after=7))
    )
    assert {each.id for each in changes(left).cancel} == {"20", "21", "22"}


def test_a_placeholder_job_whose_gpu_is_used_or_promised_stays():
    """One of three placeholder jobs is enough. 0 is used and the agent may allocate 1, so only the third can be cancelled."""
    three = (placeholder(20, 0), placeholder(21, 1), placeholder(22, 2))
    ground = Ground(gpus=4, free=1, wanted=1, placeholders=three, sharers=(cleared(8, 0),), promised=frozenset({1}))
    assert [each.id for each in changes(ground).cancel] == ["22"]
    unknown = Sharer(8, 1, own=False, devices=None)
    assert changes(dataclasses.replace(ground, sharers=(unknown,))).cancel == ()


def test_when_the_one_with_gpus_leaves_they_are_held_before_it_goes():
    """7 holds GPU 2, to which 8 is bound; 0 and 1 are free. Slurm allocates the lowest: three placeholder jobs, the last waits
    for 2.

    Its three standbys are cancelled for that. Once 2 is held, the placeholder jobs on 0 and 1 end.
    """
    heirs = tuple(placeholder(n, after=7) for n in (20, 21, 22))
    ground = Ground(gpus=4, free=2, wanted=1, placeholders=heirs, sharers=(own(7, 2, stays=False), cleared(8, 2)))
    assert not stands(ground)
    assert changes(ground) == Changes(released=heirs)
    grabbed = (placeholder(20, 0), placeholder(21, 1), placeholder(22))
    waits = dataclasses.replace(ground, free=0, placeholders=grabbed)
    assert changes(waits) == Changes()
    after = dataclasses.replace(waits, placeholders=(*grabbed[:2], placeholder(22, 2)), sharers=(cleared(8, 2),))
    assert [each.id for each in changes(after).cancel] == ["21", "20"]
    assert stands(dataclasses.replace(after, placeholders=(placeholder(22, 2),)))


def test_a_job_that_leaves_wants_no_new_reservation_but_keeps_the_one_that_it_has():
    ground = Ground(gpus=4, free=3, wanted=0, placeholders=(placeholder(20, 0),), sharers=(cleared(8, 0, stays=False),))
    assert changes(ground) == Changes()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_used_is_held_again_however_jobs_end(data):  # noqa: C901, PLR0915 (a random history, step by step)
    """A Slurm with four GPUs that starts waiting jobs by priority, on the lowest free index, and plain jobs.

    In any state in which the GPUs of cleared jobs are held, any co-located job may end, and plain jobs take free GPUs between
    two observations. The GPU reservation is complete again within a few observations, unless a plain job has the GPU. At no
    time does a plain job get a GPU in use.
    """
    gpus = 4
    taken: dict[int, str] = {}
    sharers: dict[int, Sharer] = {}
    free = list(range(gpus))
    if data.draw(st.booleans(), label="one has its own"):
        device = data.draw(st.sampled_from(free))
        free.remove(device)
        taken[device] = "own"
        sharers[7] = own(7, device)
    placeholders: list[Placeholder] = []
    for n in range(data.draw(st.integers(0 if sharers else 1, len(free)), label="placeholders")):
        device = data.draw(st.sampled_from(free))
        free.remove(device)
        placeholders.append(placeholder(20 + n, device))
        taken[device] = str(20 + n)
    bindable = [each.index for each in placeholders if each.index is not None] + [
        d for s in sharers.values() for d in s.devices or ()
    ]
    for n in range(data.draw(st.integers(1, 3), label="cleared")):
        sharers[30 + n] = cleared(30 + n, data.draw(st.sampled_from(bindable)))
    for device in data.draw(st.sets(st.sampled_from(free) if free else st.nothing()), label="strangers"):
        taken[device] = "stranger"
    number = 100

    def ground() -> Ground:
        uses = {device for each in sharers.values() if not each.own for device in each.devices or ()}
        wanted = len(uses | {d for each in sharers.values() if each.own for d in each.devices or ()})
        return Ground(gpus, gpus - len(taken), wanted, tuple(placeholders), tuple(sharers.values()))

    def slurm_starts() -> None:
        for at, each in enumerate(placeholders):
            idle = [device for device in range(gpus) if device not in taken]
            if not each.running and (each.after is None or each.after not in sharers) and idle:
                placeholders[at] = dataclasses.replace(each, index=idle[0], running=True, after=None)
                taken[idle[0]] = each.id

    def observe() -> None:
        nonlocal number
        todo = changes(ground())
        for each in todo.cancel:
            assert each.index not in used(ground())
            placeholders.remove(each)
            if each.index is not None:
                del taken[each.index]
        for each in todo.released:
            placeholders[placeholders.index(each)] = dataclasses.replace(each, after=None)
        for after in (*[None] * todo.submit, *(job for job, most in todo.standbys.items() for _ in range(most))):
            placeholders.append(placeholder(number, after=after))
            number += 1
        slurm_starts()
        placeholders[:] = [dataclasses.replace(e, after=None) if e.after not in sharers else e for e in placeholders]

    for _ in range(3):
        observe()
    assert stands(ground())
    while sharers:
        gone = sharers.pop(data.draw(st.sampled_from(sorted(sharers)), label="ends"))
        if gone.own:
            for device in gone.devices or ():
                del taken[device]
        slurm_starts()
        for device in [each for each in range(gpus) if each not in taken]:  # plain jobs take the remaining GPUs
            if data.draw(st.booleans()):
                taken[device] = "stranger"
        assert used(ground()) <= held(ground()), "a plain job could get it"
        for _ in range(3):
            observe()
        assert not any(device in used(ground()) and who == "stranger" for device, who in taken.items())
    assert not placeholders, "the GPU reservation ends with the last job"


@pytest.mark.parametrize("free", [0, 1, 3])
def test_successors_are_as_many_as_can_be_given_the_wrong_gpu(free):
    assert changes(Ground(gpus=4, free=free, wanted=1, sharers=(own(7, 3),))).standbys == {7: 1 + free}


def test_a_job_whose_gpus_cannot_be_read_is_asked_about_once_a_minute(monkeypatch: pytest.MonkeyPatch):
    """Its user has given it a name that looks like GPUs. An observation has time for the jobs of others."""
    commands = Commands()
    commands.error = UnreadableAnswer("two records of node n0", command="scontrol show job")
    commands.indexes = {"8": (1,)}
    reservations, now_s = GpuReservations(commands), [1000.0]  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_reservation.time, "monotonic", lambda: now_s[0])
    forger, honest = (pending("gpu", id=each, state="RUNNING", nodes=("n0",)) for each in "78")
    for _ in range(5):
        reservations.saw((forger, honest))
        assert reservations.devices(forger) is None
    assert commands.asked == [("gpu_indexes", "7")]
    commands.error = None
    assert reservations.devices(honest) == {1}
    now_s[0] += gpu_reservation.AGAIN_S
    commands.indexes["7"] = (0,)
    assert reservations.devices(forger) == {0}
    reservations.forget(())
    assert not reservations._again_s
