"""A storm of jobs that share GPUs on two nodes: they come and go, migrate, and agents and penstockd are killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.wire import Observation
from penstock_scheduler.api.agent_messages import status_file
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

NODES = ("t4-00", "t4-01")
CONSTANTS: dict[str, dict[str, object]] = {"policy.gandiva": {"interval_s": 6.0, "pack_interval_s": 1e6}}
FAST = {"t4": {"1": 50.0}}
MOST_JOBS = 7
"""Of one GPU each, on four GPUs."""
LATE_S = 20.0
"""For so long more jobs may run on a node than it has GPUs: one that has just started runs until it is suspended, and an agent
that was killed is away for some seconds."""


def running(conf: Path, jobs: Collection[str]) -> dict[str, set[str]]:
    """Node -> jobs with a process there that is not stopped, by the kernel."""
    found: dict[str, set[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            pairs = (process / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        said = dict(pair.partition("=")[::2] for pair in pairs)
        job = said.get("SLURM_JOB_ID", "")
        if (
            state not in "TtZX"
            and said.get("SLURM_CONF") == str(conf)
            and job in jobs
            and "CUDA_VISIBLE_DEVICES" in said
        ):
            found.setdefault(said.get("SLURMD_NODENAME", ""), set()).add(job)
    return found


def progress(site: Site, job: str) -> float:
    seen = [report.body.progress for report in site.reports(job) if isinstance(report.body, Observation)]
    return max(seen, default=0.0)


@pytest.mark.parametrize("seconds", [40.0, pytest.param(900.0, marks=pytest.mark.long)])
def test_a_storm_of_jobs_that_share_on_two_nodes(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], seconds: float
) -> None:
    """No job is lost or fails, a node never runs more jobs than it has GPUs for long, some migrate, and in the end all train."""
    slurm = make_loopback("t4:2x2", agents=True)
    wait_for(lambda: all(status_file(slurm.spool, node).exists() for node in NODES), 120, "the agents to report")
    site = make_site(slurm, policy="gandiva", round_s=1.0)
    site.spool = slurm.spool
    site.slurm_settings |= {"agents": True}
    site.extra, site.constants = "\n[policy.gandiva]\nslice_s = 3.0\n", CONSTANTS
    site.start()
    drawn, jobs, nodes = random.Random(27), list[str](), dict[str, set[str]]()
    over_s = dict.fromkeys(NODES, 0.0)
    """Since when more jobs have run on the node than it has GPUs; 0: no more do."""
    cancelled: set[str] = set()

    def look() -> None:
        now_s = time.monotonic()
        for job in site.gateway.jobs():
            if job.id in jobs and job.state in ("RUNNING", "SUSPENDED"):
                nodes.setdefault(job.id, set()).update(job.nodes)
        there = running(slurm.slurm_conf, jobs)
        for node in NODES:
            over_s[node] = (over_s[node] or now_s) if len(there.get(node, ())) > 2 else 0.0
            assert not over_s[node] or now_s - over_s[node] < LATE_S, f"{there} {site.tail()}"

    until_s, moved = time.monotonic() + seconds, 0
    while time.monotonic() < until_s or not moved:
        assert time.monotonic() < until_s + 120, f"no job migrated: {nodes} {site.tail()}"
        alive = [job for job in jobs if job not in cancelled]
        what = drawn.choices(("submit", "cancel", "agent", "penstockd"), (5, 3, 1, 1))[0]
        if len(alive) < 3 or (what == "submit" and len(alive) < MOST_JOBS):
            jobs.append(site.submit(1e6, rates=FAST))
        elif what == "cancel":
            cancelled.add(drawn.choice(alive))
            site.slurm.command("scancel", *cancelled)
        elif what == "agent":
            node = drawn.choice(NODES)
            slurm.kill_agent(node)
            slurm.start_agent(node)
        elif what == "penstockd":
            site.kill()
            site.start()
        for _ in range(drawn.randint(1, 4)):
            look()
            time.sleep(1.0)
        moved = sum(len(where) > 1 for where in nodes.values())
    alive = [job for job in jobs if job not in cancelled]
    before = {job: progress(site, job) for job in alive}

    def all_train() -> bool:
        look()
        return all(progress(site, job) > before[job] for job in alive)

    wait_for(all_train, 180, "all jobs to train on", poll_s=1.0, details=site.tail)
    states = site.states(*jobs)
    assert {states[job] for job in alive if job in states} <= {"RUNNING", "SUSPENDED", "PENDING"}
    assert {states[job] for job in cancelled if job in states} <= {"CANCELLED", "COMPLETING"}
    assert "failed unexpectedly" not in site.log.read_text()
    print(f"{len(jobs)} jobs, {len(cancelled)} cancelled, {moved} migrated")
    site.slurm.command("scancel", *alive)
