"""`penstock models`: what ended jobs have taught, from which new jobs of their kind start."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import typer
from pydantic import ValidationError

from penstock_profiles.estimators import TrainingEstimator
from penstock_scheduler.api.model_messages import KindImport, KindView
from penstock_scheduler.cli.ask import JSON, ask, local_time, print_json, print_table
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import ConfigError

models = typer.Typer(no_args_is_help=True, help="Show, forget, export and import what ended jobs have taught.")

NONE = "No ended job has taught anything. A job teaches when it ends, unless it names a model family or has a goodput table."

KIND = typer.Argument(help="Kind as in `penstock models list`, such as 'ada/train-#@64-512'.")


@models.command("list")
def list_(as_json: bool = JSON) -> None:
    """Show the kinds of the newest 2,000 ended jobs whose speed is known. For operators.

    Jobs are of one kind if they have the same user, the same name but for the numbers in it, and the same batch sizes.
    """
    found = ask(lambda penstock: penstock.models())
    if as_json:
        print_json(found)
        return
    rows = [(each.kind, each.user or "all", str(each.jobs or "-"), local_time(each.newest_s)) for each in found.kinds]
    print_table(("KIND", "USER", "JOBS", "NEWEST"), rows, NONE)
    if not found.recalled:
        typer.echo("New jobs do not start with any of this: [daemon] recall_models is false.")


@models.command()
def show(kind: str = KIND, as_json: bool = JSON) -> None:
    """Show what a kind of jobs has taught: how fast they train, and how long they are. For operators."""
    found = ask(lambda penstock: penstock.model_of(kind))
    if as_json:
        print_json(found)
        return
    typer.echo(_origin(found))
    if found.taught is None:
        typer.echo("They have reported nothing that tells their speed.")
        return
    taught, estimator = found.taught, found.taught.estimator
    print_table(("GPU TYPE", "GPUS", "BATCH A GPU", "GOODPUT"), _speeds(estimator, taught.most_gpus), "")
    if taught.work:
        middle = statistics.median(taught.work)
        typer.echo(f"Length of the {len(taught.work)} that completed: {_amount(middle)} samples in the median.")


def _origin(found: KindView) -> str:
    if not found.jobs:
        return f"{found.kind}: imported {local_time(found.newest_s)}, for the jobs of all users."
    jobs = "one job" if found.jobs == 1 else f"the newest {found.jobs} jobs"
    return f"{found.kind}: {jobs}, the last of which ended {local_time(found.newest_s)}."


def _speeds(estimator: TrainingEstimator, most_gpus: int) -> list[tuple[str, str, str, str]]:
    """A row for each GPU type and each power of two of GPUs up to the most that were measured, on one node each."""
    rows = []
    counts = [2**power for power in range(most_gpus.bit_length())]
    if most_gpus not in counts:
        counts.append(most_gpus)
    for gpu_type in sorted(estimator.models):
        for gpus in counts:
            goodput = float(estimator.goodput(gpu_type, np.array([1]), np.array([gpus]))[0])
            batch = estimator.best_batch(gpu_type, 1, gpus)
            if goodput > 0 and batch is not None:
                micro = f" x {batch.accumulation_steps + 1}" if batch.accumulation_steps else ""
                rows.append((gpu_type, str(gpus), f"{batch.atomic_batch}{micro}", f"{_amount(goodput)} samples/s"))
    return rows


def _amount(samples: float) -> str:
    return f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}"


@models.command()
def forget(kind: str = KIND, as_json: bool = JSON) -> None:
    """Let jobs of this kind that have ended teach no more, for example after the program was changed. For admins.

    Jobs that are in the queue or run keep what they started with. Jobs that end later teach again.
    """
    found = ask(lambda penstock: penstock.forget_model(kind))
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found.kind} is forgotten: new jobs of this kind start without it.")


@models.command()
def export(kinds: list[str] = typer.Argument(None, metavar="[KIND]...", help="Kinds to export; none: all.")) -> None:
    """Print what these kinds have taught, as JSON for `penstock models import` at another site. For operators.

    Users are left out; names of jobs are not.
    """
    names = kinds or [each.kind for each in ask(lambda penstock: penstock.models()).kinds]
    found = [ask(lambda penstock, name=name: penstock.model_of(name)).taught for name in names]  # type: ignore[misc]
    taught = {(each.name, each.request): each for each in reversed(found) if each is not None}
    if not taught:
        raise ConfigError("there is nothing to export: no ended job has shown its speed")
    print_json(KindImport(kinds=list(taught.values())))


@models.command("import")
def import_(
    file: Path = typer.Argument(help="File that `penstock models export` has printed."), as_json: bool = JSON
) -> None:
    """Let new jobs of all users start with what another site has learned. For admins.

    A job looks for earlier jobs of its own user first, and leaves an import sooner when its own measurements differ.
    """
    try:
        order = KindImport.model_validate_json(file.read_bytes(), extra="ignore")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"{file}: {'; '.join(describe_errors(error, KindImport)[:3])}") from None
    done = ask(lambda penstock: penstock.import_models(order.kinds))
    if as_json:
        print_json([KindView(kind=kind, user="", jobs=0, newest_s=0.0) for kind in done])
        return
    typer.echo("Imported for the jobs of all users: " + ", ".join(done))
