"""A loopback Slurm with the nodes, GPUs and partitions of a site configuration."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock_loopback import LoopbackCluster, config
from penstock_scheduler.model.nodespec import NodeSpec
from tests.end_to_end.power_saving import PowerSaving

NODE = "CPUs=64 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=256000"
"""Parameters of an ordinary node."""

MOST_GPUS = 16
"""Files for GPUs that a node has at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """A job's options for sbatch. `adaptive`: Penstock's run has --adaptive as well."""

    options: str
    adaptive: bool = True


def beside(options: str) -> Request:
    """A plain job that runs beside the others in both runs."""
    return Request(options, adaptive=False)


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs that are submitted in this order. `differs`: why Penstock's run is known to differ, with the item of the issue."""

    name: str
    jobs: tuple[Request | str, ...]
    differs: str = ""
    quick: bool = False
    """Whether CI runs it; the others are marked long."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """All jobs as requests."""
        return tuple(Request(job) if isinstance(job, str) else job for job in self.jobs)


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """A site in the shape that a centre publishes, with few nodes."""

    name: str
    shape: str
    """What is special about it, and where such a site is described."""
    nodes: Mapping[str, str]
    """The name of a node or a range of nodes -> its parameters in slurm.conf; one slurmd for each node."""
    gres: tuple[str, ...]
    """Lines of gres.conf; {gpus} is the folder with the files nvidia0 to nvidia15."""
    partitions: tuple[str, ...]
    """Lines of slurm.conf about partitions and node sets."""
    managed: tuple[str, ...]
    cases: tuple[Case, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    accounting: tuple[tuple[str, ...], ...] = ()
    """Commands of sacctmgr; without any, the site has no accounting."""
    updates: tuple[tuple[str, ...], ...] = ()
    """Updates by scontrol after these: slurmctld does not start with a QOS that slurmdbd lacks."""
    asleep: bool = False
    """Whether all nodes are powered down when the jobs come."""


TWO_TYPES = Configuration(
    name="two-types",
    shape="two GPU types",
    nodes={"t4-1": f"{NODE} Gres=gpu:t4:2", "a100-1": f"{NODE} Gres=gpu:a100:2"},
    gres=(
        "NodeName=t4-1 Name=gpu Type=t4 File={gpus}/nvidia[0-1]",
        "NodeName=a100-1 Name=gpu Type=a100 File={gpus}/nvidia[0-1]",
    ),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",),
    managed=("gpu",),
    cases=(),
)


def names(text: str) -> list[str]:
    """The nodes of a range such as gpu[1-3]."""
    if "[" not in text:
        return [text]
    stem, numbers = text.rstrip("]").split("[")
    first, _, last = numbers.partition("-")
    return [f"{stem}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]


class SiteCluster(LoopbackCluster):
    """The loopback Slurm of a configuration, with sbatch's flags."""

    def __init__(self, folder: Path, site: Configuration, **options: Any) -> None:
        nodes = [NodeSpec(name, "gpu", MOST_GPUS) for each in site.nodes for name in names(each)]
        self.power = PowerSaving(folder.parent / "power", boot_s=1.0) if site.asleep else None
        sleep = self.power.settings(idle_s=2, resume_timeout_s=60) if self.power is not None else {}
        quick = {"SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1"}
        super().__init__(
            folder,
            nodes,
            flags=True,
            accounting=bool(site.accounting),
            settings=quick | sleep | dict(site.settings),
            files=site.files,
            **options,
        )
        self.site = site

    def _write_files(self, ports: config.Ports) -> None:
        super()._write_files(ports)
        host = socket.gethostname().split(".")[0]
        written = self.slurm_conf.read_text().splitlines()
        lines = [
            line for line in written if not line.startswith(("NodeName=", "PartitionName=", "AccountingStorageTRES"))
        ]
        if self.accounting:
            lines.append("AccountingStorageTRES=gres/gpu")
        parameters = {name: text for each, text in self.site.nodes.items() for name in names(each)}
        for index, (name, text) in enumerate(parameters.items()):
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.slurmd(index)}"
            lines.append(f"NodeName={name} {place} {text}")
        self.slurm_conf.write_text("\n".join([*lines, *self.site.partitions]) + "\n")
        gpus = self.folder / "dev"
        gres = ["AutoDetect=off", *(line.format(gpus=gpus) for line in self.site.gres)]
        (self.slurm_conf.parent / "gres.conf").write_text("\n".join(gres) + "\n")
        managed = ", ".join(f"'{name}'" for name in self.site.managed)
        self.settings_file.write_text(self.settings_file.read_text().replace("'all'", managed))

    def _states(self) -> list[str]:
        listing = self.command("sinfo", "-hNa", "-o", "%N %T", check=False).stdout
        state_of = dict(line.split() for line in listing.splitlines())
        return [state_of.get(node.name, "unknown") for node in self.nodes]
