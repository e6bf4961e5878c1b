"""What each job gets or why it waits, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock_profiles.matrix import GoodputMatrix
from penstock_scheduler.model import (
    Assignment,
    Batch,
    Configuration,
    Job,
    JobId,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
)
from penstock_scheduler.people.units import duration, times
from penstock_scheduler.rounds.placement import Placed
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.never_fits import never_fits
from penstock_scheduler.rounds.policies.sia.costs import remaining, restart_factors, size_weights, source
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings


def explained(
    matrix: SiaMatrix, chosen: Mapping[JobId, Configuration], placed: Placed, instead: Mapping[JobId, Configuration]
) -> tuple[dict[JobId, Assignment], dict[JobId, Reason]]:
    """For every job its assignment, or the reason why it waits, in the order of the snapshot.

    Args:
        matrix: the matrix of the round.
        chosen: what the solver chose.
        placed: what has found nodes.
        instead: jobs that got another configuration than the chosen one, because there were no nodes for that one.
    """
    row_of = matrix.row_of
    entries = _entries(
        matrix, {job: option for job, option in {**chosen, **instead}.items() if job in placed.placements}
    )
    assignments: dict[JobId, Assignment] = {}
    waiting: dict[JobId, Reason] = {}
    for job in matrix.snapshot.jobs:
        if job.id in matrix.pins:
            assignments[job.id] = common.pinned_assignment(job, matrix.pins[job.id], matrix.snapshot)
            continue
        entry = entries.get(job.id)
        if entry is None:
            waiting[job.id] = _why_not(matrix, job, row_of[job.id], chosen.get(job.id))
            continue
        placement = placed.placements[job.id]
        reason = _why(matrix, job, entry, placement, placed.made_room_for.get(job.id))
        if job.id in instead:
            text = f"{reason.text}; {chosen[job.id]} would be better, but the free GPUs are scattered"
            reason = dataclasses.replace(reason, text=text)
        assignments[job.id] = Assignment(placement, reason, entry.goodput, entry.batch)
    return assignments, waiting


class _Entry(NamedTuple):
    """What a job gets, from the arrays of the matrix."""

    row: int
    column: int
    held: int
    """Column of what it has; -1: nothing."""
    slowest: int
    """Column of its slowest configuration."""
    ratio: float
    """How fast it is, relative to that."""
    goodput: float
    batch: Batch | None


def _entries(matrix: SiaMatrix, granted: Mapping[JobId, Configuration]) -> dict[JobId, _Entry]:
    """The entries that jobs get, all read at once: an array is slow to read value by value."""
    rows = [matrix.row_of[job] for job in granted]
    columns = [matrix.column_of[option] for option in granted.values()]
    entries = zip(
        rows,
        columns,
        matrix.held_J[rows].tolist(),
        matrix.slowest_J[rows].tolist(),
        (matrix.gain_JC[rows, columns] / matrix.base_J[rows]).tolist(),
        matrix.goodput_JC[rows, columns].tolist(),
        (Batch(*batch) if batch is not None else None for batch in matrix.goodputs.batches(rows, columns)),
        strict=True,
    )
    return dict(zip(granted, map(_Entry._make, entries), strict=True))


def _why(matrix: SiaMatrix, job: Job, entry: _Entry, placement: Placement, room_for: JobId | None) -> Reason:
    """Why a job has what it has; `room_for`: the job for which it leaves its nodes."""
    chosen, held = matrix.options[entry.column], entry.held
    measuring = matrix.measuring.get(entry.row)
    if measuring is not None and entry.column in measuring.columns:
        return measuring.reason(chosen.gpu_type, held=entry.column == held)
    speed = ""
    if entry.column != entry.slowest:
        speed = f", about {times(entry.ratio)} as fast as on {matrix.options[entry.slowest]}"
    if held < 0:
        return Reason(ReasonCode.CHOSEN, f"starts on {chosen}{speed}")
    if entry.column != held:
        return Reason(ReasonCode.CHOSEN, f"from {matrix.options[held]} to {chosen}{speed}")
    if job.allocation is not None and job.allocation.shares != placement.shares:
        cause = f"makes room for job {room_for}" if room_for is not None else "has to leave its nodes"
        return Reason(ReasonCode.CHOSEN, f"keeps {chosen} on other nodes: {cause}")
    return Reason(ReasonCode.KEPT, f"keeps {chosen}{speed}")


def remarks(snapshot: Snapshot, plan: Plan, job: Job, settings: SiaSettings) -> list[str]:
    """What a move would cost a job that has GPUs, how much it has left, and whether other jobs would gain from its GPUs."""
    said = []
    gpu_type = plan.assignments[job.id].configuration.gpu_type
    if gpu_type in plan.prices:
        would = "Other jobs would" if plan.prices[gpu_type] > 0 else "No other job would"
        said.append(f"{would} gain from more {gpu_type} GPUs in this round.")
    alone = SiaMatrix(snapshot.only([job]), settings, GoodputMatrix())
    if not alone.jobs:  # it may not be moved
        return said
    left_JP = remaining(alone)
    elsewhere_C = alone.possible_JC[0] & (np.arange(len(alone.options)) != alone.held_J[0])
    if elsewhere_C.any():
        factor_C = restart_factors(alone, left_JP, settings)[0][0, elsewhere_C]
        low, high = f"{factor_C.min():.0%}", f"{factor_C.max():.0%}"
        counts = low if low == high else f"{low} to {high}"
        said.append(f"For a move, sia counts {counts} of the job's goodput elsewhere, because of the restart.")
    given = plan.assignments[job.id].configuration
    of_type_C = np.array([option.gpu_type == gpu_type for option in alone.options], dtype=np.bool_)
    more_C = alone.ever_JC[0] & (alone.gpus_C > given.gpus) & of_type_C
    if more_C.any() and not (more_C & alone.worth_JC[0]).any():
        said.append(
            f"It does not grow on {gpu_type}: each further GPU would bring less than {settings.least_gain_per_gpu:.0%} of what "
            "its first one brings ([policy.sia] least_gain_per_gpu)."
        )
    if settings.size_power > 0 and alone.scale_J[0] > 0:
        left_s, weight = float(np.median(left_JP[0])), float(size_weights(left_JP, settings.size_power)[0])
        where = alone.options[int(alone.slowest_J[0])]
        said.append(
            f"It has about {duration(left_s)} of work left on {where}, {source(snapshot.facts[job.id])}. So it weighs "
            f"{weight:.2f}; a job that is about to end weighs 1."
        )
    return said


def _why_not(matrix: SiaMatrix, job: Job, row: int, chosen: Configuration | None) -> Reason:
    """Why a job waits; `chosen`: what the solver chose for it, for which there are no nodes."""
    needs = common.smallest_need(job)
    if job.id in matrix.bad:
        text = "its model gives a goodput that is negative or not a number: correct the model, or leave it out"
        return Reason(ReasonCode.NEVER_FITS, text, needs)
    if chosen is not None:
        text = f"{chosen} would be best, but the free GPUs are scattered over too many nodes"
        if any(node.scarce for node in matrix.snapshot.nodes):
            text += ", or lack the CPUs and memory that the job needs beside them"
        return Reason(ReasonCode.WAITING_FRAGMENTS, text, needs)
    nodes = [node for node in matrix.snapshot.nodes if node.reservation == job.reservation]
    if not nodes and job.reservation:
        text = f"no node is kept for its reservation {job.reservation} now: it has not begun, or is over"
        return Reason(ReasonCode.WAITING_CAPACITY, text, needs)
    if not nodes and matrix.snapshot.nodes:
        return Reason(ReasonCode.WAITING_CAPACITY, "all nodes are reserved now", needs)
    if not matrix.ever_JC[row].any():
        return never_fits(job, nodes, matrix.all_shapes)
    for limit in matrix.snapshot.limits:
        if limit.covers(job):
            counted_C = np.array([limit.counts(option.gpu_type) for option in matrix.options], dtype=np.bool_)
            if not (matrix.ever_JC[row] & ~(counted_C & (matrix.gpus_C > limit.gpus))).any():
                fewest = int(matrix.gpus_C[matrix.ever_JC[row]].min())
                return Reason(ReasonCode.NEVER_FITS, f"needs {fewest} GPUs, but {limit} does not allow that", needs)
    return common.others_have_them(matrix.snapshot, job)
