"""One simulation: the round loop, as the daemon runs it, on the simulated cluster and clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

from penstock_profiles.colocation import Colocation
from penstock_profiles.families import Families, load_families
from penstock_profiles.gpus import Gpus, load_gpus
from penstock_profiles.sensitivity import SensitivityProfile
from penstock_profiles.wire import Report
from penstock_scheduler.api.ports import ClusterParts, ModelSource, RoundListener, Trigger
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.pairs import Pairs
from penstock_scheduler.model import JobId, JobSpec, Node, Outcome, ReasonCode
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import RoundFailed
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.one_thread import one_blas_thread
from penstock_scheduler.rounds.policies import make_policy, sharing_parts
from penstock_scheduler.rounds.policies.wrapper import front_only
from penstock_scheduler.rounds.triggers import OnEvent, Period
from penstock_scheduler.simulator.agents import SimulatedAgents
from penstock_scheduler.simulator.cloud import CloudSpec, CloudUse, SimulatedCloud, WithWaits, spec_in_cloud
from penstock_scheduler.simulator.cluster import SimulatedCluster
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.jobs import Learner, SimulatedClock, SimulatedJob
from penstock_scheduler.simulator.learning import ArtifactLearner, FittedLearner, SimulatedMemory, SimulatedModels
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.truth import JobTruth, ModelledJob, Truth, TruthSettings
from penstock_scheduler.simulator.workloads import BadInput, InputProblem, Workload, WorkloadJob, jittered

RESTART_COST_S = 30.0
"""Assumed cost of a restart of a job without a model, s: the daemon's default."""


REST_S = 300.0
"""Rounds without anything new in the snapshot are skipped for up to this long, s. On a window of 160 jobs
(docs/measurements/simulator.md) that was every fifth round. One of 154 such rounds would have decided otherwise,
because restart factors rise with time."""


FRONT = 4
"""Waiting jobs that are shown to a policy that sees only the front of the queue. With 16 the Philly trace has 3 % fewer
ticks."""


@dataclass(frozen=True, slots=True)
class Driving:
    """How a policy is driven in a simulation."""

    round_s: float | None = 60.0
    """Seconds from one round to the next; None: a round whenever something has happened."""
    as_requested: bool = False
    """Whether each job gets exactly the GPUs that its user asked for, as under a rigid policy."""
    learner: Literal["fitted", "unprofiled", "artifact"] = "fitted"
    """What jobs know of their speed. `unprofiled`: nothing before their first run. See `FittedLearner` and
    `ArtifactLearner`."""
    move_share: float | None = None
    """As `[safety] move_share`, or None if policies alone decide, so that figures compare these."""
    moves_are_free: bool = False
    """See `SimulatedCluster`."""

    @property
    def tick_s(self) -> float:
        """Seconds from one tick of the loop to the next; infinite: until something happens."""
        return math.inf if self.round_s is None else self.round_s

    @property
    def rest_s(self) -> float:
        """For how long rounds without news are skipped."""
        return 0.0 if self.round_s is None else REST_S


DRIVINGS: Mapping[str, Driving] = {
    "sia:artifact": Driving(learner="artifact", moves_are_free=True),
    "gavel": Driving(round_s=360.0, as_requested=True),
    "gandiva": Driving(as_requested=True),
    "antman": Driving(as_requested=True),
    **dict.fromkeys(("fifo", "srtf", "las", "ftf", "slurm-backfill"), Driving(round_s=None, as_requested=True)),
}
"""Policy or preset -> how it is driven. Other policies are driven by `Driving()`."""


def driving_of(policy: PolicyChoice | str) -> Driving:
    """How a policy is driven: one with stages, or with others for some partitions, as it would be without them.

    A policy that lets jobs share GPUs decides at least once a minute, the length of a time slice.
    """
    found = DRIVINGS.get(policy if isinstance(policy, str) else policy.name, Driving())
    if found.round_s is None and sharing_parts(policy):
        return replace(found, round_s=Driving().round_s)
    return found


class JobsTruth(Protocol):
    """The truth about the jobs of a workload, such as `Truth`."""

    def of(self, job: WorkloadJob) -> JobTruth:
        """The truth about a job."""
        ...

    def check(self, workload: Workload) -> None:
        """Raise BadInput if there are jobs without a truth."""
        ...


