"""`penstock simulate whatif`: what would have happened in the daemon's recorded history on another cluster, or under other
policies?"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress

from penstock_profiles.families import load_families
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.api.whatif_messages import WhatIfOrder, WhatIfTask
from penstock_scheduler.cli.ask import ask
from penstock_scheduler.cli.options import POLICIES, STAGE, numbers, split
from penstock_scheduler.cli.policies import choices_of
from penstock_scheduler.cli.sharing import Learned, SharingOptions, shared_by
from penstock_scheduler.cli.simulate import AGENTS, ASSUME_UTILISATION, DRAW_KINDS, PAIR_TYPES, PAIRS
from penstock_scheduler.cli.simulation import make_folder, progress, show_table, tell
from penstock_scheduler.jobs.pairs import PAIRS as LEARNED
from penstock_scheduler.jobs.pairs import open_pairs
from penstock_scheduler.model import JobId, Node
from penstock_scheduler.model.nodespec import parse_nodes
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.recorded import (
    RecordedHistory,
    RecordedModels,
    RecordedTruth,
    on_types,
    recorded_history,
    unknown_types,
)
from penstock_scheduler.simulator.results import SeedResult, over_seeds
from penstock_scheduler.simulator.run import Driving, Scenario, Simulation, driving_of, simulate_policy
from penstock_scheduler.simulator.truth import EstimatedJob
from penstock_scheduler.simulator.workloads import jittered
from penstock_scheduler.store.sql import SqlStore, open_store

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.simulator.run import Simulation


RECORDED = "recorded"
"""Name of the column that shows what really happened."""


def whatif(
    store: str | None = typer.Option(
        None,
        envvar="PENSTOCK_STORE",
        help="The daemon's store: its state_dir, or a URL. Give a URL with a password in the environment variable. Without it, "
        "penstockd replays, for operators, with fewer options.",
    ),
    add_nodes: str = typer.Option("", help="Nodes to add, such as h100:2x8."),
    remove_nodes: str = typer.Option(
        "", help="Nodes to remove, such as t4:2x4. The last nodes of that kind are removed."
    ),
    like: str = typer.Option(
        "", help="Speed of a GPU type without recorded jobs: h100=a100:2 is twice as fast as an a100."
    ),
    policy: str | None = POLICIES,
    stage: list[str] = STAGE,
    from_: str = typer.Option(
        "", "--from", help="Beginning of the period, such as 2026-11-01 or 2026-11-01T08:00; by default all."
    ),
    to: str = typer.Option("", help="End of the period; by default now."),
    seeds: int = typer.Option(
        1,
        min=1,
        help="Number of simulations of each policy, each with other random numbers; see docs/admin/simulator.md.",
    ),
    prices: str = typer.Option("", help="Prices of a GPU-hour, such as t4=0.4,a100=2.5."),
    pairs: Path | None = PAIRS,
    pair_types: str = PAIR_TYPES,
    draw_kinds: bool = DRAW_KINDS,
    agents: str = AGENTS,
    assume_utilisation: float | None = ASSUME_UTILISATION,
    out: Path | None = typer.Option(None, help="Folder for report, pictures, tables and summary."),
    config: Path | None = typer.Option(
        None,
        help="A settings file: its settings of the policies apply, and its policy decides if there is no --policy.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print only the summary, as one JSON object."),
    task: bool = typer.Option(False, hidden=True, help="Run as a process of penstockd."),
    decides: str = typer.Option(
        "", "--choice", hidden=True, help="The policy with all settings, as JSON, instead of --policy."
    ),
) -> None:
    """Replay the daemon's recorded history on a changed cluster, beside what really happened."""
    period = time_of("--from", from_), time_of("--to", to)
    if store is None:
        _need_store(
            {
                "--stage": stage,
                "--config": config,
                "--out": out,
                "--prices": prices,
                "--pairs": pairs,
                "--agents": agents,
            }
        )
        order = WhatIfOrder(
            add_nodes=add_nodes,
            remove_nodes=remove_nodes,
            like=like,
            policies=tuple(split(policy or "")),
            from_s=period[0],
            to_s=period[1],
            seeds=seeds,
        )
        ask_penstockd(order, as_json=as_json)
        return
    if task:
        bound()
    policies = [PolicyChoice.model_validate_json(decides)] if decides else choices_of(policy, stage, config)
    costs = numbers("--prices", prices) or None
    record = _read(store, period, told if task else None, quiet=as_json)
    nodes = changed(record.nodes, add_nodes, remove_nodes)
    likes = _likes(like)
    types = tuple(dict.fromkeys(node.gpu_type for node in nodes))
    truths = _truths(record, types, likes)
    scenario = Scenario(nodes, record.workload, RecordedTruth(truths), load_families(), load_gpus())
    scenario.check()
    shared = shared_by(
        policies,
        SharingOptions(pairs, pair_types, draw_kinds, agents, assume_utilisation),
        types,
        _learned(store, record, {new: donor for new, (donor, _) in likes.items()}),
    )
    if shared is not None:
        shared.check(record.workload)
        shared.expect_something(record.workload)
    if out is not None:
        make_folder(out)
    results = [_result(RECORDED, 0, _lived(record, scenario), record, costs)]
    models = RecordedModels(truths)
    work = len(record.workload.jobs) * len(policies) * seeds
    with progress(work, quiet=as_json) if not task else nullcontext(told_by(work)) as show:
        for seed, choice in product(range(seeds), policies):
            name = str(choice)
            other = replace(scenario, workload=jittered(record.workload, seed, record.round_s))
            on_tick = show(f"{name}, seed {seed}", len(results) - 1)
            its = shared.agents(choice, record.workload, seed) if shared is not None else None
            simulation = simulate_policy(other, choice, None, _driving(choice, record), on_tick, models, its)
            results.append(_result(name, seed, simulation, record, costs))
            if simulation.interrupted:
                break
    begin, end = (datetime.fromtimestamp(record.start_s + at_s, UTC) for at_s in (0.0, record.end_s))
    document = over_seeds(results, cluster=_spec(nodes), workload=f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC")
    document["notes"] = [
        f"'{RECORDED}' shows what really happened on {_spec(record.nodes)}. Times are those of jobs that ended in that period.",
        "The other columns are simulated. Each job has the work that it really did, and the model that the daemon had of it.",
        *record.notes,
        *_rigid(policies, record),
        *(shared.notes(record.workload) if shared is not None else ()),
    ]
    if shared is not None:
        document["assumed"] = shared.assumed(record.workload)
    tell(results, document, out, as_json=as_json, aloud=document["notes"])


def _need_store(given: Mapping[str, object]) -> None:
    """Raises ConfigError: one of these options is set, and penstockd does not take it."""
    if names := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"{', '.join(names)}: needs --store; without it, penstockd replays, and does not take this option"
        )


