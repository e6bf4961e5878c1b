"""Corrects jobs whose end nobody saw, once the cluster's accounts know of it.

A job may end while penstockd is away for longer than the cluster remembers jobs. The next penstockd asks the accounts at once
(`Board`). If they do not answer then, the job ends as UNKNOWN, charged up to the middle of the time in which it may have ended.
`Reconciler` asks again every hour. It replaces what was not known, and corrects the charge by a further entry of the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from penstock_scheduler.accounts.gpu_seconds import add, in_cloud
from penstock_scheduler.api.ledger_messages import CORRECTED
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.api.ports import NOT_COUNTED, Accounts, Fate, GpuSecondsByJob, RoundListener, Submitter
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.board import charges_of, is_of_another
from penstock_scheduler.jobs.reused_ids import begins_s
from penstock_scheduler.model import ClusterState, EndedRun, JobId
from penstock_scheduler.people.errors import ClusterAway, StoreError
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

EVERY_S = 3600.0
DAYS = 30.0
"""Jobs that ended longer ago are left as they are."""
AT_ONCE = 200
"""Most jobs that are asked for in one hour: two calls of sacct."""
UNCORRECTED = (
    "ended while penstockd did not see it, and Slurm's accounting does not tell its GPU-hours, which may lack the time after "
    "penstockd last saw it"
)
LEAST = 1.0
"""GPU-seconds below which a charge is not corrected: the accounts count whole seconds."""


class Reconciler(RoundListener):
    """Asks the cluster's accounts at the start and every hour, in the round loop's thread.

    Args:
        cloud_nodes: names of nodes that a cloud fills. They are paid for in dollars.
        allocations: whose estimated ends are corrected as well.
    """

    def __init__(
        self,
        store: SqlStore,
        submitter: Submitter,
        accounts: Accounts,
        cloud_nodes: Callable[[], Collection[str]],
        allocations: AllocationLog,
    ) -> None:
        self._store, self._submitter, self._accounts, self._cloud_nodes = store, submitter, accounts, cloud_nodes
        self._allocations = allocations
        self._asked_s: float | None = None

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
        """Correct what can be corrected, if an hour has passed. An error is logged, and it is tried again in an hour."""
        if self._asked_s is not None and now_s - self._asked_s < EVERY_S:
            return
        self._asked_s = now_s
        since_s = now_s - DAYS * 86_400
        try:
            self._reconcile(self._store.ended_unknown(since_s, AT_ONCE))
            self._allocations.correct(since_s, AT_ONCE, self._accounts)
        except (ClusterAway, StoreError) as error:
            log.warning("ends of jobs not reconciled", extra={"text": str(error)})

    def _reconcile(self, views: Sequence[JobView]) -> None:
        if not views:
            return
        fates = self._submitter.fates([view.id for view in views])
        found = [(view, fate) for view in views if (fate := fates.get(view.id)) is not None and fate.state != "UNKNOWN"]
        found = [(view, fate) for view, fate in found if not is_of_another(view, fate)]
        if not found:
            return
        since_s = min(begins_s(view.submit_s, view.start_s) for view, _ in found)
        runs: dict[JobId, list[EndedRun]] = {}
        for run in self._accounts([view.id for view, _ in found], since_s):
            runs.setdefault(run.job, []).append(run)
        for view, fate in found:
            self._correct(view, fate, runs.get(view.id, ()))

    def _correct(self, view: JobView, fate: Fate, runs: Sequence[EndedRun]) -> None:
        used = _gpu_seconds(view, runs, self._cloud_nodes())
        if used is None:
            log.warning(
                "charge not corrected: the accounts have no run of the job, or its nodes are unknown",
                extra={"job": view.id},
            )
        gpu_seconds = view.gpu_seconds if used is None else used
        # With the old view: the correction belongs to the time of the charge.
        lines = charges_of(view, _differences(view.gpu_seconds, gpu_seconds), CORRECTED)
        known = {
            "version": view.version + 1,
            "ended": fate.state,
            "exit_code": fate.exit_code,
            "ended_text": fate.text or (UNCORRECTED if used is None else ""),
            "end_s": view.end_s if fate.end_s is None else fate.end_s,
            "gpu_seconds": dict(gpu_seconds),
        }
        self._store.save_jobs([view.model_copy(update=known)], lines)
        changed = (
            ", ".join(f"{line.amount:+.0f} GPU-seconds of {line.text}" for line in lines) or "the charge was right"
        )
        log.info("end of a job learned from the accounts", extra={"job": view.id, "state": fate.state, "text": changed})


def _gpu_seconds(view: JobView, runs: Sequence[EndedRun], cloud_nodes: Collection[str]) -> dict[str, float] | None:
    """GPU type -> GPU-seconds of all runs at the site; None: not known, as a run is missing or its nodes are gone."""
    mine = [run for run in runs if run.started_s is not None and run.started_s >= begins_s(view.submit_s, view.start_s)]
    if not mine:
        return None if view.gpu_seconds else {}
    if any(not run.held.gpu_type for run in mine):
        return None
    used: dict[JobId, dict[str, float]] = {}
    on_site = [run for run in mine if not in_cloud(run.held, cloud_nodes)]
    add(used, ((view.id, run.held, run.ended_s - run.started_s) for run in on_site if run.started_s is not None))
    return used.get(view.id, {})


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What to add to the charge, by GPU type."""
    change = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in sorted({*before, *after})}
    return {name: amount for name, amount in change.items() if abs(amount) >= LEAST}
