"""The presets `sia:artifact`, Sia as its authors' artifact runs it, and `sia:paper`, for comparison.

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

from typing import Any

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
