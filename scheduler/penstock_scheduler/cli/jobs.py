"""Commands about jobs: list, show, explain, logs, wait, cancel, efficiency, cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from penstock_profiles.sensitivity import Option
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.cli.ask import JSON, STORE, ask, hours, tell_json, tell_table, when
from penstock_scheduler.cli.options import numbers
from penstock_scheduler.cli.top import asks_for
from penstock_scheduler.errors import ConfigError, PenstockError
from penstock_scheduler.explain import explain as explain_round
from penstock_scheduler.explain import words
from penstock_scheduler.messages import MAX_PAGE, JobView, LedgerLine, ShareView
from penstock_scheduler.model import Configuration
from penstock_scheduler.policies.tuning import Amount
from penstock_scheduler.shares import sensitivity_words
from penstock_scheduler.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.client import Client
    from penstock_scheduler.store import SqlStore

JOB = typer.Argument(help="The job's id in Slurm.")
LIVE = ("queued", "starting", "running", "stopping")
STATES = (*LIVE, "ended")

FAILED, STILL_THERE = 4, 5
"""Exit statuses of `wait`: the job ended otherwise than well; it has not ended."""


def list_(
    user: str | None = typer.Option(None, help="Jobs of this user; others' are shown to operators alone."),
    state: list[str] = typer.Option(
        [], help="Jobs in this state: queued, starting, running, stopping, ended. It may stand several times."
    ),
    name: str | None = typer.Option(None, help="Jobs of this name."),
    ended: bool = typer.Option(False, "--all", help="Jobs that have ended, too."),
    store: str = STORE,
    as_json: bool = JSON,
) -> None:
    """List jobs, newest first."""
    if unknown := set(state) - set(STATES):
        raise ConfigError(f"--state: there is no state {', '.join(sorted(unknown))}; there are {', '.join(STATES)}")
    states = tuple(state) or (STATES if ended else LIVE)
    found = ask(
        lambda penstock: list(penstock.jobs(user=user, state=states, name=name)),
        lambda kept: [view for _, view in kept.jobs(user=user, states=states, name=name, limit=MAX_PAGE)],
        store,
    )
    if as_json:
        tell_json(found)
        return
    rows = [
        (view.id, view.name, view.user, _state(view), asks_for(view.spec), _holds(view), _progress(view), view.reason)
        for view in found
    ]
    tell_table(("JOB", "NAME", "USER", "STATE", "ASKS FOR", "HAS", "DONE", "REASON"), rows, "no jobs")


def show(job: str = JOB, store: str = STORE, as_json: bool = JSON) -> None:
    """Show what is known of a job."""
    view = ask(lambda penstock: penstock.job(job), lambda kept: _kept(kept, job), store)
    if as_json:
        tell_json(view)
        return
    used = ", ".join(f"{hours(amount)} of {gpu_type}" for gpu_type, amount in sorted(view.gpu_seconds.items()))
    where = view.allocation
    lines = {
        "job": view.id + (f" ({view.name})" if view.name else ""),
        "user": view.user + (f", account {view.account}" if view.account else ""),
        "state": _state(view) + (f", exit code {view.exit_code}" if view.exit_code is not None else ""),
        "asks for": asks_for(view.spec),
        "has": _holds(view),
        "on": ", ".join(f"{node} ({gpus})" for node, gpus in where.nodes.items()) if where else "",
        "submitted": when(view.submit_s),
        "started": when(view.start_s),
        "ended": when(view.end_s) if view.state == "ended" else "",
        "done": _progress(view),
        "result": _result(view),
        "restarts": str(view.restarts),
        "GPU-hours": used,
        "reason": view.reason,
        "end": f"it {view.ended_text}" if view.ended_text else "",
        "key": view.key or "",
    }
    for label, text in lines.items():
        if text:
            typer.echo(f"{label:<10} {text}")


def explain(job: str = JOB, store: str = STORE, as_json: bool = JSON) -> None:
    """Say in words why a job waits, or has what it has, and what would change it."""

    def answer(penstock: Client) -> tuple[list[str], str]:
        said = penstock.explain(job)
        return said.words or [f"Job {job}: {said.text}."], said.model_dump_json()

    def kept_answer(kept: SqlStore) -> tuple[list[str], str]:
        record = kept.last_round()
        said = explain_round(record, job) if record else None
        if said is None:
            view = _kept(kept, job)
            why = f" It {view.ended_text}." if view.ended_text else ""
            return [f"Job {job}: {_state(view)}; the newest round does not speak of it.{why}"], view.model_dump_json()
        lines = [f"By round {said.round}, at {when(said.decided_s)}:", *words(said, now_s=time.time())]
        return lines, json.dumps({"job": job, "round": said.round, "code": said.reason.code.value, "words": lines})

    lines, document = ask(answer, kept_answer, store)
    typer.echo(document if as_json else "\n".join(lines))


def logs(
    job: str = JOB,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the job has ended."),
    tail: int | None = typer.Option(None, "--tail", min=0, help="Only so many bytes from the end."),
    as_json: bool = typer.Option(False, "--json", help="Each part as a line of JSON."),
) -> None:
    """Print a job's output."""

    def read(penstock: Client) -> None:
        part = penstock.log(job, 0 if tail is None else -tail) if tail != 0 else penstock.log(job, 2**62)
        while True:
            if as_json:
                tell_json(part)
            else:
                typer.echo(part.text, nl=False)
            if part.ended or (not follow and part.next >= part.size):
                return
            part = penstock.log(job, part.next, wait_s=30.0 if follow else 0.0)

    ask(read)


