"""Commands about what jobs used: usage, cost."""

from __future__ import annotations

from pathlib import Path

import typer

from penstock_scheduler.accounts.usage import to_frame
from penstock_scheduler.api.ledger_messages import USAGE_BY, Usage, UsageLine
from penstock_scheduler.cli.ask import JSON, ask, local_time, print_json, print_table
from penstock_scheduler.cli.options import numbers
from penstock_scheduler.cli.times import FROM, TO, span_s
from penstock_scheduler.people.errors import ConfigError, PenstockError

BY = typer.Option("user", "--by", help=f"What to add up by: {', '.join(USAGE_BY)}.")


def usage(
    from_: str | None = FROM,
    to: str | None = TO,
    by: str = BY,
    csv: Path | None = typer.Option(None, "--csv", help="Write the table to this file instead, as CSV."),
    parquet: Path | None = typer.Option(None, "--parquet", help="The same as Parquet; needs pyarrow."),
    as_json: bool = JSON,
) -> None:
    """Show how many GPU-hours jobs used, and what they cost.

    A job counts with what it used in this time. A run in the cloud counts at its end. The site's prices are in the section
    budgets of the settings file.

    Example: penstock usage --from 2026-11-01 --to 2026-12-01 --by account
    """
    _show(_usage(from_, to, by), csv, parquet, as_json)


def cost(
    job: str | None = typer.Argument(None, help="Id of the job in Slurm; by default all jobs that you may see."),
    from_: str | None = FROM,
    to: str | None = TO,
    by: str = BY,
    prices: str = typer.Option("", help="Prices of a GPU-hour in USD instead of the site's, such as t4=0.4,a100=2.5."),
    as_json: bool = JSON,
) -> None:
    """Show what jobs cost: like `usage`, with prices of your own, or of one job.

    It is an error if a GPU type has no price.

    Example: penstock cost --by account --prices t4=0.4,a100=2.5
    """
    found = _usage(from_, to, by) if job is None else _of_job(job, from_, to)
    price = numbers("--prices", prices) if prices else found.prices
    lines = [
        line
        if line.where == "cloud" or line.gpu_type not in price
        else line.model_copy(update={"usd": line.gpu_hours * price[line.gpu_type]})
        for line in found.lines
    ]
    if unknown := {line.gpu_type for line in lines if line.where == "site"} - set(price):
        missing = ", ".join(sorted(unknown))
        raise ConfigError(
            f"no price of a GPU-hour is known for {missing}: give --prices {sorted(unknown)[0]}=PRICE, or ask an admin to set "
            "`prices` in section [budgets]; `penstock usage` shows GPU-hours without prices"
        )
    _show(found.model_copy(update={"lines": lines, "prices": price}), None, None, as_json)


def _usage(from_: str | None, to: str | None, by: str) -> Usage:
    if by not in USAGE_BY:
        raise ConfigError(f"--by={by!r}: choose one of {', '.join(USAGE_BY)}")
    begin_s, end_s = span_s(from_, to)
    return ask(lambda penstock: penstock.usage(by, from_s=begin_s, to_s=end_s))


def _of_job(job: str, from_: str | None, to: str | None) -> Usage:
    if from_ is not None or to is not None:
        raise ConfigError("--from and --to are for all jobs; leave them out, or leave out the job")
    view, prices = ask(lambda penstock: (penstock.job(job), penstock.usage(from_s=0.0, to_s=0.0).prices))
    lines = [
        UsageLine(name=view.user, gpu_type=gpu_type, where="site", jobs=1, gpu_hours=amount / 3600, usd=None)
        for gpu_type, amount in view.gpu_seconds.items()
    ]
    return Usage(by="user", from_s=view.submit_s, to_s=view.end_s or view.submit_s, prices=prices, lines=lines)


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
            "-" if line.usd is None else f"{line.usd:.2f}",
        )
        for line in found.lines
    ]
    named = () if found.by == "gpu-type" else (found.by.upper(),)
    if rows:
        begin = f"from {local_time(found.from_s)} " if found.from_s else ""
        typer.echo(f"Used {begin}to {local_time(found.to_s)}:")
    print_table((*named, "GPU TYPE", "JOBS", "GPU-HOURS", "USD"), rows, "No GPU-hours were used in this time.")


def _write(found: Usage, csv: Path | None, parquet: Path | None) -> None:
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
