"""Settings of `sia`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator


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
    solver: Literal["auto", "milp", "dual"] = Field(
        default="auto", description="Solver of the integer program; auto chooses by the size of the round."
    )
    gap: NonNegativeFloat = Field(default=1e-4, description="Relative gap at which a plan counts as optimal.")
    max_seconds: PositiveFloat = Field(
        default=20.0, description="Time limit of the solver. A plan that reaches it is marked as cut short."
    )
    variant: Literal["penstock", "paper", "artifact"] = Field(
        default="penstock",
        description="Whose details count. artifact: the habits of the authors' code; paper: stopping a job costs no restart. "
        "The presets sia:artifact and sia:paper set it.",
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
