"""The same jobs under plain Slurm and under Penstock, and where the two runs differ."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock_loopback import CommandFailed, wait_for
from penstock_loopback.fixtures import skip_without_slurm, started
from tests.end_to_end.site import Site
from tests.reality.cluster import Configuration, Request, SiteCluster

STARTED = ("RUNNING", "CONFIGURING", "COMPLETING", "COMPLETED", "SUSPENDED")

BROKEN = "until the site's admin has fixed this"
"""What job_submit.lua says of an error of its own."""

ROUND_S = 1.0

SETTLED_S = 1.5
"""Without a start for so long, plain Slurm has started what it can; its scheduler runs each second."""

SLURM_S = 4.0
"""How long Slurm and a busy machine may take to start a job that a round has sent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of one submission: sbatch's message if it was refused, otherwise how many of its jobs have started."""

    request: Request
    refused: str = ""
    started: int = 0
    why: str = ""
    """Slurm's reason for the elements that wait."""

    def __str__(self) -> str:
        fate = f"refused: {self.refused}" if self.refused else f"{self.started} started {self.why}"
        return f"{self.request.options}: {fate}"


class Differential:
    """A site that runs cases twice."""

    def __init__(self, cluster: SiteCluster, folder: Path) -> None:
        self.cluster = cluster
        self.site = Site(cluster, folder)
        self.site.partitions = list(cluster.site.managed)
        self.site.settings |= {"round_s": ROUND_S, "tick_s": 0.1}

    def command(self, *argv: str) -> str:
        """The output of one of Slurm's commands."""
        return self.cluster.command(*argv).stdout

    def plain(self, requests: Sequence[Request]) -> list[Outcome]:
        """The run without Penstock's flag."""
        return self._run(requests, adaptive=False)

    def adaptive(self, requests: Sequence[Request], wanted: Sequence[Outcome]) -> list[Outcome]:
        """The run with it; ends when all that is wanted has started, or two rounds later."""
        return self._run(requests, adaptive=True, wanted=wanted)

    def _run(self, requests: Sequence[Request], *, adaptive: bool, wanted: Sequence[Outcome] = ()) -> list[Outcome]:
        if self.cluster.site.asleep:
            wait_for(
                lambda: set(self.command("sinfo", "-hNa", "-o", "%t").split()) == {"idle~"}, 90, "all nodes to sleep"
            )
        try:
            sent = [self._submit(each, adaptive=adaptive) for each in requests if not each.adaptive]
            self._settle([job for job, _ in sent if job])
            sent += [self._submit(each, adaptive=adaptive) for each in requests if each.adaptive]
            jobs = [job for job, _ in sent]
            if adaptive:
                target = {job: each.started for job, each in zip(jobs, wanted, strict=True) if job}
                self._two_rounds(target)
            else:
                self._settle([job for job in jobs if job])
            started, why = self.started()
            ordered = [each for each in requests if not each.adaptive] + [each for each in requests if each.adaptive]
            return [
                Outcome(request, said, started[job], why.get(job, ""))
                for request, (job, said) in zip(ordered, sent, strict=True)
            ]
        finally:
            self.clean()

    def submit(self, request: Request, *more: str) -> tuple[str, str]:
        """The job's id and sbatch's message if it is refused, one of them empty."""
        options = [*shlex.split(request.options), *more]
        try:
            done = self.cluster.command("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 600")
        except CommandFailed as error:
            return "", str(error)
        return done.stdout.strip().partition(";")[0], ""

    def _submit(self, request: Request, *, adaptive: bool) -> tuple[str, str]:
        return self.submit(request, *(["--adaptive"] if adaptive and request.adaptive else []))

    def started(self) -> tuple[Counter[str], dict[str, str]]:
        """Job -> number of its elements that have started, and Slurm's reason for others."""
        started, why = Counter[str](), dict[str, str]()
        for line in self.command("squeue", "-hra", "-t", "all", "-o", "%F|%T|%r").splitlines():
            job, state, reason = line.split("|")
            if state in STARTED:
                started[job] += 1
            else:
                why[job] = f"{state} {reason}"
        return started, why

    def _settle(self, jobs: list[str]) -> None:
        if not jobs:
            return
        last, since_s = None, time.monotonic()
        while time.monotonic() - since_s < SETTLED_S:
            started, why = self.started()
            if (started, why) != last:
                last, since_s = (started, why), time.monotonic()
            if not why:
                return
            time.sleep(0.1)

    def _two_rounds(self, target: dict[str, int]) -> None:
        """Wait until so many have started, at most two whole rounds and the time that Slurm takes."""

        def done() -> bool:
            started, _ = self.started()
            return all(started[job] >= count for job, count in target.items())

        first = self.site.wait_round()  # it may have begun too early to see the last job
        self.site.wait_round(after=first + 2)
        with contextlib.suppress(TimeoutError):
            wait_for(done, SLURM_S, "all to start")

    def clean(self) -> None:
        """Cancel all jobs and wait until they are gone."""

        def clean() -> bool:
            left = self.command("squeue", "-ha", "-o", "%A").split()
            if left:
                self.cluster.command("scancel", *left, check=False)
            busy = [
                state
                for state in self.command("sinfo", "-hNa", "-o", "%t").split()
                if state in ("alloc", "mix", "comp")
            ]
            return not left and not busy

        wait_for(clean, 60, "all jobs to be gone")


def differences(plain: Sequence[Outcome], adaptive: Sequence[Outcome]) -> list[str]:
    """Where Penstock's run falls behind plain Slurm's."""
    found = []
    for one, other in zip(plain, adaptive, strict=True):
        if BROKEN in other.refused:
            found.append(f"job_submit.lua failed: {other}")
        elif one.refused and not other.refused:
            found.append(f"accepted, and Slurm refuses it: {one}")
        elif other.started < one.started:
            found.append(f"Slurm starts {one.started}; Penstock: {other}")
    return found


@contextlib.contextmanager
def running(folder: Path, site: Configuration) -> Iterator[Differential]:
    """A site whose Slurm runs; penstockd is started by the caller. Skips the test if this machine cannot run it."""
    skip_without_slurm(accounting=bool(site.accounting))
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    (folder / "penstock").mkdir()
    with started(SiteCluster(folder / "slurm", site)) as cluster:
        for command in site.accounting:
            cluster.command("sacctmgr", "-i", *command)
        for command in site.updates:
            cluster.command("scontrol", "update", *command)
        if cluster.power is not None:
            cluster.power.serve(cluster)
        differential = Differential(cluster, folder / "penstock")
        try:
            yield differential
        finally:
            differential.site.stop()
