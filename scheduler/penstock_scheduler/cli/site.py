"""Commands about the cluster and the daemon: queue, nodes, rounds, plan, policy, pause, resume, drain, budget, token, doctor."""

from __future__ import annotations

import json
import os
import shutil
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from penstock_scheduler.cli.ask import JSON, STORE, ask, hours, tell_json, tell_table, when
from penstock_scheduler.errors import ConfigError, PenstockError
from penstock_scheduler.messages import (
    BudgetView,
    ClusterView,
    Drained,
    DrainOrder,
    JobView,
    LedgerLine,
    Role,
    RoundSummary,
    Submission,
    TokenOrder,
)
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.spec import describe_errors
from penstock_scheduler.sharing.messages import AWAY_S, NodeStatus, status_file
from penstock_scheduler.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.client import Client

policy = typer.Typer(no_args_is_help=True, help="Which policy decides.")
token = typer.Typer(no_args_is_help=True, help="Bearer tokens for the API over TCP; for admins.")


def queue(as_json: bool = JSON) -> None:
    """Show the jobs that wait, oldest first, each with the newest round's reason, and how many GPUs are free."""

    def look(penstock: Client) -> tuple[ClusterView, list[JobView], dict[str, str]]:
        cluster = penstock.cluster()
        waiting = sorted(penstock.jobs(state=("queued",)), key=lambda view: (view.submit_s, view.id))
        if cluster.round is None:
            return cluster, waiting, {}
        return cluster, waiting, {said.job: said.text for said in penstock.round(cluster.round).decisions}

    cluster, waiting, why = ask(look)
    if as_json:
        shown = [view.model_dump(mode="json") | {"text": why.get(view.id, "")} for view in waiting]
        typer.echo(json.dumps({"cluster": cluster.model_dump(mode="json"), "waiting": shown}))
        return
    for gpu_type, total in sorted(cluster.gpus.items()):
        out, taken = cluster.unusable.get(gpu_type, 0), cluster.given.get(gpu_type, 0) + cluster.others.get(gpu_type, 0)
        free = max(total - taken - out, 0)
        typer.echo(f"{gpu_type}: {free} of {total} GPUs are free" + (f", {out} are out of service" if out else ""))
    if cluster.paused:
        typer.echo("No round is decided: an admin has paused penstockd (penstock resume).")
    now_s = time.time()
    rows = [
        (
            view.id,
            view.name,
            view.user,
            duration(max(now_s - view.submit_s, 0.0)),
            why.get(view.id, "no round has seen it yet"),
        )
        for view in waiting
    ]
    tell_table(("JOB", "NAME", "USER", "WAITS", "WHY"), rows, "no job waits")


def nodes(as_json: bool = JSON) -> None:
    """Show the nodes: GPUs allocated by Penstock, held by others, free."""
    found = ask(lambda penstock: penstock.nodes())
    if as_json:
        tell_json(found)
        return
    rows = [
        (
            node.name,
            node.gpu_type,
            str(node.gpus),
            str(node.given),
            str(node.others),
            str(max(node.gpus - node.given - node.others, 0) if node.usable else 0),
            node.state + (f", reserved: {node.reservation}" if node.reservation else ""),
        )
        for node in found
    ]
    tell_table(("NODE", "TYPE", "GPUS", "GIVEN", "OTHERS", "FREE", "STATE"), rows, "no nodes were seen yet")


def rounds(
    last: int = typer.Option(20, "--last", "-n", min=1, max=500, help="So many of the newest."),
    store: str = STORE,
    as_json: bool = JSON,
) -> None:
    """Show the newest rounds in numbers."""
    found: list[RoundSummary] = ask(
        lambda penstock: penstock.rounds(limit=last).rounds, lambda kept: kept.summaries(None, last), store
    )
    if as_json:
        tell_json(found)
        return
    rows = [
        (
            str(each.round),
            when(each.time_s),
            each.policy,
            str(each.placed),
            str(each.waiting),
            " ".join(f"{phase} {seconds:.3f} s" for phase, seconds in each.seconds.items())
            + (f", gap {each.gap:.2%}" if each.gap is not None else ""),
        )
        for each in found
    ]
    tell_table(("ROUND", "TIME", "POLICY", "PLACED", "WAITING", "TOOK"), rows, "no round has been decided yet")