@dataclass(frozen=True)
class Scenario:
    """What is the same for every policy."""

    nodes: tuple[Node, ...]
    workload: Workload
    truth: JobsTruth
    families: Families
    gpus: Gpus
    disturbances: Disturbances = field(default_factory=Disturbances)
    sensitivities: Mapping[str, SensitivityProfile] = field(default_factory=dict)
    """How CPU and memory affect speed, by the jobs' `sensitivity` or, if they have none, their models."""

    def sensitivity_of(self, job: WorkloadJob) -> SensitivityProfile | None:
        """The profile of a job; None: unknown."""
        return self.sensitivities.get(job.sensitivity or job.model or "")

    @cached_property
    def node_gpus(self) -> dict[str, int]:
        """GPU type -> GPUs of its largest node."""
        sizes: dict[str, int] = {}
        for node in self.nodes:
            sizes[node.gpu_type] = max(node.gpus, sizes.get(node.gpu_type, 0))
        return sizes

    @cached_property
    def gpus_by_type(self) -> dict[str, int]:
        """GPU type -> GPUs of all its nodes."""
        return {name: sum(node.gpus for node in self.nodes if node.gpu_type == name) for name in self.node_gpus}

    @cached_property
    def site_families(self) -> Families:
        """The catalogue under the names of the cluster's GPU types."""
        return self.families.on(self.node_gpus, self.gpus)

    @property
    def total_gpus(self) -> int:
        """Of all nodes."""
        return sum(self.gpus_by_type.values())

    def check(self) -> None:
        """Raise BadInput if the workload cannot run on this cluster. It names all jobs that cannot."""
        self.truth.check(self.workload)
        problems = []
        for job in self.workload.jobs:
            fewest = min(job.gpus, job.spec.min_gpus)
            types = job.spec.gpu_types or tuple(self.gpus_by_type)
            most = max((self.gpus_by_type.get(gpu_type, 0) for gpu_type in types), default=0)
            if fewest > most:
                found = f"a need of {fewest} GPUs of {' or '.join(types)}"
                problems.append(
                    InputProblem(f"job {job.id!r}", None, found, f"at most the {most} that the cluster has")
                )
            if job.sensitivity is not None and job.sensitivity not in self.sensitivities:
                known = ", ".join(sorted(self.sensitivities)) or "none: give their folder with --sensitivities"
                problems.append(
                    InputProblem(f"job {job.id!r}", None, f"sensitivity={job.sensitivity!r}", f"one of {known}")
                )
        if problems:
            raise BadInput(problems)


def prepare(
    nodes: tuple[Node, ...],
    workload: Workload,
    profiles: Profiles | None = None,
    *,
    gpu_speeds: Mapping[str, float] | None = None,
    disturbances: Disturbances | None = None,
    sensitivities: Mapping[str, SensitivityProfile] | None = None,
    families: Families | None = None,
    seed: int = 0,
) -> Scenario:
    """A scenario with Penstock's own catalogues.

    Args:
        nodes: the cluster.
        workload: its jobs.
        profiles: measured tables of their models; None: the catalogue.
        gpu_speeds: for jobs with recorded durations; see `TruthSettings`.
        disturbances: what goes wrong; None: nothing.
        sensitivities: how CPU and memory affect the speed of jobs; None: unknown.
        families: the catalogue of models. The default is Penstock's own.
        seed: seed of all random numbers. With a seed other than 0, jobs also arrive a little later (`jittered`).
    """
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes[node.gpu_type] = max(node.gpus, sizes.get(node.gpu_type, 0))
    families, gpus = load_families() if families is None else families, load_gpus()
    settings = TruthSettings(gpu_speeds, node_gpus=sizes, seed=seed)
    truth = Truth(tuple(sizes), profiles, families, settings, gpus)
    disturbed = replace(disturbances or Disturbances(), seed=seed)
    return Scenario(nodes, jittered(workload, seed), truth, families, gpus, disturbed, sensitivities or {})


@dataclass(slots=True)
class Tick:
    """The cluster after a tick of the loop."""

    time_s: float
    jobs: int
    """Jobs that have come and not ended."""
    running: int
    """Jobs that train."""
    restarting: int
    queued: int
    gpus_held: int
    goodput: float
    """Share of a whole job done per hour, summed over all jobs."""
    decided: bool
    """Whether a round was decided."""
    cpus_held: int = 0
    """CPUs that the policy allocated to jobs; 0: it allocates GPUs only."""
    memory_mb_held: int = 0
    """Memory that the policy allocated to jobs, MB; 0 as above."""


