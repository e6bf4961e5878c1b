"""The command `penstock demo`."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock_loopback.demo.jobs import DEMO_ROUND_S, JOBS, NODES, TIME_SCALE, DemoJob, draw
from penstock_loopback.demo.report import render_page
from penstock_loopback.demo.simulated import simulate
from penstock_loopback.demo.site import DemoSite
from penstock_profiles.families import Families, load_families
from penstock_scheduler.cli.terminal.picture import recorded
from penstock_scheduler.cli.terminal.printed import render
from penstock_scheduler.people.drawing.history import History
from penstock_scheduler.people.errors import PenstockError, StoreError
from penstock_scheduler.store.sql import SqlStore, open_store

app = typer.Typer(help="Run the same jobs under Penstock and under plain Slurm, in about six minutes.")

LIMIT_S = 480.0
"""Real seconds after which the demo ends jobs that still run."""

NEXT_STEPS = (
    (
        "Run it again",
        "penstock demo writes this page again; --keep leaves the clusters' folder with logs, rounds and reports",
    ),
    ("Decide a round again, offline", "penstock rounds replay 42 --state FOLDER/penstock/state"),
    ("Start such a cluster for experiments", "penstock loopback up; then sbatch as in docs/user/jobs.md"),
    ("Install it beside your Slurm", "docs/admin/install.md: a settings file, penstockd --check, a systemd unit"),
    ("Understand how it decides", "docs/developer/architecture.md"),
    ("Write a policy", "CONTRIBUTING.md: one file and one line"),
)


@app.callback(invoke_without_command=True)
def demo(
    out: Path = typer.Option(Path("demo-report"), help="Folder for the report."),
    seed: int = typer.Option(1, help="Seed of the draw of the jobs."),
    simulated: bool = typer.Option(
        False, help="Without Slurm: the same jobs on the simulated cluster, compared with a simulated backfill."
    ),
    keep: bool = typer.Option(False, help="Keep the clusters' folder with logs, rounds and reports."),
) -> None:
    """Run the demo and write its report."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log file, in which the table of jobs needs the width
    families = load_families()
    if simulated:
        console.print(
            "this run uses the simulated cluster instead of Slurm, and a simulated backfill instead of plain Slurm's"
        )
        histories = simulate(seed, families)
        facts = {"What is real": "nothing: the simulated cluster of Penstock ran, see docs/developer/architecture.md"}
        ok = True
    else:
        histories, facts, ok = _run(console, families, seed, keep)
    out.mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    page.write_text(
        render_page(
            histories,
            heading=f"Penstock beside plain Slurm: the same {JOBS} jobs",
            facts=facts,
            time_scale=TIME_SCALE,
            next_steps=NEXT_STEPS,
        ),
        encoding="utf-8",
    )
    averages = [history.average_jct_s for history in histories]
    for history, average in zip(histories, averages, strict=True):
        done = sum(job.end_s is not None for job in history.jobs)
        words = f"{history.title}: {done} of {len(history.jobs)} jobs ended"
        if average is not None:
            words += f", average time from submission to end {average:.0f} s"
            words += f" ({average * TIME_SCALE / 60:.0f} emulated minutes)"
        console.print(words)
    ours, plain = averages
    if ours and plain:
        console.print(f"under Penstock, jobs ended {plain / ours:.2f} times as fast")
    console.print(f"the report: {page.resolve()}")
    if not ok:
        raise typer.Exit(1)


