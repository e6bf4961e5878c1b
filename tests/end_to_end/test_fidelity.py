"""The same few jobs on a real Slurm and in the simulator. `benchmarks/fidelity.py` does it with twelve, for minutes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.fidelity_runs import (
    Difference,
    RealRun,
    compare,
    order_by_plan,
    order_by_start,
    run_on_slurm,
    tabled,
)

from penstock_loopback.demo.jobs import DemoJob
from penstock_loopback.demo.simulated import Pace, simulate_site
from penstock_profiles.families import load_families
from penstock_scheduler.simulator import Latencies

SPEC = "t4:1x4,a100:1x4"
FAMILIES = load_families()


def job(name: str, family: str, t4_hours: float, gpu_type: str, fewest: int, most: int) -> DemoJob:
    """A job on one GPU type; rigid if `fewest` is `most`. Under plain Slurm it requests `most` GPUs for a minute."""
    spec = {"gpu_types": [gpu_type], "min_gpus": fewest, "max_gpus": most}
    rigid = {"adaptivity": "rigid"} if fewest == most else {}
    return tabled(DemoJob(name, family, t4_hours, spec | rigid, (gpu_type, 1, most), limit_min=1), SPEC, FAMILIES)


CALIBRATION = (
    (job("p", "resnet18-cifar10", 0.7, "a100", 1, 4), 1.6),
    (job("q", "deepspeech2", 0.12, "t4", 1, 4), 4.8),
    (job("r", "bert-squad", 0.2, "a100", 2, 2), 8.0),
)
COMPARED = (
    (job("a", "resnet18-cifar10", 1.2, "a100", 1, 4), 1.2),
    (job("c", "deepspeech2", 0.42, "t4", 1, 4), 4.4),
    (job("b", "bert-squad", 0.65, "a100", 2, 2), 10.7),
    (job("d", "resnet50-imagenet", 0.22, "t4", 2, 2), 17.0),
    (job("e", "yolov3", 0.02, "t4", 1, 1), 26.5),
    (job("f", "bert-squad", 0.12, "a100", 1, 2), 64.4),
)
"""Jobs arrive and end in different rounds, and seldom near the time of a round, so that decisions do not depend on how long
starts and stops take: `test_decisions_do_not_depend_on_the_pace`."""

PACES = {
    "round_s": (3.0, 3.3),
    "tick_s": (0.25, 0.8),
    "start_s": (1.0, 3.5),
    "launch_s": (0.1, 1.5),
    "leave_s": (0.5, 2.5),
    "lost_s": (0.2, 1.0),
    "pause_s": (0.2, 1.5),
    "exit_s": (0.0, 0.5),
}
"""Slowest and fastest pace. Decisions are the same for each pace between them."""

TRIES = 2
"""Attempts. If the machine stands still for a second or two, rounds move and the two sides decide differently."""


def all_lived(folder: Path) -> Mapping[str, RealRun]:
    """The run on a real Slurm by policy, side by side. The durations of starts and stops come from a third run with other
    jobs."""

    def run(name: str) -> RealRun:
        jobs = CALIBRATION if name == "calibration" else COMPARED
        return run_on_slurm(
            name,
            folder / name,
            SPEC,
            [each for each, _ in jobs],
            [at_s for _, at_s in jobs],
            FAMILIES,
            penstock=name != "slurm-backfill",
            limit_s=240.0,
        )

    names = ("calibration", "sia", "slurm-backfill")
    with ThreadPoolExecutor(len(names)) as all_at_once:
        return dict(zip(names, all_at_once.map(run, names), strict=True))


def differences(lived: Mapping[str, RealRun], pace: Pace) -> dict[str, Difference]:
    """Differences between the real and the simulated run, by policy."""
    found = {}
    for policy in ("sia", "slurm-backfill"):
        jobs, arrivals_s = [each for each, _ in COMPARED], [at_s for _, at_s in COMPARED]
        simulated, store = simulate_site("", "", policy, jobs, arrivals_s, SPEC, pace, FAMILIES)
        order = order_by_plan(store.rounds) if policy == "sia" else order_by_start(simulated)
        print(policy, "real:", lived[policy].order, "simulated:", order)
        found[policy] = compare(lived[policy].history, simulated, lived[policy].order, order)
    return found


@pytest.mark.long
def test_decisions_do_not_depend_on_the_pace():
    """Otherwise, on a slow machine the real Slurm and the simulator would decide differently."""
    chance = random.Random(0)
    orders = set()
    for _ in range(60):
        drawn = {name: chance.uniform(*bounds) for name, bounds in PACES.items()}
        own = {name: drawn.pop(name) for name in ("round_s", "tick_s", "start_s")}
        arrivals_s = [at_s + chance.uniform(0.0, 0.3) for _, at_s in COMPARED]
        pace = Pace(time_scale=20.0, **own, latencies=Latencies(**drawn))
        _, store = simulate_site("", "", "sia", [each for each, _ in COMPARED], arrivals_s, SPEC, pace, FAMILIES)
        orders.add(tuple(order_by_plan(store.rounds)))
    assert len(orders) == 1, orders
    (order,) = orders
    assert len(order) == 11, "jobs are resized, not only started"


def too_slow(lived: RealRun) -> str:
    """What took too long for a comparison; empty: nothing."""
    if lived.pace is None:
        return "jobs ended before they were moved"
    took = asdict(lived.pace) | asdict(lived.pace.latencies) | {"longest round_s": lived.longest_round_s}
    most = {name: most for name, (_, most) in PACES.items()}
    most["longest round_s"] = most["round_s"] + 0.5
    return ", ".join(f"{name} {took[name]:.2f} > {limit}" for name, limit in most.items() if took[name] > limit)


@pytest.mark.long
@pytest.mark.slurm
def test_the_simulator_places_jobs_as_on_a_real_slurm_and_they_take_as_long(tmp_path, loopback):
    """The placements and their order are the same, and average completion time and makespan differ by at most 15 %."""
    slow = []
    for attempt in range(TRIES):
        lived = all_lived(tmp_path / str(attempt))
        pace = lived["calibration"].pace
        slow.append(too_slow(lived["calibration"]) or too_slow(lived["sia"]))
        if pace is None:
            continue
        found = differences(lived, pace)
        print(found)
        if all(each.same_starts and each.same_placements and each.within(0.15) for each in found.values()):
            return
    if any(slow):
        pytest.skip(f"this machine is too slow to tell: {'; '.join(filter(None, slow))}")
    pytest.fail(f"{TRIES} times different; the last time {found}")