def wait(
    job: str = JOB,
    timeout: float | None = typer.Option(None, min=0.0, help="Seconds to wait at most."),
    as_json: bool = JSON,
) -> None:
    """Wait for a job's end. Exit status 0: it completed; 4: it ended otherwise; 5: it has not ended in time."""
    view = ask(lambda penstock: penstock.wait(job, timeout_s=timeout))
    if as_json:
        tell_json(view)
    else:
        typer.echo(f"job {view.id}: {_state(view)}" + (f": it {view.ended_text}" if view.ended_text else ""))
    if view.state != "ended":
        raise typer.Exit(STILL_THERE)
    if view.ended != "COMPLETED":
        raise typer.Exit(FAILED)


def cancel(jobs: list[str] = typer.Argument(help="Ids in Slurm."), as_json: bool = JSON) -> None:
    """Ask Slurm to end jobs. Twice is once. All are tried; exit status 1 if one could not be cancelled."""

    def end(penstock: Client) -> tuple[list[JobView], list[str]]:
        asked, refused = [], []
        for job in jobs:
            try:
                asked.append(penstock.cancel(job))
            except PenstockError as error:
                if error.exit_status != 1:
                    raise
                refused.append(f"job {job}: {error}")
        return asked, refused

    asked, refused = ask(end)
    if as_json:
        tell_json(asked)
    for view in asked if not as_json else ():
        typer.echo(
            f"job {view.id}: " + (f"has ended, {view.ended}" if view.state == "ended" else "Slurm is asked to end it")
        )
    for text in refused:
        typer.echo(f"penstock: {text}", err=True)
    if refused:
        raise typer.Exit(1)


def efficiency(job: str = JOB, as_json: bool = JSON) -> None:
    """Say what a job makes of its GPUs: measured and expected, and what its restarts cost."""
    view, said, past = ask(lambda penstock: (penstock.job(job), penstock.explain(job), penstock.history(job)))
    held = view.allocation
    shapes = {Configuration(shape.nodes, shape.gpus, shape.gpu_type): shape.goodput for shape in said.configurations}
    best = max(shapes.values(), default=None)
    now = shapes.get(Configuration(len(held.nodes), held.gpus, held.gpu_type)) if held else None
    single = shapes.get(Configuration(1, 1, held.gpu_type)) if held else None
    lost_s = view.restarts * said.restart_cost_s if said.restart_cost_s is not None else None
    figures: dict[str, Any] = {
        "job": job,
        "gpu_hours": {gpu_type: amount / 3600 for gpu_type, amount in view.gpu_seconds.items()},
        "samples": view.progress,
        "goodput": now,
        "share_of_best": now / best if now and best else None,
        "scaling": now / (held.gpus * single) if now and held and single else None,
        "measured_throughput": _measured([Report.model_validate(each) for each in past.observations]),
        "restarts": view.restarts,
        "restart_seconds": lost_s,
        "share": None if said.share is None else said.share.model_dump(mode="json"),
    }
    if as_json:
        typer.echo(json.dumps(figures))
        return
    used = (
        ", ".join(f"{hours(amount)} of {gpu_type}" for gpu_type, amount in sorted(view.gpu_seconds.items()))
        or "none yet"
    )
    lines = {
        "GPU-hours": used,
        "done": _progress(view),
        "measured": _rate(figures["measured_throughput"], "samples/s in its newest report"),
        "expected": _rate(now, "useful samples/s on what it holds"),
        "of best": _share(figures["share_of_best"], "of what its fastest configuration would give"),
        "scaling": _share(figures["scaling"], "of one GPU's goodput is what each of its GPUs gives"),
        "restarts": f"{view.restarts}" + (f", about {lost_s:.0f} s of training" if lost_s else ""),
        **_shares(said.share),
    }
    for label, text in lines.items():
        typer.echo(f"{label:<11} {text}")


