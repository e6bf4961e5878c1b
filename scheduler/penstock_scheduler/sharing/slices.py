"""Time slicing: packs of jobs take turns on the GPUs of a node.

After *Gandiva: Introspective cluster scheduling for deep learning* (OSDI '18), section 3.1. At the end of each slice the packs
that have run least go on; among equals the one that runs stays, which spares it a suspend. A resumed job may get any GPU
of the node, so six jobs on four GPUs get 4/6 each. What a pack has had goes on until it is off its GPUs, and that of the next one
begins then: who is slow to leave loses by it, not its neighbours.

Of trials of one search that take turns, a better one takes the place in line of a worse one that is due, and they change what
they count as having had: the search has as much as before, and so has everybody else.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from penstock_scheduler.model import Pack


def turn(
    packs: Sequence[Pack],
    served_s: Mapping[Pack, float],
    gpus: int,
    running: Collection[Pack] = (),
    *,
    pinned: Mapping[Pack, frozenset[int]] | None = None,
    keep: Collection[Pack] = (),
    last: Collection[Pack] = (),
) -> tuple[Pack, ...]:
    """The packs of the next slice.

    The pack that is first in line always runs, so a gang does not wait for ever behind small jobs; who comes after it and
    still fits fills up. A higher priority goes before a lower one, whatever they have had.

    Args:
        packs: in the order in which they came.
        served_s: time each has held its GPUs. One that is new counts as what `entry_s` says.
        gpus: GPUs of the node that are shared; a pack that needs more never runs.
        running: the packs of the slice that is over.
        pinned: the GPUs that a pack cannot do without, as one whose jobs left something there; of two that want the same only
            one runs. A pack that is not in it, or has none, takes any.
        keep: packs that cannot be suspended now: they go before all others.
        last: packs that had better not run now: they go behind all others, whatever their priority.
    """
    line = sorted(
        packs,
        key=lambda pack: (pack not in keep, pack in last, -pack.priority, served_s[pack], pack not in running),
    )
    line = by_rank(line, pinned or {}, keep, last)
    chosen: list[Pack] = []
    taken: frozenset[int] = frozenset()
    for pack in line:
        wanted = (pinned or {}).get(pack, frozenset())
        count = max(pack.gpus, len(wanted))
        if count <= gpus and taken.isdisjoint(wanted):
            chosen.append(pack)
            taken |= wanted
            gpus -= count
    return tuple(chosen)


def by_rank(
    line: Sequence[Pack],
    pinned: Mapping[Pack, frozenset[int]],
    keep: Collection[Pack] = (),
    last: Collection[Pack] = (),
) -> list[Pack]:
    """The line when the trials of each search stand in its places by their rank; among equals the order stays.

    Places change hands only among packs of one size and priority that can do with the same GPUs: to the others they are alike.

    Args:
        line: who is first in line, first.
        pinned: see `turn`.
        keep: likewise.
        last: likewise.
    """
    places: dict[Hashable, list[int]] = {}
    for place, pack in enumerate(line):
        if pack.search:
            alike = (pack.search, pack.priority, pack.gpus, pinned.get(pack, frozenset()), pack in keep, pack in last)
            places.setdefault(alike, []).append(place)
    after = list(line)
    for some in places.values():
        for place, pack in zip(some, sorted((line[each] for each in some), key=lambda pack: pack.rank), strict=True):
            after[place] = pack
    return after


def handed_on(
    packs: Sequence[Pack],
    served_s: Mapping[Pack, float],
    pinned: Mapping[Pack, frozenset[int]],
    last: Collection[Pack] = (),
) -> dict[Pack, float]:
    """What each pack counts as having had, when the better ranked trials of a search have the places of those that had less."""
    line = sorted(packs, key=lambda pack: served_s[pack])
    return {pack: served_s[due] for due, pack in zip(line, by_rank(line, pinned, last=last), strict=True)}


def entry_s(started_s: Collection[float], slice_s: float) -> float:
    """What a newcomer counts as having had: one slice less than the least, so that its first slice is the next one.

    It is early feedback for its user, and at most one slice more than its part.

    Args:
        started_s: what those have had who have run; others who wait for their first slice do not count, and stay before it.
        slice_s: length of a slice.
    """
    return min(started_s) - slice_s if started_s else 0.0
