"""Settings of `sia`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator


class SiaSettings(BaseModel):
    """Section `[policy.sia]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fairness_p: float = Field(
        default=-0.5, description="Power p of the goodput. Below 0, it favours the jobs that have least."
    )
    allocation_lambda: float = Field(
        default=2.0,
        description="Cost of leaving a job out: above 1 for p < 0, below 0 for p > 0. Below 2 - 2 ** p, a job waits for its "
        "first GPU while others have more than they need.",
    )
    growth: float | None = Field(
        default=4.0,
        gt=1,
        description="A job whose scaling is unknown may get this many times its largest number of GPUs so far, "
        "and always the next larger number that it can have. null: no limit.",
    )
    unproven_power: NonNegativeFloat = Field(
        default=0.5,
        le=1,
        description="Beyond its largest number of GPUs so far, such a job's goodput is taken to grow by at most this power of "
        "the number. 1: by what its model says.",
    )
    measure_gpu_s: NonNegativeFloat = Field(
        default=0.0,
        description="GPU-seconds, in addition to a restart, in which a new job shows how fast it is on one GPU of each type of "
        "unknown speed, before it grows. 0: it grows at once, and other types are estimated from those on which it ran.",
    )
    size_power: NonNegativeFloat = Field(
        default=0.5,
        le=1,
        description="A job weighs the less the more work it has left, by this power of it. 0: all jobs weigh the same.",
    )
    amortise_s: PositiveFloat | None = Field(
        default=1200.0,
        description="A move must pay within what the job has left, and within this time. null: only its age counts.",
    )
    aging_s: PositiveFloat | None = Field(
        default=3600.0,
        description="Once a job has waited this long for its min_gpus, its wait weighs more and more. null: it never does.",
    )
    aging_most: NonNegativeFloat = Field(
        default=4.0, description="Most that a wait weighs: that of a job which has waited aging_s this many times more."
    )
    solver: Literal["auto", "milp", "dual"] = Field(
        default="auto", description="Solver of the integer program; auto chooses by the size of the round."
    )
    gap: NonNegativeFloat = Field(default=1e-4, description="Relative gap at which a plan counts as optimal.")
    max_nodes: PositiveInt = Field(
        default=10_000, description="Branch-and-bound nodes after which the solver returns its best plan so far."
    )
    max_seconds: PositiveFloat = Field(
        default=20.0, description="Time limit of the solver. A plan that reaches it is marked as cut short."
    )
    round_costs: bool = Field(default=False, description="As the artifact: costs have two decimals and end at 3000.")
    max_job_gpus: PositiveInt | None = Field(default=None, description="Most GPUs of one job; 64 in the artifact.")
    restart_free_when_young: bool = Field(
        default=False, description="As the artifact: a job younger than its restart cost moves freely."
    )
    leaving_is_free: bool = Field(
        default=False, description="As the artifact: the restart factor does not apply to stopping a job."
    )
    blind_start: bool = Field(
        default=False, description="As the artifact: a job that never ran gets one unit, of whichever type."
    )
    start_order: tuple[str, ...] = Field(
        default=(),
        description="With blind_start: the GPU types in the order in which such a job tries them.",
    )

    @model_validator(mode="after")
    def _check(self) -> SiaSettings:
        p, leave_out = self.fairness_p, self.allocation_lambda
        if p == 0:
            raise ValueError("fairness_p=0 weighs every configuration alike; use a non-zero value, such as -0.5")
        if p < 0 and leave_out <= 1:
            raise ValueError(
                f"allocation_lambda={leave_out} with fairness_p={p} would leave every job out: a job's slowest "
                "configuration costs 1; use more than 1, such as 2"
            )
        if p > 0 and leave_out >= 0:
            raise ValueError(
                f"allocation_lambda={leave_out} with fairness_p={p} would reward leaving jobs out; use less than 0, such as -1.1"
            )
        return self
