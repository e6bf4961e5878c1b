"""What each lever of `sia` is worth, and where it would hurt: `python benchmarks/levers.py WHAT WORKLOADS_DIR --profiles DIR`.

WHAT is `ablation`: the default without one lever, and the policy as it was before all levers with one of them; or `never-worse`:
the default against the policy before, at higher rates, on one GPU type, with half of the jobs rigid, and under disturbances; with
memory, with one that is empty at first, and with memory where 20 % of the jobs have the name of another job of the window.

WORKLOADS_DIR has the windows of Sia's artifact as `philly/workload-1.csv` and `scale/rate_50/workload-1.csv`. Nothing is known of
a job but its name. Memory is filled by simulating the first window of saturn in the same way, and no window knows what another
has taught.

Each result is one line of JSON in the file `--out`, and what is there is not simulated again, so that the benchmark may be
stopped (`--seconds`) and continued. At the end it prints a table: the mean over windows, and the ratio to the row's reference
with its 95 % confidence interval (Student's t over the logarithms of the windows' ratios). A simulation is deterministic.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.stats import t as student

from penstock_profiles.estimators import LinearEstimator
from penstock_scheduler.model import JobFacts, Snapshot
from penstock_scheduler.rounds.policies.sia import Sia
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.learning import SimulatedMemory
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import Driving, Scenario, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, read_workload

MIXED = "t4:6x4,rtx:3x8,a100:2x8"
FIGURES = ("avg_jct_h", "p50_jct_h", "p99_jct_h", "makespan_h", "gpu_h_per_job", "restarts_per_job", "worst_ftf")
SHARE_MISLABELLED = 0.2


def without_speeds(facts: JobFacts) -> JobFacts:
    """What is known of a job if the catalogue does not compare GPU types."""
    return replace(facts, model=LinearEstimator()) if isinstance(facts.model, LinearEstimator) else facts


def without_remaining(facts: JobFacts) -> JobFacts:
    """What is known of a job that does not report how far it is, and has no kin."""
    return replace(facts, remaining_work=None, likely_work=())


@dataclass(frozen=True)
class Variant:
    """How the policy runs."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[Callable[[JobFacts], JobFacts], ...] = ()
    memory: bool = False
    """Whether ended jobs teach new ones of their name."""
    warmed: bool = True
    """Whether the memory has seen the first window of saturn before."""
    mislabelled: bool = False


OFF: dict[str, Variant] = {
    "size weight": Variant({"size_power": 0.0}),
    "amortised restarts": Variant({"amortise_s": None}),
    "growth by 4": Variant({"growth": 2.0}),
    "doubt beyond what was seen": Variant({"unproven_power": 1.0}),
    "no measuring": Variant({"measure_gpu_s": 20.0}),
    "types by the catalogue": Variant(hidden=(without_speeds,)),
    "remaining work": Variant(hidden=(without_remaining,)),
    "memory": Variant(),
}
"""Lever -> the policy without it. Memory is a switch of its own."""


def variant(on: set[str]) -> Variant:
    """The policy with these levers."""
    settings: dict[str, Any] = {}
    hidden: list[Callable[[JobFacts], JobFacts]] = []
    for name in OFF.keys() - on:
        settings |= OFF[name].settings
        hidden += OFF[name].hidden
    return Variant(settings, tuple(hidden), "memory" in on)


ALL = set(OFF)
BEFORE = variant(set())


@dataclass(frozen=True)
class Setting:
    """A cluster, its windows, and what goes wrong."""

    windows: tuple[str, ...]
    cluster: str = MIXED
    rigid: bool = False
    disturbances: Disturbances = field(default_factory=Disturbances)


PHILLY = tuple(f"philly/workload-{number}" for number in (5, 6, 7, 8, 1, 2, 3, 4))
SETTINGS: dict[str, Setting] = {
    "20 an hour": Setting(PHILLY),
    "half rigid": Setting(PHILLY[:6], rigid=True),
    "disturbed": Setting(PHILLY[:6], disturbances=Disturbances(estimation_error=0.3, node_mtbf_h=48.0)),
    "one type": Setting(PHILLY[:6], "t4:16x4"),
    "50 an hour": Setting(tuple(f"scale/rate_50/workload-{number}" for number in range(1, 5))),
    "80 an hour": Setting(
        tuple(f"scale/rate_50/workload-{number}+scale/rate_30/workload-{number}" for number in range(1, 4))
    ),
}
"""A node fails every 48 hours in the mean, so a window of some 14 hours on 11 nodes sees three failures."""


