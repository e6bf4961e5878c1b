"""The models of jobs that rounds are decided with.

`SpecModels` takes the job spec's goodput table, or else its model family from the catalogue. For a job with neither it assumes
perfect scaling, as in Sia's first round, and that GPU types are as fast as for the families of the catalogue. What a job spec
claims is bounded (`claims`). `learned_models` adds what jobs report while they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator, TrainingEstimator
from penstock_profiles.families import Families, UnknownFamilyError
from penstock_profiles.gpus import Gpus, load_gpus
from penstock_profiles.learning import CERTAINTY, JobModel, Kin
from penstock_profiles.sensitivity import SensitivityProfile
from penstock_profiles.wire import Observation
from penstock_scheduler.jobs.claims import Ratio, bounded_table, ratio_of, usual_ratio_of
from penstock_scheduler.jobs.saving import NO_COSTS, RestartCosts
from penstock_scheduler.jobs.sensitivities import profile_name
from penstock_scheduler.model import Job, JobFacts, JobId, JobSpec
from penstock_scheduler.model.flags import CPU_SLOT
from penstock_scheduler.people.errors import BadJobSpec

SPECS = 1000
"""Most job specs whose estimators are kept for further jobs."""

LEAST_COST_S = 1.0
"""Least measured cost of a restart: no run saves, ends and begins again in less."""

MOST_COST_S = 1800.0
"""Most that a restart counts: a job that must not be moved would say a year, or report its beginning days late. A checkpoint of
1 TB takes 1,000 s at 1 GB/s, and a large job begins in minutes."""


TOO_COSTLY = f"its restart_cost_s counts as {MOST_COST_S:.0f} s at most: correct it"
"""The doubt about a job spec with a higher cost."""


class SpecModels:
    """Models from the job spec alone.

    Args:
        families: the catalogue, by name.
        restart_cost_s: wall-clock seconds that a restart costs a job whose job spec has no value.
        gpus: the catalogue of GPU types, which maps the site's names to those of families; None: Penstock's own.
        sensitivities: sensitivity profiles by name, looked up in each round; None: there are none.
        check_claims: whether what job specs and reports claim is bounded and checked (`claims`).
    """

    def __init__(
        self,
        families: Families,
        restart_cost_s: float,
        gpus: Gpus | None = None,
        sensitivities: Mapping[str, SensitivityProfile] | None = None,
        *,
        check_claims: bool = True,
    ) -> None:
        self.check_claims = check_claims
        self._catalogue = families
        self._gpus = load_gpus() if gpus is None else gpus
        self._restart_cost_s = restart_cost_s
        self._sensitivities: Mapping[str, SensitivityProfile] = {} if sensitivities is None else sensitivities
        self._gpu_types: frozenset[str] = frozenset()
        self._families = families
        self._known: dict[JobId, tuple[JobSpec, AnyEstimator]] = {}
        self._of_spec: dict[int, tuple[JobSpec, AnyEstimator]] = {}

    def check(self, spec: JobSpec) -> None:
        """Raises BadJobSpec if the job spec names an unknown family or profile, or an impossible batch size."""
        if spec.sensitivity is not None and spec.sensitivity not in self._sensitivities:
            known = ", ".join(sorted(self._sensitivities)) or "none: set [daemon] sensitivities"
            raise BadJobSpec(f"sensitivity {spec.sensitivity!r} is not known here; the profiles are {known}")
        try:
            _estimator(spec, self._catalogue)
        except (ArithmeticError, TypeError, ValueError) as error:
            # It must fail this job, and not the round.
            raise BadJobSpec(f"no model of the job's speed can be made of its job spec: {error}") from error

    def facts(
        self,
        jobs: Sequence[Job],
        gpu_types: Iterable[str],
        measured: RestartCosts = NO_COSTS,
        saves: Callable[[Job], bool] = lambda job: True,
    ) -> dict[JobId, JobFacts]:
        """What is known of these jobs, whose job specs have passed `check`, on the GPU types of the site.

        `measured` are restart costs that are known without a move, and `saves` tells whether a job has shown that it can save.
        A job's estimator stays the same object while its job spec and the GPU types are the same.
        """
        if (types := frozenset(gpu_types)) != self._gpu_types:
            self._gpu_types, self._families, self._known = types, self._catalogue.on(sorted(types), self._gpus), {}
            self._of_spec = {}
        before = self._known
        self._known = {
            job.id: known
            if (known := before.get(job.id)) is not None and (known[0] is job.spec or known[0] == job.spec)
            else self._of(job.spec)
            for job in jobs
        }
        costs_s, found = self._costs_s(jobs, measured), {}
        for job in jobs:
            _, estimator = self._known[job.id]
            held = 0 if job.allocation is None else job.allocation.gpus
            found[job.id] = JobFacts(
                estimator,
                costs_s[job.id],
                largest_run_gpus=held if self._grows_step_by_step(estimator, saves(job)) else None,
                unmeasured_types=_unknown_types(estimator, types),
                sensitivity=self._sensitivities.get(profile_name(job.spec)),
                saves=saves(job),
                cost_measured=bool(job.pauses_s) or job.id in measured.own_s,
                doubts=(TOO_COSTLY,) if self.check_claims and (job.spec.restart_cost_s or 0.0) > MOST_COST_S else (),
            )
        return found

    def _grows_step_by_step(self, estimator: AnyEstimator, saves: bool) -> bool:
        """Whether a job gets more GPUs only by and by: its scaling is unknown, or it cannot be moved if its table is wrong."""
        stuck = self.check_claims and isinstance(estimator, TableEstimator) and not saves
        return isinstance(estimator, LinearEstimator) or stuck

    def _of(self, spec: JobSpec) -> tuple[JobSpec, AnyEstimator]:
        """Jobs with the same job spec object share an estimator; a trace has thousands of such jobs."""
        if len(self._of_spec) > SPECS:
            self._of_spec = {}
        if id(spec) not in self._of_spec:  # the job spec is kept here, so its id stays its own
            self._of_spec[id(spec)] = spec, _estimator(spec, self._families, self._gpu_types, check=self.check_claims)
        return self._of_spec[id(spec)]

    def _costs_s(self, jobs: Sequence[Job], measured: RestartCosts) -> dict[JobId, float]:
        """Restart costs, seconds. The first that is known counts:

        1. the pauses of the job's own moves;
        2. the time that the job itself takes to save and to start;
        3. its job spec;
        4. the pauses of jobs of its family: the median of the users' medians, so that no user's jobs outvote those of others;
        5. the time that jobs of its family, or on its nodes, take to save and to start;
        6. the site's constant.

        Of several measurements the median counts, because a single move may have waited for a slow disk. A report may claim any
        time, and clocks may differ, so what was measured counts as `LEAST_COST_S` at least, and what is only said, or is of other
        jobs, as `MOST_COST_S` at most.
        """
        of_family: dict[str, dict[str, list[float]]] = {}
        for job in jobs:
            if job.spec.model_family is not None and job.pauses_s:
                of_family.setdefault(job.spec.model_family, {}).setdefault(job.user, []).extend(job.pauses_s)
        costs_s, most_s = {}, MOST_COST_S if self.check_claims else math.inf
        for job in jobs:
            if job.pauses_s:
                costs_s[job.id] = max(median(job.pauses_s), LEAST_COST_S)
            elif job.id in measured.own_s:
                costs_s[job.id] = min(max(measured.own_s[job.id], LEAST_COST_S), most_s)
            elif job.spec.restart_cost_s is not None:
                costs_s[job.id] = min(job.spec.restart_cost_s, most_s)
            elif of_users := of_family.get(job.spec.model_family or ""):
                costs_s[job.id] = min(max(median(map(median, of_users.values())), LEAST_COST_S), most_s)
            elif job.id in measured.alike_s:
                costs_s[job.id] = min(max(measured.alike_s[job.id], LEAST_COST_S), most_s)
            else:
                costs_s[job.id] = self._restart_cost_s
        return costs_s

    @property
    def ratio(self) -> Ratio:
        """How much faster a GPU type may make a job than another, by the job's own measurements."""
        return ratio_of(self._families)

    @property
    def unmeasured_ratio(self) -> Ratio:
        """The same by its job spec."""
        return usual_ratio_of(self._families, self._gpu_types)

    @property
    def gpu_types(self) -> frozenset[str]:
        """The GPU types of the site, without CPU slots, to which no job is sent by a guess."""
        return self._gpu_types - {CPU_SLOT}

    def learner(
        self,
        spec: JobSpec,
        prior: AnyEstimator,
        first: Observation,
        kin: Kin | None = None,
        gpu_types: Collection[str] = (),
    ) -> JobModel:
        """A model that learns from a job's measurements, of which `first` is one.

        It begins with what the job spec tells, or else with `kin`, earlier jobs of its kind. Without `gpu_types`, it knows only
        types of which something tells.
        """
        known = prior if isinstance(prior, TrainingEstimator) else None
        if known is not None:
            initial, largest = known.initial_batch, known.max_batch
        elif kin is not None:
            initial, largest = kin.estimator.initial_batch, kin.estimator.max_batch
        else:
            initial = spec.batch_size if spec.batch_size is not None else first.samples
            largest = max(spec.max_batch_size if spec.max_batch_size is not None else initial, initial)
        return JobModel(
            initial,
            largest,
            fixed_batch=spec.fixed_batch,
            prior=known,
            kin=None if kin is None else kin.estimator,
            certainty=CERTAINTY if kin is None else kin.certainty,
            families=self._families,
            gpus=self._gpus,
            gpus_per_replica=spec.unit,
            gpu_types=gpu_types,
        )

    def beginning(self, spec: JobSpec, first: Observation) -> JobModel:
        """A model that begins with `first` and nothing else, for what earlier jobs have shown."""
        return self.learner(spec, LinearEstimator(), first)


