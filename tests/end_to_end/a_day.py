"""An admin's day on a real Slurm with accounting: install by the pages, break what an admin breaks, uninstall.

`python -m tests.end_to_end.a_day` prints a line for each act and a table at the end, and exits with 1 if an act failed. Words
after it choose acts by parts of their names, beside the first three and the last; `--dir` keeps the site's files.
docs/measurements/a-day.md has the record of a run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.people.errors import PenstockError
from tests.end_to_end.day_site import NODES, DaySite, copy_of, over, remove_store
from tests.end_to_end.site import UNFORESEEN, pause, remove_node
from tests.folders import public_folder

ADAPTIVE = (1,) * 10 + (2,) * 6 + (4,) * 4
"""The most GPUs of each training job."""

GONE = "a100-02"
"""The node that the admin removes. No ordinary job is on it."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of an act. `wrong`: what should not have happened."""

    act: str
    happened: str
    seconds: float
    wrong: tuple[str, ...] = ()

    def line(self) -> str:
        """The row of the table."""
        told = "; ".join((self.happened, *self.wrong)).replace("|", "/").replace("\n", " ")
        return f"| {self.act} | {told} | {self.seconds:.0f} | {'FAIL' if self.wrong else 'ok'} |"


# --- the morning


def install(day: DaySite) -> str:
    """docs/admin/install.md."""
    return day.install()


def install_plugin(day: DaySite) -> str:
    """docs/admin/sbatch-plugin.md, up to a real job's report."""
    return day.install_plugin()


def submit(day: DaySite) -> str:
    """20 training jobs with the executor's reports, and 10 ordinary jobs."""
    day.ordinary += [day.plain(1, 100_000, f"--exclude={GONE}") for _ in range(10)]
    day.wait_states("RUNNING", *day.ordinary)
    day.adaptive += [day.train(gpus) for gpus in ADAPTIVE]
    wait_for(lambda: all(day.newest_runs().get(job) for job in day.adaptive), 240, "reports of all", details=day.tail)
    gpus = sum(job.gpus_counted.get("", 0) for job in day.jobs().values() if job.id in day.adaptive)
    return f"all 20 have reported, on {gpus} GPUs"


def two_addresses(day: DaySite) -> str:
    """A user exports PENSTOCK_URL with two addresses, one of which nobody serves."""
    words = ("--adaptive", "--checkpointable", "--max-gpus=1", f"--output={day.folder}/%j.out")
    exported = f"export PENSTOCK_URL=unix:{day.folder}/nobody.sock,{day.url}"
    job = day.sbatch(*words, f"--wrap={exported}; {day.trainer(20)}")
    wait_for(lambda: over(day, job), 240, "the job to end", details=day.tail)
    state = day.jobs()[job].state
    assert state == "COMPLETED", (day.folder / f"{job}.out").read_text()[-500:]
    return f"the job is {state}"


# --- slurmctld


def restart_slurmctld(day: DaySite) -> str:
    """Slurmctld is restarted."""
    day.slurm.stop_slurmctld()
    day.slurm.start_slurmctld()
    return settle(day)


def kill_slurmctld(day: DaySite) -> str:
    """kill -9 of slurmctld, and a start 20 s later. It forgets what it has started in the seconds since it saved its state."""
    settle(day)
    day.slurm.kill_slurmctld()
    told = wait_for(day.unhealthy, 90, "doctor to notice")
    pause(20)
    day.slurm.start_slurmctld()
    return f"doctor: {brief(told)}; {settle(day)}"


def freeze_slurmctld(day: DaySite) -> str:
    """SIGSTOP of slurmctld for 40 s."""
    begun = time.monotonic()
    os.kill(day.slurm.pid("slurmctld"), signal.SIGSTOP)
    try:
        told = day.wait_doctor("cluster has not answered")
        pause(max(0.0, 40 - (time.monotonic() - begun)))
    finally:
        os.kill(day.slurm.pid("slurmctld"), signal.SIGCONT)
    return f"doctor: {brief(told)}; {settle(day)}"


def reconfigure(day: DaySite) -> str:
    """scontrol reconfigure, three times."""
    for _ in range(3):
        day.admin("scontrol reconfigure")
        pause(2)
    return settle(day)


