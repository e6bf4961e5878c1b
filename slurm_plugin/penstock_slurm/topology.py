"""Which GPUs of a node are best taken together, by how they are connected. No side effects."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

Links = Sequence[Sequence[int]]
"""How well each two GPUs are connected, as `Nvml.links` of `penstock_profiles` tells it; empty: not known."""

MOST_SETS = 2000
"""As many sets are compared: all of any size among 12 GPUs, all up to four among 16."""


def choose(free: Collection[int], count: int, links: Links, beside: Collection[int] = ()) -> tuple[int, ...]:
    """So many of the free GPUs, or all if they are fewer, in the order of their indexes.

    They are the set of which, together with those `beside` it, the worst connected pair is best; then that with the greatest sum
    over all pairs; then the one that leaves the greatest sum among the rest, so that one GPU is not taken out of a pair; then
    the lowest indexes. Where there are more than `MOST_SETS` sets, one is grown from each GPU, the best next one at a time.
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
    """How well each two of them are connected; 0 of those that nothing is known of."""
    return [links[a][b] if a < len(links) and b < len(links[a]) else 0 for a, b in combinations(devices, 2)]
