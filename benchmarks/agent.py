"""Measures the cost of penstock-agent and how well jobs keep to their shares, with real processes and without a GPU.

    python benchmarks/agent.py cost [--minutes 3] [--jobs 8]
    python benchmarks/agent.py duty [--seconds 10]
    python benchmarks/agent.py antman [--periods 300]

`cost`: runs the agent as a process of its own, with `--jobs` jobs in time slices of 60 s on half as many GPUs. A stand-in for
`scontrol` sends the signals that Slurm sends. Processor time is that of the agent and of its commands; memory is its peak
resident size. Fails above 1 % of a core or 60 MiB.

`duty`: measures throughput under a duty cycle of 20, 50 and 80 %, relative to that without one, which is measured before and
after. Steps take 20 ms; one kind sleeps, as while a GPU works, and one kind computes. Fails if a sleeping one is off by more
than 5 points.

`antman`: runs a guaranteed job beside an opportunistic one on an emulated GPU (a locked file) that does one thing at a time.
Both need the GPU for half of each step; their steps take `--step` seconds and twice that. Both sleep instead of computing, as
while a GPU works, and the emulated GPU makes up for sleeping too long. If root starts the benchmark, they have priority over
all other programs, so that other load does not hide the effect of the control. TMPDIR=/dev/shm avoids the disk, too. Control
periods last 2 s. The feasible share of the opportunistic job is measured first, without an agent: shares from 4 to 32 %
alternate with share 0, and the feasible share is where the line through them makes the guaranteed job's steps 5 % longer. Then
the agent controls the share for `--periods` periods, and afterwards `--windows` windows of 12 s are measured. Fails if the
guaranteed job is more than 5 % slower in their median, or if the opportunistic job makes less than 90 % of the feasible steps.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobControl, JobStatus, control_path, statuses_dir
from penstock_scheduler.api.agent_messages import (
    NodeOrder,
    NodeStatus,
    OrderedGroup,
    OrderedJob,
    order_file,
    status_file,
)
from penstock_scheduler.model import JobId, Pack, SharedGpus

STEPPING = Path(__file__).parents[1] / "tests" / "executor" / "stepping.py"
NODE = "bench"
WINDOW_S = 12.0
SCONTROL = """#!/bin/sh
pid=$(cat {folder}/$2.pid)
case "$1" in
suspend) kill -TSTP $pid; (sleep 2; kill -STOP $pid) & ;;
resume) kill -CONT $pid ;;
esac
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "duty", "antman"])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--periods", type=int, default=300)
    parser.add_argument("--step", type=float, default=0.04)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        try:
            result, fine = {"cost": cost, "duty": duty, "antman": antman}[options.what](site, options)
        finally:
            site.close()
    result |= {"python": platform.python_version(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    print(json.dumps(result))
    sys.exit(0 if fine else 1)


class Site:
    """A spool, a node's folder, jobs and, on request, an agent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spool, self.run_dir = folder, folder / "spool", folder / "run"
        self.spool.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def agent(self) -> subprocess.Popen[bytes]:
        scontrol = self.folder / "bin" / "scontrol"
        scontrol.parent.mkdir()
        for name in ("scontrol", "squeue", "scancel"):
            scontrol.with_name(name).write_text(SCONTROL.format(folder=self.folder))
            scontrol.with_name(name).chmod(0o755)
        settings = self.folder / "penstock.toml"
        settings.write_text(
            f'[slurm]\npartitions = ["a"]\nspool_dir = "{self.spool}"\n[agent]\nrun_dir = "{self.run_dir}"\n'
            f'state_dir = "{self.folder}/state"\n'
        )
        command = [sys.executable, "-m", "penstock_slurm.agent.main", "--config", str(settings), "--node", NODE]
        environment = os.environ | {"PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
        with (self.folder / "agent.log").open("w") as log:
            self.processes.append(subprocess.Popen(command, env=environment, stderr=log))
        return self.processes[-1]

    def job(self, number: int, *arguments: str) -> None:
        statuses_dir(self.run_dir, number).mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": NODE}
        command = [sys.executable, str(STEPPING), str(self.run_dir), str(number), *arguments]
        self.processes.append(subprocess.Popen(command, env=environment))
        (self.folder / f"{number}.pid").write_text(str(self.processes[-1].pid))

    def order(self, packs: list[Pack], gpus: int, slice_s: float) -> None:
        shared = SharedGpus(NODE, gpus, tuple(packs), slice_s)
        jobs = tuple(
            OrderedJob(job=job, slurm_job=int(job), uid=os.getuid(), gpus=1, running=True) for job in shared.jobs
        )
        group = OrderedGroup(shared=shared, devices=tuple(range(gpus)))
        order = NodeOrder(node=NODE, number=1, written_s=time.time(), groups=(group,), jobs=jobs)
        path = order_file(self.spool, NODE)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, order.model_dump_json())

    def tell(self, number: int, control: JobControl) -> None:
        write_whole(control_path(self.run_dir, number), control.model_dump_json())

    def said(self, number: int) -> JobStatus:
        return JobStatus.model_validate_json((statuses_dir(self.run_dir, number) / "0.json").read_bytes())

    def steps(self, number: int, seconds: float) -> tuple[float, float]:
        """Steps per second and seconds per step, measured over the next `seconds`."""
        before = self.said(number)
        time.sleep(seconds)
        after = self.said(number)
        made = after.steps - before.steps
        return made / (after.time_s - before.time_s), (after.seconds - before.seconds) / max(made, 1)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def cost(site: Site, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    for number in range(1, options.jobs + 1):
        site.job(number, "--step", "0.1")
    site.order([Pack((JobId(str(number)),)) for number in range(1, options.jobs + 1)], options.jobs // 2, 60.0)
    agent = site.agent()
    time.sleep(15)
    before, began_s = cpu_s(agent.pid), time.monotonic()
    time.sleep(60 * options.minutes)
    used, seconds = cpu_s(agent.pid) - before, time.monotonic() - began_s
    text = Path(f"/proc/{agent.pid}/status").read_text()
    rss_mb = int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    suspended = (site.folder / "agent.log").read_text().count(" event=suspended ")
    share = 100 * used / seconds
    print(f"{options.jobs} jobs, {seconds:.0f} s: {share:.2f} % of a core, {rss_mb:.1f} MiB, {suspended} suspended")
    result = {
        "jobs": options.jobs,
        "seconds": seconds,
        "core_percent": share,
        "rss_mib": rss_mb,
        "suspended": suspended,
    }
    return result, share < 1 and rss_mb < 60


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(each) for each in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def duty(site: Site, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    result: dict[str, object] = {}
    fine = True
    for number, (kind, arguments) in enumerate({"sleeps": (), "computes": ("--busy",)}.items(), start=1):
        site.job(number, "--step", "0.02", *arguments)
        control = 0

        def speed(share: float, number: int = number) -> float:
            nonlocal control
            control += 1
            site.tell(number, JobControl(number=control, compute=share))
            wait_for(lambda: site.said(number).number == control)
            return site.steps(number, options.seconds)[0]

        wait_for((statuses_dir(site.run_dir, number)).is_dir)
        for share in (0.2, 0.5, 0.8):
            free = [speed(1.0)]
            held = speed(share)
            free.append(speed(1.0))
            found = held / statistics.fmean(free)
            fine = fine and (kind != "sleeps" or abs(found - share) <= 0.05)
            print(f"{kind}: {share:.0%} -> {found:.1%}")
            result[f"{kind}_{share:g}"] = found
        site.tell(number, JobControl(number=control + 1, compute=0.0))
    return result, fine


def antman(site: Site, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    gpu = str(site.folder / "gpu")
    for number, step in ((1, options.step), (2, 2 * options.step)):
        site.job(number, "--step", str(step), "--gpu", gpu)
        with contextlib.suppress(PermissionError):  # a GPU does not wait for other programs
            os.sched_setscheduler(site.processes[-1].pid, os.SCHED_FIFO, os.sched_param(1))
        site.tell(number, JobControl(number=1, compute=float(number == 1)))
    wait_for(lambda: site.said(1).steps > 50 and site.said(2).number == 1)
    alone_s, feasible, feasible_steps = by_hand(site, options.rounds)
    site.order([Pack((JobId("1"), JobId("2")), guaranteed=JobId("1"))], 1, 2.0)
    site.agent()
    windows = [watch(site, alone_s) for _ in range(round(2.0 * options.periods / WINDOW_S))]
    settled = [watch(site, alone_s) for _ in range(options.windows)]
    slower = sorted(slowdown for slowdown, _, _ in settled)
    steps = statistics.fmean(each for _, each, _ in settled) / feasible_steps
    result = {
        "alone_s": alone_s,
        "feasible_share": feasible,
        "share": statistics.median(share for _, _, share in settled),
        "slowdown": statistics.median(slower),
        "mean_slowdown": statistics.fmean(slower),
        "worst_slowdown": slower[-1],
        "worst_slowdown_before": max(slowdown for slowdown, _, _ in windows),
        "opportunistic_of_feasible": steps,
    }
    return result, statistics.median(slower) <= 0.05 and steps >= 0.9


def watch(site: Site, alone_s: float) -> tuple[float, float, float]:
    """The guaranteed job's slow-down in a window, and the opportunistic job's steps per second and final share."""
    before, opportunistic = site.said(1), site.said(2)
    time.sleep(WINDOW_S)
    slowdown = step_s(before, site.said(1)) / alone_s - 1
    after = site.said(2)
    steps = (after.steps - opportunistic.steps) / (after.time_s - opportunistic.time_s)
    status = NodeStatus.model_validate_json(status_file(site.spool, NODE).read_bytes())
    print(f"{slowdown:+.1%} share {status.groups[0].share:.3f} opportunistic {steps:.2f} steps/s", flush=True)
    return slowdown, steps, status.groups[0].share


def step_s(before: JobStatus, after: JobStatus) -> float:
    return (after.seconds - before.seconds) / (after.steps - before.steps)


def by_hand(site: Site, rounds: int) -> tuple[float, float, float]:
    """Seconds per step at share 0; the share at which the guaranteed job is 5 % slower, and the other job's steps per second
    there."""
    control = 1

    def measure(share: float) -> tuple[float, float]:
        nonlocal control
        control += 1
        site.tell(2, JobControl(number=control, compute=share))
        wait_for(lambda: site.said(2).number == control)
        since_s = site.said(2).time_s
        wait_for(lambda: site.said(1).time_s > since_s)
        before, opportunistic = site.said(1), site.said(2)
        time.sleep(4)
        after = site.said(2)
        return step_s(before, site.said(1)), (after.steps - opportunistic.steps) / max(
            after.time_s - opportunistic.time_s, 1
        )

    shares = (0.04, 0.08, 0.12, 0.16, 0.2, 0.24, 0.28, 0.32)
    alone: list[float] = []
    beside: dict[float, list[float]] = {share: [] for share in shares}
    steps: dict[float, list[float]] = {share: [] for share in shares}
    for _ in range(rounds):
        for share in shares:
            alone.append(measure(0.0)[0])
            seconds, made = measure(share)
            beside[share].append(seconds)
            steps[share].append(made)
    # A pause of the machine makes one measurement slower and the next one, which catches up, faster. So use medians.
    alone_s = statistics.median(alone)
    slower = [statistics.median(beside[share]) / alone_s - 1 for share in shares]
    made = [statistics.fmean(steps[share]) for share in shares]
    for share, slowdown, each in zip(shares, slower, made, strict=True):
        print(f"by hand: share {share:.2f}: {slowdown:+.2%}, opportunistic {each:.2f} steps/s", flush=True)
    # Through the origin: the errors of single shares are larger than what a curve would explain.
    slope = sum(share * slowdown for share, slowdown in zip(shares, slower, strict=True)) / sum(s * s for s in shares)
    a_step = sum(share * each for share, each in zip(shares, made, strict=True)) / sum(s * s for s in shares)
    feasible = 0.05 / slope
    low, _, high = statistics.quantiles(alone, n=4)
    print(
        f"alone {1000 * alone_s:.2f} ms a step (4 s each; quartiles {1000 * low:.2f} and {1000 * high:.2f}); "
        f"feasible {feasible:.3f}",
        flush=True,
    )
    return alone_s, feasible, a_step * feasible


def wait_for(what) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            if what():
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > end_s:
            sys.exit("a job does not answer")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
