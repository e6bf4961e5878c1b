"""Tests the search for the knee on a real input pipeline: `python benchmarks/knee.py [--most N] [--steps-ms 16,40,120]
[--json]`.

A PyTorch DataLoader augments synthetic images in worker processes (a crop of noise, resized, flipped, normalised) for a
trainer that takes a fixed time for each batch, as a GPU would. For n CPUs the loader has n workers.

The benchmark runs on machines with fewer CPUs than a GPU server. So a worker stands for a *slow* CPU: it really
augments each image, and then sleeps until `--slow` times the CPU time of one image, measured at the start, has passed.
24 workers with `--slow 100` take a quarter of a CPU together, so they do not compete, and the sleep hides moderate
other work on the machine. Processes, prefetching, queues and collation are as on a server. The caches and the memory
bandwidth that real CPUs share are not modelled.

For each time of a step, the search (at most 8 runs) is compared with measuring every number from 1 to `--most`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from penstock_profiles.sensitivity import find_knee, knee


class Images(Dataset[torch.Tensor]):
    """Images of noise, augmented on a CPU that takes at least `slot_s` for each."""

    def __init__(self, count: int, slot_s: float) -> None:
        self._count, self._slot_s = count, slot_s
        self._noise = torch.randint(0, 256, (3, 256, 256), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        until_s = time.perf_counter() + self._slot_s
        left, top = index * 7 % 64, index * 13 % 64
        crop = self._noise[:, top : top + 192, left : left + 192].float() / 255
        image = torch.nn.functional.interpolate(crop[None], size=(128, 128), mode="bicubic", antialias=True)[0]
        image = (image.flip(-1) - 0.45) / 0.22
        time.sleep(max(until_s - time.perf_counter(), 0.0))
        return image


def image_cpu_s(images: int = 60) -> float:
    """Median CPU time of augmenting one image, in seconds."""
    torch.set_num_threads(1)
    dataset, took_s = Images(images, 0.0), []
    for index in range(images):
        begun = time.process_time()
        dataset[index]
        took_s.append(time.process_time() - begun)
    return statistics.median(took_s)


def samples_per_s(cpus: int, *, slot_s: float, step_s: float, batch: int, seconds: float) -> float:
    """Speed of one run of the pipeline, in samples/s, over about `seconds` after a warm-up."""
    torch.set_num_threads(1)
    expected = min(cpus / slot_s, batch / step_s)
    # Count whole rounds, in which all workers make equally many batches.
    batches = max(round(expected * seconds / batch / cpus), 2) * cpus
    warm_up = cpus + 2  # so each worker has started and made one batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that there are more workers than CPUs, as intended
        loader = DataLoader(
            Images((batches + warm_up) * batch, slot_s), batch, num_workers=cpus, multiprocessing_context="fork"
        )
        arrivals = iter(loader)
    begun_s = free_s = 0.0
    for number, _ in enumerate(arrivals):
        # As on a GPU: a step takes a fixed time, and the next batch can be fetched meanwhile.
        begins_s = max(free_s, time.perf_counter())
        free_s = begins_s + step_s
        if number == warm_up - 1:
            begun_s = free_s
        time.sleep(max(begins_s - time.perf_counter(), 0.0))
    return batches * batch / (free_s - begun_s)


def compare(most: int, step_s: float, slot_s: float, batch: int, seconds: float, trials: int) -> dict[str, Any]:
    """The search and the sweep, each with its own measurements."""

    def measure(cpus: int) -> float:
        return max(
            samples_per_s(cpus, slot_s=slot_s, step_s=step_s, batch=batch, seconds=seconds) for _ in range(trials)
        )

    load, begun = os.getloadavg()[0], time.perf_counter()
    searched = find_knee(measure, most)
    search_s = time.perf_counter() - begun
    swept = {cpus: measure(cpus) for cpus in range(1, most + 1)}
    return {
        "step_ms": 1000 * step_s,
        "load": load,
        "searched": searched,
        "runs": len(searched),
        "search_s": round(search_s, 1),
        "sweep_s": round(time.perf_counter() - begun - search_s, 1),
        "knee": knee(searched),
        "swept": swept,
        "exhaustive_knee": knee(swept),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=24, help="the largest number of CPUs")
    parser.add_argument("--slow", type=float, default=100.0, help="time of an image, as a multiple of its CPU time")
    parser.add_argument(
        "--steps-ms",
        default="",
        help="times of a step (default: such that the knees are at 1/2, 1/4 and 1/8 of --most)",
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each run")
    parser.add_argument("--trials", type=int, default=2, help="runs with each number of CPUs; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print only the last line")
    options = parser.parse_args()
    slot_s = options.slow * image_cpu_s()
    if options.steps_ms:
        steps_s = [float(step) / 1000 for step in options.steps_ms.split(",")]
    else:
        steps_s = [options.batch * slot_s / (options.most / part) for part in (2, 4, 8)]
    rows = [compare(options.most, step_s, slot_s, options.batch, options.seconds, options.trials) for step_s in steps_s]
    for row in rows if not options.json else ():
        print(f"\na step of {row['step_ms']:.1f} ms, {1000 * slot_s:.1f} ms an image, load {row['load']:.1f}")
        for cpus, speed in row["swept"].items():
            seen = f"{row['searched'][cpus]:>8.1f}" if cpus in row["searched"] else ""
            print(f"{cpus:>4}  {speed:>8.1f} samples/s  {seen}")
        print(
            f"knee {row['knee']} in {row['runs']} runs, {row['search_s']} s; "
            f"by measuring all {row['exhaustive_knee']}, {row['sweep_s']} s"
        )
    print(json.dumps({"slot_ms": round(1000 * slot_s, 2), "most": options.most, "rows": rows}))


if __name__ == "__main__":
    main()