def plan(
    dry_run: bool = typer.Option(
        False, "--dry-run", help="What a job of this job spec would get now; nothing is submitted."
    ),
    spec: str = typer.Option("{}", help="With --dry-run: the job spec, as JSON, such as '{\"max_gpus\": 8}'."),
    name: str | None = typer.Option(None, help="With --dry-run: the job's name, by which stored profiles are found."),
    partition: str | None = typer.Option(None, help="With --dry-run: Slurm's partition."),
    account: str | None = typer.Option(None, help="With --dry-run: Slurm's account."),
    as_json: bool = JSON,
) -> None:
    """Show what the newest round gives to jobs; or, with --dry-run, what one more job would get."""
    if dry_run:
        try:
            asked = JobSpec.model_validate_json(spec)
        except ValidationError as error:
            raise ConfigError("--job spec: " + "; ".join(describe_errors(error, JobSpec))) from None
        order = Submission(command=("true",), spec=asked, name=name, partition=partition, account=account)
        said = ask(lambda penstock: penstock.forecast(order))
        if as_json:
            tell_json(said)
            return
        for line in said.words:
            typer.echo(line)
        return

    def newest(penstock: Client) -> Any:
        number = penstock.cluster().round
        if number is None:
            raise PenstockError("no round has been decided yet; see the daemon's log if that stays so")
        return penstock.round(number)

    view = ask(newest)
    if as_json:
        tell_json(view)
        return
    typer.echo(f"round {view.summary.round} at {when(view.summary.time_s)}, policy {view.summary.policy}")
    rows = [
        (said.job, f"{said.allocation.gpus} {said.allocation.gpu_type}" if said.allocation else "-", said.text)
        for said in view.decisions
    ]
    tell_table(("JOB", "GETS", "WHY"), rows, "no job of yours was in it")


@policy.command("list")
def policies(as_json: bool = JSON) -> None:
    """Show the policies, and which one decides."""
    found = ask(lambda penstock: penstock.policies())
    if as_json:
        tell_json(found)
        return
    rows = [
        ("*" if each.active else "", each.name, " ".join(f"{key}={value}" for key, value in each.settings.items()))
        for each in found
    ]
    tell_table(("", "POLICY", "SETTINGS"), rows, "no policy is installed")


@policy.command("set")
def set_policy(
    name: str = typer.Argument(help="See `penstock policy list`."),
    values: Annotated[list[str] | None, typer.Argument(help="Settings as in TOML, such as fairness_p=-1.0.")] = None,
    as_json: bool = JSON,
) -> None:
    """Decide by another policy from the next round on, also after a restart; for admins."""
    for value in values or ():
        try:
            tomllib.loads(value)
        except tomllib.TOMLDecodeError:
            raise ConfigError(
                f"{value!r} is no KEY=VALUE as in TOML; a text needs its quotes: solver='\"milp\"'"
            ) from None
    try:
        settings = tomllib.loads("\n".join(values or ()))  # together, so that sia.x=1 and sia.y=2 are both of sia
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"these settings do not go together: {error}; give each key once") from None
    change = ask(lambda penstock: penstock.set_policy(name, settings))
    if as_json:
        tell_json(change)
    else:
        typer.echo(f"{change.name} decides from the next round on.")


def pause(as_json: bool = JSON) -> None:
    """Decide no more rounds, until `penstock resume`; what runs goes on. For admins."""
    _pause(paused=True, as_json=as_json)


def resume(as_json: bool = JSON) -> None:
    """Decide rounds again; for admins."""
    _pause(paused=False, as_json=as_json)


def _pause(*, paused: bool, as_json: bool) -> None:
    said = ask(lambda penstock: penstock.pause(paused=paused))
    if as_json:
        tell_json(said)
    else:
        typer.echo("Paused: no round is decided; what runs goes on." if said.paused else "Rounds are decided again.")


