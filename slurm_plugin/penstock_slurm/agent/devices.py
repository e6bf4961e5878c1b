"""Which jobs get which GPUs of their group. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock_scheduler.model import JobId, Pack
from penstock_slurm.share.topology import Links, choose


def bind(
    running: Sequence[Pack],
    devices: Sequence[int],
    held: Mapping[JobId, tuple[int, ...]],
    pins: Mapping[JobId, frozenset[int]],
    gpus: Mapping[JobId, int],
    links: Links = (),
) -> dict[JobId, tuple[int, ...]]:
    """The GPUs of each job of the running packs; () for a job that finds none.

    No two packs have a GPU in common. A pinned job keeps its GPUs, and a running job keeps them if it can. Other jobs
    get the GPUs that are best connected. Within a pack, a job gets the GPUs that the fewest other jobs of the pack use.

    Args:
        running: the packs. They fit, pins included (`slices.next_packs`).
        devices: GPUs of the group, by index.
        held: GPUs that a job has now.
        pins: GPUs that a job cannot leave.
        gpus: number of GPUs that each job uses.
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
    # Jobs that cannot or need not move come first, then jobs that need most GPUs.
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
