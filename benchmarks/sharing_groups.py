"""Gandiva's AutoML experiment in simulation: `python benchmarks/sharing_groups.py`, and --help.

A list of configurations of which one qualifies, at the 25th, 50th and 75th percentile, on 4 and 16 GPUs: when a trial first
reports the target, run to completion and by early results, and how many more were tried than run to completion would have by
then.
The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics

from penstock_scheduler.sharing.groups import GroupSettings
from penstock_scheduler.simulator.groups import by_early_results, configurations, run_to_completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=int, default=10)
    parser.add_argument("--count", type=int, default=100, help="configurations of a list")
    parser.add_argument("--first", type=float, default=300.0, help="seconds of training before a trial is first judged")
    options = parser.parse_args()
    settings, rows = GroupSettings(first_s=options.first), []
    for gpus in (4, 16):
        for at in (0.25, 0.5, 0.75):
            slow_h, soon_h, tried = [], [], []
            for seed in range(options.lists):
                trials = configurations(options.count, at, random.Random(seed))
                slow, soon = run_to_completion(trials, gpus), by_early_results(trials, gpus, settings)
                slow_h.append(slow.found_s / 3600)
                soon_h.append(soon.found_s / 3600)
                tried.append(soon.seen / (gpus * math.ceil(soon.found_s / trials[0].training_s)))
            means = [statistics.fmean(each) for each in (slow_h, soon_h, tried)]
            rows.append({"gpus": gpus, "at": at, "completion_h": means[0], "early_h": means[1], "tried": means[2]})
            print(
                f"{gpus:3d} GPUs, {at:.0%}: {means[0]:6.2f} h, {means[1]:5.2f} h, "
                f"{means[0] / means[1]:4.1f} x, tried {means[2]:4.1f} x"
            )
    print(json.dumps({"rows": rows, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