@dataclass(slots=True)
class Simulation:
    """What happened in a simulation."""

    policy: str
    scenario: Scenario
    jobs: list[SimulatedJob]
    end_s: float = 0.0
    ticks: list[Tick] = field(default_factory=list)
    rounds: int = 0
    failed_rounds: int = 0
    cpu_s: float = 0.0
    interrupted: bool = False
    """Whether it was stopped before all jobs had ended."""
    agents: SimulatedAgents | None = None
    """Agents by which jobs shared GPUs; None: no jobs shared."""
    gpu_seconds: float | None = None
    """GPU-seconds that jobs held on site. A GPU that jobs shared counts once. None: the sum over the jobs' runs."""
    cloud: CloudUse | None = None
    """What the jobs used of the cloud; None: there was none."""


def simulate_policy(
    scenario: Scenario,
    choice: PolicyChoice | str,
    settings: Mapping[str, object] | None = None,
    driving: Driving | None = None,
    on_tick: Callable[[Simulation], None] = lambda simulation: None,
    models: ModelSource | None = None,
    agents: SimulatedAgents | None = None,
    pairs: Pairs | None = None,
    memory: SimulatedMemory | None = None,
    cloud: CloudSpec | None = None,
    on_record: Callable[[RoundRecord], None] | None = None,
) -> Simulation:
    """Simulate a policy until all jobs have ended, or the remaining jobs can never run. Ctrl-C keeps what was simulated
    so far.

    Args:
        scenario: cluster, jobs and truth.
        choice: the policy, or the name of a policy without stages.
        settings: settings of that one policy; None: its defaults.
        driving: how the policy is driven; None: see `DRIVINGS`.
        on_tick: called after each tick.
        models: what the scheduler knows of the jobs; None: what they have learned themselves.
        agents: agents by which jobs share GPUs; None: no jobs share, whatever the policy.
        pairs: what is known of pairs at the start; None: nothing.
        memory: what earlier jobs have shown, to which this simulation's jobs add; None: nothing is remembered.
        cloud: a cloud to which jobs may leave, run by the daemon's own burst manager; None: there is none.
        on_record: called with each round. Then policies always see the whole queue.

    Raises:
        ConfigError: the policy is unknown, or a setting is invalid.
    """
    policy, in_full = make_policy(choice, settings)
    driving = driving or driving_of(choice)
    begun_s = time.process_time()
    jobs = [simulated_job(job, scenario, driving, in_cloud=cloud is not None) for job in scenario.workload.jobs]
    simulation = Simulation(str(choice), scenario, jobs, agents=agents)
    clock = SimulatedClock()
    away = None if cloud is None else SimulatedCloud(cloud, clock, scenario.disturbances.seed)
    cluster = SimulatedCluster(
        scenario.nodes,
        jobs,
        clock,
        scenario.disturbances,
        moves_are_free=driving.moves_are_free,
        front=FRONT
        if front_only(policy) and driving.round_s is None and agents is None and away is None and on_record is None
        else 0,
        agents=agents,
        cloud=away,
    )
    if models is None:
        specs = SpecModels(scenario.families, RESTART_COST_S, scenario.gpus)
        models = SimulatedModels(cluster.jobs, _restart_costs_s(jobs), specs, memory)
    loop = RoundLoop(
        ClusterParts(cluster, agents=cluster if agents is not None else None, cloud_nodes=away),
        clock,
        _NoStore(),
        RoundTiming(_trigger(driving, cluster, clock, away), driving.tick_s, rest_s=driving.rest_s),
        policy,
        models,
        in_full,
        RoundSurroundings(
            annotators=(pairs or Pairs(Colocation()),),
            cloud=None if away is None else away.manager,
            move_share=driving.move_share,
            listeners=(_Rounds(simulation, cluster, away, on_record),),
        ),
    )
    _run(simulation, loop, cluster, clock, away, driving.tick_s, on_tick)
    cluster.close()
    if agents is not None or away is not None:
        simulation.gpu_seconds = cluster.gpu_seconds
    if away is not None:
        simulation.cloud = away.use()
    simulation.end_s = max([clock.now_s() if simulation.interrupted else 0.0, *(job.finish_s or 0.0 for job in jobs)])
    simulation.cpu_s = time.process_time() - begun_s
    return simulation


@dataclass
class _Rounds(RoundListener):
    """Counts the rounds of a simulation, and passes them on."""

    simulation: Simulation
    cluster: SimulatedCluster
    away: SimulatedCloud | None
    on_record: Callable[[RoundRecord], None] | None

    def decided(self, record: RoundRecord) -> None:
        self.simulation.rounds += 1
        if self.on_record is not None:
            self.on_record(record)
        if self.away is not None:
            self.away.on_round(record)
        waiting = record.plan.waiting.values()
        self.cluster.pass_over(sum(reason.code is ReasonCode.NEVER_FITS for reason in waiting))