def _shares(share: ShareView | None) -> dict[str, str]:
    """Lines on CPU and memory; none where the policy does not give them out."""
    if share is None:
        return {}
    has, part = Amount(share.cpus, share.memory_mb), Amount(share.part_cpus, share.part_memory_mb)
    options = [Option(option.cpus, option.memory_mb, option.speed) for option in share.sensitivity]
    worth = f"; {share.speed:.2f} times as fast as with that" if share.profile else ""
    return {
        "share": f"{has} on each node; its GPUs' part is {part}{worth}",
        "sensitivity": f"{sensitivity_words(options)}, by the profile {share.profile}"
        if share.profile
        else "not known",
    }


def cost(
    job: str | None = typer.Argument(None, help="The job's id in Slurm; absent: all that you may see."),
    by: str = typer.Option("user", help="What to add up by: user, account or job."),
    prices: str = typer.Option("", help="Of a GPU-hour, such as t4=0.4,a100=2.5."),
    as_json: bool = JSON,
) -> None:
    """Add up GPU-hours, and with prices what they cost: of ended jobs by the ledger, of the others so far."""
    if by not in ("user", "account", "job"):
        raise ConfigError(f"--by={by!r}: there are user, account and job")
    price = numbers("--prices", prices) if prices else {}

    def uses(penstock: Client) -> list[tuple[str, str, float]]:
        views = [penstock.job(job)] if job is not None else list(penstock.jobs(state=LIVE))
        found = [(_key(view, by), gpu_type, amount) for view in views for gpu_type, amount in view.gpu_seconds.items()]
        if job is None:
            found += [
                (getattr(line, by), line.text, line.amount) for line in _ledger(penstock) if line.kind == "gpu-seconds"
            ]
        return found

    total: dict[tuple[str, str], float] = {}
    for who, gpu_type, amount in ask(uses):
        total[who, gpu_type] = total.get((who, gpu_type), 0.0) + amount
    if unknown := {gpu_type for _, gpu_type in total} - set(price) if price else set():
        raise ConfigError(f"--prices lacks {', '.join(sorted(unknown))}")
    lines = [
        {by: who, "gpu_type": gpu_type, "gpu_hours": amount / 3600}
        | ({"cost": amount / 3600 * price[gpu_type]} if price else {})
        for (who, gpu_type), amount in sorted(total.items())
    ]
    if as_json:
        typer.echo(json.dumps(lines))
        return
    rows = [
        [
            str(line[by]) or "-",
            str(line["gpu_type"]),
            f"{line['gpu_hours']:.2f}",
            *([f"{line['cost']:.2f}"] if price else []),
        ]
        for line in lines
    ]
    tell_table((by.upper(), "GPU TYPE", "GPU-HOURS", *(["COST"] if price else [])), rows, "no GPU was used yet")


def _ledger(penstock: Client) -> Iterator[LedgerLine]:
    page = penstock.ledger()
    while True:
        yield from page.lines
        if page.next is None:
            return
        page = penstock.ledger(before=page.next)


def _key(view: JobView, by: str) -> str:
    return {"user": view.user, "account": view.account, "job": view.id}[by]


def _kept(kept: SqlStore, job: str) -> JobView:
    view = kept.job(job)
    if view is None:
        raise PenstockError(f"the store has no job {job}")
    return view


def _measured(reports: list[Report]) -> float | None:
    """Samples/s by the newest observation, of its batch and step time; None: there is none."""
    newest = max(
        (report for report in reports if isinstance(report.body, Observation)),
        key=lambda report: (report.epoch, report.sequence),
        default=None,
    )
    if newest is None or not isinstance(newest.body, Observation):
        return None
    return newest.body.samples_per_s


def _rate(rate: float | None, unit: str) -> str:
    return "not known" if rate is None else f"{rate:.4g} {unit}"


def _share(share: float | None, of_what: str) -> str:
    return "not known" if share is None else f"{share:.0%} {of_what}"


def _state(view: JobView) -> str:
    return f"ended {view.ended}".rstrip() if view.state == "ended" else view.state


def _holds(view: JobView) -> str:
    return f"{view.allocation.gpus} {view.allocation.gpu_type}" if view.allocation else "-"


def _result(view: JobView) -> str:
    result = view.result
    return f"{result.metric:.6g} after {duration(result.ran_s)} of running" if result is not None else ""


def _progress(view: JobView) -> str:
    if view.progress is None:
        return "-"
    return f"{view.progress / view.total:.0%}" if view.total else f"{view.progress:,.0f} samples"
