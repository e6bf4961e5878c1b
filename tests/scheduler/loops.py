"""Round loops for tests: on a simulated cluster, and on one that shows given states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.estimators import TableEstimator
from penstock_profiles.families import Families
from penstock_profiles.wire import Report
from penstock_scheduler.accounts.limits import LimitSettings, site_limits
from penstock_scheduler.api.ports import Accounts, Cluster, ClusterParts, Policy, SiteRules, Store
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Action, ClusterState, JobSpec, Outcome, Plan, Snapshot
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec

TABLE = {"t4": {1: 1.0, 2: 1.9, 4: 3.6}, "a100": {1: 4.0, 8: 24.0}}


def simulated(
    count: int, policy_name: str = "sia", clock: SimulatedClock | None = None, **parts: object
) -> tuple[RoundLoop, SimulatedCluster, MemoryStore]:
    """A loop on a simulated cluster with `count` jobs; `parts` take the place of its own."""
    clock = clock or SimulatedClock()
    spec = JobSpec(max_gpus=8, goodput_table=TABLE)  # type: ignore[arg-type]
    jobs = [
        SimulatedJob(str(i), f"j{i}", spec, EstimatedJob(TableEstimator(TABLE), parts.get("work", 2000.0)), i * 100.0)
        for i in range(count)
    ]
    cluster = SimulatedCluster(nodes_from_spec("t4:2x4,a100:1x8"), jobs, clock)
    store = MemoryStore()
    policy, choice = make_policy(policy_name)
    loop = RoundLoop(
        ClusterParts(parts.get("cluster", cluster)),  # type: ignore[arg-type]
        clock,
        parts.get("store", store),  # type: ignore[arg-type]
        RoundTiming(
            parts.get("trigger", Period(60.0)),  # type: ignore[arg-type]
            10.0,
            parts.get("rest_s", 0.0),  # type: ignore[arg-type]
            parts.get("settle_s", 0.0),  # type: ignore[arg-type]
        ),
        parts.get("policy", policy),  # type: ignore[arg-type]
        SpecModels(Families(), 30.0),
        choice,
        RoundSurroundings(rules=Within(parts.get("limits", LimitSettings()))),  # type: ignore[arg-type]
    )
    return loop, cluster, store


class Told:
    """A cluster that shows one state after the other, and on which nothing can be done."""

    def __init__(self, states: Iterable[ClusterState] = ()) -> None:
        self._states = iter(states)

    def observe(self) -> ClusterState:
        return next(self._states)

    def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
        return ()

    def reports(self) -> tuple[Report, ...]:
        return ()


class Nothing:
    """A policy that allocates nothing."""

    name = "nothing"

    def decide(self, snapshot: Snapshot) -> Plan:
        return Plan(snapshot.round)


def observing(
    cluster: Cluster,
    clock: SimulatedClock,
    store: Store,
    policy: Policy | None = None,
    accounts: Accounts | None = None,
    cloud_nodes: object = None,
) -> RoundLoop:
    """A loop that decides every 10 s, by default nothing."""
    parts = ClusterParts(cluster, accounts=accounts, cloud_nodes=cloud_nodes)  # type: ignore[arg-type]
    models = SpecModels(Families(), 30.0)
    return RoundLoop(parts, clock, store, RoundTiming(Period(10.0), 10.0), policy or Nothing(), models)


class Within(SiteRules):
    """Rules with the site's limits alone."""

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits

    def on(self, snapshot: Snapshot) -> Snapshot:
        return dataclasses.replace(snapshot, limits=(*snapshot.limits, *site_limits(self._limits, snapshot.jobs)))
