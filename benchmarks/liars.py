"""What a job gains by a lie: one liar beside seven honest jobs, against the same job that tells the truth.

    python benchmarks/liars.py [--policies sia,pollux,gavel,srtf,las,ftf] [--hours 4] [--seeds 3] [--only 'NAME;...']

Each round lasts 60 s. It goes through the same models (`LearnedModels`), checks (`claims`) and policies as in penstockd. The
truth of each job is a model family of the catalogue: its steps take as long as that says, whatever the job declares or reports.
Lengths of jobs are drawn with a seed.

GPU time is counted in GPU-seconds, each times the catalogue's speed of its GPU type. `gain` is the liar's share of it over the
share of its honest twin; `least` is the worst work of an honest slot, over its work beside the twin; `work` that of all seven
together. Jobs have lengths about an hour on one A100. One that ends comes again at once as a new job, the liar too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.families import load_families
from penstock_profiles.profiles import Profile
from penstock_profiles.throughput import compute_time, step_time
from penstock_profiles.wire import Observation, Report, Started
from penstock_scheduler.jobs.claims import believed
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Job, JobId, JobSpec, Phase, Placement, Snapshot
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator import nodes_from_spec

CLUSTER = "v100:2x4,a100:1x8"
TYPES = ("a100", "v100")
ROUND_S = 60.0
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gavel": ("gavel", {"throughput": "normalised"}),
    "gavel-steps": ("gavel", {"throughput": "steps"}),
}
"""Name in the table -> policy and settings. The default, steps, believes every job's own unit: docs/admin/policies.md."""
RESTART_S = 30.0
HONEST = (
    "resnet50-imagenet",
    "bert-squad",
    "yolov3",
    "deepspeech2",
    "resnet18-cifar10",
    "bert-squad",
    "resnet50-imagenet",
)
LIARS_TRUTH = "resnet50-imagenet"
"""The liar's own model."""
SCALES_BADLY = "ncf"
"""That of a liar with a family that scales better."""
LENGTH_S = 3600.0, 0.7
"""Length of a job on one A100: the median in seconds, and the spread of its logarithm."""

Lie = Callable[[Observation], Observation]


@dataclass
class Player:
    """One job: what it is, and what it says."""

    slot: str
    truth: TrainingEstimator
    spec: JobSpec
    reports: bool = True
    steps: Lie = lambda seen: seen
    about_to_end: bool = False
    """Whether it always says that it is done."""
    submit_s: float = 0.0
    placement: Placement | None = None
    restarts: int = 0
    progress: float = 0.0
    pause_s: float = 0.0
    said: int = 0
    gpu_s: dict[str, float] = field(default_factory=dict)
    number: int = 0
    seed: int = 0
    had_gpu_s: dict[str, float] = field(default_factory=dict)
    """What the jobs of this slot had before this one."""
    done: float = 0.0
    """Seconds on one A100 that those were worth."""
    stops: int = 0

    @property
    def id(self) -> JobId:
        """The job's; one that has ended comes again as another job."""
        return f"{self.slot}-{self.number}"

    @property
    def alone(self) -> float:
        """True goodput on one A100."""
        return float(self.truth.goodput("a100", np.array([1]), np.array([1]))[0])

    @property
    def work(self) -> float:
        """The job's work: the same for a liar and its twin."""
        draw = np.random.default_rng([self.seed, self.number, *self.slot.encode()])
        return self.alone * LENGTH_S[0] * float(np.exp(draw.normal(0.0, LENGTH_S[1])))

    def end_if_done(self, now_s: float) -> None:
        """Let the next job of the slot come if this one has done its work."""
        if self.progress < self.work:
            return
        self.done += self.progress / self.alone
        self.had_gpu_s = {name: self.had_gpu_s.get(name, 0.0) + self.gpu_s.get(name, 0.0) for name in TYPES}
        self.gpu_s, self.progress, self.said, self.restarts, self.placement = {}, 0.0, 0, 0, None
        self.number, self.submit_s = self.number + 1, now_s

    def rate(self) -> float:
        """Its true goodput where it is."""
        where = self.placement
        if where is None:
            return 0.0
        return float(self.truth.goodput(where.gpu_type, np.array([len(where.shares)]), np.array([where.gpus]))[0])

    def as_job(self) -> Job:
        """As the cluster shows it."""
        phase = Phase.QUEUED if self.placement is None else Phase.RUNNING
        return Job(
            self.id,
            self.id,
            f"user-{self.id}",
            self.spec,
            ("all",),
            phase,
            self.submit_s,
            self.restarts,
            self.placement,
        )

    def report(self, time_s: float) -> list[Report]:
        """What it reports at the end of a round in which it ran."""
        where = self.placement
        if where is None or not self.reports:
            return []
        nodes = len(where.shares)
        batch = self.truth.best_batch(where.gpu_type, nodes, where.gpus)
        assert batch is not None, "it runs there"
        step = self.truth.models[where.gpu_type].step
        compute_s = float(compute_time(step, batch.atomic_batch))
        whole_s = float(step_time(step, nodes, where.gpus, batch.atomic_batch))
        seen = Observation(
            gpu_type=where.gpu_type,
            nodes=nodes,
            gpus=where.gpus,
            atomic_batch=batch.atomic_batch,
            accumulation_steps=batch.accumulation_steps,
            steps=10,
            step_time_s=whole_s + batch.accumulation_steps * compute_s,
            sync_time_s=max(whole_s - compute_s, 0.0),
            grad_sqr=self.truth.grad_sqr,
            grad_var=self.truth.grad_var,
            goodput=self.rate(),
            progress=self.progress,
        )
        total = max(self.progress, 1.0) if self.about_to_end else self.work
        begun = Started(gpu_type=where.gpu_type, gpu_ids={}, progress=self.progress, total=total)
        self.said += 2
        return [
            Report(job_id=self.id, epoch=1, sequence=self.said + n, time_s=time_s, body=body)
            for n, body in enumerate((begun, self.steps(seen)))
        ]


