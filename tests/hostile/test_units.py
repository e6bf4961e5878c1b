"""The systemd units: what a hole in a daemon would be worth, and that the daemons still work with so little."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import skip_without_slurm
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.rounds.settings import load_settings
from penstock_slurm.install.units import AGENT, DAEMON, agent_units, api_units, daemon_unit
from tests.end_to_end.site import Site
from tests.end_to_end.test_two_users import ANN, as_user, folder_of
from tests.folders import public_folder

MOST_EXPOSED = 4.0
"""Of 10, by `systemd-analyze security`."""


def units(folder: Path) -> dict[str, str]:
    """The units of a site with an API of its own and agents, file name -> text."""
    config = folder / "penstock.toml"
    config.write_text("[slurm]\npartitions = ['gpu']\n[api]\nembedded = false\nuser = 'reader'\n")
    settings = load_settings(config)
    written = agent_units(settings, config, constrained=False) | api_units(settings, config)
    return {name: text for name, text in written.items() if name.endswith(".service")} | {DAEMON: daemon_unit(config)}


def values(unit: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{key}=")]


def test_no_unit_is_more_exposed_than_it_must_be(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    for name, text in units(tmp_path).items():
        (tmp_path / name).write_text(text)
        threshold = f"--threshold={MOST_EXPOSED * 10:.0f}"
        command = ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_each_unit_bounds_memory_and_tasks(tmp_path: Path):
    found = units(tmp_path)
    assert set(found) == {DAEMON, "penstock-api.service", AGENT}
    for name, text in found.items():
        assert len(values(text, "MemoryMax")) == len(values(text, "TasksMax")) == 1, name


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("needs root, whose rights the unit bounds")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed (Debian: util-linux)")
    skip_without_slurm(accounting=False)
    (capabilities,) = values(units(tmp_path)[DAEMON], "CapabilityBoundingSet")
    bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())])
    with public_folder() as public, LoopbackCluster(public / "slurm", "t4:1x4") as slurm:
        folder = Path(tempfile.mkdtemp(dir=public))
        folder.chmod(0o755)
        site = Site(slurm, folder)
        site.under = ("setpriv", f"--bounding-set={bounds}", "--inh-caps=-all", "--no-new-privs")
        site.start()
        yield site
        site.stop()


@pytest.mark.slurm
def test_with_the_rights_of_its_unit_penstockd_does_all_for_users(site: Site):
    """It submits as the user, gives the user a folder in the spool, shows the job's output, and cancels the job."""
    site.wait_round()
    url = f"unix:{site.state / 'api.sock'}"
    home = folder_of(site, ANN)
    order = Submission(
        command=("sh", "-c", "echo begun; exec sleep 600"),
        partition="all",
        output=str(home / "out"),
        working_directory="/",
    )
    with Client(url) as line:
        line.me()  # loads the client's modules before a process becomes a user without permission to read them
    job = str(as_user(ANN, lambda: Client(url).submit(order).id))
    wait_for(lambda: (home / "out").exists(), 180, "the job's output", details=site.tail)
    assert site.job(job).user == ANN
    assert (home / "out").stat().st_uid == (site.spool / job / "reports").stat().st_uid == pwd.getpwnam(ANN).pw_uid
    wait_for(lambda: "begun" in str(as_user(ANN, lambda: Client(url).log(job).text)), 60, "the log", details=site.tail)
    as_user(ANN, lambda: Client(url).cancel(job).id)
    site.wait_states("CANCELLED", job)
