"""What Slurm asks of a node's name concerns the run that has the name now only if Slurm has given the node to its job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

from penstock_cloud.cli import app
from penstock_cloud.doctor import judge_timeouts
from penstock_scheduler.burst.deciding.ledger import CloudBudgets
from penstock_scheduler.burst.manager.provider import Machine
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import Phase, Placement
from penstock_scheduler.model import Share as NodeShare
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.faulty import Faulty
from tests.cloud.other_cloud import OtherSite
from tests.cloud.test_slurm import toml

A10G = Machine("g5.xlarge", "on-demand", "a10g", 1, 4, 16000, 1.0)


@pytest.fixture
def site(tmp_path: Path, store: SqlStore) -> OtherSite:
    budget = CloudBudgets.model_validate({"site": {"usd_total": 10_000.0}})
    settings: Any = BurstSettings(
        site=UUID(SITE), name="penstock", share=tmp_path / "share", by_default=True, wait="no-wait", budget=budget
    ).model_copy(update={"reconcile_s": 1.0})
    cloud = Faulty(SITE, [A10G], time.time)
    site = OtherSite(settings, store, cloud)
    cloud._now_s = site.now_s
    return site


def asks(site: OtherSite, kind: str, *nodes: str, **jobs: str) -> None:
    """Slurm's resume or suspend program is called for these nodes."""
    folder = site.settings.share / kind
    folder.mkdir(parents=True, exist_ok=True)
    told = {"jobs": {job[1:]: [node] for job, node in jobs.items()}, "nodes": nodes, "time_s": site.now_s()}
    (folder / f"{time.time_ns()}.json").write_text(json.dumps(told))


def run_a_job(site: OtherSite, job: str) -> str:
    site.submit(job)
    site.send(job)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    site.ticks(2)
    return next(node for node, its in site.on.items() if its == job)


def end(site: OtherSite, job: str) -> None:
    site.finish(job)
    site.tick()
    site.until(lambda: not site.state.runs)


def test_a_late_suspend_of_an_earlier_run_ends_no_later_one_on_its_node(site: OtherSite) -> None:
    site.names = {"a10g-0": "a10g"}
    run_a_job(site, "7")
    end(site, "7")
    run_a_job(site, "8")
    asks(site, "suspend", "a10g-0")
    site.ticks(3)
    assert site.jobs["8"].phase is Phase.RUNNING
    assert [run.state for run in site.state.runs] == ["running"]


def test_a_late_suspend_ends_no_run_whose_job_slurm_has_not_started(site: OtherSite) -> None:
    site.starts = False
    site.submit("7")
    site.send("7")
    site.until(lambda: [run.state for run in site.state.runs] == ["booting"])
    asks(site, "suspend", "a10g-0", "a10g-1")
    site.ticks(3)
    site.starts = True
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING, most=5)


def test_a_node_that_slurm_gives_up_ends_its_run_at_once(site: OtherSite) -> None:
    """After ResumeTimeout, Slurm puts the job back into the queue and suspends the node."""
    site.boots = False
    site.submit("7")
    site.send("7")
    site.until(lambda: bool(site.on))
    site.ticks(2)
    asks(site, "suspend", *site.on)
    site._queue("7")
    site.starts = False
    site.tick()
    assert [run.state for run in site.state.runs] == ["ending"]


def test_a_resume_without_its_jobs_sends_those_back_that_slurm_shows_there(site: OtherSite) -> None:
    """Slurm deleted the file with the jobs before penstock-resume could read it."""
    node = run_a_job(site, "8")
    end(site, "8")
    site.submit("7")
    site.submit("9")
    site.on |= {node: "7", "elsewhere": "9"}
    asks(site, "resume", node)
    site.tick()
    assert site.refused == ["7"]


def test_a_late_resume_sends_no_job_back_that_runs_elsewhere(site: OtherSite) -> None:
    node = run_a_job(site, "8")
    site.submit("7")
    site.run_on_site("7")
    asks(site, "resume", node, j7=node)
    site.ticks(2)
    assert site.refused == []
    assert site.jobs["7"].phase is site.jobs["8"].phase is Phase.RUNNING


def test_a_job_that_slurm_sends_to_anothers_node_is_sent_back(site: OtherSite) -> None:
    node = run_a_job(site, "8")
    site.submit("7")
    asks(site, "resume", node, j7=node)
    site.tick()
    assert site.refused == ["7"]
    assert "submit it to the site's partitions with --burst" in site.told["7"], "Penstock never sent it there"


def booting_node(site: OtherSite) -> str:
    """The node that Penstock has ordered for job 7, which Slurm does not start yet."""
    site.starts = False
    site.submit("7")
    site.send("7")
    site.until(lambda: [run.state for run in site.state.runs] == ["booting"])
    (node,) = BurstRun.model_validate_json(site.store.cloud_runs()[0].record).nodes
    return node


