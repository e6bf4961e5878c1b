"""Time slicing: which packs of a group have its GPUs next.

After *Gandiva: Introspective cluster scheduling for deep learning* (OSDI '18), section 3.1:

1. At the end of each time slice, the packs that have had least time go first. Among equals the running pack stays,
   which saves a suspend.
2. A resumed job may get any GPU of the node, so six jobs on four GPUs get 4/6 each.
3. A pack's time counts until it is off its GPUs, and the next pack's time counts from then on. So a job that is slow to
   leave loses by it, and its neighbours do not.
4. Among time-sliced trials of one search, a better trial takes the place in line of a worse one that is due, and they
   exchange the time that they count as having had. So the search, and every other job, has as much time as before.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from penstock_scheduler.model import Pack


def next_packs(
    packs: Sequence[Pack],
    served_s: Mapping[Pack, float],
    gpus: int,
    running: Collection[Pack] = (),
    *,
    pinned: Mapping[Pack, frozenset[int]] | None = None,
    keep: Collection[Pack] = (),
    last: Collection[Pack] = (),
) -> tuple[Pack, ...]:
    """The packs of the next time slice.

    The first pack in line always runs, so a gang does not wait forever behind small jobs. Later packs fill the
    remaining GPUs. A higher priority goes before a lower one, whatever time they have had.

    Args:
        packs: the packs in the order of their arrival.
        served_s: time that each pack has held its GPUs, s. For a new pack: see `entry_s`.
        gpus: number of shared GPUs of the node. A pack that needs more never runs.
        running: the packs of the time slice that is over.
        pinned: GPUs without which a pack cannot run, for example because its jobs left something there. Of two packs
        that need
            the same GPU only one runs. A pack without an entry runs on any GPUs.
        keep: packs that cannot be suspended now. They go before all others.
        last: packs that should not run now. They go behind all others, whatever their priority.
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
    """The line with the trials of each search sorted by rank into the places of that search. Among equals the order
    stays.

    Only packs of equal size, priority and pinned GPUs change places, so that it makes no difference to other packs.

    Args:
        line: the packs, the first in line first.
        pinned: see `next_packs`.
        keep: see `next_packs`.
        last: see `next_packs`.
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
    """Time that each pack counts as having had, once better trials of a search have taken the places of those with less
    time."""
    line = sorted(packs, key=lambda pack: served_s[pack])
    return {pack: served_s[due] for due, pack in zip(line, by_rank(line, pinned, last=last), strict=True)}


def entry_s(started_s: Collection[float], slice_s: float) -> float:
    """Time that a new job counts as having had, s: one slice less than the least, so that it gets the next time slice.

    This gives its user early feedback, and the job at most one slice more than its part.

    Args:
        started_s: time that the jobs have had which have run. Jobs that wait for their first slice do not count, and
        stay ahead.
        slice_s: length of a time slice, s.
    """
    return min(started_s) - slice_s if started_s else 0.0
