"""`penstock profile sensitivity`: measure, with a job's own program, how CPU and memory affect the speed of its model."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console

from penstock_profiles.profiles import ProfileError
from penstock_profiles.sensitivity import (
    MOST_RUNS,
    Sensitivity,
    SensitivityProfile,
    SensitivityStore,
    find_knee,
    knee,
    read_profile,
    with_less_memory,
)
from penstock_profiles.wire import MEASURING_VARIABLE, SPOOL_VARIABLE, Ended, Observation
from penstock_scheduler.cli.ask import JSON, print_table
from penstock_scheduler.cli.options import split
from penstock_scheduler.cli.profile import TICK_S, name_of, running, status_of, tail_of
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.store.spool import Spool

sensitivity = typer.Typer(no_args_is_help=True, help="Measure and show how CPU and memory affect a model's speed.")

JOB_ID = "1"
"""Job id of the program outside of a Slurm job."""


@sensitivity.command(context_settings={"allow_interspersed_args": False})
def measure(
    command: list[str] = typer.Argument(help="The job's program and its options, after --."),
    memory_gb: str = typer.Option(help="Amounts of memory for the table, GB for each GPU, such as 20,60,120."),
    model: str = typer.Option("", help="Name of the profile: the jobs' model family. Default: the script's name."),
    cpus: int | None = typer.Option(
        None, min=1, help="Most CPUs for each GPU. Default: all that this process may use."
    ),
    gpus: str = typer.Option(
        "1", help="Numbers of GPUs to make tables for, such as 1,2,4. The program is measured on one."
    ),
    dataset_mb: float = typer.Option(0.0, min=0.0, help="Size of the data set, MB; 0: it needs no cache."),
    dataset_samples: float = typer.Option(1.0, min=1.0, help="Samples in the data set."),
    storage_mb_s: float = typer.Option(500.0, min=0.001, help="The job's part of the storage's bandwidth, MB/s."),
    process_mb: float = typer.Option(
        0.0, min=0.0, help="Memory that the processes of one GPU need beside the cache, MB."
    ),
    seconds: float = typer.Option(
        20.0, min=0.1, help="Seconds for each run, from its second report on; the first includes the start."
    ),
    start_seconds: float = typer.Option(300.0, min=0.1, help="Seconds until the second report of a run at the latest."),
    out: Path = typer.Option(
        Path(), help="Folder for the profile, such as that of the setting daemon.sensitivities. Default: this folder."
    ),
) -> None:
    """Run a job's program on fewer and fewer CPUs, at most 8 times, and store its speed with each share.

    The program must train with its data loader and report as under Penstock, see docs/user/executor-inside.md. The effect of
    less memory is computed from the size of the data set and the bandwidth of its storage.
    """
    console = Console(highlight=False)
    there = sorted(os.sched_getaffinity(0))
    most = len(there) if cpus is None else cpus
    if most > len(there):
        raise ConfigError(f"--cpus={most}: this process may use {len(there)}; ask Slurm for more, or give fewer")
    counts, amounts = [round(count) for count in _numbers("--gpus", gpus)], _numbers("--memory-gb", memory_gb)
    name, tried = model or name_of(command), 0

    def samples_per_s(count: int) -> float:
        nonlocal tried
        tried += 1
        with console.status(f"run {tried}, of at most {MOST_RUNS}: {count} CPUs"), _on(there[:count]):
            speed = _speed(command, seconds, start_seconds, count)
        console.print(f"{count:>4} CPUs {speed:>10.1f} samples/s")
        return speed

    try:
        SensitivityStore(out).check(name)  # a wrong name is an error before anything runs
        speeds = find_knee(samples_per_s, most)
        tables = tuple(
            with_less_memory(
                count,
                {each * count: speed * count for each, speed in speeds.items()},
                [1000 * amount * count for amount in amounts],
                dataset_mb=dataset_mb,
                dataset_samples=dataset_samples,
                storage_mb_s=storage_mb_s,
                process_mb=process_mb * count,
            )
            for count in counts
        )
        path = SensitivityStore(out).save(SensitivityProfile(name, tables))
    except ProfileError as error:
        raise PenstockError(str(error)) from None
    console.print(f"{name}: as fast with {knee(speeds)} CPUs a GPU as with {most}, by {tried} runs", soft_wrap=True)
    for table in tables:
        _tell(table)
    console.print(f"stored in {path}", soft_wrap=True)


@sensitivity.command()
def show(
    profiles: list[Path] = typer.Argument(help="Files of profiles, or folders of them."), as_json: bool = JSON
) -> None:
    """Show profiles: the speed with each share, and the least share with which a job reaches its full speed."""
    files = [file for path in profiles for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    try:
        found = [read_profile(file) for file in files]
    except ProfileError as error:
        raise PenstockError(str(error)) from None
    if not found:
        raise PenstockError(
            f"no profile in {', '.join(map(str, profiles))}; make one with penstock profile sensitivity measure"
        )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    profile.model: {
                        table.gpus: [option._asdict() for option in table.options()] for table in profile.tables
                    }
                    for profile in found
                }
            )
        )
        return
    for profile in found:
        typer.echo(profile.model)
        for table in profile.tables:
            _tell(table)


def _tell(table: Sensitivity) -> None:
    demand = table.demand()
    rows = [
        (
            str(option.cpus),
            f"{option.memory_mb / 1000:.1f}",
            f"{option.speed:,.4g}",
            "demand" if option == demand else "",
        )
        for option in table.options()
    ]
    gpus = f"{table.gpus} GPU{'s' if table.gpus > 1 else ''}"
    print_table((f"CPUS, {gpus}", "MEMORY GB", "SPEED", ""), rows, "nothing")


def _numbers(option: str, text: str) -> list[float]:
    """Numbers above 0, ascending, each once. Raises ConfigError."""
    try:
        found = sorted({float(part) for part in split(text)})
    except ValueError:
        found = []
    if not found or found[0] <= 0:
        raise ConfigError(f"{option}={text!r}: give numbers above 0, such as 1,2,4")
    return found


@contextlib.contextmanager
def _on(cpus: list[int]) -> Iterator[None]:
    """Processes that are started in the block may use these CPUs only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _speed(command: list[str], seconds: float, start_seconds: float, cpus: int) -> float:
    """Samples/s of one run, by all reports but the first, which includes the start. Raises PenstockError."""
    with tempfile.TemporaryDirectory(prefix="penstock-sensitivity-") as name:
        spool, output = Spool(Path(name)), Path(name) / "output"
        job_id = os.environ.get("SLURM_JOB_ID", JOB_ID)
        environment = os.environ | {
            SPOOL_VARIABLE: name,
            MEASURING_VARIABLE: str(Path(name) / "checkpoints"),
            "SLURM_JOB_ID": job_id,
            "SLURM_CPUS_PER_TASK": str(cpus),  # many programs choose their number of workers by this
        }
        seen: list[Observation] = []
        until_s = time.monotonic() + start_seconds
        ended = None
        with running(command, environment, output) as child:
            while time.monotonic() < until_s and ended is None:
                status = status_of(child)  # before reading, so that its last report is not missed
                for report in spool.read([job_id]):
                    if isinstance(report.body, Observation):
                        if len(seen) == 1:
                            until_s = time.monotonic() + seconds
                        seen.append(report.body)
                    elif isinstance(report.body, Ended):
                        ended = report.body.text or report.body.outcome
                if status is not None:
                    ended = ended or f"status {status}"
                    break
                time.sleep(TICK_S)
        counted = seen[1:]
        if not counted:
            why = f"ended ({ended})" if ended is not None else f"did not within {start_seconds:g} s"
            raise PenstockError(
                f"with {cpus} CPUs the program {why} before its second report of its speed; let it train longer and "
                f"report as under Penstock, see docs/user/executor-inside.md{tail_of(output)}"
            )
    if (most := max(each.gpus for each in counted)) > 1:
        raise PenstockError(f"the program ran on {most} GPUs; let it use one; --gpus makes the tables for more")
    time_s = sum(each.steps * each.step_time_s for each in counted)
    return sum(each.steps * each.step_time_s * each.samples_per_s for each in counted) / time_s