class NoHistory:
    """A store that keeps nothing."""

    def observations(self, job: str, newest: int) -> list[Report]:
        """None."""
        return []

    def newest_reports(self, job: str, kinds: Sequence[str], newest: int | None = None) -> list[Report]:
        """None."""
        return []

    def observed_since(self, row: int | None) -> tuple[int, frozenset[str]]:
        """None."""
        return 0, frozenset()

    def profiles(self, user: str, job_name: str | None = None) -> list[Profile]:
        """None."""
        return []

    def profiled(self) -> frozenset[tuple[str, str]]:
        """None."""
        return frozenset()

    def add_model(self, job: str, time_s: float, estimator: object) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    share: dict[JobId, float]
    """Job -> its part of all GPU time."""
    progress: dict[JobId, float]
    stops: dict[JobId, int]
    doubts: dict[JobId, tuple[str, ...]]


def play(players: Sequence[Player], policy_name: str, hours: float) -> Result:
    """Run these jobs for some hours."""
    families = load_families()
    models = LearnedModels(SpecModels(families, RESTART_S), NoHistory())
    name, settings = SETTINGS.get(policy_name, (policy_name, {}))
    policy, _ = make_policy(PolicyChoice(name=name, settings={name: settings} if settings else {}))
    nodes = nodes_from_spec(CLUSTER)
    speeds = families.speeds(TYPES)
    doubts: dict[JobId, tuple[str, ...]] = {}
    for number in range(1, int(hours * 3600 / ROUND_S) + 1):
        now_s = number * ROUND_S
        there = [player for player in players if player.submit_s <= now_s]
        jobs = [player.as_job() for player in there]
        known = models.facts(jobs, TYPES)
        facts = {player.id: believed(known[player.id].with_attained(dict(player.gpu_s))) for player in there}
        doubts |= {job: each.doubts for job, each in facts.items() if each.doubts}
        plan = policy.decide(Snapshot(number, now_s, nodes, tuple(jobs), facts))
        for player in there:
            given = plan.assignments.get(player.id)
            where = None if given is None else given.placement
            same = where is not None and player.placement is not None and where.suits(player.placement)
            if not same:
                player.restarts += player.placement is not None
                player.stops += player.placement is not None
                player.placement, player.pause_s = where, RESTART_S
            if player.placement is None:
                continue
            gpu_type, gpus = player.placement.gpu_type, player.placement.gpus
            player.gpu_s[gpu_type] = player.gpu_s.get(gpu_type, 0.0) + gpus * ROUND_S
            player.progress += player.rate() * (ROUND_S - player.pause_s)
            player.pause_s = 0.0
        models.learn([report for player in there for report in player.report(now_s + ROUND_S)])
        for player in there:
            player.end_if_done(now_s + ROUND_S)
    worth = {
        player.slot: sum(
            speeds[name] * (player.gpu_s.get(name, 0.0) + player.had_gpu_s.get(name, 0.0)) for name in TYPES
        )
        for player in players
    }
    whole = sum(worth.values())
    return Result(
        {slot: each / whole for slot, each in worth.items()},
        {player.slot: player.done + player.progress / player.alone for player in players},
        {player.slot: player.stops for player in players},
        doubts,
    )


