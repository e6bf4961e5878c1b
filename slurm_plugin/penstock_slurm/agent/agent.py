"""The shell around `sharing.node.Groups` on a real node: it binds GPUs, suspends, resumes, limits, measures and contains.

A job goes through these states::

    waiting ──bind──> running ──ask──> suspending ──Slurm freezes──> suspended
                         ^                 │ its turn again               │ its turn, and its GPUs are free
                         └─────────────────┴──────────Slurm resumes───────┘

Nobody gets GPUs before those who had them have moved off (the job says so, and is then frozen) or are frozen. All that decides is
in `Remembered`, which is written before Slurm is asked, and every step may be done twice: an agent may die at any line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock_profiles.files import open_regular, write_whole
from penstock_profiles.node_channel import JobControl, JobStatus, run_dir
from penstock_profiles.nvml import Sample, by_job
from penstock_scheduler import __version__
from penstock_scheduler.model import JobId, JobUse, Pack, PackSeen, SharedGpus
from penstock_scheduler.sharing.control import Steps
from penstock_scheduler.sharing.messages import (
    MAX_BYTES,
    REMEMBERED,
    CarriedGroup,
    CarriedJob,
    Contained,
    Lack,
    NodeOrder,
    NodeStatus,
    NumberedPack,
    OrderedGroup,
    OrderedJob,
    XidSeen,
    order_file,
    status_file,
)
from penstock_scheduler.sharing.node import Group, Groups, without
from penstock_slurm.agent import mps
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.devices import bind
from penstock_slurm.agent.processes import Processes
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.agent.state import DepartingJob, Hosted, Remembered, load, save
from penstock_slurm.gateway import JobGone, Refused, SlurmError

log = logging.getLogger(__name__)

BOOT = Path("/proc/sys/kernel/random/boot_id")

TELL_S = 5.0
"""A status is written at least so often."""

ALONE_S = 60.0
"""Length of a measurement of a job that has its GPUs to itself."""

INSPECT_S = 15.0
"""How often it is looked whether the node lacks anything."""

RETRY_S = 2.0
"""After Slurm has refused something."""

OVER = 1.05
"""A job may use so many times its memory limit: NVML counts the driver's context, the framework does not."""

MOST_REFUSALS = 10
"""Slices that a job keeps on its own word alone; then it is frozen where it is."""

SURE_S = 1.0
"""Steps that are counted after a job said that it stands still are no matter of a late file, if they go on for so long."""

CONTEXT_MB = 2048
"""Most that NVIDIA's driver keeps for itself in a process's context; some 500 MB are usual."""

LENIENT = 1.25
"""A guest may train so many times its share: a pause is as long as the step before it took, not as the next one will."""

PAUSE_S = 20.0
"""Jobs of several processes pause for 30 s at most, since they hear only in steps: so many are asked for."""

MAX_RATE = 1e9
"""Samples or steps a second that a job can be believed; nor fewer than its inverse."""

IDLE_CPU = 0.2
"""A job that stands still uses less of a core than this: it polls."""


class Slurm(Protocol):
    """What the agent asks of Slurm; `penstock_slurm.gateway.Gateway` has it. Raises SlurmError."""

    def suspend(self, job_id: str) -> None:
        """Freeze a running job."""
        ...

    def resume(self, job_id: str) -> None:
        """Let it go on."""
        ...

    def cancel(self, job_id: str) -> None:
        """End it for good."""
        ...


@dataclass(slots=True)
class Sight:
    """What was seen of a job lately. Not remembered over a restart."""

    statuses: dict[int, JobStatus] = field(default_factory=dict)
    mark: JobStatus | None = None
    """Its first process's status when the present measurement began; None: it has not begun."""
    obeyed: tuple[int, float] = (-1, 0.0)
    """The last control that all its processes carry out, and since when."""
    alone_since_s: float = 0.0
    busy: list[float] = field(default_factory=list)
    """Utilisation of its GPUs, a number for each sample, since then."""
    used_mb: float | None = None
    """Of one GPU at most, as NVML sees it now."""
    cpu: tuple[float, float, float] | None = None
    """(time, processor time of its processes, cores used since the look before) at the last look."""
    wrong_since_s: dict[str, float] = field(default_factory=dict)
    """Since when it does what it must not, by cause."""
    counted: tuple[float, JobStatus] | None = None
    """When its first process was heard last, and what it said, while it was a guest beside a guaranteed job."""
    over_s: float = 0.0
    """For how long it has trained beyond its share since then."""
    longest_s: float = 0.0
    """Most that it trained between two looks: a long step is told when it is over."""

    @property
    def first(self) -> JobStatus | None:
        """The status of its first process."""
        return self.statuses[min(self.statuses)] if self.statuses else None

    @property
    def usual_s(self) -> float:
        """How long its steps take, on average."""
        return self.first.seconds / max(self.first.steps, 1) if self.first is not None else 0.0

    @property
    def memory_mb(self) -> float:
        """Of one GPU at most: as NVML sees it or, where there is none, as the job says."""
        said = max((each.memory_mb for each in self.statuses.values()), default=0.0)
        return said if self.used_mb is None else self.used_mb

    @property
    def state_mb(self) -> float:
        """What it would take of the host's memory."""
        if self.used_mb is not None:
            return self.used_mb * max(len(self.statuses), 1)
        return sum(each.memory_mb for each in self.statuses.values())


