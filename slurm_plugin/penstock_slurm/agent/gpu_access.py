"""Which GPUs a job's processes can reach: its binding, the device cgroups, NVIDIA's MPS, and limits that hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock_scheduler.api.agent_messages import OrderedJob
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import limits, mps
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.state import LocalJob
from penstock_slurm.share.topology import Links, choose


class GpuAccess:
    """Binds jobs to GPUs and opens the GPUs to them.

    Args:
        state: the node's state.
        channels: the channels to the jobs.
        device_cgroups: the jobs' device cgroups.
        mps_dir: folder of the site's MPS control daemon; None: no MPS.
    """

    def __init__(
        self, state: NodeState, channels: Channels, device_cgroups: DeviceCgroups, mps_dir: Path | None
    ) -> None:
        self._state, self._channels, self._device_cgroups, self._mps_dir = state, channels, device_cgroups, mps_dir

    def bind(self, job: OrderedJob, local: LocalJob, devices: tuple[int, ...]) -> str:
        """Bind a job to GPUs. Returns why that failed; "": it did not."""
        if not local.devices:  # its tasks have not begun
            local.mps = self._may_use_mps(job)
            self._channels.go_through(job.slurm_job, self._mps_dir if local.mps else None)
            self._limit(job, local, devices)
        if trouble := self._open(job, local, devices):
            return trouble
        self._channels.bind(job.slurm_job, devices, self._device_cgroups.gpus())
        return ""

    def open_gpus(self) -> None:
        """Open the GPUs of all bound jobs to the steps that have begun meanwhile."""
        for job in self._state.sharing_jobs():
            local = self._state.jobs[job.job]
            with self._state.guard("open its GPUs to it", job.job):
                self._open(job, local, local.devices)
        for number, each in self._state.saved.departing.items():
            self._device_cgroups.give(number, each.uid, each.devices, self._state.now_s, each.cgroup)
        self._device_cgroups.forget_all_but(self._state.users())

    def _open(self, job: OrderedJob, local: LocalJob, devices: tuple[int, ...]) -> str:
        """See `DeviceCgroups.give`."""
        if local.cgroup is None:
            local.cgroup = self._device_cgroups.cgroup(job.slurm_job, job.uid)
        return self._device_cgroups.give(job.slurm_job, job.uid, devices, self._state.now_s, local.cgroup)

    def _limit(self, job: OrderedJob, local: LocalJob, devices: tuple[int, ...]) -> None:
        """Limit a job that begins in a pack: see `penstock_slurm.agent.limits`."""
        settings, pack = self._state.settings, self._state.ordered_pack(job.job)
        limiter = None if local.mps else settings.limiter
        if limiter is not None and limits.trouble(limiter):
            limiter = None  # the status says so
        found: dict[str, str] = {}
        local.most_mb = 0
        if pack is not None and len(pack.jobs) > 1 and (local.mps or limiter is not None):
            local.most_mb = pack.limit(job.job).memory_mb
            if limiter is not None:
                found = limits.by_limiter(limiter, local.most_mb, self._channels.limiter_cache(job.slurm_job))
            else:
                beside = pack.guaranteed not in (None, job.job)
                found = limits.by_mps(local.most_mb, settings.mps_percentage if beside else 100, max(devices) + 1)
        self._channels.limit(job.slurm_job, found)

    def _may_use_mps(self, job: OrderedJob) -> bool:
        """Whether a job that begins may be a client of the site's MPS: see `penstock_slurm.agent.mps`.

        All jobs of a pack are clients or none is, because only clients run on a GPU at the same time. A job that has
        begun stays what it is.
        """
        ordered = self._state.ordered_group(job.job)
        if self._mps_dir is None or ordered is None:
            return False
        pack = next(each for each in ordered.shared.packs if job.job in each.jobs)
        others = [each for each in self._state.ordered_jobs if each.job in pack.jobs and each.job != job.job]
        time_sliced = ordered.shared.wanted > min(ordered.shared.gpus, len(ordered.devices))
        if not others or time_sliced or mps.trouble(self._mps_dir):
            return False
        jobs = self._state.jobs
        begun = [each for each in others if each.own_devices or jobs[each.job].devices]
        users = {each.uid for each in others} | {self._channels.owner(number) for number in self._mps_clients()}
        return users <= {job.uid} and all(jobs[each.job].mps for each in begun)

    def _mps_clients(self) -> list[int]:
        """Slurm jobs that may be clients on this node, including jobs whose processes are about to end."""
        return [number for number in self._channels.numbers() if self._channels.by_mps(number)]


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
