"""A snapshot as arrays: the jobs that the round decides on, oldest first, and what each could have.

Axes: J jobs, C configurations, T GPU types, A accesses (different partitions, reservations and node choices).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock_profiles.estimators import AnyEstimator, PipelineEstimator
from penstock_profiles.matrix import GoodputMatrix
from penstock_scheduler.model import Adaptivity, Configuration, Job, JobId, Phase, Snapshot
from penstock_scheduler.model.flags import CPU_SLOT
from penstock_scheduler.rounds.free_gpus import Access, access_of, choices_of, doors, opens
from penstock_scheduler.rounds.placement import Placed, place
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.sia.measuring import Measuring
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings

Pool = tuple[str, Access]
"""Nodes that the same jobs may use: their GPU type, and what else decides which jobs may use them."""


ARTIFACT_MOST_GPUS = 64
"""Most GPUs of one job in the authors' artifact."""

UNBOUNDED = np.iinfo(np.int64).max
"""More GPUs than any job can have."""


class SiaMatrix:
    """What each job of a round could have, and what it would gain there.

    Args:
        snapshot: the round's snapshot.
        settings: settings of the policy.
        goodputs: evaluates the models, and keeps the rows of models that have not changed since the last round.
    """

    def __init__(self, snapshot: Snapshot, settings: SiaSettings, goodputs: GoodputMatrix) -> None:
        self.snapshot, self.goodputs = snapshot, goodputs
        self.by_id = {job.id: job for job in snapshot.jobs}
        self.pins = common.pinned(snapshot)
        free = [job for job in snapshot.jobs if job.id not in self.pins]
        self.jobs: list[Job] = sorted(free, key=lambda job: job.in_order)
        self.facts = [snapshot.facts[job.id] for job in self.jobs]
        self.models: list[AnyEstimator] = [facts.model for facts in self.facts]
        self.age_s_J = snapshot.time_s - np.array([job.submit_s for job in self.jobs], dtype=np.float64)
        self.attained_J = np.array([sum(facts.attained_gpu_s.values()) for facts in self.facts], dtype=np.float64)
        """GPU-seconds that each job has had."""
        self.restart_cost_s_J = np.array([facts.restart_cost_s for facts in self.facts], dtype=np.float64)
        capacity = common.capacities(snapshot.nodes, self.pins)
        self.types = tuple(sorted(capacity))
        self.capacity_T = np.array([capacity[name] for name in self.types], dtype=np.int64)
        held = {job.id: now for job in self.jobs if (now := job.running_as) is not None}
        self.min_J = np.array([job.spec.min_gpus for job in self.jobs], dtype=np.int64)
        self.max_J = np.array([job.spec.max_gpus for job in self.jobs], dtype=np.int64)
        self._set_options(held, settings)
        self.column_of = column = {option: c for c, option in enumerate(self.options)}
        self.held_J = np.array([column.get(held.get(job.id), -1) for job in self.jobs], dtype=np.int64)  # type: ignore[arg-type]
        self.weight_J = np.array([job.weight for job in self.jobs], dtype=np.float64)
        self._set_access()
        self._set_boots()
        self._set_possible(settings)
        self._set_gain()
        self.measuring: dict[int, Measuring] = {}
        """By row: the jobs that are being measured."""
        if settings.measure_gpu_s > 0 and any(facts.unmeasured_types for facts in self.facts):
            self._measure(settings)

    def _set_options(self, held: Mapping[JobId, Configuration], settings: SiaSettings) -> None:
        """The columns: configurations that the cluster offers, then irregular ones that only the jobs that hold them may keep."""
        exact = {int(count) for count in np.unique(self.min_J[self.min_J == self.max_J])}
        self._set_units()
        units = {int(unit) * 2**power for unit in np.unique(self.unit_JT) for power in range(8)}
        most = int(self.max_J.max(initial=1))
        if settings.variant == "artifact":
            most = min(most, ARTIFACT_MOST_GPUS)
        shared = common.configurations(self.snapshot.nodes, exact | units, most)
        odd = sorted(set(held.values()) - set(shared), key=lambda c: (c.gpu_type, c.gpus, c.nodes))
        offered = [c for c in shared if c.gpu_type in self.types]
        self.options = (*offered, *(c for c in odd if c.gpu_type in self.types))
        self.offered_C = np.arange(len(self.options)) < len(offered)
        self.gpus_C = np.array([c.gpus for c in self.options], dtype=np.int64)
        self.nodes_C = np.array([c.nodes for c in self.options], dtype=np.int64)
        index_of = {name: index for index, name in enumerate(self.types)}
        self.type_C = np.array([index_of[c.gpu_type] for c in self.options], dtype=np.int64)
        sizes: dict[str, set[int]] = {}
        for node in self.snapshot.nodes:
            sizes.setdefault(node.gpu_type, set()).add(node.gpus)
        self.regular_C = np.array([common.is_regular(c, sizes[c.gpu_type]) for c in self.options], dtype=np.bool_)
        self.parts_C = np.array(
            [c.nodes > 1 and c.gpus // c.nodes not in sizes[c.gpu_type] for c in self.options], dtype=np.bool_
        )
        """Parts of several nodes: only for jobs that want exactly this number of GPUs."""

    def _set_units(self) -> None:
        """The numbers of GPUs of each type of which each job takes multiples only."""
        self.unit_JT = np.ones((len(self.jobs), len(self.types)), dtype=np.int64)
        for row, (job, model) in enumerate(zip(self.jobs, self.models, strict=True)):
            if isinstance(model, PipelineEstimator):
                self.unit_JT[row] = [model.models[t].gpus_per_replica if t in model.models else 1 for t in self.types]
            if job.spec.scale_unit != 1 or job.spec.gpus_per_task != 1:
                self.unit_JT[row] = np.lcm(self.unit_JT[row], [job.spec.unit(name) for name in self.types])

    def _set_access(self) -> None:
        """Which jobs may use which nodes, for all partitions, reservations and node choices that occur together."""
        choices = choices_of(self.jobs)
        keys = [frozenset(doors(job)) for job in self.jobs]
        self.accesses = list(dict.fromkeys(keys))
        index = {key: access for access, key in enumerate(self.accesses)}
        self.access_J = np.array([index[key] for key in keys], dtype=np.int64)
        free = {node.name: node.gpus_for_us for node in self.snapshot.nodes}
        for placement in self.pins.values():
            for share in placement.shares:
                if share.node in free:
                    free[share.node] -= share.gpus
        self.free_gpus: dict[Pool, int] = {}
        """GPUs of each pool that the round can allocate."""
        nodes_of: dict[Pool, dict[int, int]] = {}
        for node in self.snapshot.nodes:
            pool = (node.gpu_type, access_of(node, choices))
            self.free_gpus[pool] = self.free_gpus.get(pool, 0) + max(free[node.name], 0)
            if node.may_start:
                sizes = nodes_of.setdefault(pool, {})
                sizes[node.gpus] = sizes.get(node.gpus, 0) + 1
        self.open_AC = np.zeros((len(self.accesses), len(self.options)), dtype=np.bool_)
        """Whether the nodes that are open to these jobs have this configuration at all."""
        for access, own in enumerate(self.accesses):
            count: dict[tuple[str, int], int] = {}
            for (gpu_type, open_to), sizes in nodes_of.items():
                if any(opens(door, open_to) for door in own):
                    for size, nodes in sizes.items():
                        count[gpu_type, size] = count.get((gpu_type, size), 0) + nodes
            self.open_AC[access] = [_there_is(option, count) for option in self.options]

    def _set_boots(self) -> None:
        """How long it takes until each configuration can begin, s, because not enough nodes with free GPUs are awake."""
        self.boot_s_C = np.zeros(len(self.options))
        nodes = self.snapshot.nodes
        if not any(node.boot_s for node in nodes):
            return
        held = Counter[str]()
        for job in self.snapshot.jobs:
            for share in job.allocation.shares if job.allocation is not None and job.phase is not Phase.QUEUED else ():
                held[share.node] += share.gpus
        ready = sorted((node.boot_s, node.gpu_type, node.gpus_for_us - held[node.name]) for node in nodes)
        for column, option in enumerate(self.options):
            each = option.gpus // option.nodes
            there = [boot_s for boot_s, gpu_type, free in ready if gpu_type == option.gpu_type and free >= each]
            self.boot_s_C[column] = there[option.nodes - 1] if len(there) >= option.nodes else 0.0

    def _set_possible(self, settings: SiaSettings) -> None:
        """Which entries a job may have at all (`ever_JC`), and which of them in this round (`possible_JC`)."""
        jobs, types = self.jobs, self.types
        self.goodput_JC = self.goodputs.evaluate(self.models, common.columns(self.options))
        wanted_JT = np.ones((len(jobs), len(types)), dtype=np.bool_)
        for row, job in enumerate(jobs):
            if job.spec.gpu_types is not None or job.spec.excluded_gpu_types is not None or CPU_SLOT in types:
                wanted_JT[row] = [job.spec.allows_type(name) for name in types]
        self.unit_JC = unit_JC = self.unit_JT[:, self.type_C]
        units_JC = self.gpus_C // unit_JC
        power_JC = (units_JC & (units_JC - 1)) == 0
        exact_J = self.min_J == self.max_J
        regular_JC = np.where(
            unit_JC > 1,
            (self.gpus_C % unit_JC == 0) & (power_JC | (self.nodes_C > 1)) & ~self.parts_C,
            self.regular_C,
        )
        holds_JC = self.held_J[:, None] == np.arange(len(self.options))
        in_spec_JC = (self.gpus_C >= self.min_J[:, None]) & (self.gpus_C <= self.max_J[:, None])
        in_spec_JC &= wanted_JT[:, self.type_C] & self.open_AC[self.access_J] & (self.gpus_C % unit_JC == 0)
        for row, job in enumerate(jobs):
            if job.spec.max_nodes is not None:
                in_spec_JC[row] &= self.nodes_C <= job.spec.max_nodes
            if job.spec.gpus_per_task > 1:
                in_spec_JC[row] &= self.gpus_C // self.nodes_C % job.spec.gpus_per_task == 0
        self.single_JC = in_spec_JC & self.offered_C & (self.gpus_C == 1)
        """Single GPUs that are open to each job."""
        bad_J = ~np.all(np.isfinite(self.goodput_JC) & (self.goodput_JC >= 0), axis=1)
        self.bad = {jobs[row].id for row in np.flatnonzero(bad_J)}
        self.sane_JC = np.where(bad_J[:, None], 0.0, self.goodput_JC)
        proven_J = self._proven()
        self._doubt(proven_J, settings.unproven_power)
        self.ever_JC = in_spec_JC & ((self.offered_C & (regular_JC | exact_J[:, None])) | holds_JC) & (self.sane_JC > 0)
        self.possible_JC = self.ever_JC & (self.gpus_C <= self._most_now(proven_J, settings)[:, None])
        self.worth_JC = self._worth(settings.least_gain_per_gpu)
        """Entries that are not larger than it pays; see `_worth`."""
        self.possible_JC &= holds_JC | self.worth_JC
        never_ran = np.array([job.restarts == 0 and job.phase is Phase.QUEUED for job in jobs], dtype=np.bool_)
        self.never_ran_J = never_ran
        if settings.variant == "artifact":
            fewest_JC = self.gpus_C <= np.maximum(self.min_J[:, None], unit_JC)
            self.possible_JC &= ~never_ran[:, None] | fewest_JC
            self.sane_JC = np.where(never_ran[:, None] & fewest_JC, 1.0, self.sane_JC)

    def _set_gain(self) -> None:
        """What each job gains from each entry (`gain_JC`): its goodput, in multiples of that on its slowest configuration.

        On the slowest configuration the gain is that configuration's unit, or for a rigid job its number of GPUs.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            possible_JC = np.where(self.ever_JC, self.sane_JC, np.inf)
            slowest_J = possible_JC.min(axis=1, initial=np.inf)
            base_J = np.ones(len(self.jobs))
            self.slowest_J = np.zeros(len(self.jobs), dtype=np.int64)
            """Column of the slowest configuration that each job may have."""
            if possible_JC.size:
                self.slowest_J = possible_JC.argmin(axis=1)
                base_J = np.take_along_axis(self.unit_JC, self.slowest_J[:, None], axis=1)[:, 0].astype(np.float64)
            rigid_J = np.array(
                [job.spec.adaptivity in (Adaptivity.RIGID, Adaptivity.FIXED) for job in self.jobs], dtype=np.bool_
            )
            self.base_J = base_J = np.where(rigid_J, self.min_J, base_J)
            """The gain on that configuration."""
            self.scale_J = base_J / slowest_J
            """Factor from goodput to gain; 0 where the site has no configuration to compare with."""
            self.gain_JC = np.where(self.possible_JC, self.sane_JC / slowest_J[:, None] * base_J[:, None], 0.0)

    def _measure(self, settings: SiaSettings) -> None:
        """Open single GPUs of types of unknown speed to the jobs that are to be measured there."""
        for row, job in enumerate(self.jobs):
            singles = np.flatnonzero(self.single_JC[row])
            types = {self.options[c].gpu_type: int(c) for c in singles}
            found = Measuring.of(self.snapshot, job, types, settings.measure_gpu_s)
            if found is None or job.id in self.bad:
                continue
            held = int(self.held_J[row])
            if held in found.columns:  # it stays until it has reported, or until its time there is over
                found = found.only(held)
            self.measuring[row] = found
            if held >= 0 and self.possible_JC[row, held]:  # it does not grow before it is known
                self.possible_JC[row] = False
                self.possible_JC[row, held] = True
            self.possible_JC[row, found.columns] = self.ever_JC[row, found.columns] = True

    def _proven(self) -> NDArray[np.int64]:
        """Most GPUs that each job has run on; `UNBOUNDED` for jobs whose scaling is known, or that cannot grow later."""
        proven_J = np.full(len(self.jobs), UNBOUNDED)
        for row, (job, facts) in enumerate(zip(self.jobs, self.facts, strict=True)):
            ran_on = facts.largest_run_gpus
            if ran_on is not None and job.movable:
                proven_J[row] = max(ran_on, job.allocation.gpus if job.allocation is not None else 0)
        return proven_J

    def _doubt(self, proven_J: NDArray[np.int64], power: float) -> None:
        """Bound what jobs would gain from more GPUs than they have run on: by this power of the number, from their best
        goodput on the same type. Before it is measured, a model mostly says too much, and other jobs need the GPUs."""
        if power >= 1:
            return
        for t in range(len(self.types)):
            of_type = np.flatnonzero(self.type_C == t)
            gpus_C = self.gpus_C[of_type].astype(np.float64)
            rows = np.flatnonzero(proven_J < gpus_C.max(initial=0))
            if not rows.size:
                continue
            unproven_JC = gpus_C > np.maximum(proven_J[rows], 1)[:, None]
            at = np.ix_(rows, of_type)
            sane_JC = self.sane_JC[at]
            proven_JC = np.where(unproven_JC, 0.0, sane_JC)
            best_J = proven_JC.argmax(axis=1, keepdims=True)
            known_J = np.take_along_axis(proven_JC, best_J, axis=1)
            most_JC = known_J * (gpus_C / gpus_C[best_J]) ** power
            self.sane_JC[at] = np.where(unproven_JC & (known_J > 0), np.minimum(sane_JC, most_JC), sane_JC)

    def _most_now(self, proven_J: NDArray[np.int64], settings: SiaSettings) -> NDArray[np.int64]:
        """Most GPUs that each job may have in this round: bounded for jobs whose scaling is unknown."""
        most_J = np.full(len(self.jobs), UNBOUNDED)
        if settings.growth is not None:
            for row in np.flatnonzero(proven_J < UNBOUNDED):
                more_C = self.gpus_C[self.ever_JC[row] & (self.gpus_C > proven_J[row])]
                most_J[row] = max(int(more_C.min(initial=UNBOUNDED)), int(settings.growth * proven_J[row]))
        return most_J

    def _worth(self, least: float) -> NDArray[np.bool_]:
        """Entries in which each GPU, beyond those of the next smaller such entry of the same type, brings at least this part of
        what one of the job's fewest brings there. The fewest of each type are always among them."""
        if least <= 0:
            return np.ones(self.ever_JC.shape, dtype=np.bool_)
        # As the model says, without doubt: a job that may not grow would never show how it scales.
        goodput_JC = np.where(self.ever_JC & np.isfinite(self.goodput_JC), self.goodput_JC, 0.0)
        by_size = np.argsort(self.gpus_C, kind="stable").tolist()
        first_JT = np.zeros((len(self.jobs), len(self.types)))
        for column in reversed(by_size):
            first_J = first_JT[:, self.type_C[column]]
            np.copyto(first_J, goodput_JC[:, column] / self.gpus_C[column], where=goodput_JC[:, column] > 0)
        least_JT = least * first_JT
        worth_JC: NDArray[np.bool_] = np.zeros_like(self.ever_JC)
        gpus_JT, goodput_JT = np.zeros(first_JT.shape), np.zeros(first_JT.shape)
        for column in by_size:
            before_J, with_J = gpus_JT[:, self.type_C[column]], goodput_JT[:, self.type_C[column]]
            now_J, gpus = goodput_JC[:, column], self.gpus_C[column]
            worth_J = (now_J > 0) & (
                (before_J == 0) | (now_J >= with_J + least_JT[:, self.type_C[column]] * (gpus - before_J))
            )
            worth_JC[:, column] = worth_J
            np.copyto(before_J, gpus, where=worth_J)
            np.copyto(with_J, now_J, where=worth_J)
        return worth_JC

    @functools.cached_property
    def row_of(self) -> dict[JobId, int]:
        """Job -> its row."""
        return {job.id: row for row, job in enumerate(self.jobs)}

    def rate(self, job: JobId, option: Configuration) -> float:
        """Goodput of a job of the matrix on one of its options."""
        return float(self.goodput_JC[self.row_of[job], self.column_of[option]])

    @functools.cached_property
    def all_shapes(self) -> tuple[Configuration, ...]:
        """Every configuration that the cluster has, also those that are larger than any job's spec."""
        return common.configurations(self.snapshot.nodes)

    def recorded(self, offers: tuple[Configuration, ...] = ()) -> NDArray[np.int64] | None:
        """The recorded choice, by row, if a time limit cut the recorded round short and it is now replayed.

        Args:
            offers: the cloud's offers; their columns follow those of the site.
        """
        if not self.snapshot.incumbent:
            return None
        column = {option: c for c, option in enumerate((*self.options, *offers))}
        recorded = [column.get(self.snapshot.incumbent.get(job.id), -1) for job in self.jobs]  # type: ignore[arg-type]
        return np.array(recorded, dtype=np.int64)

    def place(self, chosen: Mapping[JobId, Configuration]) -> Placed:
        """Nodes for these jobs, beside the pinned ones."""
        jobs = [self.by_id[job] for job in chosen]
        return place(
            self.snapshot.nodes,
            chosen,
            {job.id: job.partitions for job in jobs},
            {job.id: job.allocation for job in jobs if job.allocation is not None},
            self.pins,
            reservations={job.id: job.reservation for job in jobs if job.reservation},
            choices={job.id: job.nodes for job in jobs if job.nodes is not None},
            move_cost={
                job.id: job.allocation.gpus * self.snapshot.facts[job.id].restart_cost_s
                for job in jobs
                if job.allocation is not None
            },
            requests={job.id: job.request for job in self.snapshot.jobs if job.request is not None},
        )


def _there_is(option: Configuration, count: Mapping[tuple[str, int], int]) -> bool:
    """Whether nodes make up this configuration; `count`: by GPU type and GPUs of a node, how many nodes there are."""
    per_node = option.gpus // option.nodes
    whole = option.nodes > 1 and (option.gpu_type, per_node) in count
    return any(
        nodes >= option.nodes and (size == per_node or (size >= per_node and not whole))
        for (gpu_type, size), nodes in count.items()
        if gpu_type == option.gpu_type
    )