def honest() -> list[Player]:
    """Seven jobs that declare nothing and report the truth."""
    families = load_families()
    return [
        Player(f"honest-{n}", families[name].estimator(), JobSpec.model_validate(_batches(name)), submit_s=60.0 * n)
        for n, name in enumerate(HONEST)
    ]


def _batches(family: str) -> dict[str, Any]:
    known = load_families()[family]
    return {
        "max_gpus": 16,
        "checkpointable": True,
        "batch_size": known.initial_batch,
        "max_batch_size": known.max_batch,
    }


def true_table() -> dict[str, dict[int, float]]:
    """The truth about the liar as a table."""
    model, one = load_families()[LIARS_TRUTH].estimator(), np.array([1])
    counts = {"a100": (1, 2, 4, 8), "v100": (1, 2, 4, 8)}
    return {
        name: {k: float(model.goodput(name, one * (2 if (name, k) == ("v100", 8) else 1), one * k)[0]) for k in ks}
        for name, ks in counts.items()
    }


def _player(truth: str = LIARS_TRUTH, **fields: Any) -> Player:
    spec = JobSpec.model_validate(_batches(truth) | fields.pop("spec", {}))
    return Player("liar", load_families()[truth].estimator(), spec, submit_s=240.0, **fields)


def _of_family(family: str) -> Player:
    """A job that scales badly, reports nothing and declares a family; its batches are those of the family."""
    batches = {"batch_size": None, "max_batch_size": None}
    return _player(SCALES_BADLY, spec=batches | {"model_family": family}, reports=False)


def _faster_on_a100(seen: Observation) -> Observation:
    if seen.gpu_type != "a100":
        return seen
    sync_s = None if seen.sync_time_s is None else seen.sync_time_s / 1e6
    return seen.model_copy(update={"step_time_s": seen.step_time_s / 1e6, "sync_time_s": sync_s})


def _elsewhere(seen: Observation) -> Observation:
    return seen.model_copy(
        update={"gpu_type": "a100", "gpus": 1024, "nodes": 1, "step_time_s": 1e-6, "sync_time_s": 0.0, "goodput": None}
    )


def _noise(seen: Observation) -> Observation:
    """As if each further GPU, and each further sample of a batch, helped in full."""
    alone = seen.step_time_s - (seen.sync_time_s or 0.0)
    return seen.model_copy(update={"step_time_s": alone, "sync_time_s": 0.0, "grad_sqr": 1e-9, "grad_var": 1e9})


def _wild() -> dict[str, dict[int, float]]:
    rates = true_table()
    rates["a100"][8] = 1e12
    return rates


def _wild_types() -> dict[str, dict[int, float]]:
    rates = true_table()
    return rates | {"a100": {gpus: 1e6 * rate for gpus, rate in rates["a100"].items()}}


