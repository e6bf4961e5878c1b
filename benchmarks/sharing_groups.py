"""Gandiva's AutoML experiment in simulation: `python benchmarks/sharing_groups.py`; see --help.

A list has one configuration that qualifies, at the 25th, 50th or 75th percentile. On 4 and 16 GPUs, the benchmark compares
running to completion with early results: when a trial first reports the target, and how many times as many configurations have
been tried by then. Early results are modelled as the decision alone or, with --loop, by the policy `gandiva` in the round loop
on the simulated cluster. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
from collections.abc import Sequence

from replays.trial_searches import (
    Configuration,
    Found,
    by_early_results,
    by_policy,
    configurations,
    run_to_completion,
)

from penstock_scheduler.rounds.sharing.groups import GroupSettings


def main() -> None:
    defaults = GroupSettings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=int, default=10)
    parser.add_argument("--count", type=int, default=100, help="configurations in a list")
    parser.add_argument("--gpus", type=int, nargs="*", default=(4, 16))
    parser.add_argument("--first", type=float, default=defaults.first_s, help="groups.first_s")
    parser.add_argument("--eta", type=int, default=defaults.eta, help="groups.eta")
    parser.add_argument(
        "--tau",
        type=float,
        nargs=2,
        default=(0.08, 0.16),
        metavar=("LEAST", "MOST"),
        help="of the learning curves, as parts of a training",
    )
    parser.add_argument("--loop", action="store_true", help="the policy in the round loop")
    options = parser.parse_args()
    settings, rows = GroupSettings(first_s=options.first, eta=options.eta), []

    def early(trials: Sequence[Configuration], gpus: int) -> Found:
        if options.loop:
            return by_policy(trials, gpus, {"groups": settings.model_dump()})
        return by_early_results(trials, gpus, settings)

    for gpus in options.gpus:
        for at in (0.25, 0.5, 0.75):
            slow_h, soon_h, tried = [], [], []
            for seed in range(options.lists):
                trials = configurations(options.count, at, random.Random(seed), tau=tuple(options.tau))
                slow, soon = run_to_completion(trials, gpus), early(trials, gpus)
                slow_h.append(slow.found_s / 3600)
                soon_h.append(soon.found_s / 3600)
                tried.append(soon.seen / (gpus * math.ceil(soon.found_s / trials[0].training_s)))
            means = [statistics.fmean(each) for each in (slow_h, soon_h, tried)]
            rows.append({"gpus": gpus, "at": at, "completion_h": means[0], "early_h": means[1], "tried": means[2]})
            print(
                f"{gpus:3d} GPUs, {at:.0%}: {means[0]:6.2f} h, {means[1]:5.2f} h, "
                f"{means[0] / means[1]:4.1f} x, tried {means[2]:4.1f} x",
                flush=True,
            )
    print(json.dumps({"rows": rows, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
