"""`penstock usage`: what jobs used, what it cost, the budgets and the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, ask, hours, local_time, print_json, print_table
from penstock_scheduler.cli.options import FROM, TO, check_prices, numbers, span_s
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.units import money

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.api.ledger_messages import BudgetView, LedgerLine, Usage

BY = typer.Option("user", "--by", help="What to add up by: user, account, gpu-type or partition.")


def usage(
    job: str | None = typer.Argument(None, help="Id of a job in Slurm; by default all jobs that you may see."),
    from_: str | None = FROM,
    to: str | None = TO,
    by: str = BY,
    prices: str = typer.Option("", help="Prices of a GPU-hour in USD instead of the site's, such as t4=0.4,a100=2.5."),
    ledger: bool = typer.Option(
        False, "--ledger", help="Show the budgets instead, and the ledger: what each ended job has used."
    ),
    last: int = typer.Option(50, "--last", "-n", min=1, help="With --ledger: how many entries to show."),
    csv: Path | None = typer.Option(None, "--csv", help="Write the table to this file instead, as CSV."),
    parquet: Path | None = typer.Option(None, "--parquet", help="The same as Parquet; needs pyarrow."),
    as_json: bool = JSON,
) -> None:
    """Show how many GPU-hours jobs used, what they cost, and how well one job uses its GPUs.

    A job counts with what it used in this time. A run in the cloud counts at its end. The site's prices are in the section
    budgets of the settings file. With --prices, it is an error if a GPU type has no price.

    With a job, show its GPU-hours and their cost, compare its measured goodput with the expected goodput on the same GPUs, show
    how it scales and what its restarts cost, and give advice.

    Examples: penstock usage --from 2026-11-01 --to 2026-12-01 --by account; penstock usage 12; penstock usage --ledger
    """
    own = numbers("--prices", prices) if prices else None
    if ledger:
        if job is not None or own is not None or from_ or to or csv or parquet:
            raise ConfigError("--ledger shows all budgets and entries; leave out the job and all options but --last")
        _show_ledger(last, as_json=as_json)
        return
    if job is not None:
        if from_ or to or csv or parquet:
            raise ConfigError(
                "--from, --to, --csv and --parquet are for all jobs; leave them out, or leave out the job"
            )
        from penstock_scheduler.cli.efficiency import show_job  # imports the policies

        show_job(job, own, as_json=as_json)
        return
    found = _usage(from_, to, by)
    if own is not None:
        lines = [
            line if line.where == "cloud" else line.model_copy(update={"usd": line.gpu_hours * price})
            for line in found.lines
            for price in [own.get(line.gpu_type, 0.0)]
        ]
        check_prices(own, (line.gpu_type for line in lines if line.where == "site"))
        found = found.model_copy(update={"lines": lines, "prices": own})
    _show(found, csv, parquet, as_json)


def _usage(from_: str | None, to: str | None, by: str) -> Usage:
    from penstock_scheduler.api.ledger_messages import USAGE_BY

    if by not in USAGE_BY:
        raise ConfigError(f"--by={by!r}: choose one of {', '.join(USAGE_BY)}")
    begin_s, end_s = span_s(from_, to)
    return ask(lambda penstock: penstock.usage(by, from_s=begin_s, to_s=end_s))


def _show(found: Usage, csv: Path | None, parquet: Path | None, as_json: bool) -> None:
    if csv is not None or parquet is not None:
        _write(found, csv, parquet)
        return
    if as_json:
        print_json(found)
        return
    rows = [
        (
            *([] if found.by == "gpu-type" else [line.name or "-"]),
            (line.gpu_type or "-") + (" in the cloud" if line.where == "cloud" else ""),
            str(line.jobs),
            f"{line.gpu_hours:.2f}",
            "-" if line.usd is None else money(line.usd),
        )
        for line in found.lines
    ]
    named = () if found.by == "gpu-type" else (found.by.upper(),)
    if rows:
        begin = f"from {local_time(found.from_s)} " if found.from_s else ""
        typer.echo(f"Used {begin}to {local_time(found.to_s)}:")
    print_table((*named, "GPU TYPE", "JOBS", "GPU-HOURS", "USD"), rows, "No GPU-hours were used in this time.")


def _write(found: Usage, csv: Path | None, parquet: Path | None) -> None:
    from penstock_scheduler.accounts.usage import to_frame  # imports pandas

    frame = to_frame(found)
    try:
        if csv is not None:
            with csv.open("w", encoding="utf-8", newline="") as out:
                frame.to_csv(out, index=False, lineterminator="\n")
        if parquet is not None:
            frame.to_parquet(parquet, engine="pyarrow", index=False)
    except ImportError:
        raise ConfigError("--parquet needs pyarrow: pip install pyarrow, or use --csv") from None
    except OSError as error:
        raise PenstockError(f"{error.filename or csv or parquet}: {error.strerror or error}") from None


def _show_ledger(last: int, *, as_json: bool) -> None:
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
        print_table(columns, [_budget_row(budget) for budget in budgets], "")
        typer.echo()
    rows = [(local_time(line.time_s), line.account or "-", line.user, line.job, _used(line)) for line in lines]
    print_table(("TIME", "ACCOUNT", "USER", "JOB", "USED"), rows, "The ledger is empty: no job has ended yet.")


def _used(line: LedgerLine) -> str:
    from penstock_scheduler.api.ledger_messages import CORRECTED

    if line.kind in ("gpu-seconds", "cloud-gpu-seconds"):
        where = " in the cloud" if line.kind == "cloud-gpu-seconds" else ""
        why = ", corrected by Slurm's accounting" if line.key.endswith(CORRECTED) else ""
        return f"{hours(line.amount)} GPU-hours of {line.text}{where}{why}"
    return f"{money(line.amount)} USD {'at most' if line.kind == 'committed' else line.text}".rstrip()


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
        "-" if budget.ends_s is None else local_time(budget.ends_s)[:10],
        used(budget.used_gpu_hours, budget.soft_gpu_hours, budget.hard_gpu_hours),
        used(budget.used_usd, budget.soft_usd, budget.hard_usd),
        "within limits" if reached is None else f"over the {reached} limit",
    )
