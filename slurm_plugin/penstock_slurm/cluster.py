"""Slurm behind the scheduler's `Cluster` port: a thin shell that reads, calls the pure core, and writes.

What happens to a job is in few places:

- `states.py`: its state, and the table of all transitions.
- `view.py`: what the scheduler sees of it. Pure.
- `steps.py`: what an action does to it next. Pure.
- `managed.py` keeps the views up to date; `acting.py` carries the steps out; `reporting.py` reads what jobs report.

Everything is derived anew from Slurm and the spool. What the daemon remembers, such as when it first saw a job pending, only
makes it wait longer after a restart; it never does anything twice. The epoch of the next run is in the spool before the job is
released.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from penstock_profiles.wire import Report
from penstock_scheduler.api.ports import Clock, SpecCheck
from penstock_scheduler.model import (
    Action,
    ClusterState,
    EndedRun,
    GpuLimit,
    Hold,
    Job,
    JobId,
    Node,
    Outcome,
    PlainJob,
    Plan,
    Progress,
    Snapshot,
    Stop,
)
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.acting import Acting
from penstock_slurm.act.shrinking import Shrinking
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmNode, SlurmReader, SlurmWriter
from penstock_slurm.jobs.begin_times import BeginTimes, let_deadlines_count
from penstock_slurm.jobs.holds import LeftNodes
from penstock_slurm.jobs.messages import note_shares
from penstock_slurm.jobs.output_files import Endings
from penstock_slurm.jobs.states import HOLDING, LEAVING
from penstock_slurm.observe import plain_jobs
from penstock_slurm.observe.amounts import Narrowed, with_amounts, with_partition_limits
from penstock_slurm.observe.boots import Boots
from penstock_slurm.observe.cloud_nodes import SlurmCloudNodes
from penstock_slurm.observe.lost_gpus import LostGpus
from penstock_slurm.observe.managed import ManagedJobs
from penstock_slurm.observe.node_parts import NodeParts
from penstock_slurm.observe.preemption import Preemption, with_preemptible
from penstock_slurm.observe.records import Absences, Records, expect_partitions, read, unknown_values
from penstock_slurm.observe.reporting import Reporting
from penstock_slurm.observe.site import SlurmRules, SlurmSite, gpu_limits, reserved
from penstock_slurm.observe.sorting import SortedJobs
from penstock_slurm.observe.view import (
    Scene,
    accounted_run,
    booting_jobs,
    closed_nodes,
    ended_run,
    free_gpus,
    gpu_type,
    node_views,
    partition_views,
    silent_nodes,
    unlisted_nodes,
)
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.share.agents import SlurmAgents

log = logging.getLogger(__name__)


class SlurmCluster:
    """The cluster; see the module."""

    def __init__(
        self,
        reader: SlurmReader,
        writer: SlurmWriter,
        spool: Spool,
        clock: Clock,
        settings: SlurmSettings,
        check: SpecCheck,
        cloud_nodes: SlurmCloudNodes | None = None,
        sharing: SlurmAgents | None = None,
    ) -> None:
        """`sharing` is also needed if the settings have no agents any more, for jobs that still share."""
        self._reader, self._writer = reader, writer
        self._spool, self._clock, self._settings = spool, clock, settings
        self._sharing, self._cloud_nodes = sharing, cloud_nodes
        cloud = settings.cloud_partition
        self._partitions = (*settings.partitions, *([cloud] if cloud else []))
        self._site = SlurmSite(reader, clock, settings)
        self._lost_gpus = LostGpus(reader, writer, spool)
        self._shrinking = Shrinking(reader, writer, spool, settings.checkpoint_wait_s)
        self._begin_times = BeginTimes(writer, settings.plain_after_s)
        self._left_nodes = LeftNodes(writer)
        self._endings = Endings(spool.control)
        self._managed = ManagedJobs(
            reader, writer, spool, self._partitions, settings.adopt, check, settings.start_patience_s
        )
        self._reporting = Reporting(writer, spool, clock, self._managed)
        self._scene = Scene(clock.now_s(), settings.partitions, (), {})
        self._acting = Acting(
            writer, spool, clock, settings, self._managed, self._lost_gpus, self._shrinking, sharing, self._scene
        )
        self._absences = Absences()
        self._boots = Boots()
        self._parts = NodeParts(cloud or "")
        self._plain_attempts = plain_jobs.Attempts(
            settings.start_patience_s + settings.checkpoint_wait_s + plain_jobs.ROUNDS_S
        )
        self._narrowed = Narrowed()
        self._slurm_nodes: dict[str, SlurmNode] = {}
        self._has_observed = False

    def resume(self, last: Snapshot, plan: Plan) -> None:
        """Take up the room and the moves of the last round, which an earlier process decided."""
        self._plain_attempts.resume(last.nodes)
        self._acting.resume({job: given.placement for job, given in plan.assignments.items()})

    def observe(self) -> ClusterState:
        """Nodes and jobs with a job spec in the managed partitions. Four Slurm calls, whatever the number of jobs.

        Raises:
            ClusterAway: Slurm does not answer.
            RoundFailed: a managed partition does not exist.
        """
        managed, first = self._managed, not self._has_observed
        records = self._read(look_back=bool(self._endings.awaited) or first)
        listed = records.jobs if self._sharing is None else self._sharing.reservations.saw(records.jobs)
        rules, now_s = self._site.rules(), self._clock.now_s()
        scene = self._scene_of_site(records, rules, now_s)
        jobs, replaced = managed.changed(listed, scene.site, now_s)
        self._has_observed = True
        found = managed.sort(jobs)
        gone = {**records.gone, **dict.fromkeys(replaced)}
        unlisted = self._unlisted_nodes(records.nodes, found)
        every_node = (*records.nodes, *unlisted)
        self._slurm_nodes = {node.name: node for node in every_node}
        cloud = self._settings.cloud_partition
        in_cloud = [node for node in every_node if cloud in node.partitions]
        here = [node for node in every_node if cloud not in node.partitions]
        self._see_cloud(in_cloud, listed, replaced)
        failed = self._failed(records, first=first)
        busy = (*managed.steady.values(), *jobs)
        known = managed.jobs.keys() | {job.id for job in failed}
        self._lost_gpus.check((*failed, *busy), known, now_s, counts_gpus=rules.features.counts_gpus)
        boot_s = self._boots.saw(here, scene.types, rules.features.resume_timeout_s, now_s)
        scene = self._scene = dataclasses.replace(
            scene,
            types={**scene.types, **{node.name: gpu_type(node) for node in unlisted}},
            tmp_mb={node.name: node.tmp_mb for node in every_node},
            silent=silent_nodes(every_node),
            stopped_s=managed.remembered.stopped_s,
            without_gpus={job.id for job in busy if self._lost_gpus.lacks(job)},
            misplaced=self._misplaced(busy),
            boot_s=boot_s,
            booting=booting_jobs(jobs, boot_s, self._scene.booting),
        )
        managed.take_over(found, jobs, gone, scene)
        for memory in (self._lost_gpus, self._shrinking, managed.remembered):
            memory.forget(managed.matters)
        self._endings.saw(managed.left, records.ended)
        nodes = with_amounts(self._nodes(records, here, jobs), managed.jobs.values())
        managed.jobs |= self._narrowed.look(managed.jobs, nodes)
        managed.jobs |= managed.unstarted.elsewhere(managed.jobs, nodes, now_s)
        cleared = {job_id for job_id, record in managed.looked.items() if managed.cleared(record)}
        self._see_sharing(nodes, here, cleared)
        managed.jobs |= self._behind(jobs, nodes)
        views = [managed.jobs[job_id] for job_id in managed.busy]
        self._acting.nodes = {node.name: node for node in nodes}
        self._acting.scene, self._acting.free = scene, free_gpus(nodes, in_cloud, views, cleared)
        runs = (ended_run(job, self._spool.control, scene) for job in records.ended)
        return ClusterState(
            nodes,
            tuple(managed.jobs.values()),
            tuple(found.refused),
            self._limits(busy, in_cloud),
            tuple(filter(None, runs)),
            partition_views(records.partitions, scene.managed),
            unknown_values(records),
            managed.waiting,
            replaced,
            managed.unseen,
            managed.told_round,
            self._plain(jobs, nodes),
            managed.unspooled,
        )

    def _read(self, *, look_back: bool) -> Records:
        """Slurm's answers, each part of a node as a node. `look_back`: whether to ask for ended jobs in any case."""
        managed = self._managed
        records = read(
            self._reader,
            managed.records | managed.not_yet | managed.held,
            managed.states.jobs,
            self._absences,
            self._clock.now_s(),
            look_back=look_back,
        )
        records = self._parts.divide(records)
        expect_partitions(self._partitions, records.partitions)
        return records

    def _scene_of_site(self, records: Records, rules: SlurmRules, now_s: float) -> Scene:
        """The part of the scene that does not depend on what the single jobs do."""
        partitions, nodes = records.partitions, records.nodes
        return Scene(
            now_s=now_s,
            managed=self._settings.partitions,
            up=tuple(name for name in self._settings.partitions if partitions[name].up),
            types={node.name: gpu_type(node) for node in nodes},
            max_time_s={name: each.max_time_s for name, each in partitions.items()},
            whole_nodes=frozenset(name for name, each in partitions.items() if each.whole_nodes),
            most={name: (each.most_cpus, each.most_memory_mb) for name, each in partitions.items()},
            node_sizes_mb=frozenset(node.memory_mb for node in nodes if rules.features.memory),
            rules=rules,
            preemption=Preemption.of(rules.features, partitions, rules.qos),
        )

    def _unlisted_nodes(self, nodes: Sequence[SlurmNode], found: SortedJobs) -> tuple[SlurmNode, ...]:
        """Nodes that Slurm does not list, and on which managed jobs run."""
        jobs = (*self._managed.steady.values(), *(job for job, _ in found.managed.values()))
        return unlisted_nodes(jobs, nodes, self._slurm_nodes)

    def _failed(self, records: Records, *, first: bool) -> list[SlurmJob]:
        """Jobs that have failed since the last observation."""
        # What failed while no penstockd ran is seen in the first observation only.
        return [
            job
            for job in records.ended
            if job.state == "FAILED" and (self._managed.sent(job) if first else job.id in records.gone)
        ]

    def _misplaced(self, busy: Iterable[SlurmJob]) -> set[JobId]:
        """Jobs that have to restart: see `SlurmAgents.misplaced`; and those that hold nodes which their run has left."""
        shared = self._sharing.misplaced if self._sharing is not None else ()
        return {*shared, *(job.id for job in busy if self._shrinking.stuck(job))}

    def _nodes(
        self, records: Records, slurm_nodes: Sequence[SlurmNode], slurm_jobs: Iterable[SlurmJob]
    ) -> tuple[Node, ...]:
        """The managed nodes, with GPUs set aside for plain jobs."""
        managed, scene, placeholders = self._managed, self._scene, {}
        if self._sharing is not None:
            reservations = self._sharing.reservations
            placeholders = {each.node: reservations.gpus(each.node) for each in reservations.placeholders}
        kept_for = reserved(records.reservations, scene.now_s, self._settings.reservation_lead_s)
        jobs = {job_id: (record, managed.jobs[job_id]) for job_id, record in managed.busy.items()}
        closed = closed_nodes(records.jobs)
        nodes = node_views(slurm_nodes, jobs, scene, kept_for=kept_for, placeholders=placeholders, closed=closed)
        nodes = with_partition_limits(nodes, records.jobs, jobs.keys(), scene.most)
        plain = tuple(self._not_ours(slurm_jobs))
        without, nodes = nodes, with_preemptible(nodes, plain, managed.jobs.values(), scene.preemption, scene.now_s)
        self._acting.making_room = frozenset(
            node.name for node, before in zip(nodes, without, strict=True) if node.gpus_others < before.gpus_others
        )
        self._acting.due_s = plain_jobs.due_s(plain, scene.managed)
        return plain_jobs.with_room(
            nodes,
            plain,
            managed.jobs.values(),
            scene.managed,
            now_s=scene.now_s,
            patience_s=self._settings.plain_patience_s,
            attempts=self._plain_attempts,
            moves=self._acting.moves,
            on_way=self._acting.on_way(),
            rank=scene.preemption.rank,
        )

    def _behind(self, slurm_jobs: Iterable[SlurmJob], nodes: Iterable[Node]) -> dict[JobId, Job]:
        """See `plain_jobs.behind`."""
        sharing, scene = self._sharing, self._scene
        if sharing is None:
            return {}
        return plain_jobs.behind(
            self._managed.jobs.values(),
            [node for node in nodes if sharing.shares_on(node.name)],
            self._not_ours(slurm_jobs),
            scene.managed,
            now_s=scene.now_s,
            attempts=self._plain_attempts,
            moves=self._acting.moves,
            rank=scene.preemption.rank,
        )

    def _not_ours(self, slurm_jobs: Iterable[SlurmJob]) -> Iterator[SlurmJob]:
        """The plain jobs."""
        managed = self._managed
        ours = managed.busy.keys() | managed.not_yet.keys() | managed.held.keys()
        return (job for job in slurm_jobs if job.id not in ours)

    def _plain(self, slurm_jobs: Iterable[SlurmJob], nodes: Iterable[Node]) -> tuple[PlainJob, ...]:
        """The plain jobs that wait for GPUs, for the queue."""
        return plain_jobs.waiting_jobs(
            self._not_ours(slurm_jobs),
            nodes,
            self._managed.jobs.values(),
            self._scene.managed,
            now_s=self._scene.now_s,
            patience_s=self._settings.plain_patience_s,
            attempts=self._plain_attempts,
            moves=self._acting.moves,
        )

    def _see_cloud(
        self, in_cloud: Iterable[SlurmNode], listed: Iterable[SlurmJob], replaced: Collection[JobId]
    ) -> None:
        """Show the cloud's nodes the observation."""
        if self._cloud_nodes is not None:
            self._cloud_nodes.saw(in_cloud, [job for job in listed if job.id not in replaced])

    def _see_sharing(self, nodes: Iterable[Node], slurm_nodes: Iterable[SlurmNode], cleared: Collection[JobId]) -> None:
        """Show the agents the observation, and take over which jobs stand still."""
        if self._sharing is None:
            return
        managed, scene = self._managed, self._scene
        names = {node.name for node in nodes}
        shared = [node for node in slurm_nodes if node.name in names]
        self._sharing.saw(
            shared, managed.jobs, managed.records, cleared, scene.up, scene.types, scene.silent, busy=managed.busy
        )
        for job_id, suspension in self._sharing.watch.suspended.items():
            managed.jobs[job_id] = dataclasses.replace(managed.jobs[job_id], suspension=suspension)
        for job_id, frozen_s in self._sharing.watch.frozen_s.items():
            job = managed.jobs[job_id]
            managed.jobs[job_id] = dataclasses.replace(job, suspended_s=job.suspended_s + frozen_s)

    def _limits(self, slurm_jobs: Iterable[SlurmJob], in_cloud: Iterable[SlurmNode]) -> tuple[GpuLimit, ...]:
        """Slurm's limits. What runs in the cloud counts too, but no policy takes it away: so it is what others hold."""
        limits, clouds = self._scene.rules.limits, {node.name for node in in_cloud}
        if not limits:
            return ()
        here = {job.id: job for job in self._managed.records.values() if clouds.isdisjoint(job.nodes)}
        return gpu_limits(limits, here, (job for job in slurm_jobs if job.state in HOLDING | LEAVING))

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`. Acts on what the last `observe` saw."""
        busy = self._managed.busy.values()
        if self._sharing is not None:
            if not self._settings.agents:
                self._sharing.share(())
            note_shares(self._writer, [job for job in busy if job.state in HOLDING], self._sharing.note)
        self._acting.forget_moves(actions)
        stopped = self._lost_gpus.stop(busy, self._scene.silent)
        if self._sharing is not None:
            stopped |= self._sharing.watch.relieve(self._writer, self._spool, self._reporting.saved)
        if self._cloud_nodes is not None:
            stopped |= self._cloud_nodes.take_stops()
        silent, now_s = self._scene.silent, self._clock.now_s()
        self._shrinking.take_what_was_left(self._managed.behind, self._managed.spooled, silent, now_s)
        outcomes, away = self._acting.act(actions)
        if not away:
            self._keep_waiting(actions)
        return (*self._own(stopped, outcomes), *outcomes)

    def _keep_waiting(self, actions: Sequence[Action]) -> None:
        """What the jobs need that wait, and that no round acts on: holds that were asked for, begin times, no nodes."""
        managed, now_s = self._managed, self._clock.now_s()
        managed.holds.carry_out()
        waiting = (*managed.records.values(), *managed.not_yet.values())
        acted = {action.job for action in actions}
        self._begin_times.renew(waiting, acted, now_s)
        self._left_nodes.clear((*waiting, *managed.held.values()), acted)
        let_deadlines_count(self._writer, managed.not_yet.values(), now_s)

    def _own(self, stopped: Mapping[JobId, Stop], outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Outcomes of stops that no round decided, for the jobs' history."""
        found = []
        for job_id, stop in stopped.items():
            control = self._spool.control(job_id)
            hold = Hold(job_id, control.round if control is not None else 0)
            if not any(each.action.job == job_id and isinstance(each.action, Hold) for each in outcomes):
                found.append(Outcome(hold, Progress.DONE, stop.text, stop))
        return tuple(found)

    def reports(self) -> Sequence[Report]:
        """See `ports.Cluster`: the reports in the spool."""
        return self._reporting.read()

    def accounts(self, jobs: Collection[JobId], since_s: float) -> tuple[EndedRun, ...]:
        """See `ports.Accounts`: the records of slurmdbd, if there is one."""
        if not self._site.rules().features.counts_gpus:
            return ()
        try:
            runs = self._reader.runs(jobs, since_s)
        except SlurmError as error:
            log.info("cannot read Slurm's accounts", extra={"jobs": len(jobs), "text": str(error)})
            return ()
        return tuple(
            accounted_run(run, None if run.gpus else self._spool.control(run.job_id), self._scene.types) for run in runs
        )