def drain(
    kind: str | None = typer.Argument(None, help="node, gpu-type or partition."),
    name: str | None = typer.Argument(None, help="Which one. Without both, show what is drained."),
    why: str = typer.Option("", help="Shown to those who ask."),
    end: bool = typer.Option(False, "--end", help="Give it out again."),
    as_json: bool = JSON,
) -> None:
    """Give adaptive jobs no more of a node, a GPU type or a partition from the next round on; for operators.

    Under sia, pollux and gavel jobs there leave it if they may be moved; the queues let them stay until they end.
    Slurm itself is not told: other jobs still come (scontrol drains for all).
    """
    if kind is None or name is None:
        if kind is not None or end:
            raise ConfigError("say what: penstock drain node n01")
        found = ask(lambda penstock: penstock.drains())
        if as_json:
            tell_json(found)
            return
        rows = [(each.kind, each.name, when(each.since_s), each.by, each.why) for each in found]
        tell_table(("WHAT", "NAME", "SINCE", "BY", "WHY"), rows, "nothing is drained")
        return
    try:
        order = DrainOrder(kind=TypeAdapter[Drained](Drained).validate_python(kind), name=name, why=why)
    except ValidationError as error:
        raise ConfigError("; ".join(describe_errors(error, DrainOrder))) from None
    if end:
        ask(lambda penstock: penstock.end_drain(order.kind, order.name))
        typer.echo("{}" if as_json else f"The {kind} {name} is allocated again from the next round on.")
        return
    said = ask(lambda penstock: penstock.drain(order))
    if as_json:
        tell_json(said)
    else:
        typer.echo(
            f"Adaptive jobs get no more of the {kind} {name} from the next round on. Those there leave it under sia, pollux "
            "and gavel if they may be moved, else they stay until they end."
        )


def budget(
    last: int = typer.Option(50, "--last", "-n", min=1, help="So many of the ledger's newest entries."),
    as_json: bool = JSON,
) -> None:
    """Show what accounts may use and have used, and the newest entries of the ledger: what jobs that have ended used."""

    def read(penstock: Client) -> tuple[list[BudgetView], list[LedgerLine]]:
        page = penstock.ledger()
        lines = list(page.lines)
        while page.next is not None and len(lines) < last:
            page = penstock.ledger(before=page.next)
            lines += page.lines
        return penstock.budgets(), lines[:last]

    budgets, lines = ask(read)
    if as_json:
        shown = {
            "budgets": [each.model_dump(mode="json") for each in budgets],
            "ledger": [each.model_dump(mode="json") for each in lines],
        }
        typer.echo(json.dumps(shown))
        return
    if budgets:
        columns = ("ACCOUNT", "PERIOD", "ENDS", "GPU-HOURS", "CLOUD USD", "STATE")
        tell_table(columns, [_budget_row(budget) for budget in budgets], "")
        typer.echo()
    rows = [
        (
            when(line.time_s),
            line.account or "-",
            line.user,
            line.job,
            f"{hours(line.amount)} GPU-hours of {line.text}{' in the cloud' if line.kind == 'cloud-gpu-seconds' else ''}"
            if line.kind in ("gpu-seconds", "cloud-gpu-seconds")
            else f"{line.amount:.2f} USD {'at most' if line.kind == 'committed' else line.text}".rstrip(),
        )
        for line in lines
    ]
    tell_table(("TIME", "ACCOUNT", "USER", "JOB", "USED"), rows, "the ledger is empty: no job has ended yet")


def _budget_row(budget: BudgetView) -> tuple[str, ...]:
    def used(amount: float, soft: float | None, hard: float | None) -> str:
        limits = [f"{limit:g} {kind}" for kind, limit in (("soft", soft), ("hard", hard)) if limit is not None]
        return f"{amount:.2f} of {', '.join(limits)}" if limits else f"{amount:.2f}"

    limits = {
        "hard": ((budget.used_gpu_hours, budget.hard_gpu_hours), (budget.used_usd, budget.hard_usd)),
        "soft": ((budget.used_gpu_hours, budget.soft_gpu_hours), (budget.used_usd, budget.soft_usd)),
    }
    over = (kind for kind, each in limits.items() if any(most is not None and amount >= most for amount, most in each))
    reached = next(over, None)
    return (
        budget.account or "(all)",
        budget.period,
        "-" if budget.ends_s is None else when(budget.ends_s)[:10],
        used(budget.used_gpu_hours, budget.soft_gpu_hours, budget.hard_gpu_hours),
        used(budget.used_usd, budget.soft_usd, budget.hard_usd),
        "within" if reached is None else f"over the {reached} limit",
    )


