"""Running jobs that cannot report: doctor fails and names them."""

from __future__ import annotations

import pytest

from penstock_loopback import wait_for
from penstock_slurm.install.sitefile import NAME
from tests.end_to_end.site import Site
from tests.end_to_end.test_health import doctor

pytestmark = pytest.mark.slurm


def report_check(site: Site) -> dict[str, object] | None:
    """What `penstock doctor` says about the reports of jobs; None: nothing."""
    return doctor(site)[1].get("job reports")


def submitted(site: Site) -> str:
    """A job of a user who has exported nothing."""
    words = ("--adaptive", "--max-gpus=1", "--output=/dev/null", f"--wrap={site.trainer(1000)}")
    return site.slurm.command("sbatch", "--parsable", *words).stdout.strip()


def test_doctor_fails_where_jobs_were_not_told_the_spool(flag_site: Site) -> None:
    """penstock_site.lua of an older release, or of another spool. Jobs whose user chose a spool are not the site's fault."""
    site = flag_site
    lua = site.slurm.slurm_conf.parent / NAME
    whole = lua.read_text()
    told = {}
    for name, text in {
        "good": whole,
        "none": "".join(line for line in whole.splitlines(keepends=True) if str(site.spool) not in line),
        "other": whole.replace(str(site.spool), f'{site.folder}/\\"old\\"'),
    }.items():
        lua.write_text(text)
        told[name] = submitted(site)
    told["own"] = site.submit_with_flags(1000, "--max-gpus=1")
    site.wait_states("RUNNING", *told.values())
    wait_for(lambda: len(site.all_reports()) == 2, 60, "reports of the others", details=site.tail)
    found = wait_for(lambda: report_check(site), 10, "doctor to fail")
    assert not found["ok"]
    assert f"running jobs that cannot report: {told['none']}, {told['other']};" in str(found["text"])
    site.slurm.command("scancel", told["none"], told["other"])
    wait_for(lambda: report_check(site) is None, 60, "doctor to be content", details=site.tail)