def _truths(
    record: RecordedHistory, types: Sequence[str], likes: Mapping[str, tuple[str, float]]
) -> Mapping[JobId, EstimatedJob]:
    """How fast each recorded job is on these GPU types. Raises ConfigError: no job tells the speed of one of them."""
    truths = on_types(record.truths, record.nodes, likes)
    if unknown := unknown_types(truths, types):
        raise ConfigError(
            f"no job of the record has run on {', '.join(unknown)}; give its speed, such as "
            f"--like {unknown[0]}={record.nodes[0].gpu_type}:2 for twice as fast"
        )
    return truths


Period = tuple[float | None, float | None]


def _read(
    store: str, period: Period = (None, None), tell: Callable[[float, str], None] | None = None, *, quiet: bool
) -> RecordedHistory:
    """The recorded history in a store. Only this function opens a store.

    Args:
        period: first and last time, s since 1970; None: all.
        tell: called with the share of the rounds that are read, and words.
    """
    opened = open_store(store)
    numbers = _numbers(opened, *period)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as shown:

        def rounds() -> Iterator[RoundRecord]:
            for at, number in enumerate(shown.track(numbers, description="rounds of the record")):
                if tell is not None:
                    tell(READING * at / len(numbers), f"reads round {number}")
                yield opened.round(number)

        return recorded_history(rounds(), opened.reports())