@token.command("create")
def create_token(
    user: str = typer.Option(..., help="Whose it is."),
    role: str = typer.Option("user", help="user, operator, admin, or job: reports of one job alone."),
    job: str | None = typer.Option(None, help="With --role job: whose reports it is for."),
    expires: float = typer.Option(30.0, min=0.01, help="Days until it is worthless."),
    note: str = typer.Option("", help="What it is for."),
    as_json: bool = JSON,
) -> None:
    """Make a token. Its secret is shown this once."""
    try:
        order = TokenOrder(
            user=user,
            role=TypeAdapter[Role](Role).validate_python(role),
            job=job,
            expires_s=time.time() + expires * 86400,
            note=note,
        )
    except ValidationError as error:
        raise ConfigError("; ".join(describe_errors(error, TokenOrder))) from None
    made = ask(lambda penstock: penstock.create_token(order))
    if as_json:
        tell_json(made)
        return
    typer.echo(made.token)
    typer.echo(
        f"Token {made.view.id} of {made.view.user}, {made.view.role}, good until {when(made.view.expires_s)}. "
        "It is not shown again.",
        err=True,
    )


@token.command("list")
def list_tokens(as_json: bool = JSON) -> None:
    """Show the tokens, without their secrets."""
    found = ask(lambda penstock: penstock.tokens())
    if as_json:
        tell_json(found)
        return
    rows = [
        (
            each.id,
            each.user,
            each.role,
            "revoked" if each.revoked else "expired" if each.expires_s < time.time() else when(each.expires_s),
            each.note,
        )
        for each in found
    ]
    tell_table(("ID", "USER", "ROLE", "GOOD UNTIL", "NOTE"), rows, "there are no tokens")


@token.command("revoke")
def revoke_token(token_id: str = typer.Argument(help="See `penstock token list`."), as_json: bool = JSON) -> None:
    """Make a token worthless at once."""
    gone = ask(lambda penstock: penstock.revoke_token(token_id))
    if as_json:
        tell_json(gone)
    else:
        typer.echo(f"Token {gone.id} of {gone.user} is worthless now.")


def agents_in(spool: Path, now_s: float) -> tuple[list[str], list[str]]:
    """Nodes in the spool whose agents answer, and those whose do not."""
    answer: list[str] = []
    silent: list[str] = []
    for folder in sorted((spool / "agents").glob("*")):
        try:
            status = NodeStatus.model_validate_json(status_file(spool, folder.name).read_bytes())
            late = now_s - status.time_s >= AWAY_S
        except (OSError, ValueError):
            late = True
        (silent if late else answer).append(folder.name)
    return answer, silent


def doctor(as_json: bool = JSON) -> None:
    """Check what Penstock needs, from this machine as this user. Exit status 1 if something is wrong."""
    checks: list[tuple[str, bool, str]] = []

    def check(what: str, good: bool, text: str) -> None:
        checks.append((what, good, text))

    for command in ("sbatch", "squeue", "scontrol", "scancel"):
        found = shutil.which(command)
        check(command, found is not None, found or "not on PATH; install Slurm's commands (Debian: slurm-client)")
    spool = os.environ.get("PENSTOCK_SPOOL")
    if spool is not None:
        there = Path(spool).is_dir()
        check("PENSTOCK_SPOOL", there, spool if there else f"{spool} is no folder here; jobs cannot report through it")
        answer, silent = agents_in(Path(spool), time.time())
        if answer or silent:
            remedy = (
                f"no word for {AWAY_S:.0f} s from {', '.join(silent)}; jobs cannot share there: start penstock-agent"
            )
            check("agents", not silent, remedy if silent else f"of {len(answer)} nodes answer")
    try:
        health, me = ask(lambda penstock: (penstock.ready(), penstock.me()))
    except PenstockError as error:
        check("penstockd", False, str(error))
    else:
        check(
            "penstockd",
            health.status == "ok",
            "; ".join(health.problems) or f"version {health.version}, round {health.round}",
        )
        check("who you are", True, f"{me.user}, {me.role}, by {me.by}")
    well = all(good for _, good, _ in checks)
    if as_json:
        typer.echo(json.dumps([{"check": what, "ok": good, "text": text} for what, good, text in checks]))
    else:
        tell_table(("CHECK", "", "WHAT"), [(what, "ok" if good else "WRONG", text) for what, good, text in checks], "")
    if not well:
        raise typer.Exit(1)
