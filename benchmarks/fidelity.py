"""Compares the simulator with a real Slurm: the same twelve jobs on both, in compressed time.

    python benchmarks/fidelity.py [--trials 1] [--out DIR]

Each trial runs them on two loopback clusters side by side: under penstockd with `sia`, and as plain jobs under
Slurm's own backfill. Both are then simulated. The durations of starts and stops come from a third run with other jobs. The
benchmark prints a line for each comparison and, last, one JSON object. With `--out`, it writes a page for each comparison. One
trial takes six minutes. The limits are those of issue 5: average completion time and makespan within 5 %, on a quiet machine.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from penstock_loopback.demo.jobs import DemoJob
from penstock_loopback.demo.report import render_page
from penstock_loopback.demo.simulated import Pace, simulate_site
from penstock_profiles.families import load_families
from penstock_scheduler.model.nodespec import DEFAULT_SPEC
from penstock_scheduler.people.drawing.history import History

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fidelity_runs import (
    CALIBRATION,
    TIME_SCALE,
    RealRun,
    compare,
    order_by_plan,
    order_by_start,
    run_on_slurm,
    tabled,
)

LIMIT = 0.05
LIMIT_S = 420.0

FAMILIES = load_families()
ARRIVALS_S = 120.0
JOBS = (
    DemoJob("imagenet-a", "resnet50-imagenet", 10, {"max_gpus": 16}, ("a100", 1, 8)),
    DemoJob("cifar-a", "resnet18-cifar10", 2.5, {"max_gpus": 16}, ("rtx", 1, 4)),
    DemoJob("bert-a", "bert-squad", 12, {"max_gpus": 16}, ("a100", 1, 4)),
    DemoJob("speech-a", "deepspeech2", 1.5, {"max_gpus": 16}, ("t4", 1, 4)),
    DemoJob("yolo", "yolov3", 1.2, {"max_gpus": 8}, ("t4", 1, 4)),
    DemoJob("ncf", "ncf", 0.4, {"max_gpus": 1, "adaptivity": "fixed"}, ("t4", 1, 1)),
    DemoJob(
        "imagenet-rigid", "resnet50-imagenet", 3, {"min_gpus": 4, "max_gpus": 4, "adaptivity": "rigid"}, ("rtx", 1, 4)
    ),
    DemoJob("bert-scaling", "bert-squad", 2, {"max_gpus": 4, "adaptivity": "strong-scaling"}, ("a100", 1, 1)),
    DemoJob("cifar-b", "resnet18-cifar10", 4, {"max_gpus": 16}, ("rtx", 1, 8)),
    DemoJob("speech-b", "deepspeech2", 2.5, {"max_gpus": 16}, ("rtx", 1, 8)),
    DemoJob("bert-b", "bert-squad", 8, {"min_gpus": 2, "max_gpus": 16}, ("rtx", 1, 8)),
    DemoJob(
        "imagenet-pinned", "resnet50-imagenet", 6, {"min_gpus": 2, "max_gpus": 8, "preemptible": False}, ("a100", 1, 8)
    ),
)
"""In the order of their submission. Few of them wait, so that a job's time is its own."""
COMPARED = tuple(tabled(job, DEFAULT_SPEC, FAMILIES) for job in JOBS)
ARRIVALS = [1.0 + number * ARRIVALS_S / (len(JOBS) - 1) for number in range(len(JOBS))]


def main() -> None:
    """Run the trials and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-fidelity-") as name:
        folder = Path(name)
        jobs, arrivals_s = (
            tuple(tabled(job, DEFAULT_SPEC, FAMILIES) for job, _ in CALIBRATION),
            [s for _, s in CALIBRATION],
        )
        print("calibration: another run, to measure how long starts and stops take", flush=True)
        pace = run_on_slurm(
            "", folder / "calibration", DEFAULT_SPEC, jobs, arrivals_s, FAMILIES, penstock=True, limit_s=LIMIT_S
        ).pace
        if pace is None:
            sys.exit("no job was moved in the calibration, so the time of a move is unknown: is the machine busy?")
        trials = [trial(folder / str(number), pace, arguments.out) for number in range(arguments.trials)]
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    print(json.dumps({"benchmark": "fidelity", "machine": machine, "calibration": asdict(pace), "trials": trials}))


def trial(folder: Path, pace: Pace, out: Path | None) -> dict[str, object]:
    """Both policies once, and the load of the machine while they ran."""

    def run(policy: str) -> RealRun:
        title = "On a real Slurm"
        cluster = folder / policy
        return run_on_slurm(
            title, cluster, DEFAULT_SPEC, COMPARED, ARRIVALS, FAMILIES, penstock=policy == "sia", limit_s=LIMIT_S
        )

    policies = ("sia", "slurm-backfill")
    with ThreadPoolExecutor(2) as both:
        lived = dict(zip(policies, both.map(run, policies), strict=True))
    load = os.getloadavg()[0]
    told: dict[str, object] = {"load": round(load, 2)}
    for policy, real in lived.items():
        note = "no processes ran: progress is computed"
        simulated, store = simulate_site(
            "In the simulator", note, policy, COMPARED, ARRIVALS, DEFAULT_SPEC, pace, FAMILIES
        )
        order = order_by_plan(store.rounds) if policy == "sia" else order_by_start(simulated)
        difference = compare(real.history, simulated, real.order, order)
        told[policy] = asdict(difference) | {
            "within_limit": difference.within(LIMIT),
            "avg_jct_s": [real.history.average_jct_s, simulated.average_jct_s],
            "makespan_s": [real.history.makespan_s, simulated.makespan_s],
        }
        print(
            f"{policy}: simulated average completion time {difference.average_jct:+.1%}, makespan {difference.makespan:+.1%}, "
            f"placements {'the same' if difference.same_placements else 'differ'}; load {load:.1f}",
            flush=True,
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{policy}.html").write_text(_page(policy, [real.history, simulated]), encoding="utf-8")
    return told


def _page(policy: str, histories: list[History]) -> str:
    return render_page(
        histories,
        heading=f"{policy}: the same twelve jobs on a real Slurm and in the simulator",
        facts={"To repeat": "python benchmarks/fidelity.py", "How it was done": "docs/admin/simulator.md"},
        time_scale=TIME_SCALE,
        next_steps=(("What the figures mean", "docs/admin/simulator.md"),),
    )


if __name__ == "__main__":
    main()
