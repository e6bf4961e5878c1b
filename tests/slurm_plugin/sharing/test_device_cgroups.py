"""Jobs that share GPUs on a real Slurm that constrains devices (cgroup v1), with a real agent; other devices are the GPUs."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import SharedGpus
from tests.slurm_plugin.sharing.rig import NODE, Rig, packs

pytestmark = pytest.mark.slurm

HIERARCHY = Path("/sys/fs/cgroup/devices")
DEVICES = ((1, 5), (1, 7), (1, 8))
"""/dev/zero, /dev/full, /dev/random."""


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Path]:
    """A folder with device files, if Slurm can make cgroups. Slurm's cgroups are removed afterwards."""
    if os.geteuid() != 0 or not (HIERARCHY / "devices.allow").exists():
        pytest.skip("needs root and the hierarchy `devices` of cgroup v1")
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    if (HIERARCHY / f"slurm_{NODE}").exists():
        pytest.skip(f"another cluster has {HIERARCHY}/slurm_{NODE}")
    for index, (major, minor) in enumerate(DEVICES):
        os.mknod(tmp_path / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    yield tmp_path

    def gone() -> bool:
        with contextlib.suppress(OSError):  # the last of its processes are about to end
            for folder, _, _ in os.walk(HIERARCHY / f"slurm_{NODE}", topdown=False):
                Path(folder).rmdir()
        return not (HIERARCHY / f"slurm_{NODE}").exists()

    wait_for(gone, 120, "its cgroups to go")


def test_a_job_opens_the_gpus_that_it_is_bound_to_and_no_others_also_in_later_steps(
    gpus: Path, make_loopback, tmp_path: Path
) -> None:
    rig = Rig(
        make_loopback(
            "t4:1x3",
            agents=True,
            settings={"TaskPlugin": "task/cgroup"},
            files={
                "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainDevices=yes\n",
                "gres.conf": f"AutoDetect=off\nNodeName={NODE} Name=gpu Type=t4 File={gpus}/gpu[0-2]\n",
            },
        ),
        tmp_path,
    )
    with rig.slurm.settings_file.open("a") as settings:
        settings.write(f"gpu_file = '{gpus}/gpu[0-2]'\n")
    rig.slurm.kill_agent(NODE)
    rig.slurm.start_agent(NODE)
    wait_for(lambda: (status := rig.status()) is not None and status.lacks == (), 120, "the agent to answer")

    opens = tmp_path / "opens.sh"
    opens.write_text(
        f"seen=$CUDA_VISIBLE_DEVICES:; for gpu in 0 1 2; do (: <{gpus}/gpu$gpu) 2>/dev/null && seen=$seen$gpu; done\n"
        f"echo $seen >>{tmp_path}/$1-$SLURM_JOB_ID\n"
    )
    script = (
        f"sh {opens} batch; srun sh {opens} first; while ! test -e {tmp_path}/go-on; do sleep 0.1; done; "
        f"srun sh {opens} second; sh {opens} batch; exec sleep 1000"
    )

    def told(name: str, job: str) -> list[str]:
        path = tmp_path / f"{name}-{job}"
        return path.read_text().splitlines() if path.exists() else []

    jobs = rig.submit(script=script), rig.submit(script=script)
    rig.wants(dict.fromkeys(jobs, 1), SharedGpus(NODE, 2, packs(*jobs)))
    rig.until(lambda: all(told("first", job) and rig.bound.get(job) for job in jobs), "a step of each has begun")
    bound = {job: ",".join(map(str, rig.bound[job])) for job in jobs}
    assert len(set(bound.values())) == 2
    (tmp_path / "go-on").touch()
    rig.until(lambda: all(len(told("batch", job)) == 2 for job in jobs), "a later step of each has ended")
    for job in jobs:
        opened = f"0:{bound[job]}"
        assert told("batch", job) == [opened] * 2, "the only one that it sees is the first to CUDA"
        assert (told("first", job), told("second", job)) == ([opened], [opened])
    status = rig.status()
    assert status is not None
    assert status.lacks == ()