def _numbers(store: SqlStore, from_s: float | None, to_s: float | None) -> list[int]:
    """Numbers of the rounds in a period, ascending. Raises ConfigError: there are none."""
    numbers = store.round_numbers()
    if from_s is None and to_s is None:
        return numbers
    found = []
    before = None
    while page := store.summaries(before, 1000):
        found += [each.round for each in page if (from_s or 0.0) <= each.time_s <= (to_s or math.inf)]
        before = page[-1].round
        if from_s is not None and page[-1].time_s < from_s:
            break
    if not found:
        raise ConfigError("no round is kept of this period; `penstock rounds list` lists those that are")
    return found[::-1]


def _learned(store: str, record: RecordedHistory, like: Mapping[str, str]) -> Learned:
    """What the site knows of pairs: from the daemon's file or, if the store is a database, from the recorded rounds.

    Raises ConfigError: the file cannot be read.
    """
    file = Path(store) / LEARNED
    if "://" in store or not file.exists():
        return Learned(record.pairs, "as the record's rounds have them", like, record.gpu_memory_mb)
    return Learned(open_pairs(file).known, f"what the site has learned ({file})", like, record.gpu_memory_mb)


def changed(nodes: Sequence[Node], add: str, remove: str) -> tuple[Node, ...]:
    """The cluster with other nodes. Raises SpecError, and ConfigError if there are fewer nodes to remove."""
    left = list(nodes)
    for gone in parse_nodes(remove) if remove else ():
        place = next(
            (n for n in reversed(range(len(left))) if (left[n].gpu_type, left[n].gpus) == (gone.gpu_type, gone.gpus)),
            None,
        )
        if place is None:
            raise ConfigError(f"--remove-nodes={remove!r}: there are fewer; the record has {_spec(nodes)}")
        del left[place]
    partitions = tuple(dict.fromkeys(name for node in nodes for name in node.partitions))
    new = [
        replace(node, name=f"new-{node.name}", partitions=(*partitions, "all"))
        for node in (nodes_from_spec(add) if add else ())
    ]
    if not left and not new:
        raise ConfigError(f"--remove-nodes={remove!r} leaves no node")
    return tuple(replace(node, partitions=(*node.partitions, "all")) for node in left) + tuple(new)


def _spec(nodes: Sequence[Node]) -> str:
    kinds = Counter((node.gpu_type, node.gpus) for node in nodes)
    return ",".join(f"{gpu_type}:{count}x{gpus}" for (gpu_type, gpus), count in kinds.items())


def _likes(text: str) -> Mapping[str, tuple[str, float]]:
    found = {}
    for part in split(text):
        match = re.fullmatch(r"(\S+)=(\S+):(\d+(?:\.\d+)?)", part)
        if match is None or float(match[3]) <= 0:
            raise ConfigError(f"--like: {part!r} is not NEW=KNOWN:TIMES, such as h100=a100:2")
        found[match[1]] = (match[2], float(match[3]))
    return found


def _driving(policy: PolicyChoice, record: RecordedHistory) -> Driving:
    """As in any simulation, but with the daemon's time between rounds and the jobs' own job specs, the only recorded
    requests."""
    driving = driving_of(policy)
    return replace(driving, round_s=None if driving.round_s is None else record.round_s, as_requested=False)


