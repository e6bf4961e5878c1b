"""Jobs run only on the nodes that their user allows, by --nodelist, --exclude and --constraint of the real sbatch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.model import Plan
from penstock_scheduler.store.sql import open_store
from penstock_slurm.submit.cli import app
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]


def newest_plan(site: Site) -> Plan:
    store = open_store(site.state)
    return store.round(store.round_numbers()[-1]).plan


def drain(site: Site, *nodes: str) -> None:
    site.slurm.command("scontrol", "update", f"NodeName={','.join(nodes)}", "State=DRAIN", "Reason=test")


def test_a_job_stays_on_allowed_nodes_over_moves_and_waits_for_one(
    make_flag_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes are drained one after the other. The A100s and t4-02 are idle all the time."""
    site = make_flag_site("t4:3x4,a100:1x8")
    site.start()
    flags = {
        "nodelist": ("--max-gpus=1", "--nodelist=t4-[00-01]"),
        "exclude": ("--max-gpus=1", "--exclude=a100-00,t4-02"),
        "constraint": ("--max-gpus=1", "--constraint=t4", "--exclude=t4-02"),
    }
    jobs = {name: site.submit_with_flags(10_000, *given) for name, given in flags.items()}
    site.wait_states("RUNNING", *jobs.values())
    wait_for(lambda: all(site.starts(job) for job in jobs.values()), 120, "first reports", details=site.tail)
    first = {site.job(job).nodes for job in jobs.values()}
    assert first <= {("t4-00",), ("t4-01",)}
    drain(site, "t4-00")
    wait_for(
        lambda: {site.job(job).nodes for job in jobs.values()} == {("t4-01",)},
        180,
        "t4-00 to be left",
        details=site.tail,
    )
    site.wait_states("RUNNING", *jobs.values())
    drain(site, "t4-01")
    late = site.submit_with_flags(10_000, "--max-gpus=1", "--nodelist=t4-[00-01]")
    wait_for(lambda: late in newest_plan(site).waiting, 120, "a round with the new job", details=site.tail)
    assert "takes new jobs now: all are down, silent or drained" in newest_plan(site).waiting[late].text
    socket = f"unix:{site.state / 'api.sock'}"
    for name, value in (site.slurm.environment() | {"PENSTOCK_URL": socket}).items():
        monkeypatch.setenv(name, value)

    def dry_run(*argv: str) -> str:
        return CliRunner().invoke(app, ["--dry-run", "--adaptive", *argv, "x.sh"]).output

    for given in flags.values():
        assert "takes new jobs now: all are down, silent or drained" in dry_run(*given)
    assert "The job would get" in dry_run("--max-gpus=1", "--exclude=t4-[00-01]")
    site.wait_round(site.wait_round(site.wait_round()))
    assert site.states(late) == {late: "PENDING"}
    site.slurm.command("scontrol", "update", "NodeName=t4-00", "State=RESUME")
    site.wait_states("RUNNING", late, *jobs.values())
    assert site.job(late).nodes == ("t4-00",)
    for job in jobs.values():
        assert set(site.places(job).values()) <= {"t4-00", "t4-01"}


def test_slurm_itself_starts_such_a_job_on_allowed_nodes_only(make_flag_site: MakeSite) -> None:
    """penstockd does not run at all; the jobs are plain after 4 s. Each would rather run on the other nodes of the list."""
    site = make_flag_site("t4:3x4", plain_after_s=4)
    given = {"t4-02": "--nodelist=t4-02", "t4-01": "--exclude=t4-00,t4-02"}
    sleeps = ("--adaptive", "--max-gpus=1", "--output=/dev/null", "--wrap=sleep 600")
    jobs = {node: site.sbatch(flag, *sleeps) for node, flag in given.items()}
    site.wait_states("RUNNING", *jobs.values())
    assert {node: site.job(job).nodes for node, job in jobs.items()} == {node: (node,) for node in jobs}


def test_a_job_whose_nodes_are_only_in_its_comment_job_is_refused(
    make_loopback: MakeLoopback, make_site: MakeSite
) -> None:
    """Without the plugin nothing notes the user's nodes before Penstock overwrites them."""
    site = make_site(make_loopback("t4:2x4"))
    site.start()
    job = site.submit(1, "--nodelist=t4-01")
    wait_for(lambda: "--nodelist" in site.job(job).admin_comment, 120, "the daemon's message", details=site.tail)
    assert site.job(job).held
