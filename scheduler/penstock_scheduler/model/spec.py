"""The job spec: what a user may ask for, by sbatch's flags, a comment, the API or Airflow.

On Slurm a job spec is JSON in the job's comment or admin_comment, under the key `penstock`, so that a site's own keys fit
beside it. `job_submit.lua` writes it into admin_comment from sbatch's flags. Without the flags a user writes it into the
comment::

    sbatch --hold --gres=gpu:1 --comment='{"penstock": {"max_gpus": 8, "gpu_types": ["a100", "t4"]}}' train.sh
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock_scheduler.model.flags import CPU_SLOT, Flag, Syntax, summary
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import BadJobSpec

SPEC_KEY = "penstock"
"""Key of the job spec in a comment's JSON object."""

Count = Annotated[int, Field(gt=0, le=10**9)]
"""A number of GPUs or samples, small enough for the arrays of a round."""

Amount = Annotated[float, Field(gt=0, le=1e15)]
"""Seconds, dollars, or samples per second."""

FEW = 3
"""Most errors of a job spec that its user is told at once. Slurm keeps the text with each job, of an array with each element."""
LONGEST = 500
"""Most characters of one of them."""

_HAS_KEY = re.compile(rf"""['"]?\b{SPEC_KEY}\b['"]?\s*[:=]""")
"""Matches a comment that has the key, even in bad JSON, but not one such as "see the penstock docs"."""


class Adaptivity(StrEnum):
    """What the scheduler may change while the job lives."""

    ADAPTIVE = "adaptive"
    """GPU count, GPU type and batch size."""
    STRONG_SCALING = "strong-scaling"
    """GPU count and type; the total batch size is the user's."""
    RIGID = "rigid"
    """GPU type only."""
    FIXED = "fixed"
    """Nothing, once the job has started."""


class GpuClass(StrEnum):
    """The two classes of jobs that share GPUs (AntMan)."""

    GUARANTEED = "guaranteed"
    """The job keeps the speed that it would have alone."""
    OPPORTUNISTIC = "opportunistic"
    """The job uses what guaranteed jobs leave."""


class Burst(StrEnum):
    """Whether a job may run in the cloud."""

    NEVER = "never"
    ALLOWED = "allowed"
    ONLY = "only"


