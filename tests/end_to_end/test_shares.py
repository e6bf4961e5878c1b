"""CPUs and memory of a plan on a real Slurm that allocates both."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile, SensitivityStore, read_profile
from penstock_scheduler.api.client import Client
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm

IMAGE = Sensitivity(1, (1, 3, 6, 9, 12), (60_000, 120_000), ((0.3, 0.3), (1, 1), (1.75, 1.75), (2, 2), (2, 3)))
LANGUAGE = Sensitivity(1, (1, 3), (20_000, 60_000), ((1, 1), (1, 1)))

OUTGROWS = "import time; time.sleep(1); held = bytearray(200 << 20); time.sleep(60)"


@pytest.fixture
def shared(make_loopback: MakeLoopback, make_site: Callable[..., Site], tmp_path: Path) -> Iterator[Site]:
    """Two nodes of 4 GPUs, 12 CPUs and 240 GB, and a daemon that decides by sia and synergy-tune."""
    slurm: LoopbackCluster = make_loopback(
        "t4:2x4:12c:240g",
        settings={
            "JobAcctGatherType": "jobacct_gather/linux",
            "JobAcctGatherFrequency": "task=1",
            "JobAcctGatherParams": "OverMemoryKill",
        },
    )
    store = SensitivityStore(tmp_path / "sensitivities")
    for name, table in (("image", IMAGE), ("language", LANGUAGE)):
        store.save(SensitivityProfile(name, (table,)))
    tiny = Sensitivity(1, (1,), (100,), ((1,),))
    store.save(SensitivityProfile("tiny", (tiny,)))
    site = make_site(slurm, stages=["synergy-tune"], sensitivities=str(tmp_path / "sensitivities"))
    site.start()
    return site


def given(site: Site, job_id: str) -> tuple[int, int, str]:
    """NumCPUs, CPUs/Task and MinMemoryNode of a job, from `scontrol show job`."""
    text = site.slurm.command("scontrol", "show", "job", job_id).stdout
    found = {key: re.search(rf"\b{key}=(\S+)", text) for key in ("NumCPUs", "CPUs/Task", "MinMemoryNode")}
    assert all(found.values()), text
    numbers = {key: match[1] for key, match in found.items() if match}
    return int(numbers["NumCPUs"]), int(numbers["CPUs/Task"]), numbers["MinMemoryNode"]


def in_mb(text: str) -> float:
    """Slurm writes 120000M, or 58.59G of 1024 MB."""
    return float(text[:-1]) * {"M": 1, "G": 1024}[text[-1]]


def test_started_jobs_have_the_cpus_and_the_memory_of_the_plan(shared: Site):
    rates = {"t4": {"1": RATES["t4"]["1"]}}
    jobs = {
        "image": shared.submit(600, rates=rates, sensitivity="image"),
        "language": shared.submit(600, rates=rates, sensitivity="language"),
        "": shared.submit(600, rates=rates),
    }
    shared.wait_states("RUNNING", *jobs.values())
    newest = shared.wait_round()
    record = open_store(shared.state).round(newest)
    for job_id in jobs.values():
        share = record.plan.assignments[job_id].placement.shares[0]
        cpus, per_task, memory = given(shared, job_id)
        assert (cpus, per_task) == (share.cpus, share.cpus)
        assert in_mb(memory) == pytest.approx(share.memory_mb, abs=10)
    assert given(shared, jobs["image"])[0] == 12
    assert given(shared, jobs["language"])[0] == 1
    assert given(shared, jobs[""])[0] == 3, "without a profile, it has its GPU's proportional share"
    # They stay unchanged round after round: no job is restarted to get the share that it already has.
    shared.wait_round(after=newest + 2)
    assert shared.states(*jobs.values()) == dict.fromkeys(jobs.values(), "RUNNING")
    assert all(shared.job(job_id).restarts == 0 for job_id in jobs.values())
    # Three more jobs. The third finds GPUs only where the image model has all 12 CPUs, and needs its share of 3 CPUs. So the
    # image model is restarted with the rest.
    more = [shared.submit(600, rates=rates) for _ in range(3)]
    shared.wait_states("RUNNING", *more, *jobs.values())
    assert given(shared, jobs["image"])[0] == 9
    assert shared.job(jobs["image"]).restarts == 1
    # The trainer is only emulated and stays as fast as before. So its profile was wrong, and is corrected.
    learned = shared.state / "sensitivities" / "image.json"
    wait_for(learned.exists, 120, "a corrected profile", details=shared.tail)
    table = read_profile(learned).at(1)
    assert table is not None
    assert table.speed(9, 120_000) >= 2.5, "2 by the profile, 3 by what was measured"
    assert table.speed(12, 120_000) == 3
    shared.slurm.command("scancel", *jobs.values(), *more)


def test_a_job_that_outgrows_its_memory_is_reported_with_the_remedy(shared: Site):
    """By its profile, 100 MB are enough, but it uses 200 MB."""
    spec = '{"penstock": {"max_gpus": 1, "sensitivity": "tiny", "goodput_table": {"t4": {"1": 1.0}}}}'
    script = f"exec {sys.executable} -c '{OUTGROWS}'"
    job_id = shared.sbatch(
        "--hold", "--requeue", "--gres=gpu:1", f"--comment={spec}", f"--output={shared.folder}/%j.out", "--wrap", script
    )
    wait_for(lambda: "exceeded the 100 MB" in shared.log.read_text(), 120, "message about it", details=shared.tail)
    assert "measure it again" in shared.log.read_text()
    with Client(f"unix:{shared.state / 'api.sock'}") as penstock:
        told = penstock.wait(job_id, timeout_s=120).ended_text
        assert "exceeded the 100 MB" in told, "its user gets the message, too"
        assert "penstock profile sensitivity measure" in told
        assert told in penstock.explain(job_id).text
    assert "exceeded memory limit" in (shared.folder / f"{job_id}.out").read_text(), "it was Slurm that ended it"