def _run(
    simulation: Simulation,
    loop: RoundLoop,
    cluster: SimulatedCluster,
    clock: SimulatedClock,
    away: SimulatedCloud | None,
    tick_s: float,
    on_tick: Callable[[Simulation], None],
) -> None:
    """Take ticks until all jobs have ended, or the remaining jobs can never run, or Ctrl-C."""
    try:
        with one_blas_thread():
            while not cluster.finished or (away is not None and away.manager.runs):
                rounds = simulation.rounds
                try:
                    outcomes = loop.tick()
                    if away is not None:
                        away.acted(outcomes)
                except RoundFailed:
                    simulation.failed_rounds += 1
                simulation.ticks.append(_tick(cluster, clock.now_s(), simulation.rounds > rounds))
                on_tick(simulation)
                if _stuck(simulation.ticks[-1], cluster) and (away is None or away.at_rest):
                    break
                clock.sleep(tick_s)
    except KeyboardInterrupt:
        simulation.interrupted = True


def _restart_costs_s(jobs: Sequence[SimulatedJob]) -> dict[JobId, float]:
    """The cost of a restart as the job spec gives it, or else as the truth has it."""
    return {
        job.id: job.truth.model.restart_cost_s if isinstance(job.truth, ModelledJob) else RESTART_COST_S for job in jobs
    } | {job.id: job.spec.restart_cost_s for job in jobs if job.spec.restart_cost_s is not None}


def _trigger(
    driving: Driving, cluster: SimulatedCluster, clock: SimulatedClock, away: SimulatedCloud | None
) -> Trigger:
    """The trigger of rounds. Lets the clock stop at the ticks that see a round, or what happens on site or in the cloud.

    With a cloud, a tick in which nothing happens is left out. Short of that, the ticks are those of the daemon, because each
    step of a run takes one of them, and the instances cost money meanwhile.
    """
    trigger = OnEvent() if driving.round_s is None else Period(driving.round_s)
    if away is None:
        if driving.round_s is None:
            clock.next_event_s = cluster.next_event_s
        return trigger
    if isinstance(trigger, OnEvent):
        clock.next_event_s = lambda: away.tick_from(min(cluster.next_event_s(), away.next_event_s(), away.next_leave_s))
        return WithWaits(trigger, away)
    clock.next_event_s = lambda: away.tick_from(min(cluster.next_event_s(), away.next_event_s(), trigger.next_s))
    return trigger


def simulated_job(job: WorkloadJob, scenario: Scenario, driving: Driving, *, in_cloud: bool = False) -> SimulatedJob:
    """A job of the workload. `in_cloud`: whether there is a cloud, for which its running time counts."""
    truth = scenario.truth.of(job)
    spec = job.as_requested if driving.as_requested else job.spec
    if in_cloud:
        spec = spec_in_cloud(spec, job.spec, job.duration_s)
    learner: Learner | None = None
    if isinstance(truth, ModelledJob):
        learner = _learner(job, truth, spec, scenario, driving)
    return SimulatedJob(
        job.id,
        job.name or job.id,
        spec,
        truth,
        job.submit_s,
        learner,
        job.batch_size,
        job.user,
        job.account,
        job.time_limit_s,
        scenario.sensitivity_of(job),
    )


def _learner(job: WorkloadJob, truth: ModelledJob, spec: JobSpec, scenario: Scenario, driving: Driving) -> Learner:
    if driving.learner == "artifact":
        tuned = job.batch_size if job.batch_size is not None else truth.model.max_batch
        return ArtifactLearner(truth, tuned, scenario.node_gpus)
    return FittedLearner(
        job.id,
        truth,
        spec,
        scenario.node_gpus,
        scenario.site_families,
        scenario.disturbances,
        profiled=driving.learner == "fitted",
    )


def _tick(cluster: SimulatedCluster, now_s: float, decided: bool) -> Tick:
    held = cluster.totals()
    return Tick(
        now_s,
        held.jobs,
        held.running,
        held.restarting,
        held.jobs - held.running - held.restarting,
        held.gpus_held,
        held.goodput_s * 3600,
        decided,
        held.cpus_held,
        held.memory_held_mb,
    )


def _stuck(tick: Tick, cluster: SimulatedCluster) -> bool:
    """Whether the remaining jobs get no GPUs although all nodes are usable and idle."""
    return tick.jobs > 0 and tick.gpus_held == 0 and cluster.whole and not cluster.expects_more


class _NoStore:
    """A store that keeps nothing, because a simulation is never continued."""

    def last_round(self) -> RoundRecord | None:
        return None

    def save_round(self, record: RoundRecord) -> None:
        pass

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        pass

    def add_reports(self, reports: Sequence[Report]) -> None:
        pass