def test_a_job_whose_run_ended_before_slurm_started_it_is_told_that(site: OtherSite) -> None:
    node = booting_node(site)
    site.recall("7")
    site.until(lambda: not site.state.runs)
    asks(site, "resume", node, j7=node)
    site.tick()
    assert site.told == {
        "7": f"Slurm started it on {node} after its run in the cloud had ended (it was recalled); it is queued again"
    }


def test_a_job_that_slurm_starts_late_on_a_node_that_is_always_up_is_queued_again(site: OtherSite) -> None:
    """A gateway asks for no instance, so Slurm does not ask penstockd to resume it."""
    node = booting_node(site)
    site.recall("7")
    site.until(lambda: not site.state.runs)
    site.submit("8")
    for job in ("7", "8"):  # the second one names the cloud partition itself, and its cloud runner ends it
        site._start(job, Placement("a10g", "burst", (NodeShare(node, 1),)))
    site.ticks(2)
    assert site.told == {
        "7": f"Slurm started it on {node} after its run in the cloud had ended (it was recalled); it is queued again"
    }
    assert (site.jobs["7"].phase, site.jobs["8"].phase) == (Phase.QUEUED, Phase.RUNNING)


def test_a_job_that_slurm_starts_on_the_nodes_of_an_earlier_run_is_told_that(site: OtherSite) -> None:
    own = booting_node(site)
    (other,) = {name for name, kind in site.names.items() if kind == "a10g"} - {own}
    asks(site, "resume", other, j7=other)
    site.tick()
    assert site.told == {"7": f"Slurm started it on {other}, but its instances are {own}; it is queued again"}
    site.starts = True
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)


def test_runs_of_an_earlier_job_of_the_same_id_are_not_its_own(site: OtherSite) -> None:
    node = run_a_job(site, "7")
    end(site, "7")
    site.submit("7")
    asks(site, "resume", node, j7=node)
    site.tick()
    assert "with --burst" in site.told["7"]


def test_the_node_that_was_used_least_recently_is_used_first(site: OtherSite) -> None:
    used = []
    for number in range(4):
        used.append(run_a_job(site, str(number)))
        end(site, str(number))
    assert used == ["a10g-0", "a10g-1", "a10g-0", "a10g-1"]


def test_slurms_timeouts_are_checked_against_ours() -> None:
    def wrong(**config: str) -> list[str]:
        return [each.text for each in judge_timeouts(config, 600.0) if not each.ok]

    known = {"ResumeProgram": "/usr/bin/penstock-resume", "ResumeTimeout": "600 sec", "SuspendTimeout": "120 sec"}
    assert wrong(**known) == []
    (short,) = wrong(**known | {"ResumeTimeout": "60 sec"})
    assert "ResumeTimeout is 60 s" in short
    (short,) = wrong(**known | {"SuspendTimeout": "3 sec"})
    assert "SuspendTimeout is 3 s" in short
    (old,) = wrong(**known | {"SLURM_VERSION": "22.05.8"})
    assert "Slurm 22.05.8 holds a job" in old
    assert wrong(**known | {"SLURM_VERSION": "22.05.8", "SlurmctldParameters": "cloud_dns,cloud_reg_addrs"}) == []
    assert wrong(**known | {"SLURM_VERSION": "22.05.8", "PrologSlurmctld": "/bin/true"}) == []
    assert len(wrong(**known | {"SLURM_VERSION": "22.05.8", "PrologSlurmctld": "(null)"})) == 1
    assert wrong(**known | {"SLURM_VERSION": "23.02.0"}) == []
    assert len(wrong(ResumeTimeout="INFINITE", SuspendTimeout="x")) == 1, (
        "what cannot be read, or has no program, is said"
    )


def test_penstock_cloud_doctor_asks_the_sites_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud_settings: Any
) -> None:
    """The partition's own line goes before the rest of slurm.conf."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        "if [ \"$2 $3\" = 'partition burst' ]; then echo '   ResumeTimeout=30 SuspendTimeout=GLOBAL'; exit; fi\n"
        "echo 'ResumeProgram = /r'\necho 'ResumeTimeout = 6000 sec'\necho 'SuspendTimeout = 60 sec'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    config = tmp_path / "penstock.toml"
    where = (
        f'[daemon]\ncloud = "ec2"\nstate_dir = "{tmp_path}"\n[slurm]\npartitions = ["gpu"]\ncloud_partition = "burst"\n'
    )
    config.write_text(where + toml(cloud_settings()))
    told = CliRunner().invoke(app, ["doctor", "--config", str(config)])
    assert told.exit_code == 1
    assert "FAIL ResumeTimeout: ResumeTimeout is 30 s" in told.output
    assert "ok   SuspendTimeout" in told.output