def _run(console: Console, families: Families, seed: int, keep: bool) -> tuple[list[History], dict[str, str], bool]:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    with ExitStack() as stack:
        sites = [
            DemoSite(folder / name, NODES, penstock=name == "penstock", round_s=DEMO_ROUND_S)
            for name in ("penstock", "plain")
        ]
        console.print(f"two Slurm clusters with {NODES} each, one under penstockd, in {folder}")
        for site in sites:
            stack.callback(site.down)
            site.up()
        version = sites[0].gateway.version()
        sites[0].next_round_s()
        begun_s = time.time()
        try:
            if not _play(console, families, draw(seed, families), sites, begun_s):
                console.print("[red]not all jobs ended in time; the report shows what has happened")
        except KeyboardInterrupt:
            console.print("stopped; the report shows what has happened")
        for site in sites:
            site.observe()
        ended_s = time.time()
        notes = (
            "Every two seconds, penstockd decides which GPUs each job has, and how many those have that are not rigid",
            "Each job has the GPUs that its user requested, and Slurm's backfill, here every second, decides when it starts",
        )
        titles = ("Under Penstock", "Under plain Slurm")
        histories = [
            site.history(title, note, begun_s, ended_s, families)
            for site, title, note in zip(sites, titles, notes, strict=True)
        ]
        ok = all(site.ended == JOBS and site.completed for site in sites)
    for site in sites:
        if site.daemon_died and not ok:
            console.print(f"[red]see {folder}/penstock/penstockd.log")
    if not keep and ok:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"kept: {folder}")
    expected = [history.average_jct_s or 0.0 for history in simulate(seed, families)]
    facts = {
        "Jobs": f"seed {seed}: drawn from a published workload (docs/developer/demo.md). Penstock may resize half of them; the "
        "others are rigid, and run from their start to their end on the GPUs that they asked for",
        "Expected by the simulator": "average time from submission to end "
        f"{expected[0]:.0f} s under Penstock and {expected[1]:.0f} s under plain Slurm",
        "Slurm": f"{version[0]:02d}.{version[1]:02d}, two loopback clusters on one machine",
        "What is real": "slurmctld, slurmd, munged, sbatch, penstockd, every job's process, its checkpoints and restarts",
        "What is emulated": "the GPUs, and the speed of training: each job progresses at the rate of its model family on its "
        "GPUs, which the scheduler knows from the same catalogue",
        "Time": f"one real second stands for {TIME_SCALE:g} emulated seconds; restarts take their real time",
        "To repeat": f"script/demo --seed {seed}",
    }
    return histories, facts, ok


def _play(
    console: Console, families: Families, jobs: list[tuple[DemoJob, float]], sites: list[DemoSite], begun_s: float
) -> bool:
    """Submit jobs and show progress until all jobs have ended. Returns False if they have not in time."""
    store = None
    todo = list(jobs)
    live = console.is_terminal and not console.is_dumb_terminal
    printed_s = 0.0
    # The alternate screen, because lines that a resized terminal wraps would stay on the normal one.
    with Live(console=console, auto_refresh=False, screen=True) if live else ExitStack() as screen:
        while True:
            elapsed_s = time.time() - begun_s
            while todo and elapsed_s >= todo[0][1]:
                job, _ = todo.pop(0)
                for site in sites:
                    site.submit(job, families)
            for site in sites:
                site.observe()
            if not todo and all(site.ended == len(jobs) for site in sites):
                return True
            if elapsed_s > LIMIT_S:
                return False
            if sites[0].daemon_died:
                raise PenstockError(f"penstockd ended unexpectedly; see {sites[0].folder}/penstockd.log")
            store = store or _store(sites[0].state)
            if isinstance(screen, Live):
                screen.update(_screen(store, sites, elapsed_s, len(todo)), refresh=True)
            elif elapsed_s - printed_s >= 15:
                printed_s = elapsed_s
                console.print(_progress(sites, elapsed_s, len(todo)))
                if (record := store.last_round() if store else None) is not None:
                    console.print(render(recorded(record)))
            time.sleep(0.5)


def _store(state: Path) -> SqlStore | None:
    try:
        return open_store(state)
    except StoreError:  # penstockd has not created it yet
        return None


def _progress(sites: list[DemoSite], elapsed_s: float, to_come: int) -> Text:
    minutes, seconds = divmod(int(elapsed_s), 60)
    text = f"{minutes}:{seconds:02d}  {to_come} jobs to come;  "
    for site in sites:
        running = sum(job.state == "RUNNING" for job in site.records.values())
        waiting = sum(job.state == "PENDING" for job in site.records.values())
        name = "Penstock" if site.penstock else "plain Slurm"
        text += f"{name}: {running} running, {waiting} waiting, {site.ended} ended;  "
    return Text(text.rstrip("; "), style="bold cyan")


def _screen(store: SqlStore | None, sites: list[DemoSite], elapsed_s: float, to_come: int) -> RenderableType:
    record = store.last_round() if store else None
    top: RenderableType = render(recorded(record)) if record is not None else Text("waiting for the first round")
    return Group(_progress(sites, elapsed_s, to_come), top)
