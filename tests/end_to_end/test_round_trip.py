"""sbatch -> snapshot -> decision -> placed, resized, moved and finished on a real Slurm."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.store.sql import SqlStore, open_store
from penstock_slurm.gateway import SlurmJob
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm


def only(gpu_type: str) -> dict[str, dict[str, float]]:
    return {gpu_type: RATES[gpu_type]}


def test_jobs_run_on_all_three_types_and_complete(site: Site):
    jobs = {gpu_type: site.submit(4, rates=only(gpu_type)) for gpu_type in RATES}
    site.wait_completed(*jobs.values())
    for gpu_type, job in jobs.items():
        assert [start[0] for start in site.starts(job)] == [gpu_type]
        assert site.job(job).restarts == 0


def test_a_job_grows_from_1_to_4_to_16_gpus_and_keeps_its_progress(site: Site):
    """Other jobs hold its preferred GPUs: first all but one, then all but four of its node."""
    blockers = [
        site.slurm.command(
            "sbatch", "--parsable", "-w", node, f"--gres=gpu:{gpus}", "--wrap", "sleep 600"
        ).stdout.strip()
        for node, gpus in (("a100-00", 7), ("a100-01", 8))
    ]
    site.wait_states("RUNNING", *blockers)
    job = site.submit(100_000, rates=only("a100"), max_gpus=16)
    wait_for(lambda: len(site.starts(job)) == 1, 120, "the first run", details=site.tail)
    site.slurm.command("scancel", blockers[0])
    blockers[0] = site.slurm.command(
        "sbatch", "--parsable", "-w", "a100-00", "--gres=gpu:4", "--wrap", "sleep 600"
    ).stdout.strip()
    wait_for(lambda: len(site.starts(job)) > 1, 120, "the second run", details=site.tail)
    pause(1.5)
    site.slurm.command("scancel", *blockers)
    wait_for(lambda: site.starts(job)[-1][1] == 16, 180, "all GPUs", details=site.tail)
    site.wait_round(site.wait_round() + 1)
    site.slurm.command("scancel", job)
    site.wait_states("CANCELLED", job)
    starts = site.starts(job)
    assert starts[0][1:] == (1, 0)
    assert all(few < many for (_, few, _), (_, many, _) in pairwise(starts)), (
        "1, 4, 16; a round may see GPUs become free one by one"
    )
    assert all(before < after for (_, _, before), (_, _, after) in pairwise(starts))
    site.assert_progress_kept(job, lost=1.0)
    site.assert_no_run_twice(job)
    # All moves were measured, and the next round uses the measured cost, not the 1 s of the settings.
    assert site.log.read_text().count(f"job={job} pause_s=") == len(starts) - 1
    last = open_store(site.state).last_round()
    assert last is not None
    costs = [
        (each.pauses_s, record.snapshot.facts[job].restart_cost_s)
        for number in range(1, last.snapshot.round + 1)
        for record in [open_store(site.state).round(number)]
        for each in record.snapshot.jobs
        if each.id == job
    ]
    assert costs[0] == ((), 1.0)
    pauses_s, cost_s = costs[-1]
    assert len(pauses_s) == len(starts) - 1
    assert all(each >= 1.2 for each in pauses_s), "at least the pause that Slurm needs between two runs"
    assert cost_s == pytest.approx(sum(pauses_s) / len(pauses_s))
    newest = site.wait_round()
    seen = {
        each.submit_s
        for number in range(1, newest + 1)
        for each in open_store(site.state).round(number).snapshot.jobs
        if each.id == job
    }
    assert len(seen) == 1, "Slurm resets SubmitTime at a requeue, but a job's age must not change"


def test_an_unknown_job_is_measured_on_each_type_and_then_has_the_fastest(loopback, make_site):
    """It uses its own measurements: an A100 is four times as fast as a T4, and twice as fast as an RTX."""
    site: Site = make_site(loopback)
    site.extra = "[policy.sia]\nmeasure_gpu_s = 600.0\n"  # on a busy machine a start takes long
    site.start()
    store = open_store(site.state)
    job = site.submit(2000, goodput_table=None, max_gpus=4)
    wait_for(lambda: len(site.starts(job)) >= 3, 240, "the third type", details=site.tail)

    def all_measured():
        return not any(known.unmeasured_types for known in store.last_round().snapshot.facts.values())

    wait_for(all_measured, 180, "all reports", details=site.tail)
    wait_for(lambda: site.starts(job)[-1][0] == "a100", 180, "the fastest type", details=site.tail)
    runs = [(gpu_type, gpus) for gpu_type, gpus, _ in site.starts(job)]
    assert sorted(runs[:3]) == [("a100", 1), ("rtx", 1), ("t4", 1)]
    assert {gpu_type for gpu_type, _ in runs[3:]} <= {"a100"}
    said = [told(store, job, f" {number} of 3 types") for number in (1, 2, 3)]
    kinds = "|".join(RATES)
    for number, text in enumerate(said, 1):
        assert re.fullmatch(rf"(is to be measured|being measured) on ({kinds}), {number} of 3 types", text)
    site.assert_progress_kept(job, lost=1.0)
    site.slurm.command("scancel", job)


def told(store: SqlStore, job: str, words: str) -> str:
    """The reason with these words that a round gave for the job's allocation; empty if there is none yet."""
    for number in store.round_numbers():
        given = store.round(number).plan.assignments.get(job)
        if given is not None and given.reason.text.endswith(words):
            return given.reason.text
    return ""