def partition_states(day: DaySite) -> str:
    """The partition is DOWN, DRAIN, INACTIVE and UP again."""
    told = []
    before = day.before()
    for state in ("DOWN", "DRAIN", "INACTIVE"):
        day.admin(f"scontrol update PartitionName=all State={state}")
        pause(12)
        told.append(f"{state}: {len(day.moved(before))} moved, doctor: {brief(day.unhealthy()) or 'ok'}")
    day.admin("scontrol update PartitionName=all State=UP")
    return "; ".join((*told, settle(day)))


# --- nodes


def drain(day: DaySite) -> str:
    """A node is drained and resumed."""
    day.admin("scontrol update NodeName=a100-00 State=DRAIN Reason=fan")
    wait_for(lambda: not on(day, "a100-00"), 180, "training jobs to leave a100-00", details=day.tail)
    pause(10)
    day.admin("scontrol update NodeName=a100-00 State=RESUME")
    return f"training jobs left it; {settle(day)}"


def reserve(day: DaySite) -> str:
    """A reservation takes a node for a maintenance, and ends."""
    flags = "Flags=MAINT,IGNORE_JOBS Users=root"
    day.admin(f"scontrol create reservation ReservationName=fans StartTime=now Duration=60 Nodes=a100-01 {flags}")
    pause(20)
    left = len(on(day, "a100-01"))
    day.admin("scontrol delete ReservationName=fans")
    before = day.before()
    told = settle(day, 30)
    changed = len(day.moved(before))
    assert changed <= 6, f"{changed} of 20 training jobs were stopped within 30 s of its end"
    return f"{left} training jobs on it under the reservation; {changed} moved after its end; {told}"


def lose_node(day: DaySite) -> str:
    """A node is drained, removed from slurm.conf, and slurmctld restarted. A job that ran there waits meanwhile."""
    waits = on(day, GONE)[:1]
    for job in waits:
        day.admin(f"scontrol requeuehold {job}")
    day.admin(f"penstock drain node {GONE} --why replaced")
    # A job that is stopped and not sent on yet still names the node, and slurmctld would fail it.
    elsewhere = [job for job in day.adaptive if job not in waits]
    left = lambda: not on(day, GONE) and all(day.jobs()[job].state == "RUNNING" for job in elsewhere)  # noqa: E731
    wait_for(left, 180, f"training jobs to leave {GONE} and to run again", details=day.tail)
    day.admin(f"scontrol update NodeName={GONE} State=DRAIN Reason=replaced")
    remove_node(day.slurm, GONE)
    day.admin("penstock slurm sync")
    day.admin(f"penstock drain node {GONE} --end")
    states = [day.jobs()[job].state for job in waits]
    assert states == ["PENDING"] * len(waits), f"jobs {waits} that ran there and waited are {states}"
    for job in waits:
        day.admin(f"scontrol release {job}")
    return f"{len(waits)} job that ran there waited, and runs again; {settle(day)}"


# --- jobs


def six_ordinary(day: DaySite) -> str:
    """Six ordinary jobs of two GPUs come while no GPU is free."""
    before = day.before()
    jobs = [day.plain(2, 20) for _ in range(6)]
    day.waited += jobs
    pause(3)
    queue = day.penstock("list", "--waiting")
    waiting = [job for job in jobs if day.jobs()[job].state == "PENDING"]
    unlisted = [job for job in waiting if not re.search(rf"\b{job}\b", queue)]
    wait_for(lambda: over(day, *jobs), 300, "the six to end", details=day.tail)
    stopped = len(day.moved(before))
    told = settle(day, 30)
    assert not unlisted or not waiting, f"jobs {unlisted} wait and are not in `list --waiting`: {queue}"
    return f"{len(waiting)} waited, all ended; {stopped} of 20 training jobs were moved, shrunk or stopped; {told}"


def two_hundred(day: DaySite) -> str:
    """180 adaptive and 20 ordinary jobs are submitted in a short time."""
    begun = time.monotonic()
    adaptive, ordinary = [], []
    for number in range(200):
        if number % 10 == 9:
            ordinary.append(day.plain(1, 2))
        else:
            adaptive.append(day.sbatch("--adaptive", "--max-gpus=1", "--output=/dev/null", "--wrap=sleep 2"))
    took = time.monotonic() - begun
    day.waited += ordinary
    wait_for(lambda: over(day, *ordinary), 300, "the ordinary jobs to end", details=day.tail)
    done = sum(day.jobs()[job].state == "COMPLETED" for job in adaptive)
    day.admin(f"scancel {' '.join(adaptive)}")
    wait_for(lambda: over(day, *adaptive), 120, "all to end", details=day.tail)
    return f"200 in {took:.0f} s; all 20 ordinary ended, and {done} adaptive ones, before the rest was cancelled; {settle(day)}"