LIARS: dict[str, tuple[Callable[[], Player], Callable[[], Player]]] = {
    "table, many GPUs, silent": (
        lambda: _player(spec={"goodput_table": _wild()}, reports=False),
        lambda: _player(spec={"goodput_table": true_table()}, reports=False),
    ),
    "table, GPU types, silent": (
        lambda: _player(spec={"goodput_table": _wild_types()}, reports=False),
        lambda: _player(spec={"goodput_table": true_table()}, reports=False),
    ),
    "table, true steps": (
        lambda: _player(spec={"goodput_table": _wild()}),
        lambda: _player(spec={"goodput_table": true_table()}),
    ),
    "family, silent": (
        lambda: _of_family(LIARS_TRUTH),
        lambda: _player(SCALES_BADLY, reports=False),
    ),
    "0 s left": (lambda: _player(about_to_end=True), _player),
    "restart costs a year": (lambda: _player(spec={"restart_cost_s": 3e7}), _player),
    "steps on other GPUs": (lambda: _player(steps=_elsewhere), _player),
    "steps faster on one type": (lambda: _player(steps=_faster_on_a100), _player),
    "ends in 1 s, silent": (
        lambda: _player(spec={"runtime_s": 1.0}, reports=False),
        lambda: _player(spec={"runtime_s": LENGTH_S[0]}, reports=False),
    ),
}
"""Name -> the liar, and its honest twin."""

NOISE = {"nothing: comes 60 s later": (lambda: replace(_player(), submit_s=300.0), _player)}
"""What one run tells of another by chance: no lie at all."""

BOUND = {
    "steps and noise made up": (
        lambda: _player(steps=_noise, spec={"max_batch_size": 640}),
        lambda: _player(spec={"max_batch_size": 640}),
    ),
    "family, its own was true": (lambda: _of_family(LIARS_TRUTH), lambda: _of_family(SCALES_BADLY)),
}
"""Nothing can contradict these: a job that makes up all of its reports in agreement with each other, which counts as one that
scales perfectly; and a silent one that could have said that it scales badly, which counts as silent."""


@dataclass(frozen=True)
class Row:
    """A liar under one policy."""

    liar: str
    policy: str
    truth: float
    """The twin's share of all GPU time."""
    lie: float
    least: float
    """Worst work of an honest slot, over that beside the twin."""
    work: float
    """The same for all honest slots together."""
    stops: float
    """How often honest jobs were stopped, over that beside the twin."""
    named: bool
    """Whether a doubt named the lie."""

    @property
    def gain(self) -> float:
        """The liar's share over its twin's."""
        return over(self.lie, self.truth)


def over(lied: float, beside: float) -> float:
    """The first over the second; infinite if only the second is nothing, and 1 if both are."""
    return lied / beside if beside else math.inf if lied else 1.0


def row(name: str, policy: str, hours: float, seeds: int) -> Row:
    """Run a liar and its twin, once with each seed."""
    liar, twin = (LIARS | NOISE | BOUND)[name]
    slots = [player.slot for player in honest()]

    def played(make: Callable[[], Player], seed: int) -> Result:
        players = [*honest(), make()]
        for player in players:
            player.seed = seed
        return play(players, policy, hours)

    beside = [played(twin, seed) for seed in range(seeds)]
    lied = [played(liar, seed) for seed in range(seeds)]

    done = {slot: over(*(fmean(r.progress[slot] for r in results) for results in (lied, beside))) for slot in slots}
    all_done = [fmean(sum(r.progress[slot] for slot in slots) for r in results) for results in (lied, beside)]
    stops = [fmean(sum(r.stops[slot] for slot in slots) for r in results) for results in (lied, beside)]
    truth, lie = (fmean(r.share["liar"] for r in results) for results in (beside, lied))
    named = any(job.startswith("liar") for result in lied for job in result.doubts)
    return Row(name, policy, truth, lie, min(done.values()), over(*all_done), over(*stops), named)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--policies", default="sia,pollux,gavel,srtf,las,ftf")
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.only.split(";") if name] or [*LIARS, *BOUND, *NOISE]
    print(f"{'policy':8} {'liar':26} {'truth':>7} {'lie':>7} {'gain':>5} {'least':>6} {'work':>6} {'stops':>6} named")
    for policy in arguments.policies.split(","):
        for name in names:
            r = row(name, policy, arguments.hours, arguments.seeds)
            found = f"{r.gain:5.2f} {r.least:6.2f} {r.work:6.2f} {r.stops:6.2f} {'yes' if r.named else 'no'}"
            print(f"{policy:8} {name:26} {r.truth:7.1%} {r.lie:7.1%} {found}", flush=True)


if __name__ == "__main__":
    main()