class JobSpec(BaseModel):
    """What a job asks for. The scheduler chooses what is absent.

    Each field is declared here and nowhere else. From these declarations, `script/generate` writes the tables for other
    languages and for the documentation; see "Add a field to the job spec" in CONTRIBUTING.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, title="Penstock job spec")

    adaptivity: Annotated[
        Adaptivity,
        Flag(
            "adaptive",
            Syntax.CHOICE,
            example="strong-scaling",
            argument="MODE",
            choices=(Adaptivity.ADAPTIVE, Adaptivity.STRONG_SCALING, Adaptivity.RIGID),
            bare_value=Adaptivity.ADAPTIVE,
            help="let Penstock choose the GPUs: adaptive (count, type, batch), strong-scaling (count, type) or rigid (type)",
            notes="`adaptive` is the default. All other flags need this one.",
        ),
    ] = Field(
        default=Adaptivity.ADAPTIVE,
        description="How Penstock may change the job: GPU count, type and batch size (adaptive), count and type "
        "(strong-scaling), type (rigid), or nothing once the job has started (fixed).",
    )
    min_gpus: Annotated[Count, Flag("min-gpus", Syntax.COUNT, example="2", notes="Absent: 1.")] = Field(
        default=1, description="Fewest GPUs that the job can use."
    )
    max_gpus: Annotated[
        Count,
        Flag(
            "max-gpus",
            Syntax.COUNT,
            example="8",
            notes="Absent: as many as the header requests. A rigid job takes its one GPU count from this or from `--min-gpus`.",
        ),
    ] = Field(default=1, description="Most GPUs that the job can use.")
    gpu_types: Annotated[
        tuple[str, ...] | None,
        Flag(
            "gpu-types",
            Syntax.TYPES,
            example="a100,t4",
            help="GPU types that the job can use, best first, or ^TYPE for any but these",
            notes="For example `a100,rtx`, or `^t4,^rtx` for all but these (not `!t4`, which the shell would change).",
        ),
    ] = Field(
        default=None,
        min_length=1,
        description="GPU types that the job can use, as in GRES, the preferred ones first. Absent: any type.",
    )
    excluded_gpu_types: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="GPU types that the job must not get, instead of gpu_types."
    )
    batch_size: Annotated[Count | None, Flag("batch-size", Syntax.COUNT, example="256")] = Field(
        default=None, description="Total batch size that the script was written for. Absent: the model family's."
    )
    max_batch_size: Annotated[Count | None, Flag("max-batch-size", Syntax.COUNT, example="4096")] = Field(
        default=None, description="Largest total batch size that still trains well. Absent: the model family's."
    )
    scale_unit: Annotated[
        Count | dict[str, Count],
        Flag(
            "scale-unit",
            Syntax.UNITS,
            example="a100=2,rtx=8",
            help="GPUs of one replica of the model: 4, or by type a100=2,rtx=8",
            notes="The job gets multiples of it.",
        ),
    ] = Field(
        default=1,
        description="GPUs of one replica of the model, for all types or by type, such as {'a100': 2, 'rtx': 8}. The job's GPU "
        "count is a multiple of it. A type that is not named has 1.",
    )
    max_nodes: Count | None = Field(
        default=None, description="Most nodes that the job can run on. Absent: as many as its GPUs need."
    )
    gpus_per_task: Count = Field(
        default=1, description="GPUs of each of the job's tasks. The job has a multiple of it on each of its nodes."
    )
    model_family: Annotated[
        str | None,
        Flag("model-family", Syntax.NAME, example="bert-squad", notes="See [the catalogue](../developer/profiles.md)."),
    ] = Field(default=None, description="Model family of the catalogue that is about as fast as the job's model.")
    sensitivity: Annotated[
        str | None,
        Flag("sensitivity", Syntax.NAME, example="resnet18", notes="See [profiles](../admin/synergy.md#profiles)."),
    ] = Field(
        default=None,
        description="The site's profile of what CPU and memory are worth to the job. Absent: that of its model family.",
    )
    goodput_table: dict[str, Annotated[dict[Count, Amount], Field(min_length=1)]] | None = Field(
        default=None,
        min_length=1,
        description="Measured rate by GPU type and GPU count, such as {'t4': {'1': 90, '4': 310}}, instead of model_family.",
    )
    restart_cost_s: Amount | None = Field(
        default=None,
        description="Seconds of training that one restart costs. Absent: the model family's, or the site's default.",
    )
    gpu_class: Annotated[
        GpuClass | None,
        Flag(
            "gpu-class",
            Syntax.CHOICE,
            example="opportunistic",
            argument="CLASS",
            choices=tuple(GpuClass),
            notes="See [sharing](../admin/sharing.md).",
        ),
    ] = Field(
        default=None,
        description="Class of the job where jobs share GPUs: guaranteed or opportunistic. Absent: the site's default.",
    )
    preemptible: Annotated[
        bool,
        Flag("non-preemptible", Syntax.SWITCH, example="yes", help="never stop, move or resize the job once it runs"),
    ] = Field(default=True, description="Whether Penstock may stop, move or resize the job once it runs.")
    burst: Annotated[
        Burst | None,
        Flag(
            "burst",
            Syntax.CHOICE,
            example="allowed",
            argument="WHEN",
            choices=tuple(Burst),
            notes="See [bursting](../admin/bursting.md).",
        ),
    ] = Field(
        default=None,
        description="Whether the job may run in the cloud: never, allowed or only. Absent: the site's default.",
    )
    burst_budget_usd: Annotated[Amount | None, Flag("burst-budget", Syntax.DOLLARS, example="12.50")] = Field(
        default=None,
        description="Most dollars that one run of the job may cost in the cloud. Absent: no limit of its own.",
    )
    data_size_bytes: Annotated[
        Annotated[int, Field(gt=0, lt=2**63)] | None,
        Flag(
            "data-size",
            Syntax.SIZE,
            example="500G",
            help="size of the input: 500G (K, M, G or T)",
            notes="The units are powers of 1,024.",
        ),
    ] = Field(
        default=None,
        description="Size of the job's input in bytes, which must reach the cloud if the job runs there.",
    )
    checkpoint_every_s: Annotated[
        Amount | None,
        Flag(
            "checkpoint-every",
            Syntax.TIME,
            example="30",
            help="time between two checkpoints that the job makes by itself",
        ),
    ] = Field(
        default=None,
        description="Seconds between two checkpoints that the job makes by itself: what it can lose when the cloud takes its "
        "instance back.",
    )
    checkpointable: Annotated[
        bool,
        Flag(
            "checkpointable",
            Syntax.SWITCH,
            example="yes",
            help="the job saves its state when Penstock asks, so it may be moved before it has shown that",
            notes="See [saving](saving.md).",
        ),
    ] = Field(
        default=False,
        description="Whether the job saves its state when Penstock or Slurm asks it to, so that it may be moved before it has "
        "shown that.",
    )
    grow_shrink: Annotated[
        bool,
        Flag(
            "grow-shrink",
            Syntax.SWITCH,
            example="yes",
            help="lend the job idle GPUs of its node; it gives them back at once",
            notes="See [sharing](../admin/sharing.md).",
        ),
    ] = Field(
        default=False,
        description="Whether the policy gandiva may lend the job idle GPUs of its node, which the job gives back at once.",
    )
    trial_group: Annotated[
        str | None,
        Flag(
            "trial-group",
            Syntax.NAME,
            example="lr-search",
            notes="See [trials of one search](searches.md).",
        ),
    ] = Field(
        default=None,
        min_length=1,
        description="Name that the trials of one search share. In a job array, `array` makes its elements the trials.",
    )
    runtime_s: Annotated[
        Amount | None, Flag("runtime", Syntax.TIME, example="8:00:00", help="your estimate of the running time")
    ] = Field(
        default=None,
        description="Your estimate of the job's running time in seconds. How long the job waits for local GPUs, and what it "
        "commits in the cloud, follow from it. Absent: estimated from what is known.",
    )

    @field_validator("*")
    @classmethod
    def _printable(cls, value: object) -> object:
        """Refuse names that no file, database or other program would take: control characters, halves of surrogate pairs."""
        names = (value,) if isinstance(value, str) else value if isinstance(value, tuple | dict) else ()
        for name in names:
            if isinstance(name, str) and not name.isprintable():
                raise ValueError(f"{name!a} has characters that cannot be shown; use letters, digits and ._+-")
        return value

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
        if self.gpu_types and self.excluded_gpu_types:
            raise ValueError(
                "give gpu_types or excluded_gpu_types, not both: with gpu_types, a type that is not named is excluded"
            )
        if self.burst is Burst.NEVER and self.burst_budget_usd is not None:
            raise ValueError("burst_budget_usd is for jobs that may burst; leave it out, or set burst to 'allowed'")
        if self.gpu_types or isinstance(self.scale_unit, int):
            units = {self.unit(gpu_type) for gpu_type in self.gpu_types or ("any",)}
            if all(self.max_gpus // unit * unit < self.min_gpus for unit in units):
                raise ValueError(
                    f"no count from min_gpus={self.min_gpus} to max_gpus={self.max_gpus} is a multiple of "
                    f"scale_unit={self.scale_unit} and of gpus_per_task={self.gpus_per_task}; make max_gpus a multiple of it"
                )
        return self

    @property
    def says_it_saves(self) -> bool:
        """Whether the user says that a stop does not lose all of the job's work."""
        return self.checkpointable or self.checkpoint_every_s is not None

    def unit(self, gpu_type: str) -> int:
        """The job's GPU count on `gpu_type` is a multiple of this: GPUs of one replica of the model, and of one task."""
        replica = self.scale_unit if isinstance(self.scale_unit, int) else self.scale_unit.get(gpu_type, 1)
        return math.lcm(replica, self.gpus_per_task)

    def allows_type(self, gpu_type: str) -> bool:
        """Whether the job can use GPUs of `gpu_type`. CPU slots have no GPU, so only a job that names them can use them."""
        if self.gpu_types is not None:
            return gpu_type in self.gpu_types
        return gpu_type not in (CPU_SLOT, *(self.excluded_gpu_types or ()))

    def allows(self, gpu_type: str, gpus: int, nodes: int = 1) -> bool:
        """Whether the job can use `gpus` GPUs of `gpu_type` on `nodes` nodes that have equally many of them."""
        within = self.min_gpus <= gpus <= self.max_gpus
        return (
            self.allows_type(gpu_type) and within and gpus % self.unit(gpu_type) == 0 and self.allows_nodes(gpus, nodes)
        )

    def allows_nodes(self, gpus: int, nodes: int) -> bool:
        """Whether the job can run with `gpus` GPUs on `nodes` nodes that have equally many of them."""
        return (self.max_nodes is None or nodes <= self.max_nodes) and gpus // nodes % self.gpus_per_task == 0

    @property
    def fixed_batch(self) -> bool:
        """Whether the total batch size must stay as it is."""
        return self.adaptivity is not Adaptivity.ADAPTIVE

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """The flags of sbatch by the field that they set, in the order of the fields. Each has its help text."""
        found = {}
        for name, field in cls.model_fields.items():
            for flag in (each for each in field.metadata if isinstance(each, Flag)):
                found[name] = replace(flag, help=flag.help or summary(field.description or ""))
        return found


def parse_spec(text: str) -> JobSpec | None:
    """The job spec in a comment; None if the comment has none.

    Raises:
        BadJobSpec: the text has the key `penstock` but is not valid. The message names the field, its value and the remedy.
    """
    if not _HAS_KEY.search(text):
        return None
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested a thousand deep, or a number of thousands of digits
        why = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadJobSpec(
            f"the comment is not JSON: {why} of {text[:80]!r}; "
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
        try:
            told = describe_errors(error, JobSpec)
        except RecursionError:  # Python cannot show a value that is nested so deep
            raise BadJobSpec("a value is nested too deep") from None
        shown = [each if len(each) <= LONGEST else f"{each[:LONGEST]}…" for each in told[:FEW]]
        more = [f"and {len(told) - FEW} more"] if told[FEW:] else []
        raise BadJobSpec("; ".join([*shown, *more])) from None
