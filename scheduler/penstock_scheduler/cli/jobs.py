"""Commands about jobs: list, show, explain, history, logs, wait, hold, release, cancel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import typer

from penstock_scheduler.cli.ask import (
    JSON,
    STORE,
    ask,
    asks_for,
    hours,
    local_time,
    print_fields,
    print_json,
    print_refused,
    print_table,
)
from penstock_scheduler.cli.cluster import show_waiting
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.safe_text import one_line
from penstock_scheduler.people.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.api.history_messages import AllocationSpan
    from penstock_scheduler.api.messages import AllocationView, JobView, RefusedJob
    from penstock_scheduler.store.sql import SqlStore

JOB = typer.Argument(help="Id of the job in Slurm.")
LIVE = ("queued", "starting", "running", "stopping")
STATES = (*LIVE, "ended")

FAILED, NOT_ENDED = 4, 5
"""Exit statuses of `wait`: the job did not complete, or it has not ended."""


def list_(
    user: str | None = typer.Option(None, help="Only jobs of this user. Only operators see jobs of other users."),
    state: list[str] = typer.Option(
        [], help="Only jobs in this state: queued, starting, running, stopping or ended. Repeatable."
    ),
    name: str | None = typer.Option(None, help="Only jobs with this name."),
    ended: bool = typer.Option(False, "--all", help="Also jobs that have ended."),
    waiting: bool = typer.Option(False, "--waiting", help="Only jobs that wait, with their places, and the free GPUs."),
    store: str = STORE,
    as_json: bool = JSON,
) -> None:
    """List jobs, newest first, or the queue.

    Jobs that Penstock refuses follow, with the reason, unless --state is given.

    With --waiting, show the jobs that hold no GPUs in the order of submission, and the free GPUs. PLACE: the place among the
    jobs that wait for GPUs; the policy may start a later one first. Of other users' jobs, the reason is shown as its code.

    Examples: penstock list --state queued --state running; penstock list --waiting
    """
    if waiting:
        if state or name or ended:
            raise ConfigError("--waiting shows all jobs without GPUs; leave out --state, --name and --all")
        show_waiting(user, as_json=as_json)
        return
    from penstock_scheduler.api.estimate_messages import end_cell, start_cell
    from penstock_scheduler.api.messages import MAX_PAGE

    if unknown := set(state) - set(STATES):
        raise ConfigError(
            f"--state: there is no state {', '.join(sorted(unknown))}; the states are {', '.join(STATES)}"
        )
    states = tuple(state) or (STATES if ended else LIVE)

    def read(penstock: Client) -> tuple[list[JobView], list[RefusedJob]]:
        refused = [] if state or as_json else penstock.refused()
        wanted = [each for each in refused if user in (None, each.user) and name in (None, each.name)]
        return list(penstock.jobs(user=user, state=states, name=name)), wanted

    found, refused = ask(
        read,
        lambda kept: ([view for _, view in kept.jobs(user=user, states=states, name=name, limit=MAX_PAGE)], []),
        store,
    )
    if as_json:
        print_json(found)
        return
    now_s = time.time()
    rows = [
        (
            view.id,
            view.name,
            view.user,
            _state(view),
            asks_for(view.spec),
            _holds(view),
            _progress(view),
            start_cell(view.estimate, now_s) if view.state == "queued" else "",
            end_cell(view.estimate, now_s),
            view.reason,
        )
        for view in found
    ]
    columns = ("JOB", "NAME", "USER", "STATE", "ASKS FOR", "GPUS", "PROGRESS", "STARTS IN", "ENDS IN", "REASON")
    print_table(columns, rows, "No jobs found.")
    print_refused(refused)


def show(job: str = JOB, store: str = STORE, as_json: bool = JSON) -> None:
    """Show one job in detail."""
    view = ask(lambda penstock: penstock.job(job), lambda kept: _kept(kept, job), store)
    if as_json:
        print_json(view)
        return
    where = view.allocation
    print_fields(
        {
            "job": view.id + (f" ({view.name})" if view.name else ""),
            "user": view.user + (f", account {view.account}" if view.account else ""),
            "state": _state(view) + (f", exit code {view.exit_code}" if view.exit_code is not None else ""),
            "cause": f"it {view.ended_text}" if view.ended_text else "",
            "cannot save": "" if view.state == "ended" else view.cannot_save,
            "asks for": asks_for(view.spec),
            "GPUs": _holds(view),
            "nodes": ", ".join(f"{node} ({gpus})" for node, gpus in where.nodes.items()) if where else "",
            "submitted": local_time(view.submit_s),
            "started": local_time(view.start_s),
            "ended": local_time(view.end_s) if view.state == "ended" else "",
            "progress": _progress(view),
            "result": _result(view),
            "expected": _expected(view),
            "restarts": str(view.restarts),
            "GPU-hours": _gpu_hours(view),
            "reason": view.reason,
            "last stop": view.stopped,
            "note": f"it {view.note}" if view.note else "",
            view.suspended.state if view.suspended else "suspended": _suspended(view),
            "key": view.key or "",
        }
    )


def _expected(view: JobView) -> str:
    """When a job is expected to start and end; empty: it has ended, or nothing has been estimated."""
    if view.state == "ended" or view.estimate is None:
        return ""
    from penstock_scheduler.api.estimate_messages import estimate_lines

    return " ".join(estimate_lines(view.estimate, view.state, time.time()))


def explain(job: str = JOB, store: str = STORE, as_json: bool = JSON) -> None:
    """Explain why a job waits, or why it has its GPUs.

    For a job that waits: when it may start, and with which job spec it would start sooner. For a job with GPUs: what a move
    would cost, and how fast the job would be in other configurations.
    """

    def answer(penstock: Client) -> tuple[list[str], str]:
        explanation = penstock.explain(job)
        return explanation.lines, explanation.model_dump_json()

    def kept_answer(kept: SqlStore) -> tuple[list[str], str]:
        from penstock_scheduler.rounds.explain import explain as explain_round  # imports all policies
        from penstock_scheduler.rounds.explain import words

        record = kept.last_round()
        found = explain_round(record, job) if record else None
        if found is None:
            view = _kept(kept, job)
            if view.note:
                return [f"Job {job} {view.note}."], view.model_dump_json()
            cause = f" It {view.ended_text}." if view.ended_text else ""
            return [f"Job {job}: {_state(view)}. The newest round did not consider it.{cause}"], view.model_dump_json()
        lines = [f"By round {found.round}, at {local_time(found.decided_s)}:", *words(found, now_s=time.time())]
        return lines, json.dumps({"job": job, "round": found.round, "code": found.reason.code.value, "lines": lines})

    lines, document = ask(answer, kept_answer, store)
    typer.echo(document if as_json else "\n".join(map(one_line, lines)))


def history(job: str = JOB, as_json: bool = JSON) -> None:
    """Show what Penstock did with a job: when it started, moved, resized or stopped the job, and in which round.

    Then it shows which GPUs the job held when, and what ended that. `penstock plan --round N` shows why a round did something.
    """
    found, spans = ask(lambda penstock: (penstock.history(job), list(penstock.allocations(job))))
    if as_json:
        typer.echo(
            json.dumps(found.model_dump(mode="json") | {"spans": [each.model_dump(mode="json") for each in spans]})
        )
        return
    rows = [
        (
            local_time(each.time_s),
            str(each.round),
            each.action,
            _gpus(each.allocation),
            each.progress,
            "; ".join(filter(None, (each.stop, each.text))),
        )
        for each in found.outcomes
    ]
    columns = ("TIME", "ROUND", "ACTION", "GPUS", "PROGRESS", "TEXT")
    print_table(columns, rows, f"Penstock has done nothing with job {job} yet.")
    if spans:
        typer.echo()
        print_table(("FROM", "TO", "GPUS", "NODES", "ENDED BY"), [_span_row(each) for each in spans], "")


def _span_row(span: AllocationSpan) -> tuple[str, ...]:
    ids = span.gpu_ids or {}
    nodes = ",".join(
        f"{node}:{count}" + (f"({','.join(map(str, ids[node]))})" if node in ids else "")
        for node, count in sorted(span.nodes.items())
    )
    begun, to = local_time(span.from_s), "now"
    if span.to_s is not None:
        day = begun.partition(" ")[0]  # once is enough, and a narrow terminal would cut both
        to = ("" if span.exact else "about ") + local_time(span.to_s).removeprefix(f"{day} ")
    ended = ": ".join(filter(None, (span.end, span.end_text)))
    return (
        begun,
        to,
        f"{span.gpus} {span.gpu_type}" + (" shared" if span.shared else ""),
        nodes,
        ended,
    )


def logs(
    job: str = JOB,
    follow: bool = typer.Option(False, "--follow", "-f", help="Keep printing new output until the job has ended."),
    tail: int | None = typer.Option(None, "--tail", min=0, help="Begin this many bytes before the end."),
    stderr: bool = typer.Option(False, "--stderr", help="Print the file of standard error, if it is another one."),
    as_json: bool = typer.Option(False, "--json", help="Print each part of the output as one line of JSON."),
) -> None:
    """Print a job's output, for as long as its file is there."""
    stream: Literal["stdout", "stderr"] = "stderr" if stderr else "stdout"

    def read(penstock: Client) -> None:
        part = penstock.log(job, 0 if tail is None else -tail if tail else 2**62, stream=stream)
        told = ""
        while True:
            if as_json:
                print_json(part)
            else:
                typer.echo("\n".join(part.text.replace("\r\n", "\n").split("\r")), nl=False)  # a progress bar
            if part.note != told and (told := part.note):
                typer.echo(told[0].upper() + told[1:] + ".", err=True)
            if part.ended or (not follow and part.next >= part.size):
                return
            part = penstock.log(job, part.next, wait_s=30.0 if follow else 0.0, stream=stream)

    ask(read)


