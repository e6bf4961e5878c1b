"""Gandiva: jobs take turns, and are packed where that pays, instead of waiting for GPUs of their own.

After *Gandiva: Introspective cluster scheduling for deep learning* (Xiao et al., OSDI '18). In each round:

1. *Undo*: a pack whose jobs' throughputs, relative to alone, added up to no more than taking turns gives is taken apart, and so
   are the worst of the others while GPUs are idle (`sharing.packing`).
2. *Shrink*: jobs that have grown give back what they can on nodes on which jobs take turns.
3. *Land*: who is between two runs goes on to where it was sent, if that is free. Who waits gets GPUs by Algorithm 1
   (`sharing.gandiva`); else some that jobs which have grown give back, of the one node where that is least; with turns as the
   last resort, up to `max_height`.
4. *Migrate*: off nodes on which jobs take turns, to free GPUs or to nodes with less to do; out of packs, to free GPUs; and off
   a node that can be emptied for a job that finds no room in one piece (defragmentation).
5. *Pack*: on nodes on which jobs still take turns, the pairs that promise most.
6. *Grow*: where nobody waits, jobs that declared it (`grow_shrink`) take what has been idle on their node for `idle_s`.

Of trials of one search (`trial_group`) those that look hopeless by what they have reported rest: they give back their GPUs and
wait, until others turn out worse (`sharing.groups`). The more promising land first, and where trials take turns, a better one has
the turns of those that are worse. Before all of them each has a first slice.

Mode `reactive` has only 2, 3 and 6. A job that was moved, packed or unpacked neither migrates nor grows for `interval_s`, and is
not packed for `pack_interval_s`; a pack that does not pay is undone, and GPUs that somebody needs are given back, at any time.
Where it is known what memory a GPU has, each job of a pack has a limit, and none is packed of whom it is not known what it uses.
On a cluster without agents nobody shares: then this is Algorithm 1 with a queue.

Where this departs from the paper: a job is never spread over pieces of several nodes, for Slurm asks for as many GPUs on each
node of a job; so there is none whose pieces are brought together later. Jobs of several nodes get whole ones to themselves.
Jobs that may not be moved take no turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import (
    Assignment,
    Configuration,
    GpuClass,
    Job,
    JobId,
    Node,
    Pack,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    SharedGpus,
    SharingState,
    Snapshot,
)
from penstock_scheduler.policies import common
from penstock_scheduler.policies.room import Allowance, Room
from penstock_scheduler.sharing.gandiva import land
from penstock_scheduler.sharing.groups import GroupSettings, TrialSeen, judge
from penstock_scheduler.sharing.packing import Measured, Memory, PackingSettings, Tenant, choose, undo


class GandivaSettings(BaseModel):
    """Section `[policy.gandiva]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["introspective", "reactive"] = Field(
        default="introspective", description="Reactive: nobody is packed, and nobody migrates."
    )
    slice_s: float = Field(default=60.0, gt=0, description="Length of a turn, seconds.")
    max_height: float = Field(
        default=2.0, ge=1, description="Most GPUs wanted over GPUs there, on a node that a new job may land on."
    )
    interval_s: float = Field(
        default=600.0,
        ge=0,
        description="Least time between a job's last move and its next migration or growth, seconds.",
    )
    idle_s: float = Field(
        default=300.0, ge=0, description="Least time for which GPUs have been idle into which a job grows, seconds."
    )
    pack_interval_s: float = Field(
        default=120.0, ge=0, description="Least time between a job's last move and its next packing, seconds."
    )
    least_total: float = Field(
        default=1.0, ge=1, description="Packs whose relative throughputs add up to no more than this are undone."
    )
    groups: GroupSettings = GroupSettings()
    migrations: int = Field(default=4, ge=0, description="Most migrations in one round.")

    @property
    def packing(self) -> PackingSettings:
        """Those of `sharing.packing`."""
        return PackingSettings(least_total=self.least_total, interval_s=self.pack_interval_s)


def colocation(state: SharingState, gpu_types: Iterable[str]) -> Colocation:
    """What the snapshot knows of pairs, with utilisations for the prior."""
    pairs = {(pair.gpu_type, pair.mine, pair.theirs): Pair(share=pair.share) for pair in state.pairs}
    used = {use.kind: use.utilisation for use in state.uses.values() if use.utilisation is not None}
    return Colocation(pairs, {(gpu_type, kind): share for gpu_type in gpu_types for kind, share in used.items()})


def priority(job: Job) -> int:
    """Whose turn goes before whose: a guaranteed job's before others."""
    return 1 if job.spec.gpu_class is GpuClass.GUARANTEED else 0


def _search_of(job: Job) -> tuple[str, str] | None:
    """Whose trial it is: the user, and what that one calls the search."""
    return None if job.spec.trial_group is None else (job.user, job.spec.trial_group)


def tenant(job: Job, gpus: int, state: SharingState) -> Tenant:
    """A job as `sharing.packing` sees it."""
    use = state.use(job.id)
    moved_s = -math.inf if use.moved_s is None else use.moved_s
    return Tenant(job.id, use.kind, gpus, use.memory_mb, priority(job), moved_s)


class Gandiva:
    """The policy; see the module."""

    name = "gandiva"
    shares = True

    def __init__(self, settings: GandivaSettings) -> None:
        self._settings = settings
        self._requests = common.Requests()

    def decide(self, snapshot: Snapshot) -> Plan:
        """One round."""
        return _Round(self._settings, snapshot, self._requests.of(snapshot)).plan()


@dataclass(slots=True)
class _SharedNode:
    """A node whose GPUs are allocated here."""

    node: Node
    gpus: int
    packs: list[Pack] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return sum(pack.gpus for pack in self.packs)

    @property
    def free(self) -> int:
        return max(self.gpus - self.wanted, 0)

    @property
    def height(self) -> float:
        return self.wanted / self.gpus if self.gpus > 0 else math.inf

    def view(self) -> SharedGpus:
        return SharedGpus(self.node.name, self.gpus, tuple(self.packs))


class _Round:
    def __init__(self, settings: GandivaSettings, snapshot: Snapshot, requests: Mapping[JobId, common.Request]) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._requests = requests
        self._state = snapshot.sharing
        self._max_height = settings.max_height if self._state is not None else 1.0
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._allowance = Allowance(snapshot.limits)
        self._memory = Memory(self._state if self._state is not None else SharingState())
        self._fixed: dict[JobId, Placement] = {}
        self._busy: set[JobId] = set()
        """Jobs that are in flight, or have been moved in this round: they are left alone."""
        self._gpus: dict[JobId, int] = {}
        """GPUs of each job that has a place on one node."""
        self._sites: dict[str, _SharedNode] = {}
        self._site_of: dict[JobId, _SharedNode] = {}
        self._why: dict[JobId, str] = {}
        self._waiting: dict[JobId, Reason] = {}
        self._queue: list[Job] = []
        self._migrations = 0
        self._rank: dict[JobId, int] = {}
        """Of trials: who of a group lands before whom."""
        self._standing: dict[JobId, int] = {}
        """Of trials: who of a group has a turn before whom; many may have one place."""
        self._group_submit_s: dict[tuple[str, str], float] = {}
        for job in snapshot.jobs:
            if (key := _search_of(job)) is not None:
                self._group_submit_s[key] = min(job.submit_s, self._group_submit_s.get(key, math.inf))
        self._judge_groups()
        self._settle_in()
        types = {node.gpu_type for node in snapshot.nodes}
        self._known = colocation(self._state, types) if self._state is not None else Colocation()

    def plan(self) -> Plan:
        introspective = self._settings.mode == "introspective" and self._state is not None
        if introspective:
            self._undo()
        for site in self._sites.values():
            self._shrink(site, 0)
        self._land(introspective)
        if introspective:
            self._migrate()
            self._pack()
        self._grow()
        return self._made()

    # Who is where.

    def _judge_groups(self) -> None:
        """Let the hopeless trials of each search rest."""
        if self._state is None:
            return
        groups: dict[tuple[str, str], list[Job]] = {}
        for job in sorted(self._snapshot.jobs, key=lambda job: (job.submit_s, job.id)):
            if (key := _search_of(job)) is not None and job.id in self._state.uses:
                groups.setdefault(key, []).append(job)
        for (_, name), jobs in groups.items():
            uses = [self._state.uses[job.id] for job in jobs]
            trials = [TrialSeen(job.id, use.ran_s, use.results) for job, use in zip(jobs, uses, strict=True)]
            verdict = judge(trials, self._settings.groups)
            self._rank |= {job: place for place, job in enumerate(verdict.order)}
            self._standing |= {job: 1 + min(place, verdict.judged) for place, job in enumerate(verdict.order)}
            self._standing |= dict.fromkeys(verdict.resting, 2 + verdict.judged)
            self._standing |= {trial.job: 0 for trial in trials if trial.trained_s < self._settings.slice_s}
            for job_id in verdict.resting:
                job = self._jobs[job_id]
                if job.phase in (Phase.QUEUED, Phase.RUNNING) and common.movable(job):
                    text = f"other trials of {name} look better after as much training"
                    self._waiting[job_id] = Reason(ReasonCode.STOPPED_BY_GROUP, text)

    def _settle_in(self) -> None:
        """Find who stays where it is, and what each node has for the others."""
        nodes = {node.name: node for node in self._snapshot.nodes}
        pins = common.pinned(self._snapshot)
        residents: list[tuple[Job, Placement]] = []
        firm: list[tuple[Job, Placement]] = []
        """On their way, and not to be stopped there."""
        for job in self._snapshot.jobs:
            flying = common.in_flight(job)
            where = job.target if flying else job.allocation
            node = nodes.get(where.nodes[0]) if where is not None and len(where.shares) == 1 else None
            if job.id in self._waiting:
                continue
            if job.phase is Phase.QUEUED or where is None:
                self._queue.append(job)
            elif job.phase is Phase.RUNNING and not common.movable(job):
                self._fixed[job.id] = where
            elif node is None or not node.usable:
                if job.id in pins or job.phase is Phase.RUNNING:
                    self._fixed[job.id] = where
                else:
                    self._queue.append(job)
            elif flying and self._state is None and job.id not in pins:
                self._queue.append(job)
            elif flying and not common.movable(job):
                firm.append((job, where))
            else:
                residents.append((job, where))
                if flying:
                    self._busy.add(job.id)
        taken = Counter[str]()
        for where in self._fixed.values():
            taken.update({share.node: share.gpus for share in where.shares})
        for job, where in firm:
            name = where.nodes[0]
            if taken[name] + where.gpus > nodes[name].gpus_for_us:
                self._queue.append(job)
            else:
                self._fixed[job.id] = where
                taken[name] += where.gpus
        for job_id, where in self._fixed.items():
            self._allowance.take(self._jobs[job_id], where.gpus, where.gpu_type)
        for node in self._snapshot.nodes:
            if node.usable:
                self._sites[node.name] = _SharedNode(node, max(node.gpus_for_us - taken[node.name], 0))
        by_node: dict[str, dict[JobId, tuple[Job, Placement]]] = {}
        for job, where in sorted(residents, key=lambda each: (each[0].submit_s, each[0].id)):
            self._gpus[job.id] = where.gpus
            self._allowance.take(job, where.gpus, where.gpu_type)
            by_node.setdefault(where.nodes[0], {})[job.id] = (job, where)
        for name, there in by_node.items():
            self._house(self._sites[name], there)

    def _house(self, site: _SharedNode, there: dict[JobId, tuple[Job, Placement]]) -> None:
        """Put the jobs of a node in the packs in which they are; who has no room any more is in the queue again."""
        packs = []
        for group in self._state.groups if self._state is not None else ():
            if group.node == site.node.name:
                packs += [pack.jobs for pack in group.packs]
        together = [[job for job in jobs if job in there] for jobs in packs]
        known = {job for jobs in together for job in jobs}
        for jobs in [*together, *([job] for job in there if job not in known)]:
            if not jobs:
                continue
            gpus = max(self._gpus[job] for job in jobs)
            if gpus > site.gpus or (self._state is None and gpus > site.free):
                for job in jobs:
                    self._to_queue(job)
            elif self._memory.limits(tuple(jobs), site.node.gpu_type) is None:
                for job in jobs:
                    self._add(site, (job,))
                    self._why[job] = "leaves its pack, for whose memory the GPU has no room any more"
                self._busy |= set(jobs)
            else:
                self._add(site, tuple(jobs))

    def _to_queue(self, job_id: JobId) -> None:
        job = self._jobs[job_id]
        self._allowance.take(job, -self._gpus.pop(job_id), self._type_of(job))
        self._queue.append(job)

    def _type_of(self, job: Job) -> str:
        where = job.allocation or job.target
        assert where is not None, "it has a place"
        return where.gpu_type

    def _add(self, site: _SharedNode, jobs: tuple[JobId, ...]) -> None:
        gpus = max(self._gpus[job] for job in jobs)
        limits = self._memory.limits(jobs, site.node.gpu_type) or ()
        site.packs.append(Pack(jobs, gpus, max(priority(self._jobs[job]) for job in jobs), limits=limits))
        for job in jobs:
            self._site_of[job] = site

    # Packs that do not pay.

    def _undo(self) -> None:
        assert self._state is not None, "packs are of a cluster with agents"
        by_site: dict[str, list[Measured]] = {}
        newest = {frozenset(seen.jobs): seen for seen in self._state.seen}
        for seen in newest.values():
            if len(seen.jobs) != 2 or any(job not in self._site_of for job in seen.jobs):
                continue
            site = self._site_of[seen.jobs[0]]
            if any(set(pack.jobs) == set(seen.jobs) for pack in site.packs):
                one, other = (tenant(self._jobs[job], self._gpus[job], self._state) for job in seen.jobs)
                measured = Measured((one, other), (seen.speeds[0], seen.speeds[1]))
                by_site.setdefault(site.node.name, []).append(measured)
        for name, all_measured in by_site.items():
            site = self._sites[name]
            spare = 0 if self._queue else site.free
            for measured in undo(all_measured, spare, self._settings.packing):
                self._split(site, {one.job for one in measured.pack})

    def _split(self, site: _SharedNode, jobs: set[JobId]) -> None:
        """Take a pack apart; its jobs stay on the node."""
        pack = next(pack for pack in site.packs if set(pack.jobs) == jobs)
        site.packs.remove(pack)
        for job in pack.jobs:
            self._add(site, (job,))
        self._busy |= jobs

    # Who waits.

    def _grown(self, site: _SharedNode) -> list[tuple[Pack, int]]:
        """Jobs that have grown on a node and the GPUs that each can give back, those with most first."""
        found = []
        for pack in site.packs:
            job = self._jobs[pack.jobs[0]]
            least = job.spec.min_gpus
            settled = job.id not in self._busy or job.phase is Phase.QUEUED
            grown = len(pack.jobs) == 1 and job.spec.grow_shrink and pack.gpus > least and settled
            allowed = common.allowed(job, Configuration(1, least, site.node.gpu_type)) and self._may_be_on(job.id, site)
            if grown and allowed:
                found.append((pack, pack.gpus - least))
        return sorted(found, key=lambda each: -each[1])

    def _give_back(self, site: _SharedNode, pack: Pack, gpus: int) -> None:
        job = self._jobs[pack.jobs[0]]
        self._allowance.take(job, -gpus, site.node.gpu_type)
        self._gpus[job.id] = pack.gpus - gpus
        site.packs[site.packs.index(pack)] = replace(pack, gpus=pack.gpus - gpus)
        self._busy.add(job.id)
        self._why[job.id] = f"gives back {gpus} GPUs that others need"

    def _shrink(self, site: _SharedNode, free: int) -> None:
        """Let jobs that have grown go back to what they asked for, until so many GPUs of the node are free."""
        for pack, gpus in self._grown(site):
            if site.gpus - site.wanted < free:
                self._give_back(site, pack, gpus)

    def _land(self, introspective: bool) -> None:
        refused: set[object] = set()
        queue = sorted(self._queue, key=lambda job: (-priority(job), *self._came(job)))
        for job in [job for job in queue if not self._go_on(job)]:
            request = self._request(job)
            turns = common.movable(job)
            key = (tuple(request), turns, job.partitions, job.reservation, job.user, job.account, job.qos)
            if not request:
                self._waiting[job.id] = common.never_fits(job, self._snapshot.nodes)
            elif key in refused or not self._find(job, request, introspective):
                refused.add(key)
                if job.id not in self._waiting:
                    most = self._max_height if turns else 1.0
                    text = f"waits for {next(iter(request)).gpus} GPUs" + (
                        f": on each node jobs want {most:g} times the GPUs that are there" if most > 1 else ""
                    )
                    self._waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))

    def _go_on(self, job: Job) -> bool:
        """Let a job that is between two runs go where it was sent, be it to grow or to make room, if that is free."""
        going = job.target if job.phase is Phase.QUEUED else None
        if going is None or len(going.shares) > 1 or not common.movable(job):
            return False
        site, option = self._sites.get(going.nodes[0]), going.configuration
        if (
            site is None
            or site.free < option.gpus
            or not (common.allowed(job, option) and common.is_open(site.node, job))
            or self._allowance.refuses(job, option.gpus, option.gpu_type) is not None
        ):
            return False
        self._place(job, option, site)
        return True

    def _came(self, job: Job) -> tuple[object, ...]:
        """When a job came; trials of one search as a whole, and then by what they promise."""
        search = _search_of(job)
        if search is None:
            return (job.submit_s, 0, job.id)
        return (self._group_submit_s[search], self._rank.get(job.id, len(self._rank)), job.id)

    def _request(self, job: Job) -> common.Request:
        """What a job asks for; one that grows and shrinks asks for the least, and grows into what is idle."""
        request = self._requests[job.id]
        least = job.spec.min_gpus
        if not job.spec.grow_shrink or not request or next(iter(request)).gpus == least:
            return request
        types = dict.fromkeys(option.gpu_type for option in request)
        smaller = {Configuration(1, least, gpu_type): 0.0 for gpu_type in types}
        allowed = {option: 0.0 for option in smaller if common.allowed(job, option)}
        return allowed or request

    def _find(self, job: Job, request: common.Request, introspective: bool) -> bool:
        """Give a job a place, if there is one."""
        options = self._within_limits(job, request)
        open_to_it = [self._sites[node.name] for node in common.open_nodes(self._snapshot.nodes, job) if node.usable]
        single = {
            option: [site for site in open_to_it if site.node.gpu_type == option.gpu_type and site.gpus > 0]
            for option in options
            if option.nodes == 1
        }
        ways = [self._free, self._freed]
        if introspective:
            ways.append(self._defragment)
        if common.movable(job):
            ways.append(self._turn)
        for way in ways:
            for option, sites in single.items():
                site = way(option.gpus, sites)
                if site is not None:
                    self._place(job, option, site)
                    return True
        if any(self._whole(job, option) for option in options if option.nodes > 1):
            return True
        for option, sites in single.items() if introspective else ():
            if sum(site.free + sum(gpus for _, gpus in self._grown(site)) for site in sites) >= option.gpus:
                for site in sites:  # pieces, which migration brings together in later rounds
                    self._shrink(site, site.gpus)
        return False

    def _within_limits(self, job: Job, request: common.Request) -> list[Configuration]:
        """What limits let the job have, if need be when others under the same limit have given back what they have grown by."""
        allowed, refused = self._allowance.within(job, request)
        if not refused:
            return list(allowed)
        first = next(iter(request))
        limit = self._allowance.refuses(job, first.gpus, first.gpu_type)
        assert limit is not None, "it refuses all"
        tried, back = self._allowance.copy(), []
        for site in self._sites.values():
            for pack, gpus in self._grown(site):
                other = self._jobs[pack.jobs[0]]
                if not limit.covers(other) or not limit.counts(site.node.gpu_type):
                    continue
                tried.take(other, -gpus, site.node.gpu_type)
                back.append((site, pack, gpus))
                allowed, _ = tried.within(job, request)
                if allowed:
                    for each in back:
                        self._give_back(*each)
                    return list(allowed)
        self._waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, refused, common.smallest_need(job))
        return []

    # Where a job of one node may go: the ways to find it a place, in the order in which they are tried.

    def _free(self, gpus: int, sites: Sequence[_SharedNode], most: float = 1.0) -> _SharedNode | None:
        """Algorithm 1, up to so many times the GPUs of a node."""
        landing = land(gpus, [site.view() for site in sites], most, spread=False)
        return self._sites[landing.shares[0][0]] if landing is not None else None

    def _freed(self, gpus: int, sites: Sequence[_SharedNode]) -> _SharedNode | None:
        """The node on which jobs that have grown must give back least."""
        back = [(sum(more for _, more in self._grown(site)), site) for site in sites]
        able = [site for more, site in back if more > 0 and site.free + more >= gpus]
        if not able:
            return None
        site = max(able, key=lambda site: site.free)
        self._shrink(site, gpus)
        return site

    def _turn(self, gpus: int, sites: Sequence[_SharedNode]) -> _SharedNode | None:
        return self._free(gpus, sites, self._max_height)

    def _place(self, job: Job, option: Configuration, site: _SharedNode) -> None:
        self._allowance.take(job, option.gpus, option.gpu_type)
        if common.movable(job):
            self._gpus[job.id] = option.gpus
            self._add(site, (job.id,))
            self._busy.add(job.id)
        else:  # GPUs of its own: whoever comes after it must not make it take turns
            self._fixed[job.id] = common.on_one_node(job, site.node, option.gpus)
            site.gpus -= option.gpus

    def _whole(self, job: Job, option: Configuration) -> bool:
        """Whole nodes for a job of several: nobody else is there, and nobody comes."""
        empty = [site.node for site in self._sites.values() if not site.packs and site.gpus == site.node.gpus]
        where = Room(empty, (), "best").find(job, [option])
        if where is None:
            return False
        self._fixed[job.id] = where
        self._allowance.take(job, where.gpus, where.gpu_type)
        for share in where.shares:
            self._sites[share.node].gpus -= share.gpus
        return True

    # Migration.

    def _defragment(self, gpus: int, sites: Sequence[_SharedNode]) -> _SharedNode | None:
        """Empty the node with most free GPUs by filling those with fewer, if there is room for a job then; None: it cannot be."""
        if sum(site.free for site in sites) < gpus:
            return None
        source = max((site for site in sites if site.packs and site.gpus >= gpus), key=lambda s: s.free, default=None)
        if source is None or source.wanted > source.gpus:
            return None
        others = [site for site in sites if site is not source and site.packs]
        free = {site.node.name: site.free for site in others}
        moves: list[tuple[Pack, _SharedNode]] = []
        missing = gpus - source.free
        for pack in sorted(source.packs, key=lambda pack: -pack.gpus):
            if missing <= 0:
                break
            fits = [s for s in others if free[s.node.name] >= pack.gpus and self._may_move(pack, s)]
            if fits:
                target = min(fits, key=lambda site: free[site.node.name])
                free[target.node.name] -= pack.gpus
                missing -= pack.gpus
                moves.append((pack, target))
        if missing > 0 or self._migrations + len(moves) > self._settings.migrations:
            return None
        for pack, target in moves:
            self._move(pack, source, target, "makes room for a job that needs GPUs in one piece")
        return source

    def _migrate(self) -> None:
        """Off nodes with turns; then out of packs, to GPUs that nobody uses."""
        for source in sorted(self._sites.values(), key=lambda site: (-site.height, site.node.name)):
            while source.packs and source.wanted > source.gpus and self._migrations < self._settings.migrations:
                moved = False
                for pack in sorted(source.packs, key=lambda pack: (pack.priority, len(pack.jobs), pack.gpus)):
                    target = self._better(source, pack)
                    if target is not None:
                        self._move(pack, source, target, f"leaves {source.node.name}, where jobs take turns")
                        moved = True
                        break
                if not moved:
                    break
        if self._somebody_waits():
            return
        for source in list(self._sites.values()):
            for pack in [pack for pack in source.packs if len(pack.jobs) > 1]:
                job = pack.jobs[-1]
                alone = Pack((job,), self._gpus[job], pack.priority)
                targets = [s for s in self._sites.values() if s.free >= alone.gpus and self._may_move(alone, s)]
                if targets and self._migrations < self._settings.migrations:
                    self._split(source, set(pack.jobs))
                    self._busy.discard(job)
                    single = next(each for each in source.packs if each.jobs == (job,))
                    best = min(targets, key=lambda site: (site is not source, site.free, site.node.name))
                    if best is not source:
                        self._move(single, source, best, "leaves its pack for GPUs of its own")

    def _better(self, source: _SharedNode, pack: Pack) -> _SharedNode | None:
        """The node on which a pack has less to share: one with room, or with half a job for each GPU less to do."""
        if not all(self._rested(job, self._settings.interval_s) for job in pack.jobs):
            return None
        most = source.height - 0.5
        found = [
            site
            for site in self._sites.values()
            if site is not source
            and site.gpus >= pack.gpus
            and (site.free >= pack.gpus or (site.wanted + pack.gpus) / site.gpus <= most)
            and self._may_move(pack, site)
        ]
        return min(found, key=lambda s: ((s.wanted + pack.gpus) / s.gpus, s.free, s.node.name), default=None)

    def _may_move(self, pack: Pack, site: _SharedNode) -> bool:
        return all(self._rested(job, self._settings.interval_s) and self._may_be_on(job, site) for job in pack.jobs)

    def _rested(self, job_id: JobId, interval_s: float) -> bool:
        return job_id not in self._busy and common.rested(self._snapshot, job_id, interval_s)

    def _may_be_on(self, job_id: JobId, site: _SharedNode) -> bool:
        job, node = self._jobs[job_id], site.node
        if self._site_of[job_id].node.gpu_type != node.gpu_type or not job.spec.allows_type(node.gpu_type):
            return False
        return common.is_open(node, job)

    def _move(self, pack: Pack, source: _SharedNode, target: _SharedNode, why: str) -> None:
        source.packs.remove(pack)
        target.packs.append(pack)
        for job in pack.jobs:
            self._site_of[job] = target
            self._why[job] = why
            self._busy.add(job)
        self._migrations += 1

    # Packing and growing.

    def _pack(self) -> None:
        assert self._state is not None, "packs are of a cluster with agents"
        for site in self._sites.values():
            if site.wanted <= site.gpus:
                continue
            tenants = [
                tenant(self._jobs[pack.jobs[0]], pack.gpus, self._state)
                for pack in site.packs
                if len(pack.jobs) == 1 and pack.jobs[0] not in self._busy and self._profiled(pack.jobs[0])
            ]
            gpu_type = site.node.gpu_type
            pairs = choose(
                tenants,
                site.wanted - site.gpus,
                self._known,
                gpu_type,
                self._state.gpu_memory_mb.get(gpu_type, 0),
                self._snapshot.time_s,
                self._settings.packing,
            )
            for one, other in pairs:
                site.packs = [pack for pack in site.packs if pack.jobs[0] not in (one.job, other.job)]
                self._add(site, (one.job, other.job))

    def _profiled(self, job: JobId) -> bool:
        assert self._state is not None, "jobs are profiled by agents"
        return self._state.use(job).profiled

    def _somebody_waits(self) -> bool:
        return any(reason.code is ReasonCode.WAITING_CAPACITY for reason in self._waiting.values())

    def _grow(self) -> None:
        """Where nobody waits, who declared it takes what has been idle on its node for long enough."""
        if self._somebody_waits():
            return
        for site in self._sites.values():
            idle = self._idle(site)
            for index, pack in enumerate(site.packs):
                job = self._jobs[pack.jobs[0]]
                if (
                    len(pack.jobs) > 1
                    or not job.spec.grow_shrink
                    or not self._may_be_on(job.id, site)
                    or not self._rested(job.id, self._settings.interval_s)
                ):
                    continue
                gpus = pack.gpus
                while (
                    2 * gpus - pack.gpus <= idle
                    and common.allowed(job, Configuration(1, 2 * gpus, site.node.gpu_type))
                    and self._allowance.refuses(job, 2 * gpus - pack.gpus, site.node.gpu_type) is None
                ):
                    gpus *= 2
                if gpus > pack.gpus:
                    idle -= gpus - pack.gpus
                    self._allowance.take(job, gpus - pack.gpus, site.node.gpu_type)
                    self._gpus[job.id] = gpus
                    site.packs[index] = replace(pack, gpus=gpus)
                    self._why[job.id] = f"grows by {gpus - pack.gpus} GPUs that nobody uses"

    def _idle(self, site: _SharedNode) -> int:
        """GPUs of a node that nobody has had for `idle_s`, and that nobody is given now."""
        since_s = self._snapshot.idle_since_s.get(site.node.name, ())
        long = sum(self._snapshot.time_s - each_s >= self._settings.idle_s for each_s in since_s)
        return min(long, site.free)

    # The plan.

    def _made(self) -> Plan:
        assignments: dict[JobId, Assignment] = {}
        shared: list[SharedGpus] = []
        for job_id, where in self._fixed.items():
            job = self._jobs[job_id]
            if job.phase is Phase.QUEUED:
                reason = common.given(job, where, "which nobody uses")
                assignments[job_id] = common.assign(job, where, reason, self._snapshot)
            else:
                assignments[job_id] = common.pinned_assignment(job, where, self._snapshot)
        for site in self._sites.values():
            turns = site.wanted > site.gpus
            if turns:
                shared.append(SharedGpus(site.node.name, site.gpus, self._ranked(site.packs), self._settings.slice_s))
            for pack in site.packs:
                if not turns and len(pack.jobs) > 1:
                    shared.append(SharedGpus(site.node.name, pack.gpus, (pack,), self._settings.slice_s))
                for job_id in pack.jobs:
                    assignments[job_id] = self._assignment(self._jobs[job_id], site, pack, turns)
        order = [job.id for job in self._snapshot.jobs]
        return Plan(
            self._snapshot.round,
            {job_id: assignments[job_id] for job_id in order if job_id in assignments},
            {job_id: self._waiting[job_id] for job_id in order if job_id in self._waiting},
            shared=tuple(shared),
        )

    def _ranked(self, packs: Sequence[Pack]) -> tuple[Pack, ...]:
        """The packs of a node on which jobs take turns, those of trials with their rank."""
        found = list(packs)
        searches: dict[str, dict[int, int]] = {}
        for index, pack in enumerate(packs):
            jobs = [self._jobs[job] for job in pack.jobs]
            keys = {_search_of(job) for job in jobs}
            key = keys.pop()
            if key is not None and not keys:
                searches.setdefault(":".join(key), {})[index] = min(self._standing.get(job.id, 0) for job in jobs)
        for search, places in searches.items():
            ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
            for index, place in places.items():
                found[index] = replace(found[index], search=search, rank=ranks[place])
        return tuple(found)

    def _assignment(self, job: Job, site: _SharedNode, pack: Pack, turns: bool) -> Assignment:
        where = common.on_one_node(job, site.node, self._gpus[job.id])
        part = min(site.gpus / site.wanted, 1.0) if turns else 1.0
        others = [other for other in pack.jobs if other != job.id]
        words = [f"on GPUs that job {' and job '.join(others)} trains on at the same time"] if others else []
        if turns:
            turn = f"in turns with {len(site.packs) - 1} others"
            trial = job.spec.trial_group is not None
            words.append(f"{turn}, the better trials of a search first" if trial else f"{part:.0%} of the time, {turn}")
        if job.id in self._why:
            words.append(self._why[job.id])
        reason = common.given(job, where, ", ".join(words) or "which nobody else uses")
        if others or turns:
            reason = replace(reason, code=ReasonCode.SHARES)
        if common.in_flight(job):
            reason = Reason(ReasonCode.IN_FLIGHT, f"on its way to {where.configuration}")
        goodput = common.rate(self._snapshot.models[job.id], where.configuration) * part
        for other in others:
            assert self._state is not None, "packs are of a cluster with agents"
            kinds = [self._state.use(each).kind for each in (job.id, other)]
            goodput *= self._known.share(where.gpu_type, *kinds) or 0.5
        return common.assign(job, where, reason, self._snapshot, goodput)
