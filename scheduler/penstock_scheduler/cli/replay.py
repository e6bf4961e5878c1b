"""`penstock rounds replay`: decide a saved round again, offline."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from penstock_scheduler.cli.ask import STATE
from penstock_scheduler.cli.options import STAGE
from penstock_scheduler.cli.policies import choice_of
from penstock_scheduler.model import Plan
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord, load_round
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.sql import open_store


def replay(
    source: str = typer.Argument(metavar="ROUND", help="Number of a round in the store, or a JSON file with a round."),
    state: str = STATE,
    policy: str = typer.Option(
        "", help="Decide by another policy than the recorded one: a name, or a settings file (*.toml)."
    ),
    stage: list[str] = STAGE,
    search: bool = typer.Option(
        False, help="For a round that was cut short: search again instead of starting from its incumbent."
    ),
) -> None:
    """Decide a saved round again and compare. Exit status 0: the same plan; 1: another plan, or an unreadable round."""
    record = read_round(source, state)
    plan = decide_again(record, policy=choice_of(policy, stage) if policy else None, search=search)
    if record.plan.cut_short and not search:
        typer.echo("the round was cut short by its time limit; the search starts from the incumbent that it recorded")
    differences = compare(record.plan, plan)
    for line in differences:
        typer.echo(line)
    what = f"round {record.snapshot.round}: {len(record.snapshot.jobs)} jobs, {len(record.snapshot.nodes)} nodes"
    typer.echo(f"{what}: {'the same plan' if not differences else f'{len(differences)} jobs differ'}")
    if differences and not policy:
        raise typer.Exit(1)


def read_round(source: str, state: str) -> RoundRecord:
    """A saved round, by its number in the store or from a file. Raises PenstockError."""
    if source.isdigit():
        return open_store(state).round(int(source))
    try:
        text = Path(source).read_bytes()
    except OSError as error:
        raise PenstockError(f"{source}: {error.strerror}") from None
    return load_round(text, source)


def decide_again(record: RoundRecord, *, policy: PolicyChoice | None = None, search: bool = False) -> Plan:
    """The plan that the recorded policy, or another, gives for the recorded snapshot. Raises PenstockError."""
    again, _ = make_policy(policy or record.policy)
    snapshot = record.snapshot
    if record.plan.cut_short and not search:
        snapshot = dataclasses.replace(snapshot, incumbent=record.plan.incumbent)
    return again.decide(snapshot)


def compare(recorded: Plan, again: Plan) -> list[str]:
    """A line for each job that the two plans treat differently."""

    def what(plan: Plan, job: str) -> str:
        if job in plan.assignments:
            return str(plan.assignments[job].placement)
        if job in plan.bursts:
            return f"{'back from' if job in plan.recalls else 'in the cloud on'} {plan.bursts[job].offer}"
        return f"nothing ({plan.waiting[job].code.value})" if job in plan.waiting else "not in the plan"

    plans = (recorded, again)
    jobs = sorted({job for plan in plans for job in (*plan.assignments, *plan.waiting, *plan.bursts)})
    return [
        f"job {job}: recorded {what(recorded, job)}, now {what(again, job)}"
        for job in jobs
        if what(recorded, job) != what(again, job)
    ]
