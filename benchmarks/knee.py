"""The search for the knee on a real input pipeline: `python benchmarks/knee.py [--most N] [--json]`.

A PyTorch DataLoader augments synthetic images (a crop of noise, resized, flipped, normalised: real work on a CPU) for a trainer
that takes a fixed time for each batch, as a GPU would. For n CPUs the loader has n workers, and all are kept to n of the
machine's CPUs. The search is compared with measuring every number. On a machine of few CPUs there are few points: with
two, any answer is within one step. `--workers` varies the number of workers alone, on all CPUs: more points, of which
those beyond the CPUs bring nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from penstock_profiles.sensitivity import find_knee, knee

BATCH = 16


class Images(Dataset[torch.Tensor]):
    """Noise, augmented."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._noise = torch.randint(0, 256, (3, 512, 512), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        left, top = index * 7 % 128, index * 13 % 128
        crop = self._noise[:, top : top + 384, left : left + 384].float() / 255
        image = torch.nn.functional.interpolate(crop[None], size=(224, 224), mode="bicubic", antialias=True)[0]
        return (image.flip(-1) - 0.45) / 0.22


def samples_per_s(cpus: int, affinity: int, batches: int, step_s: float) -> float:
    """Speed of one short run with so many workers on so many CPUs, warm-up not counted."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, cpus, affinity, batches, step_s).result()


def _run(workers: int, affinity: int, batches: int, step_s: float) -> float:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:affinity])
    torch.set_num_threads(1)
    loader = DataLoader(Images((batches + 4) * BATCH), BATCH, num_workers=workers, multiprocessing_context="fork")
    begun = 0.0
    for number, _ in enumerate(loader):
        if number == 3:
            begun = time.perf_counter()
        time.sleep(step_s)  # the accelerator's part, during which this process needs no CPU
    return batches * BATCH / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="the largest number; default: this machine's CPUs")
    parser.add_argument("--workers", action="store_true", help="vary workers on all CPUs")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    most = options.most or cores

    def measure(cpus: int) -> float:
        affinity = cores if options.workers else min(cpus, cores)
        return max(samples_per_s(cpus, affinity, options.batches, options.step_s) for _ in range(options.trials))

    searched = find_knee(measure, most)
    swept = {cpus: measure(cpus) for cpus in range(1, most + 1)}
    figures: dict[str, Any] = {
        "cpus": cores,
        "load": os.getloadavg()[0],
        "searched": searched,
        "runs": len(searched),
        "knee": knee(searched),
        "swept": swept,
        "exhaustive_knee": knee(swept),
    }
    if not options.json:
        for cpus, speed in swept.items():
            print(f"{cpus:>4}  {speed:>8.1f} samples/s  {'measured' if cpus in searched else ''}")
        print(f"knee {figures['knee']} in {figures['runs']} runs; by measuring all {figures['exhaustive_knee']}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