@pytest.mark.long
def test_a_rigid_job_changes_type_only(site: Site):
    rates = {"t4": {"4": 4.0}, "rtx": {"4": 12.0}}
    blockers = [
        site.slurm.command("sbatch", "--parsable", "-w", node, "--gres=gpu:8", "--wrap", "sleep 600").stdout.strip()
        for node in ("rtx-00", "rtx-01")
    ]
    site.wait_states("RUNNING", *blockers)
    job = site.submit(150, rates=rates, adaptivity="rigid", min_gpus=4, max_gpus=4)
    wait_for(lambda: site.starts(job), 120, "the first run", details=site.tail)
    pause(4)  # old enough that moving pays for the restart
    site.slurm.command("scancel", *blockers)
    wait_for(lambda: len(site.starts(job)) == 2, 120, "the second run", details=site.tail)
    site.wait_states("COMPLETED", job)
    assert [(gpu_type, gpus) for gpu_type, gpus, _ in site.starts(job)] == [("t4", 4), ("rtx", 4)]
    site.assert_progress_kept(job, lost=1.0)


def test_a_job_that_does_not_answer_is_stopped_all_the_same_and_told(make_site, loopback):
    """It claims to read requests, but does not. When its time to save is over, Slurm's signals end it."""
    site: Site = make_site(loopback)
    site.slurm_settings["checkpoint_wait_s"] = 3
    site.start()
    blockers = [
        site.slurm.command("sbatch", "--parsable", "-w", node, "--gres=gpu:8", "--wrap", "sleep 600").stdout.strip()
        for node in ("a100-00", "a100-01")
    ]
    site.wait_states("RUNNING", *blockers)
    program = (
        "import time; from penstock_executor import connect; from penstock_profiles.wire import Started; "
        "connect().report(Started(gpu_type='t4', gpu_ids={'t4-00': (0,)})); time.sleep(600)"
    )
    comment = json.dumps(
        {"penstock": {"goodput_table": {"t4": {"1": 1.0}, "a100": {"1": 9.0}}, "checkpointable": True}}
    )
    options = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", f"--output={site.folder}/%j.out")
    job = site.sbatch(*options, f'--wrap=exec {sys.executable} -c "{program}"')
    wait_for(lambda: len(site.starts(job)) == 1, 120, "the first run", details=site.tail)
    pause(4)  # old enough that moving pays for the restart
    site.slurm.command("scancel", *blockers)
    wait_for(lambda: len(site.starts(job)) == 2, 120, "the second run", details=site.tail)
    assert site.job(job).nodes[0].startswith("a100")
    told = json.loads(site.job(job).admin_comment)["penstock_says"]
    assert "it did not save within" in told
    states = [line.split(" state=")[1].split()[0] for line in site.log.read_text().splitlines() if " state=" in line]
    # Slurm may finish starting or stopping it between two observations.
    assert [state for state in states if state not in ("placing", "stopping")][:3] == [
        "held",
        "running",
        "checkpointing",
    ]
    assert states[states.index("checkpointing") + 1] in ("stopping", "held")
    site.slurm.command("scancel", job)
    wait_for(lambda: "state=done" in site.log.read_text(), 120, "the daemon to see its end", details=site.tail)


