"""docs/admin/sharing-setup.md as an admin follows it, on a site that was set up by the pages on installing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import skip_without_slurm, started
from penstock_slurm.share.gpu_reservation import NAME
from tests.end_to_end.day_site import DaySite
from tests.end_to_end.pages import BIN, blocks

pytestmark = [pytest.mark.slurm, pytest.mark.long]

PAGE = "docs/admin/sharing-setup.md"
NODE = "t4-00"
LINUXPROC = "FAILED  Slurm suspends all processes of a job (ProctrackType=proctrack/cgroup)"
"""The only check that a loopback cluster cannot pass."""


@pytest.fixture
def day(tmp_path: Path) -> Iterator[DaySite]:
    skip_without_slurm(accounting=False)
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    (tmp_path / "site").mkdir()
    with started(LoopbackCluster(tmp_path / "slurm", "t4:1x2", stand_in=True)) as slurm:
        site = DaySite(slurm, tmp_path / "site")
        try:
            site.install()
            site.install_plugin()
            yield site
        finally:
            site.stop()


def section(number: int) -> str:
    """The text of a step."""
    text = (BIN.parents[1] / PAGE).read_text(encoding="utf-8")
    return text.partition(f"\n## {number}. ")[2].partition("\n## ")[0]


def agent_of(day: DaySite) -> subprocess.Popen[bytes]:
    """The agent as its unit starts it, with what the page puts into /etc/default/penstock-agent."""
    unit = (day.folder / "units" / "penstock-agent.service").read_text()
    command = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0]
    folders = re.findall(r"^ExecStartPre=\+(.*)$", unit, re.MULTILINE)
    for each in folders:
        subprocess.run(shlex.split(each), check=True)
    assert "`SLURMD_NODENAME=...` if the node's name in Slurm is not its `hostname" in section(4).replace("\n", " ")
    environment = dict(os.environ) | day.slurm.environment() | {"SLURMD_NODENAME": NODE}
    with (day.folder / "agent.log").open("ab") as log:
        return subprocess.Popen(shlex.split(command), env=environment, stdout=log, stderr=log)


def test_the_steps_of_the_page_let_two_jobs_share_a_gpu(day: DaySite) -> None:
    # 3. On the host of slurmctld
    assert "Set `agents = true` under `[slurm]`" in section(3)
    text = day.config.read_text().replace("[slurm]\n", "[slurm]\nagents = true\n")
    run_dir, state_dir = day.folder / "run", day.folder / "agent-state"
    day.config.write_text(f"{text}[agent]\nrun_dir = '{run_dir}'\nstate_dir = '{state_dir}'\n")
    assert "`penstock slurm install --apply`" in section(3)
    told = day.admin("penstock slurm install --apply")
    assert f"run_dir={run_dir}" in (day.slurm.slurm_conf.parent / "plugstack.conf").read_text()

    # 4. On each node: what the command prints is what the page says, with this site's paths
    printed = re.findall(r"^    ((?:pip|install|cp|systemctl) .*?)(?:  +#.*)?$", told, re.MULTILINE)
    words = [each.split()[:2] for each in printed]
    assert words == [each.split()[:2] for each in blocks(PAGE, "pip install")[0] if "run-penstock" not in each] + [
        ["cp", "penstock-agent.service"],
        ["systemctl", "daemon-reload"],
    ]
    for line in printed:
        if line.startswith("cp "):
            day.admin(f"cd lib && {line}")

    # 5. Check
    agent = agent_of(day)
    try:
        day.stop()
        day.start()
        assert "`penstock slurm check`" in section(5)

        def failed() -> list[str]:
            lines = day.admin("penstock slurm check || true").splitlines()
            return [line for line in lines if line.startswith("FAILED")]

        wait_for(lambda: failed() == [LINUXPROC], 60, "the agent to be what the check asks for", details=failed)

        # 6. Choose a policy that shares
        (stages,) = re.findall(r"`(stages = \[.*?\])` in `\[policy\]`", section(6))
        day.config.write_text(day.config.read_text() + f"[policy]\n{stages}\n")
        day.stop()
        day.start()
        jobs = [day.train(1) for _ in range(3)]
        wait_for(lambda: all(day.newest_runs().get(job) for job in jobs), 240, "all to train", details=day.tail)
        shared = wait_for(
            lambda: [job for job in jobs if any(each in day.penstock("explain", job) for each in jobs if each != job)],
            60,
            "explain to name the jobs that share",
            details=lambda: [day.penstock("explain", job) for job in jobs],
        )
        assert len(shared) >= 2

        # Switch it off
        day.config.write_text(day.config.read_text().replace(stages, "stages = []"))
        day.stop()
        day.start()
        day.admin(f"scancel {' '.join(jobs)}")
        wait_for(
            lambda: not day.admin("squeue -h --name penstock-placeholder"),
            180,
            f"{NAME} to leave",
            details=day.tail,
        )
        day.config.write_text(day.config.read_text().replace("agents = true\n", "agents = false\n"))
        day.stop()
        day.start()
        job = day.train(1)
        wait_for(lambda: day.newest_runs().get(job), 120, "a job to train with GPUs of its own", details=day.tail)
    finally:
        agent.terminate()
        agent.wait(30)
