"""What Penstock knows about a job beyond what the cluster reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.sensitivity import SensitivityProfile


@dataclass(frozen=True, slots=True)
class Promise:
    """What a job said of its work, beside what it must have done by the speed that it reports. All work is in the unit of its
    goodput times seconds."""

    work: float
    """The whole work that it first said it has."""
    done: float
    """What it says that it has done."""
    gpus: int
    """Most GPUs that it has held."""
    least: dict[str, float]
    """GPU type -> the least work that a GPU-second on it does."""
    silent: AnyEstimator | None = None
    """The model that counts once the job has run for long, if it has measured nothing itself; None: `JobFacts.model` does."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts about one job in a snapshot that do not come from the cluster."""

    model: AnyEstimator
    """Its model: how fast it is on each configuration."""
    restart_cost_s: float
    """Wall-clock seconds of training that a restart costs it."""
    largest_run_gpus: int | None = None
    """Most GPUs that it has run on; 0: it never ran; None: its scaling is known, so its growth is not bounded."""
    unmeasured_types: tuple[str, ...] = ()
    """GPU types, sorted, on which the speed of a job that learns from its runs is neither measured nor in the catalogue."""
    remaining_work: float | None = None
    """Work left, in the unit of its goodput times seconds, >= 0; None: not known."""
    likely_work: tuple[float, ...] = ()
    """Where `remaining_work` is not known: what earlier jobs of its family had left after as much work, in the same unit."""
    attained_gpu_s: dict[str, float] = field(default_factory=dict)
    """GPU-seconds that it has held so far, by GPU type."""
    sensitivity: SensitivityProfile | None = None
    """How its speed depends on CPU and memory; None: not known."""
    saves: bool = True
    """Whether it has shown, or its job spec says, that it can save its state. Stopping another job loses all its work."""
    save_failure: str = ""
    """Why its last checkpoint could not be written, if it could not."""
    starts_until_s: float = 0.0
    """Until when its present run counts as starting, s since 1970: earlier runs reported, and this one has not yet. 0: it has
    begun, or nothing tells."""
    cost_measured: bool = False
    """Whether `restart_cost_s` was measured on the job itself."""
    promise: Promise | None = None
    """By which `model`, `remaining_work` and `likely_work` are checked; None: nothing is known."""
    doubts: tuple[str, ...] = ()
    """Claims of its user or of its reports that count for less than they say, as sentences without a subject's name."""

    def with_attained(self, gpu_s: dict[str, float]) -> JobFacts:
        """The same facts with these GPU-seconds. Written out because `replace` takes three times as long."""
        return JobFacts(
            self.model,
            self.restart_cost_s,
            self.largest_run_gpus,
            self.unmeasured_types,
            self.remaining_work,
            self.likely_work,
            gpu_s,
            self.sensitivity,
            self.saves,
            self.save_failure,
            self.starts_until_s,
            self.cost_measured,
            self.promise,
            self.doubts,
        )

    def differs_by_time_only(self, other: JobFacts) -> bool:
        """Whether only the work done so far differs. That grows with time while a job runs."""
        same = replace(
            self,
            remaining_work=other.remaining_work,
            likely_work=other.likely_work,
            attained_gpu_s=other.attained_gpu_s,
            promise=other.promise,
        )
        return same == other
