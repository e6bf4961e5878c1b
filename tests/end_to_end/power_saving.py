"""A loopback Slurm whose own power saving ends and starts the slurmds: for tests of nodes that are powered down."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from penstock_loopback import LoopbackCluster
from penstock_loopback.fixtures import MakeLoopback
from penstock_loopback.machine import free_ports
from penstock_loopback.processes import MARK

UNBLOCKED = 'import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); os.execvp("slurmd", sys.argv[1:])'
"""A child of slurmctld has SIGTERM blocked, so that SuspendProgram could not end the slurmd again."""


class PowerSaving:
    """The programs of the power saving, and what they have done. A node in `broken` does not boot.

    Args:
        folder: for the programs and their log.
        boot_s: how long a node takes to boot.
    """

    def __init__(self, folder: Path, boot_s: float) -> None:
        self.folder, self._boot_s = folder, boot_s
        self.log = folder / "power.log"
        self.broken = folder / "broken"
        self.broken.mkdir(parents=True)
        self.log.touch()
        for name in ("resume", "suspend"):
            (folder / name).write_text("#!/bin/bash\nexit 1\n")
            (folder / name).chmod(0o755)

    def settings(self, *, idle_s: int, resume_timeout_s: int) -> dict[str, str]:
        """Lines of slurm.conf."""
        return {
            "ResumeProgram": str(self.folder / "resume"),
            "SuspendProgram": str(self.folder / "suspend"),
            "ResumeTimeout": str(resume_timeout_s),
            "SuspendTimeout": "3",
            "SuspendTime": str(idle_s),
            "ResumeRate": "0",
            "SuspendRate": "0",
        }

    def serve(self, slurm: LoopbackCluster) -> None:
        """Let the programs end and start the slurmds of this cluster, and of no other: by the files with their pids."""
        conf = slurm.slurm_conf
        found = re.search(r"^SlurmdPidFile=(.+)$", conf.read_text(), re.MULTILINE)
        assert found is not None
        pid_file = found[1].replace("%n", "$n")
        head = f"#!/bin/bash\nexport SLURM_CONF={conf} {MARK}={slurm.folder} PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
        each = 'for n in $(scontrol show hostnames "$1"); do'
        (self.folder / "suspend").write_text(
            f'{head}echo "suspend $1" >>{self.log}\n{each} kill "$(cat {pid_file})" && rm -f {pid_file}; done\n'
        )
        (self.folder / "resume").write_text(
            f'{head}echo "resume $1" >>{self.log}\n{each}\n  [ -e {self.broken}/$n ] && continue\n'
            f"  ( sleep {self._boot_s}; exec {sys.executable} -c '{UNBLOCKED}' slurmd -D -b -N $n ) "
            f"</dev/null >>{self.folder}/$n.log 2>&1 &\ndone\n"
        )

    def resumed(self) -> list[str]:
        """The nodes that Slurm had woken, as it named them, in order."""
        return [line.split()[1] for line in self.log.read_text().splitlines() if line.startswith("resume ")]


def with_power_saving(
    make_loopback: MakeLoopback, folder: Path, nodes: str, *, boot_s: float = 4.0, idle_s: int = 5, timeout_s: int = 60
) -> tuple[LoopbackCluster, PowerSaving]:
    """A Slurm that powers its nodes down after `idle_s` s without jobs, and wakes them in `boot_s` s."""
    power = PowerSaving(folder / "power", boot_s)
    slurm = make_loopback(nodes, settings=power.settings(idle_s=idle_s, resume_timeout_s=timeout_s))
    power.serve(slurm)
    return slurm, power


def with_cloud_nodes(
    make_loopback: MakeLoopback, folder: Path, *, boot_s: float = 4.0, idle_s: int = 5, timeout_s: int = 60
) -> tuple[LoopbackCluster, PowerSaving]:
    """A Slurm as AWS ParallelCluster and slurm-gcp set it up: one T4 node that always runs, and two A100 nodes in the cloud."""
    power, host, first = PowerSaving(folder / "power", boot_s), socket.gethostname().split(".")[0], free_ports(2)
    settings = power.settings(idle_s=idle_s, resume_timeout_s=timeout_s) | {
        "NodeName": f"q1-dy-a100-[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{first + 1}] CPUs=8 Boards=1 "
        "SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:a100:2 State=CLOUD Weight=1000 "
        "Feature=dynamic,gpu",
        "PartitionName": "q1 Nodes=q1-dy-a100-[1-2] MaxTime=INFINITE State=UP",
        "SuspendExcNodes": "t4-00",
        "SlurmctldParameters": "idle_on_node_suspend,power_save_min_interval=2,cloud_reg_addrs",
        "PrivateData": "cloud",
        "TreeWidth": "65533",
    }
    gres = (
        "AutoDetect=off\nNodeName=t4-00 Name=gpu Type=t4 File={devices}\n"
        "NodeName=q1-dy-a100-[1-2] Name=gpu Type=a100 File={devices}\n"
    )
    devices = folder / "nvidia"
    devices.mkdir()
    for number in range(2):
        (devices / str(number)).touch()
    slurm = make_loopback("t4:1x2", settings=settings, files={"gres.conf": gres.format(devices=f"{devices}/[0-1]")})
    power.serve(slurm)
    return slurm, power


def states(slurm: LoopbackCluster) -> dict[str, str]:
    """Node -> its state, as scontrol prints it."""
    listing = slurm.command("scontrol", "-o", "show", "node").stdout
    return dict(re.findall(r"^NodeName=(\S+).* State=(\S+)", listing, re.MULTILINE))


def asleep(slurm: LoopbackCluster, *nodes: str) -> bool:
    """Whether these nodes, or all, are powered down and idle."""
    found = states(slurm)
    return {found[name] for name in nodes or found} == {"IDLE+POWERED_DOWN"}
