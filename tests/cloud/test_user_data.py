"""The generated user data, really run: an instance ends itself when it should, and passes on EC2's notice."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.ec2 import connect
from penstock_cloud.settings import CloudSettings
from penstock_cloud.templates import mounts
from penstock_loopback import wait_for
from penstock_scheduler.burst.manager.provider import Order
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor


@pytest.mark.skipif(shutil.which("curl") is None, reason="cloud nodes need curl; install it")
def test_a_node_joins_slurm_once_slurm_wakes_it(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job holds a node for a moment while the node still counts as powered down. slurmctld ignores it then, for good.

    It also ignores one that says to have booted before it was woken: both times are whole seconds, of two clocks.
    """
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    (programs / "scontrol").write_text(
        f'#!/bin/bash\necho x >>{asked}\necho "   State=$(cat {tmp_path}/state) Weight=1"\n'
        f"grep -q POWERING_UP {tmp_path}/state && touch {tmp_path}/woken\n"
    )
    (programs / "slurmd").write_text(f"#!/bin/bash\ntouch {tmp_path}/joined\nexec sleep 60\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    (tmp_path / "state").write_text("MIXED+CLOUD+POWERED_DOWN")
    settings = cloud_settings()
    tags = {"run": "7.1", "node": "n", "lifetime_s": "3600"}
    with Hypervisor(ec2, tmp_path / "hypervisor") as hypervisor:
        Region(connect(settings), settings).launch_gang(
            Order("n", "token", "g5.xlarge", "on-demand", ("n",), tags, 1.0)
        )
        joined = tmp_path / "joined"
        wait_for(
            lambda: joined.exists() or (asked.exists() and asked.stat().st_size >= 6),
            120,
            "it asks thrice",
            details=hypervisor.console,
        )
        assert not joined.exists()
        (tmp_path / "state").write_text("MIXED+CLOUD+NOT_RESPONDING+POWERING_UP")
        wait_for(joined.exists, 120, "it joins", details=hypervisor.console)
        assert joined.stat().st_mtime - (tmp_path / "woken").stat().st_mtime >= 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="cloud nodes need curl; install it")
def test_instances_end_themselves_and_pass_on_a_notice(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2, tmp_path: Path
) -> None:
    """Three instances whose nodes Slurm never requests, and a daemon that is dead once the notice was passed on.

    `short` has reached its longest life of 1 s; `long` may live for an hour, but the daemon is
    silent; `nameless` cannot read its name.
    """
    settings = cloud_settings(silent_s=8.0)
    fleet = Region(connect(settings), settings)

    def launch(node: str, tags: dict[str, str]) -> str:
        order = Order(node, f"token-{node}", "g5.xlarge", "on-demand", (node,), {"run": node} | tags, 1.0)
        return fleet.launch_gang(order)[node]

    alive = settings.share / "alive"
    alive.parent.mkdir(parents=True, exist_ok=True)
    alive.touch()
    os.utime(alive, (2**31 - 1, 2**31 - 1))  # until the notice has been passed on
    with Hypervisor(ec2, tmp_path / "hypervisor") as hypervisor:
        short = launch("short", {"node": "short", "lifetime_s": "1"})
        long = launch("long", {"node": "long", "lifetime_s": "3600"})
        nameless = launch("nameless", {})
        wait_for(lambda: len(hypervisor.booted) == 3, 120, "all boot")
        hypervisor.notice("long")
        wait_for(lambda: short not in ec2.running(), 120, "the short one ends", details=hypervisor.console)
        wait_for(lambda: nameless not in ec2.running(), 120, "the nameless one ends", details=hypervisor.console)
        notice = settings.share / "notices" / "long"
        wait_for(notice.exists, 120, "the notice is passed on", details=hypervisor.console)
        assert "terminate" in notice.read_text()
        alive.unlink()
        wait_for(lambda: long not in ec2.running(), 120, "the other ends, too", details=hypervisor.console)
        assert "its longest life, 1 s, is over" in hypervisor.console()
        assert "penstockd has been silent for 8 s" in hypervisor.console()
        assert "cannot read its tags" in hypervisor.console()


MOUNTS = {"/data": "s3://lab/sets/a", "/models": "s3://lab-models", "/home": "efs://fs-1", "/fsx": "fsx://fs-2.aws/abc"}


@pytest.mark.parametrize("fails", ["", "lustre"])
def test_folders_are_mounted_or_the_instance_ends(
    cloud_settings: Callable[..., CloudSettings], tmp_path: Path, fails: str
) -> None:
    """The generated lines under bash, with programs that note their arguments."""
    inside = {str(tmp_path) + at: what for at, what in MOUNTS.items()}
    for name in ("mount", "mount-s3"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\necho {name} "$@"\n[ -z "{fails}" ] || [[ "$*" != *{fails}* ]]\n')
        program.chmod(0o755)
    lines = mounts(cloud_settings(mounts=inside, instance_profile="lab"))
    script = "\n".join(["set -u", 'end() { echo "ends: $*"; exit 0; }', *lines, "mount_all", "echo joins"])
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    told = subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True)
    rights = "--allow-other --allow-delete --allow-overwrite --dir-mode 0777 --file-mode 0666"
    assert told.stdout.replace(str(tmp_path), "").splitlines() == [
        f"mount-s3 {rights} --prefix sets/a/ lab /data",
        f"mount-s3 {rights} lab-models /models",
        "mount -t efs -o tls fs-1:/ /home",
        "mount -t lustre -o relatime,flock fs-2.aws@tcp:/abc /fsx",
        "ends: it cannot mount fsx://fs-2.aws/abc at /fsx" if fails else "joins",
    ]
    assert not told.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"/data": "s3://lab"}, "need instance_profile"),
        ({"data": "efs://fs-1"}, "mounts"),
        ({"/data": "efs://fs-1; reboot"}, "mounts"),
        ({"/data": "http://x"}, "mounts"),
    ],
)
def test_a_mount_that_cannot_be_is_refused(
    cloud_settings: Callable[..., CloudSettings], given: dict[str, str], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        cloud_settings(mounts=given)