def test_jobs_that_penstock_does_not_manage_are_never_touched(site: Site):
    """A plain job, a job with a foreign comment and a job held by its user stay unchanged while managed jobs start and end."""
    plain = site.slurm.command("sbatch", "--parsable", "--gres=gpu:3", "-p", "t4", "--wrap", "sleep 600").stdout.strip()
    foreign = site.slurm.command(
        "sbatch", "--parsable", "--gres=gpu:1", '--comment={"ticket": 7}', "--wrap", "sleep 600"
    ).stdout.strip()
    held = site.slurm.command("sbatch", "--parsable", "--hold", "--gres=gpu:1", "--wrap", "true").stdout.strip()
    site.wait_states("RUNNING", plain, foreign)

    def seen() -> dict[str, SlurmJob]:
        return {job: site.job(job) for job in (plain, foreign, held)}

    before = seen()
    ours = [site.submit(3, max_gpus=16) for _ in range(4)]
    site.wait_states("COMPLETED", *ours)
    assert seen() == before


def test_bad_specs_are_refused_in_words_that_the_user_can_read_and_the_rest_goes_on(site: Site):
    def comment(**fields: object) -> str:
        return json.dumps({"penstock": fields})

    bad = {
        "{'penstock': {'max_gpus': 4}}": "not JSON",
        comment(max_gpus=2, min_gpus=4): "max_gpus=2 is less than min_gpus=4",
        comment(max_gpu=4): "unknown key 'max_gpu'",
        comment(max_gpus=4, model_family="gpt-9"): "unknown model family 'gpt-9'",
    }
    refused = {
        site.sbatch("--hold", "--gres=gpu:1", f"--comment={text}", "--wrap=true"): words for text, words in bad.items()
    }
    typed = site.sbatch("--hold", "--gres=gpu:t4:1", f"--comment={comment(max_gpus=4)}", "--wrap=true")
    refused[typed] = "--gres=gpu:1"
    never = site.submit(5, gpu_types=["h100"])
    fine = site.submit(2)
    site.wait_states("COMPLETED", fine)
    number = 0
    for _ in range(3):  # the message to a job stays the same, although it quotes a job spec
        number = site.wait_round(number)
        for job, words in refused.items():
            assert words in json.loads(site.job(job).admin_comment)["penstock_says"]
            assert site.states(job) == {job: "PENDING"}
    record = open_store(site.state).round(number)
    assert "no node here has h100" in record.plan.waiting[never].text
    assert len(record.snapshot.refused) == len(refused)


def test_a_real_training_is_moved_twice_and_ends_with_the_weights_of_one_that_was_not(site: Site):
    """The NumPy example through sbatch. Its user requeues it twice, and its final weights are the same to the bit."""
    program = Path(__file__).parents[2] / "examples" / "numpy_mlp" / "train.py"

    def submit(name: str) -> str:
        comment = json.dumps({"penstock": {"adaptivity": "rigid"}})
        script = (
            f"exec {sys.executable} {program} --steps 8000 --checkpoint-every 500 "
            f"--checkpoint-dir {site.folder}/{name} --weights {site.folder}/{name}.npz"
        )
        options = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", f"--output={site.folder}/%j.out")
        return site.sbatch(*options, f"--wrap={script}")

    moved, alone = submit("moved"), submit("alone")
    for run in (1, 2):
        wait_for(lambda run=run: len(site.starts(moved)) == run, 120, f"run {run}", details=site.tail)
        pause(2)
        site.slurm.command("scontrol", "requeue", moved)
    site.wait_completed(moved, alone)
    assert len(site.starts(moved)) == 3
    assert len(site.starts(alone)) == 1
    assert site.starts(moved)[-1][2] > 0
    weights = [np.load(site.folder / f"{name}.npz") for name in ("moved", "alone")]
    for key in weights[1].files:
        assert np.array_equal(weights[0][key], weights[1][key])