class Agent:
    """One node's. Call `tick` every `poll_s`.

    Args:
        node: Slurm's name of it.
        spool: the folder shared with the daemon.
        settings: see there.
        state_folder: for what is remembered.
        slurm: by which jobs are suspended.
        channels: to the jobs.
        processes: of the jobs.
        host_memory_mb: all of the node's memory, MB.
        sample: the GPUs now, by NVML; None: there are none that it knows.
        plugin: what is wrong with the node's SPANK plugin, also in words; None: nothing is.
        device_cgroups: of the jobs; None: Slurm constrains no devices.
        links: how well each two GPUs are connected, by Slurm's indexes; empty: not known.
    """

    def __init__(
        self,
        node: str,
        spool: Path,
        settings: AgentSettings,
        state_folder: Path,
        slurm: Slurm,
        channels: Channels,
        processes: Processes,
        host_memory_mb: int,
        sample: Callable[[], Sample] | None = None,
        plugin: Callable[[], tuple[Lack, str] | None] = lambda: None,
        device_cgroups: DeviceCgroups | None = None,
        links: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self._node, self._spool, self._settings = node, spool, settings
        self._slurm, self._channels, self._processes = slurm, channels, processes
        self._sample, self._plugin = sample, plugin
        self._device_cgroups = device_cgroups or DeviceCgroups(node, lambda: False)
        self._links = links
        self._mps_dir = run_dir(settings.mps_dir, node) if settings.mps_dir is not None else None
        self._lacks: dict[Lack, str] = {}
        self._host_mb = settings.host_memory_mb if settings.host_memory_mb is not None else host_memory_mb // 2
        state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state_file = state_folder / "state.json"
        self._state: Remembered = load(self._state_file, BOOT.read_text(encoding="ascii").strip())
        self._groups = Groups(self, settings.control, self._state.groups, self._state.account)
        self._sights: dict[JobId, Sight] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._saved = self._told = ""
        self._told_s = self._sampled_s = self._inspected_s = self._let_go_s = -math.inf
        self._untold = False
        """Whether the last status could not be written, which has been logged."""
        self._living: dict[int, list[int]] = {}
        self._gpu_memory_mb: dict[str, int] = {}
        self._now_s = 0.0

    def tick(self, now_s: float) -> None:
        """Do what is to be done now."""
        self._now_s = now_s
        self._set_back()
        self._read_order()
        for job in self._jobs():
            self._hear(job)
        if now_s - self._sampled_s >= self._settings.sample_s:
            self._sampled_s = now_s
            self._look_at_processes()
            self._look_at_gpus()
        elif self._ends():
            self._look_at_processes()
        if now_s - self._inspected_s >= INSPECT_S:
            self._inspected_s = now_s
            self._inspect()
        self._let_go()
        self._regroup()
        self._state.account.forget({job.job for job in self._jobs()})  # not before: what they had is counted as they go
        self._end_slices()
        self._groups.take_seen()  # is told with its number
        self._save()
        self._carry_out()
        self._open_gpus()
        self._mark()
        self._contain()
        self._save()
        self._tell()

    def _set_back(self) -> None:
        """The node's clock may be: what it was in the future must not hold anything up."""
        now_s = self._now_s
        self._sampled_s, self._told_s = min(self._sampled_s, now_s), min(self._told_s, now_s)
        self._inspected_s = min(self._inspected_s, now_s)
        self._let_go_s = min(self._let_go_s, now_s + RETRY_S)
        for group in self._groups.groups:
            group.since_s = min(group.since_s, now_s)
        for mine in self._state.hosted.values():
            mine.asked_s, mine.resumed_s = min(mine.asked_s, now_s), min(mine.resumed_s, now_s)
            mine.retry_s = min(mine.retry_s, now_s + RETRY_S)
            mine.free_s = min(mine.free_s, now_s + self._settings.freeze_s)
            mine.begun_s = min(mine.begun_s, now_s) if mine.begun_s < math.inf else math.inf
        for sight in self._sights.values():
            sight.obeyed = (sight.obeyed[0], min(sight.obeyed[1], now_s))
            sight.alone_since_s = min(sight.alone_since_s, now_s)
            if sight.counted is not None:
                sight.counted = (min(sight.counted[0], now_s), sight.counted[1])
            sight.wrong_since_s = {cause: min(since_s, now_s) for cause, since_s in sight.wrong_since_s.items()}

    # --- the order

    def _jobs(self) -> tuple[OrderedJob, ...]:
        return self._state.order.jobs if self._state.order is not None else ()

    def _order_of(self, job: JobId) -> OrderedJob | None:
        return next((each for each in self._jobs() if each.job == job), None)

    def _ordered(self) -> tuple[OrderedGroup, ...]:
        return self._state.order.groups if self._state.order is not None else ()

    def _ordered_pack(self, job: JobId) -> Pack | None:
        """Its pack as the daemon wants it, those included who are not here (yet), or stand still."""
        return next((pack for each in self._ordered() for pack in each.shared.packs if job in pack.jobs), None)

    def _sight(self, job: JobId) -> Sight:
        return self._sights.setdefault(job, Sight())

    def _read_order(self) -> None:
        """Take in a new order. Without one, or while the spool is away, the last one stands."""
        path = order_file(self._spool, self._node)
        try:
            opened = open_regular(path)
        except OSError as error:
            log.debug("no order", extra={"text": str(error)})
            return
        with opened as file:
            about = os.fstat(file.fileno())
            stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
            if stamp == self._stamp or about.st_size > MAX_BYTES:
                return
            try:
                order = NodeOrder.model_validate_json(file.read(MAX_BYTES))
                if order.node != self._node:
                    raise ValueError(f"is for {order.node}")
            except ValueError as error:
                log.warning("order passed over", extra={"text": str(error)[:300]})
                return
            finally:
                self._stamp = stamp
        before = self._state.order
        if before is not None and before.number == order.number:
            return
        try:
            for job in order.jobs:
                self._channels.open(job.slurm_job, job.uid)
        except OSError as error:  # the last order stands
            log.warning("order cannot be carried out yet", extra={"text": str(error)})
            self._stamp = None
            return
        self._take_in(order)

    def _take_in(self, order: NodeOrder) -> None:
        hosted = self._state.hosted
        own = {job.job: job for job in self._jobs()}
        self._state.order = order
        log.info("order taken", extra={"number": order.number, "jobs": len(order.jobs), "groups": len(order.groups)})
        for job in order.jobs:
            mine = hosted.get(job.job)
            begun = mine is not None and (mine.alive or mine.state != "waiting")
            # Who holds GPUs of Slurm's was never bound, unless in a run before.
            again = (begun and not job.running) or bool(job.own_devices and self._channels.bound(job.slurm_job))
            if mine is None or mine.number != job.slurm_job or again:
                if mine is not None and job.job in own:
                    self._dismiss(own[job.job], mine)
                if again or not job.running:
                    self._channels.clear(job.slurm_job)  # of a run before
                hosted[job.job] = self._found(job)
                self._sights.pop(job.job, None)
            if not hosted[job.job].gone:
                hosted[job.job].cgroup = None  # that of the run which is ordered now
            if job.running:
                self._state.leaving.pop(job.slurm_job, None)
        wanted = {job.job for job in order.jobs}
        for each in [each for each in hosted if each not in wanted]:
            mine = hosted.pop(each)
            if each in own:
                self._dismiss(own[each], mine)
            self._sights.pop(each, None)
        numbers = {job.slurm_job for job in order.jobs}
        for number in [number for number in self._channels.numbers() if number not in numbers]:
            uid = self._channels.owner(number)
            if uid is None:
                self._channels.close(number)
            elif number not in self._state.leaving:  # one of which the state was lost, or that never ran
                self._state.leaving[number] = DepartingJob(uid, self._channels.bound(number), frozen=True)

    def _found(self, job: OrderedJob) -> Hosted:
        """A job that is new here, or of which the state was lost, or that the daemon did not name for a while."""
        devices = job.own_devices or self._channels.bound(job.slurm_job)
        if not (job.running and devices):
            return Hosted(job.slurm_job)
        self._living = self._processes.scan(self._users())
        frozen = self._is_frozen(job.slurm_job)
        # Nobody knows whether one that is frozen has moved off its GPUs.
        return Hosted(
            job.slurm_job,
            "suspended" if frozen else "running",
            devices,
            resumed_s=self._now_s,
            tried=frozen,
            alive=frozen,
            mps=self._channels.by_mps(job.slurm_job),
        )

    def _dismiss(self, job: OrderedJob, mine: Hosted) -> None:
        """Let go of a job that the daemon does not name any more: alive, it may use its GPUs, and must not stay frozen."""
        devices = mine.devices or job.own_devices
        frozen = mine.state in ("suspending", "suspended") or mine.tried
        if devices or frozen:
            self._state.leaving[mine.number] = DepartingJob(job.uid, devices, frozen, mine.cgroup)

    def _let_go(self) -> None:
        """Have those go on that are dismissed and frozen."""
        if self._now_s < self._let_go_s:
            return
        for number, departing in self._state.leaving.items():
            if not departing.frozen or number not in self._living:
                continue
            try:
                self._slurm.resume(str(number))
            except (JobGone, Refused) as error:
                log.info("not resumed", extra={"slurm_job": number, "text": str(error)})
            except SlurmError as error:
                log.warning("not resumed yet", extra={"slurm_job": number, "text": str(error)})
                self._let_go_s = self._now_s + RETRY_S
                return
            departing.frozen = False

    def _users(self) -> dict[int, int]:
        """Those of all jobs that may have processes here."""
        return {number: departing.uid for number, departing in self._state.leaving.items()} | {
            job.slurm_job: job.uid for job in self._jobs()
        }

    def _regroup(self) -> None:
        """Have the groups carried out with those of their jobs that are here."""
        hosted, jobs = self._state.hosted, {job.job: job for job in self._jobs()}
        here = {job.job for job in jobs.values() if job.running and not hosted[job.job].gone}
        for name in here:
            pack = self._ordered_pack(name)
            if pack is None or pack.jobs != hosted[name].held_out or pack.guaranteed not in here:
                hosted[name].held_out = ()
        here = {name for name in here if not hosted[name].held_out}
        wanted: list[SharedGpus] = []
        for ordered in self._ordered():
            group = dataclasses.replace(ordered.shared, gpus=min(ordered.shared.gpus, len(ordered.devices)))
            for job in group.jobs:
                if job not in here:
                    group = without(group, job)
            if group.packs:
                wanted.append(group)
        if wanted == [group.order for group in self._groups.groups]:
            return
        sharers = [job for group in wanted for job in group.jobs]
        running = {job: hosted[job].state == "running" and job not in self._groups.group_of for job in sharers}
        for job in sharers:
            if running[job] and self._sight(job).alone_since_s:
                self._ran_alone(job)
        for fresh in self._groups.order(wanted, self._now_s, running):
            for job in fresh.order.jobs:
                self._begin_measuring(job)
        self._state.groups = self._groups.groups

    # --- turns and measurements

    def _end_slices(self) -> None:
        for group in self._groups.groups:
            if self._is_over(group) or self._finds_no_room(group):
                for pack in group.running:
                    if len(pack.jobs) == 1:
                        self._learn_alone(pack.jobs[0])
                    for name in pack.jobs:
                        self._state.hosted[name].why = ""
                self._groups.end_slice(group, self._now_s)
                for name in group.order.jobs:
                    self._begin_measuring(name)
        for job in self._jobs():
            mine, sight = self._state.hosted[job.job], self._sight(job.job)
            if job.job in self._groups.group_of or not job.running or mine.gone or mine.held_out:
                sight.alone_since_s = 0.0
            elif not sight.alone_since_s:
                self._begin_measuring(job.job)
                sight.alone_since_s = self._now_s
                if job.job not in self._state.account.moved_s:
                    self._groups.started(job.job, self._now_s)
            elif self._trained_s(job.job, sight.alone_since_s) >= ALONE_S:
                self._ran_alone(job.job)

    def _is_over(self, group: Group) -> bool:
        """Whether the slice is: not before all who had to leave have left, and all whose turn it is have had all of it.

        Else one that is slow to leave would be back before the next had its part. But if Slurm does not do its part, the
        others do not wait for ever. While one of them starts the slice does not begin, else it would show nothing.
        """
        hosted, slice_s = self._state.hosted, group.order.slice_s
        turn = [hosted[job] for pack in group.running for job in pack.jobs]
        began_s = max((mine.begun_s for mine in turn if mine.state == "running"), default=0.0)
        age_s = self._now_s - max(group.since_s, began_s)
        if age_s < slice_s or age_s > 2 * slice_s + self._settings.suspend_wait_s + self._settings.freeze_s:
            return age_s >= slice_s
        if any(hosted[job].state == "suspending" for job in group.order.jobs):
            return False
        return all(mine.state == "running" and self._now_s - mine.resumed_s >= slice_s for mine in turn)

    def _ran_alone(self, job: JobId) -> None:
        sight = self._sight(job)
        seconds = self._trained_s(job, sight.alone_since_s)
        self._groups.ran_alone(job, seconds, self._now_s, ALONE_S)
        if seconds >= ALONE_S:
            self._learn_alone(job)
        self._begin_measuring(job)
        sight.alone_since_s = self._now_s

    def _trained_s(self, job: JobId, since_s: float) -> float:
        """Seconds since then in which a job that had GPUs had started, too."""
        return max(self._now_s - max(since_s, self.begun_s(job)), 0.0)

    def _begin_measuring(self, job: JobId) -> None:
        sight = self._sight(job)
        sight.mark, sight.busy = None, []

    def _mark(self) -> None:
        """Begin measurements of those who run as they were told to, and beside whom all do."""
        for job in self._jobs():
            sight, first = self._sight(job.job), self._sight(job.job).first
            pack = self._groups.pack_of(job.job)
            if sight.mark is not None or first is None or self._state.hosted[job.job].state != "running":
                continue
            if first.time_s < self._state.hosted[job.job].resumed_s or first.suspended is not None:
                continue
            if pack is None or all(self._settled(each, first.time_s) for each in pack.jobs):
                sight.mark = first

    def _hear(self, job: OrderedJob) -> None:
        sight, mine = self._sight(job.job), self._state.hosted[job.job]
        told = mine.control.number
        sight.statuses = self._channels.hear(job.slurm_job, job.uid)
        said = sight.statuses.values()
        if not said or any(each.number != told for each in said):
            sight.obeyed = (-1, 0.0)
        elif sight.obeyed[0] != told:
            sight.obeyed = (told, min(max(each.time_s for each in said), self._now_s))
        if mine.begun_s < math.inf:
            return
        if any(each.steps for each in said):
            mine.begun_s = self._now_s
            pack = self._groups.pack_of(job.job)
            for each in pack.jobs if pack is not None else (job.job,):
                self._begin_measuring(each)
        elif mine.state == "running" and self._now_s - mine.resumed_s >= self._settings.start_wait_s:
            mine.begun_s = 0.0

    def _settled(self, job: JobId, at_s: float = math.inf) -> bool:
        """Whether the job carried out at that time what it is told now. Nobody waits for one that never says anything."""
        sight, mine = self._sight(job), self._state.hosted[job]
        told, since_s = sight.obeyed
        silent = not sight.statuses and mine.begun_s < math.inf
        return silent or (told == mine.control.number and since_s <= at_s)

    def _rate(self, job: JobId) -> float:
        """Samples or steps a second since the mark; 0: not known."""
        sight = self._sight(job)
        first, mark = sight.first, sight.mark
        if first is None or mark is None or first.time_s <= mark.time_s or first.pid != mark.pid:
            return 0.0
        made = first.samples - mark.samples or first.steps - mark.steps
        rate = made / (first.time_s - mark.time_s)
        return rate if 1 / MAX_RATE < rate < MAX_RATE else 0.0

    def _learn_alone(self, job: JobId) -> None:
        mine, sight = self._state.hosted.get(job), self._sight(job)
        if mine is None:
            return
        mine.rate = self._rate(job) or mine.rate
        if sight.busy:
            mine.utilisation = min(sum(sight.busy) / len(sight.busy), 1.0)
        elif sight.first is not None and sight.first.utilisation is not None:
            mine.utilisation = sight.first.utilisation

    # --- the `Ground` of the groups

    def seen(self, pack: Pack) -> PackSeen | None:
        """Rates over those alone, where both are known of all."""
        hosted = self._state.hosted
        alone = [hosted[job].rate if job in hosted else 0.0 for job in pack.jobs]
        now = [self._rate(job) for job in pack.jobs]
        if not all(alone) or any(self._sight(job).mark is None for job in pack.jobs):
            return None
        group = next((each for each in self._ordered() if pack.jobs[0] in each.shared.jobs), None)
        speeds = tuple(rate / before for rate, before in zip(now, alone, strict=True))
        seen = PackSeen(pack.jobs, group.gpu_type if group is not None else "", speeds)
        packs = self._state.packs
        packs.append(NumberedPack(number=_next(packs), seen=seen))
        return seen

    def steps(self, pack: Pack, group: Group) -> Steps:
        """By what its first process counts; none before all of the pack do as they were told."""
        assert pack.guaranteed is not None, "steps are of the guaranteed job"
        sight = self._sight(pack.guaranteed)
        return steps_between(sight.mark, sight.first)

    def begun_s(self, job: JobId) -> float:
        """By its first step."""
        mine = self._state.hosted.get(job)
        return mine.begun_s if mine is not None else 0.0

    def on_s(self, job: JobId) -> float:
        """Since it was let run."""
        mine = self._state.hosted.get(job)
        return mine.resumed_s if mine is not None and mine.state in ("running", "suspending") else math.inf

    def off_s(self, job: JobId) -> float:
        """When Slurm had frozen it."""
        mine = self._state.hosted.get(job)
        if mine is None:
            return 0.0
        on = mine.state in ("running", "suspending") or (mine.state == "suspended" and not mine.off)
        return math.inf if on else mine.free_s

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        """MPS clients, and those whose state would not fit into what the host may take: the smallest are let go first."""
        hosted = self._state.hosted
        room_mb = self._host_mb - sum(each.moved_mb for each in hosted.values() if each.state == "suspended")
        refused = []
        for job in sorted(leaving, key=lambda job: self._sight(job).state_mb):
            mine = hosted.get(job)
            if mine is None or mine.state == "suspended" or mine.gone:
                continue
            if mine.mps:
                refused.append(job)
                mine.why = "keeps its turn: a client of NVIDIA's MPS is not suspended"
                continue
            needs_mb = self._sight(job).state_mb
            if needs_mb <= room_mb:
                room_mb -= needs_mb
                mine.refusals = 0
                continue
            if self._sight(job).used_mb is None:
                if mine.refusals >= MOST_REFUSALS:
                    continue
                mine.refusals += 1
            refused.append(job)
            mine.why = (
                f"keeps its turn: suspended, it would take {needs_mb:.0f} MB of the host's memory, and of the "
                f"{self._host_mb} MB for that {max(room_mb, 0):.0f} are left"
            )
        return refused

    def pinned(self, job: JobId) -> frozenset[int]:
        """GPUs that it holds by Slurm, has a driver's context on, or, an MPS client, cannot be moved off."""
        ordered = self._order_of(job)
        mine = self._state.hosted.get(job)
        if ordered is None or mine is None:
            return frozenset()
        if ordered.own_devices:
            return frozenset(ordered.own_devices)
        return frozenset() if mine.anywhere and not mine.mps else frozenset(mine.devices)

    def crowded(self, pack: Pack) -> bool:
        """By what those who did not move off hold of their GPUs, and what each of the pack was seen to need."""
        found = {job: text for job in pack.jobs if (text := self._no_room(job))}
        for job, text in found.items():
            self._state.hosted[job].why = text
        return bool(found)

    def _finds_no_room(self, group: Group) -> bool:
        """Whether those who had to leave have left so much that somebody whose turn it is cannot come."""
        return any(self._no_room(job) for pack in group.running for job in pack.jobs if job not in group.crowded)

    def _no_room(self, job: JobId) -> str:
        """Why a job that is off its GPUs would not fit on them, in words; "": it does, or nobody knows what it needs."""
        mine, pack = self._state.hosted.get(job), self._ordered_pack(job)
        if mine is None or pack is None or mine.state not in ("waiting", "suspended") or not mine.memory_mb:
            return ""
        ordered = next(each for each in self._ordered() if pack in each.shared.packs)
        gpu_mb = self._gpu_memory_mb.get(ordered.gpu_type, math.inf)
        hosted, pinned = self._state.hosted.items(), self.pinned(job)
        needs_mb = sum(
            each.memory_mb for name, each in hosted if name in pack.jobs and set(each.devices) & set(mine.devices)
        )
        left_mb = {
            device: sum(
                each.left_mb
                for name, each in hosted
                if name not in pack.jobs and device in each.devices and not each.gone
            )
            for device in pinned or ordered.devices
        }
        roomy = [device for device, mb in left_mb.items() if mb + needs_mb <= gpu_mb]
        if len(roomy) == len(left_mb) or (not pinned and len(roomy) >= len(mine.devices)):
            return ""
        most_mb = max(left_mb.values())
        return (
            f"waits for room: others hold {most_mb:.0f} MB of its GPU also while they stand still, and it was seen to need "
            f"{needs_mb} of the {gpu_mb} MB"
        )

    # --- carrying out

    def _carry_out(self) -> None:
        """Bring each job a step closer to what its group wants."""
        jobs = {job.job: job for job in self._jobs()}
        targets = self._targets(jobs)
        for mine in self._state.hosted.values():
            self._look_whether_off(mine)
        for name, job in jobs.items():
            first = self._sight(name).first
            anywhere = first is not None and all(each.anywhere for each in self._sight(name).statuses.values())
            self._state.hosted[name].anywhere = anywhere
            with self._alone(name):
                self._step(job, targets.get(name))
        for name, job in jobs.items():
            with self._alone(name):
                self._limit(job, self._state.hosted[name])

    @contextlib.contextmanager
    def _alone(self, job: JobId) -> Iterator[None]:
        """A job's folder in which nothing can be written, since it or another one has filled it, is no matter of the others'."""
        try:
            yield
        except OSError as error:
            self._state.hosted[job].why = f"its folder on the node cannot be written: {error.strerror}"

    def _step(self, job: OrderedJob, target: tuple[int, ...] | None) -> None:
        """Bring a job closer to what its group wants; None: it is not its turn."""
        mine = self._state.hosted[job.job]
        if not job.running or mine.gone:
            return
        if job.job not in self._groups.group_of:
            target = mine.devices or job.own_devices  # nobody shares with it: it runs where it is
            mine.why = ""
            if mine.held_out:
                target, mine.why = None, "stands still while the guaranteed job is there: it did not keep to its share"
        if mine.state == "running" and not (target and set(target) == set(mine.devices or target)):
            if mine.mps:
                mine.why = "runs on out of turn: a client of NVIDIA's MPS is not suspended"
                return
            self._ask(job, mine)
        elif mine.state == "suspending":
            self._freeze(job, mine, wanted=bool(target) and set(target or ()) == set(mine.devices))
        elif mine.state in ("waiting", "suspended") and target:
            self._let_run(job, mine, target)
        elif mine.state == "suspended" and mine.tried:
            self._ask(job, mine)  # it may have gone on

    def _targets(self, jobs: Mapping[JobId, OrderedJob]) -> dict[JobId, tuple[int, ...]]:
        """The GPUs of those whose turn it is."""
        found: dict[JobId, tuple[int, ...]] = {}
        hosted = self._state.hosted
        for group in self._groups.groups:
            ordered = next((each for each in self._ordered() if set(group.order.jobs) <= set(each.shared.jobs)), None)
            if ordered is None:
                continue
            names = group.order.jobs
            found |= bind(
                group.running,
                ordered.devices,
                {job: hosted[job].devices for job in names if hosted[job].state in ("running", "suspending")},
                {job: self.pinned(job) for job in names},
                {job: jobs[job].gpus for job in names if job in jobs},
                self._links,
            )
        return found

    def _ask(self, job: OrderedJob, mine: Hosted) -> None:
        """Have it move off its GPUs, or, if it says that it is too large for that, only be frozen."""
        if mine.refusals < MOST_REFUSALS:
            self._word(mine, suspend=f"{mine.control.number + 1}")
        mine.moved_mb = self._sight(job.job).state_mb
        mine.state, mine.asked_s, mine.why = "suspending", self._now_s, ""

    def _freeze(self, job: OrderedJob, mine: Hosted, *, wanted: bool) -> None:
        """Have Slurm freeze it once it has moved off, or its time is up."""
        if wanted and (mine.tried or self._is_frozen(job.slurm_job)):
            mine.state, mine.free_s = "suspended", self._now_s  # Slurm may have done what it was asked
            return
        if wanted:
            self._word(mine, suspend=None)
            mine.state, mine.resumed_s = "running", self._now_s
            return
        if self._now_s < mine.retry_s:
            return
        statuses = list(self._sight(job.job).statuses.values())
        answers = [each for each in statuses if each.suspends]
        asked = mine.control.suspend is not None
        answered = asked and bool(answers) and all(each.suspended == mine.control.suspend for each in answers)
        late = self._now_s - mine.asked_s > self._settings.suspend_wait_s
        if asked and answers and len(answers) == len(statuses) and not answered and not self._is_frozen(job.slurm_job):
            if not late:
                return
            self._caught(
                job,
                "no-answer",
                f"did not move off its GPUs within {self._settings.suspend_wait_s:g} s of being asked to",
                kill=self._settings.no_answer == "kill",
                else_="was frozen where it was, its memory still on them",
            )
            if mine.gone or self._now_s < mine.retry_s:
                return
        if self._is_under_way(mine):
            return
        moved = answered and len(answers) == len(statuses)
        mine.tried = True
        self._save()
        try:
            self._slurm.suspend(str(job.slurm_job))
        except JobGone:
            self._has_gone(job, mine)
            return
        except SlurmError as error:
            # Asked once more for what it has done already, Slurm refuses.
            if not (isinstance(error, Refused) and self._is_frozen(job.slurm_job)):
                mine.tried = not isinstance(error, Refused)
                mine.why, mine.retry_s = f"Slurm does not suspend it: {error}", self._now_s + RETRY_S
                return
        mine.state, mine.tried, mine.why = "suspended", False, ""
        mine.off, mine.free_s = moved, self._now_s + (0.0 if moved else self._settings.freeze_s)
        mine.moved_mb = min(sum(each.moved_mb for each in statuses), mine.moved_mb) if moved else 0.0
        mine.left_mb = max(each.left_mb for each in statuses) if moved else self._sight(job.job).memory_mb
        mine.refusals = 0
        self._sight(job.job).cpu = self._sight(job.job).used_mb = None  # what was seen was before
        log.info("suspended", extra={"job": job.job, "slurm_job": job.slurm_job, "moved": moved})

    def _let_run(self, job: OrderedJob, mine: Hosted, target: tuple[int, ...]) -> None:
        """Give it its GPUs once those who had them are off them."""
        if self._now_s < mine.retry_s or any(self._uses(other) & set(target) for other in self._others(job.job)):
            return
        leaving = self._state.leaving.items()
        if any(number != job.slurm_job and set(departing.devices) & set(target) for number, departing in leaving):
            return
        if self._is_under_way(mine) or not self._room_made(job.job):
            return
        group = self._groups.group_of.get(job.job)
        if group is not None and job.job not in group.crowded and self._no_room(job.job):
            return  # another one has the next turn
        # An agent that has lost its state finds jobs frozen of which it knows nothing.
        frozen = mine.state == "suspended" or self._is_frozen(job.slurm_job)
        if frozen:
            self._word(mine, suspend=None)
        if not job.own_devices and target != mine.devices:
            if not mine.devices:  # its tasks have not begun
                mine.mps = self._goes_through_mps(job)
                self._channels.go_through(job.slurm_job, self._mps_dir if mine.mps else None)
            if trouble := self._open(job, mine, target):
                mine.why, mine.retry_s = f"its GPUs cannot be opened to it: {trouble}", self._now_s + RETRY_S
                return
            self._channels.bind(job.slurm_job, target, self._device_cgroups.gpus())
        mine.devices = target
        if frozen:
            mine.tried = True
            self._save()
            try:
                self._slurm.resume(str(job.slurm_job))
            except JobGone:
                self._has_gone(job, mine)
                return
            except SlurmError as error:
                if not isinstance(error, Refused) or self._is_frozen(job.slurm_job):
                    mine.why, mine.retry_s = f"Slurm does not resume it: {error}", self._now_s + RETRY_S
                    return
                log.info("not suspended after all", extra={"job": job.job, "text": str(error)})
        self._begin_measuring(job.job)
        mine.state, mine.resumed_s, mine.moved_mb, mine.why = "running", self._now_s, 0.0, ""
        statuses = self._sight(job.job).statuses.values()
        if statuses and all(each.suspends for each in statuses):
            mine.left_mb = 0.0  # it may move off the next time
        mine.tried = False
        log.info("runs", extra={"job": job.job, "slurm_job": job.slurm_job, "devices": ",".join(map(str, target))})

    def _open_gpus(self) -> None:
        """Have the steps that jobs have begun meanwhile reach their GPUs as well."""
        for job in self._sharers():
            mine = self._state.hosted[job.job]
            self._open(job, mine, mine.devices)
        for number, departing in self._state.leaving.items():
            self._device_cgroups.give(number, departing.uid, departing.devices, self._now_s, departing.cgroup)
        self._device_cgroups.forget_all_but(self._users())

    def _sharers(self) -> list[OrderedJob]:
        """Jobs that are bound to GPUs which they do not hold by Slurm."""
        return [job for job in self._jobs() if self._state.hosted[job.job].devices and not job.own_devices]

    def _open(self, job: OrderedJob, mine: Hosted, devices: tuple[int, ...]) -> str:
        """See `DeviceCgroups.give`."""
        if mine.cgroup is None:
            mine.cgroup = self._device_cgroups.cgroup(job.slurm_job, job.uid)
        return self._device_cgroups.give(job.slurm_job, job.uid, devices, self._now_s, mine.cgroup)

    def _goes_through_mps(self, job: OrderedJob) -> bool:
        """Whether a job that begins may do so as a client of the site's MPS: see `penstock_slurm.agent.mps`.

        All of a pack are clients or none is, for only clients run at the same time. And whoever has begun stays what it is.
        """
        ordered = next((each for each in self._ordered() if job.job in each.shared.jobs), None)
        if self._mps_dir is None or ordered is None:
            return False
        pack = next(each for each in ordered.shared.packs if job.job in each.jobs)
        mates = [each for each in self._jobs() if each.job in pack.jobs and each.job != job.job]
        takes_turns = ordered.shared.wanted > min(ordered.shared.gpus, len(ordered.devices))
        if not mates or takes_turns or mps.trouble(self._mps_dir):
            return False
        hosted = self._state.hosted
        begun = [each for each in mates if each.own_devices or hosted[each.job].devices]
        users = {each.uid for each in mates} | {self._channels.owner(number) for number in self._mps_clients()}
        return users <= {job.uid} and all(hosted[each.job].mps for each in begun)

    def _mps_clients(self) -> list[int]:
        """Slurm's numbers of jobs that may be clients on this node, those included whose processes are about to end."""
        return [number for number in self._channels.numbers() if self._channels.by_mps(number)]

    def _is_frozen(self, number: int) -> bool:
        """Whether processes of a job of Slurm's stand still by SIGSTOP."""
        states = [self._processes.state(pid) for pid in self._living.get(number, [])]
        return any(state is not None and state.letter == "T" for state in states)

    def _is_under_way(self, mine: Hosted) -> bool:
        """Whether the node has yet to freeze the job, or to let it go on, as Slurm was asked last.

        slurmd takes 2 s to freeze a job, and what it is asked meanwhile in any order: a job that is let go on and frozen again
        within that time may run on while Slurm calls it suspended.
        """
        if mine.tried or mine.number not in self._living:
            return False  # nobody knows what came of it, or there is nothing to be seen
        frozen = self._is_frozen(mine.number)
        if mine.state == "suspended":
            return not frozen and self._now_s < mine.free_s + self._settings.suspend_wait_s
        return frozen and self._now_s < mine.resumed_s + self._settings.suspend_wait_s

    def _others(self, job: JobId) -> list[JobId]:
        """Who must not be on its GPUs while it runs: all but those whom it is packed with."""
        pack = self._groups.pack_of(job)
        mates = pack.jobs if pack is not None else (job,)
        return [other for other in self._state.hosted if other not in mates]

    def _uses(self, job: JobId) -> set[int]:
        mine = self._state.hosted[job]
        ordered = self._order_of(job)
        if ordered is None or (mine.gone and mine.number not in self._living):
            return set()
        if mine.state == "waiting" and not ordered.own_devices:
            return set()
        if mine.state == "suspended" and not mine.tried and mine.off:
            return set()
        if not ordered.running:
            return set()
        return set(mine.devices or ordered.own_devices)

    def _look_whether_off(self, mine: Hosted) -> None:
        """One that did not move off its GPUs is off them when it is seen frozen: on a busy node later than after `freeze_s`.

        One of which nothing is seen counts as off then, and one that runs on after `suspend_wait_s` more.
        """
        if mine.state != "suspended" or mine.tried or mine.off or self._now_s < mine.free_s:
            return
        late = self._now_s > mine.free_s + self._settings.suspend_wait_s
        if late or mine.number not in self._living or self._is_frozen(mine.number):
            mine.off, mine.free_s = True, self._now_s

    def _room_made(self, job: JobId) -> bool:
        """Whether those beside it have taken in their limits of memory, or have had time enough to."""
        pack = self._groups.pack_of(job)
        mates = [each for each in pack.jobs if each != job] if pack is not None else []
        group = self._groups.group_of.get(job)
        waited_s = self._now_s - group.since_s if group is not None else math.inf
        # Who has had no turn yet has nothing on a GPU.
        mates = [each for each in mates if self._state.hosted[each].state != "waiting"]
        limited = [each for each in mates if pack is not None and pack.limit(each).memory_mb]
        return waited_s > self._settings.suspend_wait_s or all(self._limited(each, pack) for each in limited)

    def _limited(self, job: JobId, pack: Pack | None) -> bool:
        """Whether it keeps to its limit in the pack, or to a lower one that is still to be raised."""
        now_mb = self._state.hosted[job].control.memory_mb or math.inf
        return pack is not None and now_mb <= (pack.limit(job).memory_mb or math.inf) and self._settled(job)

    def _limit(self, job: OrderedJob, mine: Hosted) -> None:
        """Tell the job what it may use. A limit of memory is raised only after all lower ones beside it are in force."""
        pack = self._groups.pack_of(job.job)
        if mine.gone or (job.job in self._groups.group_of and pack is None):
            return
        if mine.held_out:
            self._word(mine, compute=0.0)
            return
        memory_mb, before_mb = (pack.limit(job.job).memory_mb if pack is not None else 0), mine.control.memory_mb
        raised = (memory_mb or math.inf) > (before_mb or math.inf)
        mates = [each for each in pack.jobs if each != job.job] if pack is not None else []
        if raised and not all(
            self._limited(each, pack) or self._state.hosted[each].state != "running" for each in mates
        ):
            memory_mb = before_mb
        self._word(mine, compute=self._groups.compute(job.job), memory_mb=memory_mb)

    def _word(self, mine: Hosted, **changes: object) -> None:
        """Tell the job, if that is news to it."""
        control = mine.control.model_copy(update=changes)
        if control == mine.control and control.number:
            return
        control = control.model_copy(update={"number": control.number + 1})
        self._channels.tell(mine.number, control)
        mine.control = control

    # --- looking, and containing

    def _inspect(self) -> None:
        """Look whether the node lacks anything; what is new is logged."""
        lacks: dict[Lack, str] = {}
        if (found := self._plugin()) is not None:
            lacks[found[0]] = found[1]
        if self._mps_dir is not None and (text := mps.trouble(self._mps_dir)):
            lacks["no-mps"] = f"no nvidia-cuda-mps-control answers, packs run without it: {text}"
        living = any(job.slurm_job in self._living for job in self._sharers())
        if text := self._device_cgroups.trouble(living=living):
            lacks["no-devices"] = f"GPUs cannot be opened to jobs that share, to which Slurm denies them: {text}"
        for lack, text in lacks.items():
            if lack not in self._lacks:
                log.warning("the node lacks something", extra={"lack": lack, "text": text})
        self._lacks = lacks

    def _look_at_processes(self) -> None:
        self._living = self._processes.scan(self._users())
        for number in [number for number in self._state.leaving if number not in self._living]:
            del self._state.leaving[number]
            if all(job.slurm_job != number for job in self._jobs()):
                self._channels.close(number)
        for job in self._jobs():
            mine = self._state.hosted[job.job]
            if job.slurm_job in self._living and job.running:
                mine.alive, mine.gone = True, mine.gone and "killed" in mine.told
            elif mine.alive and not mine.gone:
                if mine.state == "suspended":
                    self._caught(
                        job, "died", "ended while it was suspended", kill=False, else_="its turn goes to the next"
                    )
                self._has_gone(job, mine)

    def _ends(self) -> bool:
        """Whether somebody may wait for GPUs until processes have ended."""
        gone = (mine.number for mine in self._state.hosted.values() if mine.gone)
        return any(departing.devices for departing in self._state.leaving.values()) or any(
            map(self._living.__contains__, gone)
        )

    def _has_gone(self, job: OrderedJob, mine: Hosted) -> None:
        """It has ended: the next in line has its place."""
        mine.gone = True
        group = self._groups.left(job.job, self._now_s)
        self._state.groups = self._groups.groups
        for each in group.order.jobs if group is not None else ():
            self._begin_measuring(each)

    def _look_at_gpus(self) -> None:
        if self._sample is None:
            return
        try:
            sample = self._sample()
        except Exception:  # whatever the driver does, turns go on
            log.warning("GPUs cannot be sampled", exc_info=True)
            for sight in self._sights.values():
                sight.used_mb = None
            return
        xids = self._state.xids
        for reading in sample.readings:
            if reading.device.memory_mb is not None:
                self._gpu_memory_mb[reading.device.gpu_type] = int(reading.device.memory_mb)
        errors = [(reading.device.index, reading.xids) for reading in sample.readings]
        errors += [(lost.index, lost.xids) for lost in sample.lost]
        for index, codes in errors:
            for xid in codes:
                xids.append(XidSeen(number=_next(xids), time_s=self._now_s, device=index, xid=xid))
        numbers = {job.slurm_job: job for job in self._jobs()}

        def job_of(pid: int) -> str | None:
            number = self._processes.job_of(pid)
            return numbers[number].job if number in numbers else None

        uses: dict[JobId, list[tuple[float | None, float | None]]] = {}
        for (name, _), use in by_job(sample, job_of).items():
            uses.setdefault(name, []).append((use.used_mb, use.utilisation))
        for job in numbers.values():
            sight, mine = self._sight(job.job), self._state.hosted[job.job]
            used = [mb for mb, _ in uses.get(job.job, []) if mb is not None]
            busy = [share for _, share in uses.get(job.job, []) if share is not None]
            sight.used_mb = max(used, default=None)
            if mine.state == "suspended" and sight.used_mb is not None:
                mine.left_mb = sight.used_mb
            if busy:
                sight.busy.append(sum(busy) / len(busy))
            mine.memory_mb = max(mine.memory_mb, int(sight.used_mb or 0))

    def _contain(self) -> None:
        for job in self._jobs():
            mine, sight = self._state.hosted[job.job], self._sight(job.job)
            if mine.gone or not job.running:
                continue
            mine.memory_mb = max(mine.memory_mb, int(sight.memory_mb))
            limit_mb = mine.control.memory_mb
            over = mine.state == "running" and limit_mb > 0 and sight.memory_mb > OVER * limit_mb
            self._watch(
                job,
                "memory",
                over,
                f"holds {sight.memory_mb:.0f} MB of a GPU on which it may have {limit_mb} MB beside others",
            )
            first = sight.first
            claims = first is not None and first.suspended is not None and first.suspended == mine.control.suspend
            said = "says that it stands still, moved off its GPUs, and"
            self._watch(job, "lies", claims and self._makes_steps(job.job), f"{said} trains on", patience_s=SURE_S)
            left_mb = sum(each.left_mb for each in sight.statuses.values())
            holds = claims and sight.used_mb is not None and sight.used_mb > left_mb + CONTEXT_MB
            self._watch(job, "lies", holds, f"{said} holds {sight.used_mb or 0:.0f} MB of one")
            frozen = mine.state == "suspended" and not mine.tried
            frozen = frozen and self._now_s > mine.free_s + self._settings.freeze_s
            runs_on = frozen and self._computes(job)
            if runs_on and "no-freeze" not in sight.wrong_since_s:
                with contextlib.suppress(SlurmError):
                    self._slurm.suspend(str(job.slurm_job))  # somebody else may have resumed it
            self._watch(job, "no-freeze", runs_on, "runs on though Slurm has suspended it")
            self._hold_to_share(job)

    def _hold_to_share(self, job: OrderedJob) -> None:
        """Freeze a guest of a guaranteed job on which a share has no effect: it would train at that one's cost.

        One that never speaks, or has stopped to, cannot be told its share. One that speaks may still train beyond it.
        """
        mine, sight, pack = self._state.hosted[job.job], self._sight(job.job), self._ordered_pack(job.job)
        carried = self._groups.pack_of(job.job)
        if pack is None or carried is None or carried.guaranteed in (None, job.job) or mine.state != "running":
            sight.counted, sight.over_s = None, 0.0
            sight.wrong_since_s.pop("share", None)
            return
        settings, whose = self._settings, f"beside guaranteed job {carried.guaranteed}"
        self._count_beyond(sight, mine.control)
        if sight.over_s > settings.misuse_s + 2 * sight.longest_s:
            text = f"trained {sight.over_s:.0f} s more than its share of {mine.control.compute:.1%} {whose} allows"
            if settings.misuse == "kill" and "lies" not in mine.told:
                self._caught(job, "lies", text, kill=True, else_="was left as it is")
            else:
                self._hold_out(job, pack, text)
            return
        if mine.begun_s == math.inf or sight.obeyed[0] == mine.control.number:
            sight.wrong_since_s.pop("share", None)
            return
        silent_s = self._now_s - sight.wrong_since_s.setdefault("share", self._now_s)
        if not sight.statuses and silent_s >= settings.suspend_wait_s:
            self._hold_out(job, pack, f"says nothing to the agent of its node, so it has no share {whose}")
        elif silent_s >= settings.suspend_wait_s + settings.start_wait_s + 2 * max(sight.longest_s, sight.usual_s):
            self._hold_out(job, pack, f"has not taken up its share {whose} for {silent_s:.0f} s")

    def _count_beyond(self, sight: Sight, control: JobControl) -> None:
        """Count what a guest has trained beyond its share while it says that it carries it out, and since the look before."""
        before, first = sight.counted, sight.first
        sight.counted = (self._now_s, first) if first is not None and first.number == control.number else None
        if before is None or sight.counted is None or before[1].number != control.number:
            return
        steps = steps_between(before[1], sight.counted[1])
        made_s, seconds = steps.count * steps.mean_s, self._now_s - before[0]
        sight.longest_s = max(sight.longest_s, made_s)
        allowed_s = (LENIENT * control.compute + sight.usual_s / (sight.usual_s + PAUSE_S)) * seconds
        sight.over_s = max(sight.over_s + made_s - allowed_s, 0.0)

    def _hold_out(self, job: OrderedJob, pack: Pack, text: str) -> None:
        """Leave a guest out of its pack until the guaranteed job goes or the pack is another one, and tell its user."""
        mine = self._state.hosted[job.job]
        if mine.mps:
            done = "was left as it is, since a client of NVIDIA's MPS is not suspended"
        else:
            mine.held_out = pack.jobs
            done = f"was frozen until job {pack.guaranteed} is gone"
        remedy = "a program that uses Penstock's executor keeps to its share"
        self._caught(job, "share", text, kill=False, else_=f"{done}; {remedy}")

    def _makes_steps(self, job: JobId) -> bool:
        """Whether it counts more steps than when it said that it stands still."""
        sight = self._sight(job)
        first = sight.first
        if first is None:
            return False
        if sight.mark is None or sight.mark.suspended != first.suspended:
            sight.mark = first
        return first.steps > sight.mark.steps

    def _computes(self, job: OrderedJob) -> bool:
        """Whether its processes, between the last two looks, used the processor as those do not that stand still."""
        sight = self._sight(job.job)
        before_s, before_cpu_s, share = sight.cpu or (0.0, 0.0, 0.0)
        if self._now_s - before_s < self._settings.sample_s:
            return share > IDLE_CPU
        pids = self._living.get(job.slurm_job, [])
        cpu_s = sum(state.cpu_s for pid in pids if (state := self._processes.state(pid)) is not None)
        share = (cpu_s - before_cpu_s) / (self._now_s - before_s) if sight.cpu is not None else 0.0
        sight.cpu = (self._now_s, cpu_s, share)
        return share > IDLE_CPU

    def _watch(self, job: OrderedJob, cause: str, wrong: bool, text: str, patience_s: float | None = None) -> None:
        """Contain a job that has done it for too long."""
        since = self._sight(job.job).wrong_since_s
        key = text.partition(" holds ")[0] if cause == "lies" else cause
        if not wrong:
            since.pop(key, None)
            return
        began_s = since.setdefault(key, self._now_s)
        if self._now_s - began_s >= (self._settings.misuse_s if patience_s is None else patience_s):
            text = f"{text}, for {self._now_s - began_s:.0f} s"
            self._caught(job, cause, text, kill=self._settings.misuse == "kill", else_="was left as it is")

    def _caught(self, job: OrderedJob, cause: str, text: str, *, kill: bool, else_: str) -> None:
        """Do something about a job, once for each cause, and have its user told."""
        mine = self._state.hosted[job.job]
        if cause in mine.told or (kill and self._now_s < mine.retry_s):
            return
        killed = False
        if kill:
            try:
                self._slurm.cancel(str(job.slurm_job))
                killed = True
            except JobGone:
                pass
            except SlurmError as error:
                log.warning("not cancelled yet", extra={"job": job.job, "text": str(error)})
                mine.retry_s = self._now_s + RETRY_S
                return
        mine.told.add(cause)
        done = "it was cancelled" if killed else f"it {else_}" if cause != "died" else else_
        contained = self._state.contained
        contained.append(
            Contained.model_validate(
                {
                    "number": _next(contained),
                    "job": job.job,
                    "time_s": self._now_s,
                    "cause": cause,
                    "text": f"job {job.job} {text}: {done}.",
                    "killed": killed,
                }
            )
        )
        log.warning("contained", extra={"job": job.job, "text": contained[-1].text})
        if killed:
            mine.told.add("killed")
            self._has_gone(job, mine)

    # --- what is told

    def _save(self) -> None:
        state = self._state
        state.account = self._groups.account
        for some in (state.packs, state.contained, state.xids):
            del some[:-REMEMBERED]
        text = state.model_dump_json()
        if text != self._saved:
            try:
                save(self._state_file, state)
            except OSError as error:  # turns go on
                log.warning("the state is not saved", extra={"text": f"{self._state_file}: {error}"})
                return
            self._saved = text

    def _tell(self) -> None:
        status = self.status()
        text = status.model_copy(update={"time_s": 0.0}).model_dump_json(exclude={"jobs": {"__all__": {"use"}}})
        if text == self._told and self._now_s - self._told_s < TELL_S:
            return
        path = status_file(self._spool, self._node)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, status.model_dump_json())
        except OSError as error:
            log.log(
                logging.DEBUG if self._untold else logging.WARNING,
                "the daemon cannot be told",
                extra={"text": f"{error}; on NFS root must be able to write there (no_root_squash)"},
            )
            self._untold = True
            return
        self._told, self._told_s, self._untold = text, self._now_s, False

    def status(self) -> NodeStatus:
        """All that is known now."""
        state = self._state
        carried = {job: group for group in self._groups.groups for job in group.order.jobs}
        groups = []
        for ordered in self._ordered():
            group = next((carried[job] for job in ordered.shared.jobs if job in carried), None)
            if group is not None:
                groups.append(
                    CarriedGroup(shared=ordered.shared, running=group.running, share=min(group.control.share, 1.0))
                )
        return NodeStatus(
            node=self._node,
            order=state.order.number if state.order is not None else 0,
            time_s=self._now_s,
            history=state.history,
            release=__version__,
            lacks=tuple(sorted(self._lacks)),
            groups=tuple(groups),
            jobs=tuple(self._carried(job) for job in self._jobs()),
            packs=tuple(state.packs),
            contained=tuple(state.contained),
            xids=tuple(state.xids),
            gpu_memory_mb=self._gpu_memory_mb,
            links=self._links,
        )

    def _carried(self, job: OrderedJob) -> CarriedJob:
        mine, account = self._state.hosted[job.job], self._groups.account
        # Who does not tell its steps cannot be compared with itself in a pack, so it counts as not profiled.
        profiled = job.job in account.profiled and mine.rate > 0
        use = JobUse(
            job.kind or job.job,
            mine.utilisation if profiled else None,
            mine.memory_mb,
            account.ran_s.get(job.job, 0.0),
            account.moved_s.get(job.job),
            answers=bool(self._sight(job.job).statuses) or (None if mine.begun_s == math.inf else False),
        )
        return CarriedJob(
            job=job.job,
            state=mine.state,
            devices=mine.devices or job.own_devices,
            use=use,
            mps=mine.mps,
            why=mine.why,
        )


def steps_between(before: JobStatus | None, after: JobStatus | None) -> Steps:
    """The steps that a process made between two of its statuses.

    None if one is missing, they are of two processes, or the time that it says they took cannot be.
    """
    if before is None or after is None or before.pid != after.pid or after.steps <= before.steps:
        return Steps()
    count, seconds = after.steps - before.steps, after.seconds - before.seconds
    mean_s = seconds / count
    if not 1 / MAX_RATE < mean_s < MAX_RATE:
        return Steps()
    return Steps(count, mean_s, max(after.squares - before.squares - count * mean_s**2, 0.0))


def _next(some: Iterable[NumberedPack | Contained | XidSeen]) -> int:
    return max((each.number for each in some), default=0) + 1