def requeue_and_hold(day: DaySite) -> str:
    """scontrol requeue, hold, requeuehold and release of training jobs."""
    first, second, third = day.adaptive[:3]
    before = day.before()
    day.admin(f"scontrol requeue {first}")
    day.admin(f"scontrol hold {second}")
    day.admin(f"scontrol requeuehold {third}")
    wait_for(lambda: day.newest_runs()[first] > before.runs[first], 240, f"job {first} to run again", details=day.tail)
    assert day.jobs()[second].state == "RUNNING", "a running job runs on when it is held"
    told = wait_for(lambda: held(day, third), 60, f"explain of {third} to say that it is held", details=day.tail)
    day.admin(f"scontrol release {second} {third}")
    wait_for(lambda: day.newest_runs()[third] > before.runs[third], 240, f"job {third} to run again", details=day.tail)
    return f"explain: {brief(told)}; released, it runs again; {settle(day)}"


# --- penstockd


def bad_settings(day: DaySite) -> str:
    """The settings file has a mistake: --check, a reload and a start name it."""
    kept = copy_of(day.config)
    day.config.write_text(day.config.read_text() + "rund_s = 60\n")
    told = day.admin("penstockd --config /etc/penstock/penstock.toml --check", fails=True)
    assert "rund_s" in told, told
    assert day.daemon is not None
    assert day.daemon.pid is not None
    os.kill(day.daemon.pid, signal.SIGHUP)
    wait_for(lambda: "rund_s" in day.log.read_text(), 60, "the log to name the key", details=day.tail)
    assert day.runs, "penstockd keeps its settings"
    day.stop()
    day.start(wait=False)
    status = day.ended()
    assert status, "penstockd refuses to start"
    kept.replace(day.config)
    day.start()
    return f"--check: {brief(told)}; refused on reload and start (status {status}); {settle(day)}"


def kill_penstockd(day: DaySite) -> str:
    """kill -9 of penstockd, and a start."""
    day.kill()
    assert "penstockd" in day.unhealthy()
    day.start()
    return settle(day)


def lose_store(day: DaySite) -> str:
    """`rm penstock.db*` under a running penstockd, and a restart."""
    remove_store(day)
    told = day.wait_doctor("the store cannot be written")
    day.stop()
    remove_store(day)
    jobs = day.jobs()
    day.start()
    looks = wait_for(
        lambda: next((each for each in day.health().warnings if "only looks" in each), ""), 60, "the look to be told"
    )
    pause(10)
    same = [job for job in day.adaptive if day.jobs()[job].start_s == jobs[job].start_s]
    assert len(same) == len(day.adaptive), f"{len(day.adaptive) - len(same)} training jobs changed while it only looks"
    return f"doctor: {brief(told)}; after the restart: {brief(looks)}"


def uninstall(day: DaySite) -> str:
    """The plugin is uninstalled and penstockd stopped: jobs go on."""
    running = {job.id: job.start_s for job in day.jobs().values() if job.state == "RUNNING"}
    day.stop()
    shown = day.admin("penstock slurm uninstall")
    assert "nothing was changed" in shown
    day.admin("penstock slurm uninstall --apply")
    assert "unrecognized option" in day.admin("sbatch --adaptive --wrap=true", fails=True)
    pause(10)
    now = day.jobs()
    assert {job: now[job].start_s for job in running if now[job].state == "RUNNING"} == running
    leftovers = [path.name for path in day.slurm.slurm_conf.parent.iterdir() if "penstock" in path.name]
    assert leftovers == ["penstock.toml"], leftovers  # the loopback cluster's own
    plain = day.sbatch("--output=/dev/null", "--wrap=true")
    wait_for(lambda: over(day, plain), 60, "an ordinary job to end")
    return f"all {len(running)} running jobs run on; sbatch knows no --adaptive; ordinary jobs run"


# --- the day