def _rigid(policies: Sequence[PolicyChoice], record: RecordedHistory) -> list[str]:
    """A sentence on policies that do not choose numbers of GPUs, if that makes a difference."""
    rigid = [str(policy) for policy in policies if driving_of(policy).as_requested]
    elastic = sum(job.spec.min_gpus < job.spec.max_gpus for job in record.workload.jobs)
    if not rigid or not elastic:
        return []
    jobs = len(record.workload.jobs)
    return [
        f"{elastic} of {jobs} jobs also run on fewer GPUs. {', '.join(rigid)} gives each the maximum of its job spec."
    ]


def _lived(record: RecordedHistory, scenario: Scenario) -> Simulation:
    """What really happened, in the form of a simulation."""
    here = replace(scenario, nodes=record.nodes)
    return Simulation(
        RECORDED,
        here,
        list(record.lived),
        record.end_s,
        list(record.ticks),
        len(record.ticks),
        gpu_seconds=record.gpu_seconds,
    )


def _result(
    name: str, seed: int, simulation: Simulation, record: RecordedHistory, costs: Mapping[str, float] | None
) -> SeedResult:
    """A result with the figures of the jobs that ended in the record only, so that all columns compare the same
    jobs."""
    rows = [row for row in job_rows(simulation, costs) if row.id in record.ended]
    return SeedResult(name, seed, simulation, rows, summarise(simulation, rows))


MEMORY_BYTES = 8 * 2**30
"""Address space of a task."""
LONGEST_S = 3600
"""Processor time of a task, s. penstockd ends a task earlier; this holds if penstockd is gone."""
READING = 0.2
"""Share of the work that reading the record counts as."""
TELL_S = 0.5
POLL_S = 1.0


def bound() -> None:
    """Give this process the lowest priority, and limit its memory and processor time."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))


_told_s = 0.0


def told(fraction: float, step: str) -> None:
    """Tell penstockd how far the task is, twice a second at most."""
    global _told_s  # one task is one process
    if time.monotonic() - _told_s >= TELL_S:
        _told_s = time.monotonic()
        print(json.dumps({"fraction": round(fraction, 4), "step": step}), file=sys.stderr, flush=True)  # noqa: T201


def told_by(total: int) -> Callable[[str, int], Callable[[Simulation], None]]:
    """As `cli.simulation.progress`, for `told`. `total`: jobs of all simulations."""

    def show(label: str, before: int) -> Callable[[Simulation], None]:
        def on_tick(simulation: Simulation) -> None:
            if len(simulation.ticks) % 16 == 0:
                ended = before * len(simulation.jobs) + sum(job.finish_s is not None for job in simulation.jobs)
                told(READING + (1 - READING) * ended / max(total, 1), f"simulates {label}")

        return on_tick

    return show


def ask_penstockd(order: WhatIfOrder, *, as_json: bool) -> None:
    """Let penstockd replay, wait for it, and print the result. Ctrl-C cancels the replay. Raises PenstockError."""

    def follow(penstock: Client) -> WhatIfTask:
        task = penstock.whatif(order)
        with Progress(console=Console(stderr=True), transient=True, disable=as_json) as shown:
            bar = shown.add_task(task.step, total=1.0)
            try:
                while task.state == "running":
                    time.sleep(POLL_S)
                    task = penstock.whatif_task(task.id)
                    shown.update(bar, completed=task.fraction, description=task.step)
            except KeyboardInterrupt:
                penstock.end_whatif(task.id)
                raise
        return task

    task = ask(follow)
    if task.result is None:
        raise PenstockError(task.error or "somebody cancelled the replay")
    if as_json:
        typer.echo(json.dumps(task.result))
        return
    show_table(task.result)
    for note in task.result.get("notes", ()):
        typer.echo(note, err=True)


def time_of(option: str, text: str) -> float | None:
    """A time in s since 1970, from a date, a date and time (local unless it has a zone), or such seconds. Raises ConfigError."""
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{option}={text!r} is no time; write it as 2026-11-01 or 2026-11-01T08:00") from None
