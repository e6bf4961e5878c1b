"""The job spec: what a user may ask for, whichever way it reaches us (sbatch flags, comment, API, Airflow).

Later features only add fields. On Slurm a job spec travels as JSON in the job's comment or admin_comment, under the key
`penstock`, so that it can share the field with a site's own keys. `job_submit.lua` writes it into admin_comment from
sbatch's flags; without the flags a user writes it into the comment::

    sbatch --hold --gres=gpu:1 --comment='{"penstock": {"max_gpus": 8, "gpu_types": ["a100", "t4"]}}' train.sh
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock_scheduler.errors import BadJobSpec

SPEC_KEY = "penstock"
"""Key of the job spec in a comment's JSON object."""

Count = Annotated[int, Field(gt=0, le=10**9)]
"""Of GPUs or samples: what the arrays of a round can hold."""

Amount = Annotated[float, Field(gt=0, le=1e15)]
"""Of seconds, dollars, samples a second."""

_MEANS_US = re.compile(rf"""['"]?\b{SPEC_KEY}\b['"]?\s*[:=]""")
"""A comment that means us, well written or not. One that only speaks of us, as in "see the penstock docs", does not."""


class Adaptivity(StrEnum):
    """What of a job the scheduler may change."""

    ADAPTIVE = "adaptive"
    """GPU count, GPU type and batch size."""
    STRONG_SCALING = "strong-scaling"
    """GPU count and type; the total batch size is the user's."""
    RIGID = "rigid"
    """GPU type only."""
    FIXED = "fixed"
    """Nothing, once the job has started."""


class GpuClass(StrEnum):
    """Whose needs come first where jobs share GPUs (AntMan)."""

    GUARANTEED = "guaranteed"
    """It keeps the speed that it would have alone."""
    OPPORTUNISTIC = "opportunistic"
    """It takes what guaranteed jobs leave."""


class Burst(StrEnum):
    """Whether a job may run in the cloud."""

    NEVER = "never"
    ALLOWED = "allowed"
    ONLY = "only"


class EstimatorKind(StrEnum):
    """Which kind of model describes a job's speed."""

    TRAINING = "training"
    """Progress of training: throughput times statistical efficiency."""
    THROUGHPUT = "throughput"
    """Samples per second, as in batch inference."""
    LATENCY = "latency"
    """Requests answered within a latency bound."""
    TABLE = "table"
    """Measured rates."""