def wait(
    job: str = JOB,
    timeout: float | None = typer.Option(None, min=0.0, help="Most seconds to wait."),
    as_json: bool = JSON,
) -> None:
    """Wait until a job has ended.

    The exit status is 0 if the job completed, 4 if it ended in another way, and 5 if it has not ended in time.
    """
    view = ask(lambda penstock: penstock.wait(job, timeout_s=timeout))
    if as_json:
        print_json(view)
    else:
        typer.echo(f"Job {view.id}: {_state(view)}" + (f". It {view.ended_text}." if view.ended_text else ""))
    if view.state != "ended":
        raise typer.Exit(NOT_ENDED)
    if view.ended != "COMPLETED":
        raise typer.Exit(FAILED)


def hold(jobs: list[str] = typer.Argument(help="Ids of the jobs in Slurm."), as_json: bool = JSON) -> None:
    """Keep jobs from being started until they are released.

    A job that runs continues, and is not started again after a stop. All jobs are tried. The exit status is 1 if one could not
    be held.
    """
    runs = "goes on; after a stop it is not started again until `penstock release`"
    _each(jobs, lambda penstock, job: penstock.hold(job), "is held; `penstock release` lets it start", as_json, runs)


def release(jobs: list[str] = typer.Argument(help="Ids of the jobs in Slurm."), as_json: bool = JSON) -> None:
    """Let held jobs start again.

    Releases holds of `penstock hold` and of Slurm. Only admins release a job that an admin holds. All jobs are tried. The exit
    status is 1 if one could not be released.
    """
    _each(jobs, lambda penstock, job: penstock.release(job), "is released; the next round considers it", as_json)