MORNING: dict[str, Callable[[DaySite], str]] = {
    "install.md": install,
    "sbatch-plugin.md": install_plugin,
    "20 adaptive and 10 ordinary jobs": submit,
}
ACTS: dict[str, Callable[[DaySite], str]] = {
    "PENSTOCK_URL with two addresses": two_addresses,
    "slurmctld restarted": restart_slurmctld,
    "slurmctld killed with -9": kill_slurmctld,
    "slurmctld frozen for 40 s": freeze_slurmctld,
    "slurmctld reconfigured": reconfigure,
    "partition DOWN, DRAIN, INACTIVE, UP": partition_states,
    "node drained and resumed": drain,
    "reservation made and ended": reserve,
    "node removed": lose_node,
    "six ordinary jobs of 2 GPUs": six_ordinary,
    "200 jobs at once": two_hundred,
    "requeue, hold, requeuehold": requeue_and_hold,
    "bad settings": bad_settings,
    "penstockd killed with -9": kill_penstockd,
    "store removed": lose_store,
}


def settle(day: DaySite, least_s: float = 10) -> str:
    """Wait until every training job runs, or waits for GPUs, and rounds go on. Says how many run."""
    pause(least_s)
    wait_for(lambda: day.health().status == "ok", 120, "penstockd to be ready", details=day.unhealthy)

    def running() -> int:
        return sum(day.jobs()[job].state == "RUNNING" for job in day.adaptive)

    wait_for(lambda: running() == len(day.adaptive), 120, "all training jobs to run", details=day.tail)
    return f"{running()} of {len(day.adaptive)} training jobs run"


def on(day: DaySite, node: str) -> list[str]:
    """The training jobs on a node."""
    return [job for job, record in day.jobs().items() if job in day.adaptive and node in record.nodes]


def held(day: DaySite, job: str) -> str:
    """What explain says of a job, once it says that it is held."""
    told = day.penstock("explain", job)
    return told if "held" in told or "hold" in told else ""


def brief(text: str) -> str:
    """The first words of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 150 else f"{line[:147]}..."


def do(day: DaySite, name: str, act: Callable[[DaySite], str], *, last: bool = False) -> Row:
    """Do an act, look at everything, and print the row."""
    begun = time.monotonic()
    happened, wrong = "", list[str]()
    try:
        before = day.before() if day.adaptive and not last else None
        happened = act(day)
        if before is not None:
            wrong += day.wrong(before)
    except (AssertionError, OSError, PenstockError, subprocess.TimeoutExpired) as error:
        wrong.append(brief(str(error)) or repr(error))
        (day.folder / f"failed-{name.replace(' ', '-').replace('/', '-')}.txt").write_text(f"{error}\n{day.tail()}")
    row = Row(name, happened, time.monotonic() - begun, tuple(wrong))
    print(row.line(), flush=True)
    return row


def a_day(slurm: LoopbackCluster, folder: Path, chosen: tuple[str, ...] = ()) -> list[Row]:
    """The whole day, or its morning, the chosen acts and its end."""
    day = DaySite(slurm, folder)
    acts = {name: act for name, act in ACTS.items() if not chosen or any(each in name for each in chosen)}
    rows = []
    try:
        for name, act in MORNING.items():
            rows.append(do(day, name, act))
            if rows[-1].wrong:
                return rows  # nothing more can be said of a site that is not set up
        rows += [do(day, name, act) for name, act in acts.items()]
        rows.append(do(day, "uninstalled", uninstall, last=True))
    finally:
        day.stop()
        if day.log.exists() and UNFORESEEN in day.log.read_text():
            rows.append(Row("penstockd's log", "", 0, (f"it has: {UNFORESEEN}",)))
    return rows


def cluster(folder: Path) -> LoopbackCluster:
    """The Slurm of the day. Ended jobs are asked for at its end, and slurmctld forgets them after five minutes by default."""
    return LoopbackCluster(folder, NODES, accounting=True, settings={"MinJobAge": "7200"})


def table(rows: list[Row]) -> str:
    """All rows as a table."""
    return "\n".join(("| act | what happened | s | |", "| --- | --- | ---: | --- |", *(row.line() for row in rows)))


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.a_day", description=__doc__)
    parser.add_argument("acts", nargs="*", help="parts of the acts' names; none: the whole day")
    parser.add_argument("--dir", type=Path, help="an empty folder, which is kept")
    options = parser.parse_args(arguments)
    with public_folder() as passing:
        folder = passing if options.dir is None else options.dir.absolute()
        (folder / "site").mkdir(parents=True, exist_ok=True)
        with cluster(folder / "slurm") as slurm:
            print(f"{slurm.command('scontrol', '--version').stdout.strip()}, {NODES}, {folder}", flush=True)
            rows = a_day(slurm, folder / "site", tuple(options.acts))
    print(f"\n{table(rows)}")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