class JobSpec(BaseModel):
    """What a job asks for. Fields that are absent are the scheduler's to choose."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, title="Penstock job spec")

    adaptivity: Adaptivity = Adaptivity.ADAPTIVE
    min_gpus: Count = Field(default=1, description="Fewest GPUs that the job can use.")
    max_gpus: Count = Field(default=1, description="Most GPUs that the job can use.")
    gpu_types: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="GPU types that the job can use, as in GRES, the preferred ones first; absent: any.",
    )
    excluded_gpu_types: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="GPU types that the job must not get; instead of gpu_types."
    )
    scale_unit: Count | dict[str, Count] = Field(
        default=1,
        description="GPUs of one replica of the model, for all types or by type, such as {'a100': 2, 'rtx': 8}: the job's "
        "GPU count is a multiple of it. A type that is not named has 1.",
    )
    batch_size: Count | None = Field(
        default=None, description="Total batch size that the script was written for; absent: the model family's."
    )
    max_batch_size: Count | None = Field(default=None, description="Largest total batch size that still trains well.")
    model_family: str | None = Field(
        default=None, description="A family of the catalogue whose speed resembles the job's."
    )
    sensitivity: str | None = Field(
        default=None,
        description="The site's profile of what CPU and memory are worth to the job; absent: that of its model_family.",
    )
    goodput_table: dict[str, Annotated[dict[Count, Amount], Field(min_length=1)]] | None = Field(
        default=None,
        min_length=1,
        description="Measured rate by GPU type and GPU count, such as {'t4': {'1': 90, '4': 310}}.",
    )
    restart_cost_s: Amount | None = Field(
        default=None,
        description="Seconds of training that one restart costs; absent: the model family's, or the site's default.",
    )
    preemptible: bool = Field(default=True, description="Whether a running job may be stopped, moved or resized.")
    gpu_class: GpuClass | None = Field(
        default=None,
        description="Whose needs come first where jobs share GPUs; absent: the site's.",
    )
    grow_shrink: bool = Field(
        default=False,
        description="Whether the job can take more GPUs of its node for a while and give them back at once: gandiva lets it.",
    )
    burst: Burst | None = Field(default=None, description="Whether the job may run in the cloud; absent: the site's.")
    burst_budget_usd: Amount | None = Field(
        default=None, description="Most dollars that one run of the job may cost in the cloud."
    )
    data_size_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = Field(
        default=None, description="Size of the input, which has to get to the cloud if the job runs there."
    )
    checkpoint_every_s: Amount | None = Field(
        default=None, description="Seconds between two checkpoints that the job makes by itself."
    )
    trial_group: str | None = Field(
        default=None,
        min_length=1,
        description="Name that the trials of one search share: gandiva compares them. `array` in a job array: its elements.",
    )
    runtime_s: Amount | None = Field(default=None, description="The user's estimate of the job's running time.")
    estimator: EstimatorKind | None = Field(
        default=None,
        description="Which kind of model describes the job's speed. Not used yet: a goodput_table is a table, everything "
        "else is taken for training.",
    )

    @model_validator(mode="after")
    def _check(self) -> JobSpec:
        if self.max_gpus < self.min_gpus:
            raise ValueError(
                f"max_gpus={self.max_gpus} is less than min_gpus={self.min_gpus}; raise max_gpus or lower min_gpus"
            )
        if self.adaptivity in (Adaptivity.RIGID, Adaptivity.FIXED) and self.min_gpus != self.max_gpus:
            raise ValueError(
                f"a {self.adaptivity} job has one GPU count, but min_gpus={self.min_gpus} and max_gpus={self.max_gpus}; "
                "set both to it, or choose adaptivity 'adaptive' or 'strong-scaling'"
            )
        if self.batch_size and self.max_batch_size and self.max_batch_size < self.batch_size:
            raise ValueError(f"max_batch_size={self.max_batch_size} is less than batch_size={self.batch_size}")
        if self.goodput_table and self.model_family:
            raise ValueError("give goodput_table or model_family, not both: they may contradict each other")
        if self.goodput_table and self.estimator not in (None, EstimatorKind.TABLE):
            raise ValueError(f"a goodput_table is no estimator {self.estimator!r}: leave one of them out")
        if self.gpu_types and self.excluded_gpu_types:
            raise ValueError("give gpu_types or excluded_gpu_types, not both: a type that is not named is excluded")
        if self.burst is Burst.NEVER and self.burst_budget_usd is not None:
            raise ValueError("burst_budget_usd is for jobs that may burst; leave it out, or set burst to 'allowed'")
        if self.gpu_types or isinstance(self.scale_unit, int):
            units = {self.unit(gpu_type) for gpu_type in self.gpu_types or ("any",)}
            if all(self.max_gpus // unit * unit < self.min_gpus for unit in units):
                raise ValueError(
                    f"no count from min_gpus={self.min_gpus} to max_gpus={self.max_gpus} is a multiple of "
                    f"scale_unit={self.scale_unit}; make max_gpus a multiple of it"
                )
        return self

    def unit(self, gpu_type: str) -> int:
        """GPUs of one replica of the model on `gpu_type`."""
        return self.scale_unit if isinstance(self.scale_unit, int) else self.scale_unit.get(gpu_type, 1)

    def allows_type(self, gpu_type: str) -> bool:
        """Whether the job can use GPUs of `gpu_type`."""
        if self.excluded_gpu_types is not None and gpu_type in self.excluded_gpu_types:
            return False
        return self.gpu_types is None or gpu_type in self.gpu_types

    def allows(self, gpu_type: str, gpus: int) -> bool:
        """Whether the job can use `gpus` GPUs of `gpu_type`."""
        within = self.min_gpus <= gpus <= self.max_gpus
        return self.allows_type(gpu_type) and within and gpus % self.unit(gpu_type) == 0

    @property
    def fixed_batch(self) -> bool:
        """Whether the total batch size must stay as it is."""
        return self.adaptivity is not Adaptivity.ADAPTIVE


def parse_spec(text: str) -> JobSpec | None:
    """The job spec in a comment, or None if the text has none (it is empty, or holds something of the site's own).

    Raises:
        BadJobSpec: the text names `penstock` but is not valid; the message says which field, what it holds and the remedy.
    """
    if not _MEANS_US.search(text):
        return None
    try:
        document: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadJobSpec(
            f"the comment is not JSON: {error.msg} at character {error.pos} of {text[:80]!r}; "
            f'write it as {{"{SPEC_KEY}": {{"max_gpus": 4}}}}, in single quotes for the shell'
        ) from None
    if not isinstance(document, dict) or SPEC_KEY not in document:
        raise BadJobSpec(
            f'the comment names {SPEC_KEY}, but not as a key of its object; write {{"{SPEC_KEY}": {{"max_gpus": 4}}}}'
        )
    return validate_spec(document[SPEC_KEY])


def validate_spec(fields: object) -> JobSpec:
    """A job spec from its decoded JSON. Raises BadJobSpec naming the field, its value and the remedy."""
    try:
        return JobSpec.model_validate(fields)
    except ValidationError as error:
        raise BadJobSpec("; ".join(describe_errors(error, JobSpec))) from None


def describe_errors(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence for each thing that pydantic found wrong, naming the field, its value and, for a typo, the valid keys."""
    sentences = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            keys = _table(model, item["loc"][:-1]).model_fields
            sentences.append(f"unknown key {where!r}; the keys are {', '.join(sorted(keys))}")
        elif item["type"] == "value_error":
            sentences.append(f"{where}: {item['ctx']['error']}" if where else str(item["ctx"]["error"]))
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            sentences.append(f"{where}={item['input']!r}: {message}" if where else f"{item['input']!r}: {message}")
    return sentences


def _table(model: type[BaseModel], where: tuple[int | str, ...]) -> type[BaseModel]:
    """The model at a place within another one; the outermost that is known, where the place is not a model's."""
    for name in where:
        field = model.model_fields.get(str(name))
        inner = _model_in(field.annotation) if field is not None else None
        model = model if inner is None else inner
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)
