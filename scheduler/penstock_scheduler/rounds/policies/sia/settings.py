"""Settings of `sia`, with the presets `sia:artifact`, Sia as its authors' artifact runs it, and `sia:paper`, for comparison.

The artifact differs from the paper, and from Penstock, in these ways.

- `allocation_lambda` is 1.1, as in the paper. A job's first GPU is then worth less than another job's second: a new job, which
  starts on one GPU, waits as long as one old job has 4.
- Costs are rounded to two decimals and end at 3000. So 48 and 52 GPUs weigh the same, and jobs move without
  any gain where costs are equal.
- No job gets more than 64 GPUs.
- A job younger than its restart cost moves freely, though it loses most by moving.
- The restart factor makes all entries but the held one worse, but not stopping. So a young job is stopped
  rather than moved, and comes back at no cost. By default the factor applies to stopping, too: with p < 0, leaving out a
  running job costs lambda * r ** p.
- A job that never ran gets one unit of some type, and no type is preferred, whatever is known about the job.
  Among equals, the artifact's solver takes the first type in the order of the artifact's own names (`costs.START_ORDER`). In the
  rounds recorded from its simulator, all 40 such jobs got a T4.

The setting `variant` has all of these but the first; `paper` has that of the restart factor alone. These are settings:

- `aging_s` is null: a wait weighs the same however long it is.
- `growth` is 2 and `unproven_power` 1: a job doubles at most, and its model is believed beyond what it has run on.
- `size_power` is 0 and `amortise_s` null: the work that jobs have left does not count.
- `measure_gpu_s` is 0: the artifact knows each job's speed before it starts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator


class SiaSettings(BaseModel):
    """Section `[policy.sia]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fairness_p: float = Field(
        default=-0.5,
        ge=-10.0,
        le=10.0,
        description="Power p of the goodput. Below 0, it favours the jobs that have least.",
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
    least_gain_per_gpu: NonNegativeFloat = Field(
        default=0.0,
        lt=1,
        description="A job grows only while each further GPU brings at least this part of what its first of that type brings. "
        "0: it takes all that are idle.",
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


ARTIFACT: dict[str, Any] = {
    "allocation_lambda": 1.1,
    "growth": 2.0,
    "unproven_power": 1.0,
    "measure_gpu_s": 0.0,
    "aging_s": None,
    "size_power": 0.0,
    "amortise_s": None,
    "variant": "artifact",
}
"""Settings of the preset `sia:artifact`."""

PAPER: dict[str, Any] = {
    "allocation_lambda": 1.1,
    "growth": 2.0,
    "unproven_power": 1.0,
    "measure_gpu_s": 20.0,
    "aging_s": None,
    "size_power": 0.0,
    "amortise_s": None,
    "variant": "paper",
}
"""Settings of the preset `sia:paper`: the policy as the paper describes it, without the artifact's habits."""
