"""Which job gets which of the GPUs that its group has on the node. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock_scheduler.model import JobId, Pack
from penstock_slurm.topology import Links, choose


def bind(
    running: Sequence[Pack],
    devices: Sequence[int],
    held: Mapping[JobId, tuple[int, ...]],
    pins: Mapping[JobId, frozenset[int]],
    gpus: Mapping[JobId, int],
    links: Links = (),
) -> dict[JobId, tuple[int, ...]]:
    """The GPUs of each job of the packs that run; () for one that finds none.

    Packs have GPUs of their own. Who is pinned keeps its GPUs, and who runs keeps them if it can; others get those that are best
    connected. Within a pack a job gets those that the fewest others of the pack use.

    Args:
        running: `slices.turn` has seen to it that they fit, pins included.
        devices: GPUs of the group, by index.
        held: those that a job has now.
        pins: those that a job cannot leave.
        gpus: how many each job uses.
        links: see `choose`.
    """
    own: dict[Pack, list[int]] = {}
    for pack in running:
        own[pack] = sorted(frozenset[int]().union(*(pins.get(job, frozenset()) for job in pack.jobs)))
    taken = {device for mine in own.values() for device in mine}
    for pack in running:
        for device in (each for job in pack.jobs for each in held.get(job, ())):
            if len(own[pack]) < pack.gpus and device in devices and device not in taken:
                own[pack].append(device)
                taken.add(device)
    for pack in running:
        free = {*devices} - taken
        fill = choose(free, pack.gpus - len(own[pack]), links, own[pack])
        own[pack] += fill
        taken.update(fill)
    return {job: each for pack in running for job, each in _within(pack, own[pack], held, pins, gpus, links).items()}


def _within(
    pack: Pack,
    own: Sequence[int],
    held: Mapping[JobId, tuple[int, ...]],
    pins: Mapping[JobId, frozenset[int]],
    gpus: Mapping[JobId, int],
    links: Links,
) -> dict[JobId, tuple[int, ...]]:
    users: Counter[int] = Counter()
    found: dict[JobId, tuple[int, ...]] = {}
    # Who cannot or need not move comes first, then who needs most.
    for job in sorted(
        pack.jobs, key=lambda job: (job not in pins or not pins[job], job not in held, -gpus.get(job, 1))
    ):
        pin, had = pins.get(job, frozenset()), held.get(job, ())
        if pin:
            mine = tuple(sorted(pin))
        elif had and set(had) <= set(own) and len(had) == gpus.get(job, 1):
            mine = had
        else:
            mine = ()
            for often in sorted({users[device] for device in own}):
                equal = [device for device in own if users[device] == often]
                mine = tuple(sorted(mine + choose(equal, gpus.get(job, 1) - len(mine), links, mine)))
        if len(mine) < gpus.get(job, 1):
            mine = ()
        users.update(mine)
        found[job] = mine
    return found
