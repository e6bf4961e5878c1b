"""Chooses GPUs of a node that are well connected. No side effects."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

Links = Sequence[Sequence[int]]
"""How well each two GPUs are connected, from `Nvml.links` of `penstock_profiles`; empty: not known."""

MOST_SETS = 2000
"""Most sets that are compared: enough for all sets among 12 GPUs, and for sets of up to four among 16."""


def choose(free: Collection[int], count: int, links: Links, beside: Collection[int] = ()) -> tuple[int, ...]:
    """`count` of the free GPUs, or all if they are fewer, in the order of their indexes.

    Among all sets, together with the GPUs `beside` them, the choice is by: the best worst-connected pair; then the greatest sum
    over all pairs; then the greatest sum over the pairs that remain, so that a pair is not torn apart; then the lowest indexes.
    With more than `MOST_SETS` sets, one set is grown greedily from each GPU.
    """
    pool = sorted(free)
    count = max(min(count, len(pool)), 0)
    if not links or count in (0, len(pool)):
        return tuple(pool[:count])

    def worth(chosen: Sequence[int]) -> tuple[int, int, int]:
        together = _between((*beside, *chosen), links)
        rest = _between((device for device in pool if device not in chosen), links)
        return min(together, default=0), sum(together), sum(rest)

    if math.comb(len(pool), count) <= MOST_SETS:
        return max(combinations(pool, count), key=worth)
    grown = []
    for first in pool:
        chosen = [first]
        while len(chosen) < count:
            chosen.append(max((each for each in pool if each not in chosen), key=lambda each: worth([*chosen, each])))
        grown.append(tuple(sorted(chosen)))
    return max(grown, key=worth)


def _between(devices: Iterable[int], links: Links) -> list[int]:
    """How well each two of these GPUs are connected; 0 where it is not known."""
    return [links[a][b] if a < len(links) and b < len(links[a]) else 0 for a, b in combinations(devices, 2)]