def _unknown_types(estimator: AnyEstimator, gpu_types: frozenset[str]) -> tuple[str, ...]:
    """GPU types on which a learning job's speed is in neither a table nor the catalogue; sorted."""
    if isinstance(estimator, LinearEstimator):
        return tuple(sorted(gpu_types))
    return tuple(sorted(gpu_types - estimator.models.keys())) if isinstance(estimator, TrainingEstimator) else ()


def _estimator(
    spec: JobSpec, families: Families, gpu_types: Collection[str] = (), *, check: bool = True
) -> AnyEstimator:
    """From the job spec, or for a job of which nothing is known, from how fast these GPU types are in general."""
    if spec.goodput_table is not None:
        table = {gpu_type: dict(rates) for gpu_type, rates in spec.goodput_table.items()}
        return TableEstimator(bounded_table(table, usual_ratio_of(families, gpu_types)) if check else table)
    if spec.model_family is None:
        return LinearEstimator(families.speeds(gpu_types))
    try:
        family = families[spec.model_family]
        if not family.gpus:  # the catalogue has it for none of the site's types
            return LinearEstimator(families.speeds(gpu_types))
        return family.estimator(spec.batch_size, spec.max_batch_size, fixed_batch=spec.fixed_batch)
    except UnknownFamilyError as error:
        raise BadJobSpec(str(error)) from None
    except ValueError as error:
        raise BadJobSpec(f"model_family {spec.model_family!r}: {error}") from None