def _each(
    jobs: list[str], order: Callable[[Client, str], JobView], done: str, as_json: bool, running: str = ""
) -> None:
    """Give an order about each job. Exits with status 1 if one was refused.

    Args:
        jobs: their ids.
        order: gives it.
        done: is said of a job afterwards.
        as_json: whether to print the jobs instead.
        running: is said instead of a job that runs.
    """

    def give(penstock: Client) -> tuple[list[JobView], list[str]]:
        asked, refused = [], []
        for job in jobs:
            try:
                asked.append(order(penstock, job))
            except PenstockError as error:
                if error.exit_status != 1:
                    raise
                refused.append(f"job {job}: {error}")
        return asked, refused

    asked, refused = ask(give)
    if as_json:
        print_json(asked)
    for view in asked if not as_json else ():
        said = running if running and view.state == "running" else done
        typer.echo(f"Job {view.id} " + (f"had ended before: {view.ended}." if view.state == "ended" else f"{said}."))
    for text in refused:
        typer.echo(f"penstock: {text}", err=True)
    if refused:
        raise typer.Exit(1)


def cancel(jobs: list[str] = typer.Argument(help="Ids of the jobs in Slurm."), as_json: bool = JSON) -> None:
    """Cancel jobs.

    All jobs are tried. The exit status is 1 if one could not be cancelled.
    """
    _each(jobs, lambda penstock, job: penstock.cancel(job), "is being cancelled", as_json)


def _kept(kept: SqlStore, job: str) -> JobView:
    view = kept.job(job)
    if view is None:
        raise PenstockError(f"the store has no job {job}")
    return view


def _state(view: JobView) -> str:
    if view.state == "ended":
        return f"ended {view.ended}".rstrip()
    state = view.state if view.suspended is None else view.suspended.state
    return f"{state}, cannot save" if view.cannot_save else state


def _suspended(view: JobView) -> str:
    if view.suspended is None:
        return ""
    since_s = view.suspended.since_s
    return (f"since {local_time(since_s)}: " if since_s is not None else "") + view.suspended.text


def _holds(view: JobView) -> str:
    return _gpus(view.allocation)


def _gpus(allocation: AllocationView | None) -> str:
    return f"{allocation.gpus} {allocation.gpu_type}" if allocation else "-"


def _gpu_hours(view: JobView) -> str:
    return ", ".join(f"{hours(amount)} of {gpu_type}" for gpu_type, amount in sorted(view.gpu_seconds.items()))


def _result(view: JobView) -> str:
    result = view.result
    return f"{result.metric:.6g}, after it had run for {duration(result.ran_s)}" if result is not None else ""


def _progress(view: JobView) -> str:
    if view.progress is None:
        return "-"
    return f"{view.progress / view.total:.0%}" if view.total else f"{view.progress:,.0f} samples"
