"""Commands about the cluster and the rounds: nodes, rounds list, plan; and `penstock list --waiting`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, STORE, ask, local_time, print_json, print_refused, print_table
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.api.history_messages import QueueEntry
    from penstock_scheduler.api.messages import ClusterView, RefusedJob, RoundSummary, RoundView


def show_waiting(user: str | None, *, as_json: bool) -> None:
    """`penstock list --waiting`: the waiting jobs, of one user or of all, and the free GPUs."""
    from penstock_scheduler.api.estimate_messages import OLD_S, new_jobs_line, start_cell

    def read(penstock: Client) -> tuple[ClusterView, list[QueueEntry], list[RefusedJob]]:
        refused = [each for each in penstock.refused() if user in (None, each.user)]
        return penstock.cluster(), list(penstock.queue(user=user)), refused

    cluster, waiting, refused = ask(read)
    if as_json:
        shown = [entry.model_dump(mode="json") for entry in waiting]
        never = [each.model_dump(mode="json") for each in refused]
        typer.echo(json.dumps({"cluster": cluster.model_dump(mode="json"), "waiting": shown, "refused": never}))
        return
    for gpu_type, total in sorted(cluster.gpus.items()):
        out = cluster.unusable.get(gpu_type, 0)
        used = cluster.allocated.get(gpu_type, 0) + cluster.others.get(gpu_type, 0)
        free = max(total - used - out, 0)
        typer.echo(f"{gpu_type}: {free} of {total} GPUs are free" + (f", {out} are out of service" if out else ""))
    if cluster.paused:
        typer.echo("Rounds are paused: no job starts until an admin runs `penstock rounds resume`.")
    now_s = time.time()
    for each in cluster.new_jobs:
        if now_s - each.at_s < OLD_S:
            typer.echo(f"{new_jobs_line(each)}.")
    rows = [
        (
            "" if entry.position is None else str(entry.position),
            entry.job,
            entry.name,
            entry.user,
            duration(max(now_s - entry.submit_s, 0.0)),
            start_cell(entry.estimate, now_s) or "not known",
            entry.text or entry.code,
        )
        for entry in waiting
        if entry.code != "refused"  # they are listed below
    ]
    columns = ("PLACE", "JOB", "NAME", "USER", "WAITED", "STARTS IN (80 %)", "REASON")
    print_table(columns, rows, "No jobs are waiting.")
    print_refused(refused)


def nodes(as_json: bool = JSON) -> None:
    """Show the nodes, their GPUs, and the jobs that hold them.

    ALLOCATED: GPUs that Penstock's jobs hold. OTHERS: GPUs that other jobs hold. JOBS: Penstock's jobs and their users, with the
    number of their GPUs on the node.
    """
    found = ask(lambda penstock: penstock.nodes())
    if as_json:
        print_json(found)
        return
    rows = [
        (
            node.name,
            node.gpu_type,
            str(node.gpus),
            str(node.allocated),
            str(node.others),
            str(node.free),
            node.state
            + (f", reserved: {node.reservation}" if node.reservation else "")
            + (f", {node.out_of_reach} of the GPUs without free CPUs or memory" if node.out_of_reach else "")
            + (f"; it {node.note}" if node.note else ""),
            ", ".join(f"{each.job} {each.user} ({each.gpus})" for each in node.jobs),
        )
        for node in found
    ]
    columns = ("NODE", "TYPE", "GPUS", "ALLOCATED", "OTHERS", "FREE", "STATE", "JOBS")
    print_table(columns, rows, "No nodes have been observed yet.")


def rounds(
    last: int = typer.Option(20, "--last", "-n", min=1, max=500, help="How many rounds to show."),
    store: str = STORE,
    as_json: bool = JSON,
) -> None:
    """Show the newest rounds.

    PLACED and WAITING: number of jobs with and without GPUs. Gap: upper bound of the distance to the best plan.
    """
    found: list[RoundSummary] = ask(
        lambda penstock: penstock.rounds(limit=last).rounds, lambda kept: kept.summaries(None, last), store
    )
    if as_json:
        print_json(found)
        return
    rows = [
        (
            str(each.round),
            local_time(each.time_s),
            each.policy,
            str(each.placed),
            str(each.waiting),
            ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in each.seconds.items())
            + (f", gap {each.gap:.2%}" if each.gap is not None else ""),
        )
        for each in found
    ]
    print_table(("ROUND", "TIME", "POLICY", "PLACED", "WAITING", "TOOK"), rows, "No round has been decided yet.")


def plan(
    number: int | None = typer.Option(
        None, "--round", min=1, help="Show this round instead of the newest, as `penstock history JOB` numbers it."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Show what one more job would get now. Nothing is submitted."
    ),
    spec: str = typer.Option("{}", help="With --dry-run: the job spec, as JSON, such as '{\"max_gpus\": 8}'."),
    name: str | None = typer.Option(None, help="With --dry-run: the job's name, which selects its stored profiles."),
    partition: str | None = typer.Option(None, help="With --dry-run: the job's partition in Slurm."),
    account: str | None = typer.Option(None, help="With --dry-run: the job's account in Slurm."),
    approve: int | None = typer.Option(
        None,
        metavar="ROUND",
        help="Let plans stop the jobs that the refused plan of this round would have stopped. For admins.",
    ),
    as_json: bool = JSON,
) -> None:
    """Show what the newest round, or an earlier one, gives each job, and why; and whether the plan gate refused it.

    With --dry-run, show what one more job would get. With --approve, allow the stops of a refused plan for 15 minutes.

    Examples: penstock plan --round 812; penstock plan --dry-run --spec '{"max_gpus": 8}'
    """
    if approve is not None:
        refused = approve
        approval = ask(lambda penstock: penstock.approve(refused))
        if as_json:
            print_json(approval)
        else:
            jobs = f"{len(approval.jobs)} job{'s' if len(approval.jobs) != 1 else ''}: {', '.join(approval.jobs)}"
            typer.echo(f"Approved: until {local_time(approval.until_s)}, plans may stop {jobs}.")
        return
    if dry_run:
        if number is not None:
            raise ConfigError(
                "--dry-run is about a new job now, and --round about an earlier round; leave one of them out"
            )
        _forecast(spec, name, partition, account, as_json=as_json)
        return

    def chosen(penstock: Client) -> RoundView:
        wanted = penstock.cluster().round if number is None else number
        if wanted is None:
            raise PenstockError("no round has been decided yet; if this does not change, see the daemon's log")
        return penstock.round(wanted)

    view = ask(chosen)
    if as_json:
        print_json(view)
        return
    summary = view.summary
    typer.echo(f"Round {summary.round}, decided at {local_time(summary.time_s)} by the policy {summary.policy}")
    rows = [
        (each.job, f"{each.allocation.gpus} {each.allocation.gpu_type}" if each.allocation else "-", each.text)
        for each in view.decisions
    ]
    print_table(("JOB", "GPUS", "REASON"), rows, "The round had none of your jobs.")
    if view.refused:
        typer.echo(f"\nThe plan gate refused the first plan of this round: {'; '.join(view.refused)}.")
        typer.echo("Every running job keeps what it has. Your jobs that the refused plan would have stopped:")
        print_table(("JOB", "WHY"), list(view.would_stop.items()), "none")
        typer.echo(f"An admin can let it pass: penstock plan --approve {summary.round}")


def _forecast(spec: str, name: str | None, partition: str | None, account: str | None, *, as_json: bool) -> None:
    from pydantic import ValidationError

    from penstock_scheduler.api.messages import PlanOrder
    from penstock_scheduler.model import JobSpec
    from penstock_scheduler.model.spec_errors import describe_errors

    try:
        asked = JobSpec.model_validate_json(spec)
    except ValidationError as error:
        raise ConfigError("--spec: " + "; ".join(describe_errors(error, JobSpec))) from None
    order = PlanOrder(spec=asked, name=name, partition=partition, account=account)
    forecast = ask(lambda penstock: penstock.forecast(order))
    if as_json:
        print_json(forecast)
        return
    for line in forecast.lines:
        typer.echo(line)
