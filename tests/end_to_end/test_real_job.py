"""`penstock slurm check --submit` on a real Slurm: where a site is complete, and where a step is missing."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from penstock_scheduler.model import JobSpec, parse_spec
from penstock_slurm.install import real_job
from penstock_slurm.install.cli import app
from penstock_slurm.install.sitefile import NAME
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

STEPS = (
    "penstockd answers",
    "sbatch takes an adaptive job",
    "starts on a GPU",
    "the job finds its spool and writes its report",
    "its report reaches penstockd",
)


def submitted(site: Site) -> list[str]:
    """The lines about the real job, from `penstock slurm check --submit`."""
    done = CliRunner().invoke(app, ["check", "--no-jobs", "--submit", "--config", str(site.config)])
    lines = done.output.splitlines()
    assert not isinstance(done.exception, Exception), done.output
    first = next(index for index, line in enumerate(lines) if STEPS[0] in line)
    return lines[first:]


def test_a_real_job_tells_the_first_step_that_fails(flag_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site = flag_site
    whole = submitted(site)
    assert len(whole) == len(STEPS), whole
    for step, line in zip(STEPS, whole, strict=True):
        assert line.startswith("ok"), whole
        assert step in line
    site.stop()
    gone = submitted(site)
    assert gone[0].startswith("FAILED"), gone
    assert len(gone) == 2
    site.start()
    # penstock_site.lua of a site that does not tell jobs where the spool is: the job has no PENSTOCK_SPOOL.
    lua = site.slurm.slurm_conf.parent / NAME
    lua.write_text("".join(line for line in lua.read_text().splitlines(keepends=True) if str(site.spool) not in line))
    lost = submitted(site)
    assert lost[3].startswith("FAILED  the job finds its spool"), lost
    assert "PENSTOCK_SPOOL is not set in the job" in lost[4]
    assert len(lost) == 5
    # All GPUs are taken by a job that nobody may stop.
    monkeypatch.setattr(real_job, "START_WAIT_S", 5.0)
    every = [
        site.submit_with_flags(1000, f"--max-gpus={gpus}", f"--min-gpus={gpus}", f"--gpu-types={name}")
        for name, gpus in (("t4", 4), ("a100", 8))
    ]
    site.wait_states("RUNNING", *every)
    busy = submitted(site)
    assert busy[2].startswith("FAILED"), busy
    assert "run the check again later" in busy[3]
    assert site.states(*every) == dict.fromkeys(every, "RUNNING")
    checks = [job for job in site.gateway.jobs(finished=True) if job.name == "penstock-check"]
    assert checks
    assert {job.state for job in checks} <= {"COMPLETED", "FAILED", "CANCELLED"}
    assert parse_spec(checks[0].admin_comment) == JobSpec(max_gpus=1, preemptible=False)