def rows(what: str) -> Iterator[tuple[str, str, Variant, str]]:
    """(setting, name, variant, name of what it is compared with) of each row."""
    if what == "ablation":
        yield "20 an hour", "before", BEFORE, "before"
        yield "20 an hour", "all", variant(ALL), "before"
        for name in OFF:
            yield "20 an hour", f"all but {name}", variant(ALL - {name}), "all"
            yield "20 an hour", f"only {name}", variant({name}), "before"
        return
    for setting in SETTINGS:
        yield setting, "before", BEFORE, "before"
        yield setting, "all but memory", variant(ALL - {"memory"}), "before"
        yield setting, "all", variant(ALL), "all but memory"
        yield setting, "all from no memory", replace(variant(ALL), warmed=False), "all but memory"
        yield setting, "all mislabelled", replace(variant(ALL), mislabelled=True), "all but memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ablation", "never-worse"))
    parser.add_argument("folder", metavar="WORKLOADS_DIR", type=Path)
    parser.add_argument("--profiles", type=Path, required=True, help="measured tables of the windows' models")
    parser.add_argument("--out", type=Path, required=True, help="file of the results, one a line")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="only these (%(default)s)")
    parser.add_argument("--variants", help="only these, by commas (all)")
    parser.add_argument("--most", type=int, help="only so many windows of each setting")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no window after this time")
    options = parser.parse_args()
    tables, begun_s = Profiles(options.profiles), time.monotonic()
    done = read(options.out)
    warm: dict[tuple[str, str], SimulatedMemory] = {}
    todo = [
        (window, *row)
        for row in rows(options.what)
        if row[0] in options.settings.split(",")
        if options.variants is None or row[1] in options.variants.split(",")
        for window in SETTINGS[row[0]].windows[: options.most]
    ]  # all windows of a row, then the next row
    for window, setting, name, how, _ in todo:
        if (setting, name, window) in done:
            continue
        if time.monotonic() - begun_s > options.seconds:
            print("more to do: run it again")
            break
        memory = None
        if how.memory:
            if not how.warmed:
                warm[setting, name] = SimulatedMemory()
            if (setting, name) not in warm:
                warm[setting, name] = SimulatedMemory()
                simulated(
                    "saturn/workload-1", setting, replace(how, mislabelled=False), options, tables, warm[setting, name]
                )
            memory = copy.deepcopy(warm[setting, name])
        figures = simulated(window, setting, how, options, tables, memory)
        with options.out.open("a") as file:
            file.write(json.dumps([setting, name, window, figures]) + "\n")
        done[setting, name, window] = figures
    table(options.what, done)


def read(file: Path) -> dict[tuple[str, str, str], dict[str, float]]:
    """The results that are there."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {(setting, name, window): figures for setting, name, window, figures in map(json.loads, lines)}


def simulated(
    window: str, name: str, how: Variant, options: argparse.Namespace, tables: Profiles, memory: SimulatedMemory | None
) -> dict[str, float]:
    """The figures of one window."""
    scenario = scenario_of(options.folder, window, SETTINGS[name], tables, mislabelled=how.mislabelled)
    with hiding(how.hidden):
        simulation = simulate_policy(scenario, "sia", how.settings, Driving(learner="unprofiled"), memory=memory)
    assert all(job.finish_s is not None for job in simulation.jobs)
    summary = summarise(simulation, job_rows(simulation))
    return {figure: float(getattr(summary, figure)) for figure in (*FIGURES, "cpu_s")}


def scenario_of(folder: Path, window: str, setting: Setting, tables: Profiles, *, mislabelled: bool) -> Scenario:
    """A window as this setting has it. All that is random depends on the window's name."""
    jobs = [
        replace(job, id=f"{place}.{job.id}", name=job.name or job.id)
        for place, part in enumerate(window.split("+"))
        for job in read_workload(folder / f"{part}.csv").jobs
    ]
    jobs.sort(key=lambda job: (job.submit_s, job.id))
    random = np.random.default_rng([ord(letter) for letter in window])
    if setting.rigid:
        jobs = [replace(job, spec=job.as_requested) if random.random() < 0.5 else job for job in jobs]
    if mislabelled:
        names = [job.name for job in jobs]
        jobs = [
            replace(job, name=names[random.integers(len(names))]) if random.random() < SHARE_MISLABELLED else job
            for job in jobs
        ]
    seed = sum(map(ord, window))
    scenario = prepare(nodes_from_spec(setting.cluster), Workload(window, tuple(jobs)), tables)
    return replace(scenario, disturbances=replace(setting.disturbances, seed=seed))


@contextmanager
def hiding(hidden: tuple[Callable[[JobFacts], JobFacts], ...]) -> Iterator[None]:
    """Let the policy know less of every job."""
    decide = Sia.decide

    def decided(self: Sia, snapshot: Snapshot) -> Any:
        facts = dict(snapshot.facts)
        for hide in hidden:
            facts = {job: hide(each) for job, each in facts.items()}
        return decide(self, replace(snapshot, facts=facts))

    with patch.object(Sia, "decide", decided):
        yield


def table(what: str, done: Mapping[tuple[str, str, str], Mapping[str, float]]) -> None:
    """Print a row for each variant of which all windows are there."""
    print(
        f"{'setting':<14}{'variant':<38}{'windows':>8}{'of':>9}{'ratio':>7}{'95 %':>15}"
        + "".join(f"{f:>17}" for f in FIGURES)
    )
    for setting, name, _, reference in rows(what):
        windows = [window for window in SETTINGS[setting].windows if (setting, name, window) in done]
        if not windows:
            continue
        mine = [done[setting, name, window] for window in windows]
        ratios = [
            math.log(figures["avg_jct_h"] / done[setting, reference, window]["avg_jct_h"])
            for window, figures in zip(windows, mine, strict=True)
            if (setting, reference, window) in done
        ]
        means = "".join(f"{statistics.mean(figures[f] for figures in mine):>17.3f}" for f in FIGURES)
        print(f"{setting:<14}{name:<38}{len(windows):>8}{reference:>9}{interval(ratios)}{means}")


def interval(logs: list[float]) -> str:
    """The mean ratio, and its 95 % confidence interval."""
    if len(logs) < 2:
        return f"{'':>22}"
    mean = statistics.mean(logs)
    off = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):>7.3f}{f'{math.exp(mean - off):.3f} to {math.exp(mean + off):.3f}':>15}"


if __name__ == "__main__":
    main()
