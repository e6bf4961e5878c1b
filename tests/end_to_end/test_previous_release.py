"""The release before this one, from the repository's history, side by side with this one: upgrade, and the way back.

`PREVIOUS` is set at each release (docs/developer/release.md). What CI checks of this is in tests/scheduler/test_overlap.py and
tests/scheduler/store/test_compatibility.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.wire import Observation, Report, claimed_epochs, read, reports_file
from penstock_scheduler.api.agent_messages import status_file
from penstock_scheduler.api.client import Client
from penstock_scheduler.cli import make_app
from penstock_scheduler.store import schema
from penstock_scheduler.store.backup import make_backup
from penstock_scheduler.store.tables import COMPATIBLE_FROM
from tests.end_to_end.pair import pair as two_daemons
from tests.end_to_end.site import UNFORESEEN, Site
from tests.end_to_end.test_sharing import FAST, group_of, until
from tests.executor.spool import ROOT
from tests.scheduler.databases import REASON, available, restartable

pytestmark = [pytest.mark.slurm, pytest.mark.long]

PREVIOUS = "3573f142"
"""Tag or commit of the release before. Until the first release: a commit with the first schema that a release has."""

PACKAGES = ("profiles", "scheduler", "slurm_plugin", "executor", "cloud")

DAEMON = "import sys; from penstock_scheduler.daemon.penstockd import main; sys.exit(main())"


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of the release before. The libraries are this one's."""
    folder = tmp_path_factory.mktemp("previous")
    archive = folder / "previous.tar"
    done = subprocess.run(
        ["git", "archive", "-o", archive, PREVIOUS, *PACKAGES], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"needs the repository's history with {PREVIOUS}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return os.pathsep.join(str(folder / package) for package in PACKAGES)


class OldDaemon:
    """penstockd of the release before."""

    def __init__(self, site: Site, path: str) -> None:
        before = site.log.read_text().count("event=started") if site.log.exists() else 0
        with site.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DAEMON, "--config", site.config],
                env=dict(os.environ, PYTHONPATH=path),
                stdout=log,
                stderr=log,
            )
        self._site, self._before = site, before

    def wait_started(self) -> None:
        wait_for(
            lambda: self._site.log.read_text().count("event=started") > self._before,
            120,
            "the old penstockd to start",
            details=self._site.tail,
        )

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def test_an_upgrade_and_the_way_back_under_jobs_that_share_a_gpu(
    previous: str, make_loopback: MakeLoopback, make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", previous)  # agents and jobs inherit it
    slurm = make_loopback("t4:1x1", agents=True)
    (node,) = (node.name for node in slurm.nodes)
    wait_for(lambda: status_file(slurm.spool, node).exists(), 120, "the old agent to report")
    site = make_site(slurm, policy="gandiva", round_s=1.0)
    site.spool = slurm.spool
    site.slurm_settings |= {"agents": True}
    site.extra = "\n[policy.gandiva]\nslice_s = 2.0\n"
    site.write_settings()
    old = OldDaemon(site, previous)
    try:
        old.wait_started()
        pair = [site.submit(1e6, rates=FAST, options="--utilisation=0.9") for _ in range(2)]
        until(site, lambda: group_of(site, *pair) is not None, "a group of both")
        before = _whole_upgrade(site, node, pair, old, monkeypatch)
        site.stop()

        # The way back. A release before that does not tolerate the schema needs the backup from before the upgrade.
        if before < COMPATIBLE_FROM:
            refused = OldDaemon(site, previous)
            assert refused.process.wait(120) == 1
            assert f"can use no schema newer than {before} of it" in site.log.read_text()
            restore = [
                "-m",
                "penstock_scheduler.cli",
                "db",
                "restore",
                site.folder / "before.db",
                site.state,
                "--replace",
            ]
            subprocess.run([sys.executable, *restore], env=dict(os.environ, PYTHONPATH=previous), check=True)
        old = OldDaemon(site, previous)
        old.wait_started()
        _undisturbed(site, pair)
    finally:
        old.stop()


@pytest.mark.skipif(not available(), reason=REASON)
def test_two_releases_lead_in_turn_and_no_job_notices(
    previous: str, make_loopback: MakeLoopback, tmp_path: Path
) -> None:
    """docs/admin/maintenance.md, "Upgrade without a stop": the standby is upgraded and leads, and the way back."""
    slurm = make_loopback("t4:1x4")
    with restartable() as server, two_daemons(slurm, tmp_path, server, round_s=1.0) as two:
        for member in two.members.values():
            member.environment["PYTHONPATH"] = previous
        two.start()
        runs = two.site.submit(4000)
        two.site.wait_states("RUNNING", runs)
        standby = two.stands_by()
        assert standby is not None
        standby.stop()
        del standby.environment["PYTHONPATH"]
        told = CliRunner().invoke(make_app(), ["db", "upgrade", str(two.site.store)])
        assert told.exit_code == 0, told.output
        standby.start()
        for _ in range(2):  # the new one leads, and the old one again
            two.wait_ready(120)
            before = two.leader()
            two.takeover_s(lambda: Client(f"unix:{two.leader().socket}").move_leader())  # type: ignore[union-attr]
            two.wait_ready(120)
            assert two.leader() is not before
            new = two.site.submit(3)
            two.site.wait_states("COMPLETED", new)
        assert two.site.job(runs).restarts == 0
        two.assert_one_writer()
        assert UNFORESEEN not in two.log.read_text(), two.site.tail()
        slurm.command("scancel", runs)


def _whole_upgrade(site: Site, node: str, pair: list[str], old: OldDaemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """Upgrade under the jobs. Returns the schema of the release before."""
    _undisturbed(site, pair)
    assert old.stop() == 0
    monkeypatch.delenv("PYTHONPATH")
    before = make_backup(site.state, site.folder / "before.db").revision
    if before < schema.REVISION:
        site.start(wait=False)
        assert site.ended() == 1
        assert f"this version needs {schema.REVISION}; run penstock db upgrade" in site.log.read_text()
    told = CliRunner().invoke(make_app(), ["db", "upgrade", str(site.state)])
    assert told.exit_code == 0, told.exception

    # This penstockd with the old agent and old executors; then the new agent takes over from the old one.
    site.start()
    _undisturbed(site, pair)
    site.slurm.kill_agent(node)
    site.slurm.start_agent(node)
    _undisturbed(site, pair)
    return before


def progress(site: Site, job: str) -> float:
    """The newest progress of a job, from the spool: this release does not read the store of the one before."""
    epoch = max(claimed_epochs(site.spool, job), default=0)
    if epoch == 0:
        return 0.0
    lines = reports_file(site.spool, job, epoch).read_bytes().split(b"\n")[:-1]
    bodies = (read(Report, line).body for line in lines)
    return max((body.progress for body in bodies if isinstance(body, Observation)), default=0.0)


def _undisturbed(site: Site, pair: list[str]) -> None:
    """Both go on in turns, and neither was started again."""
    for _ in range(2):
        before = {job: progress(site, job) for job in pair}
        until(site, lambda: all(progress(site, job) > before[job] for job in pair), f"{pair} to continue to train")  # noqa: B023
    assert {job: site.job(job).restarts for job in pair} == dict.fromkeys(pair, 0), site.tail()
    assert {job.id: job.state for job in site.gateway.jobs() if job.id in pair}.keys() == set(pair)
