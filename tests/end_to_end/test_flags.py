"""A job submitted with sbatch's adaptive flags runs under a real penstockd."""

from __future__ import annotations

import json

import pytest

from penstock_scheduler.model import parse_spec
from penstock_slurm.loopback import wait_for
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


def test_a_job_with_flags_is_placed_within_its_spec_and_completes(flag_site: Site) -> None:
    job = flag_site.submit_with_flags(60, "--min-gpus=2", "--max-gpus=4", "--gpu-types=^t4", "--non-preemptible")
    flag_site.wait_completed(job)
    starts = flag_site.starts(job)
    assert starts
    assert {(gpu_type, gpus) for gpu_type, gpus, _ in starts} <= {("a100", 2), ("a100", 4)}


def test_what_the_daemon_says_stands_beside_the_spec(flag_site: Site) -> None:
    """The list for job_submit.lua is older than the daemon's catalogue, and has a family that was removed."""
    job = flag_site.sbatch("--adaptive", "--max-gpus=4", "--model-family=gone", "--wrap=true")
    before = parse_spec(flag_site.job(job).admin_comment)

    def told() -> bool:
        return "penstock_says" in flag_site.job(job).admin_comment

    wait_for(told, 120, "the daemon's message", details=flag_site.tail)
    after = flag_site.job(job).admin_comment
    assert "'gone'" in json.loads(after)["penstock_says"]
    assert parse_spec(after) == before
    number = flag_site.wait_round()
    flag_site.wait_round(number)
    assert flag_site.job(job).admin_comment == after  # and the message is not repeated
    assert flag_site.states(job) == {job: "PENDING"}
