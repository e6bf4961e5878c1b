"""The text of a loopback cluster's configuration files.

The cluster works in a container, without cgroups and systemd: Slurm tracks processes by their parents and binds GPUs by
environment variables. Slurm 22.05 and 24.11 accept these files.
"""

import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_scheduler.model.nodespec import NodeSpec
from penstock_slurm.gateway import STAND_IN

# Some plugins read cgroup.conf even when nothing uses cgroups.
CGROUP_CONF = (
    "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainDevices=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
)


CONTROLLERS = {"ctl-0": "127.0.0.1", "ctl-1": "127.0.0.2"}
"""Host name -> address of a controller and its backup. slurmctld tells by its host's name which of the two it is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of a cluster. `short` is `folder`, or one with a shorter name for Unix sockets (108 bytes at most)."""

    folder: Path
    short: Path

    @property
    def slurm_conf(self) -> Path:
        """The value of SLURM_CONF. slurmdbd.conf, gres.conf and cgroup.conf are in the same folder."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """/etc/hosts of a controller that has a backup."""
        return self.folder / "etc" / "hosts"

    @property
    def munge_socket(self) -> Path:
        """The socket of munged."""
        return self.short / "run" / "munge.sock"

    @property
    def mariadb_socket(self) -> Path:
        """The socket of MariaDB, in a folder of mode 0700 because MariaDB's root has no password."""
        return self.short / "db" / "sock"

    @property
    def log(self) -> Path:
        """The folder of a .log and a .err for each daemon, and of Slurm's record of ended jobs, jobcomp.txt."""
        return self.folder / "log"

    def gpu(self, index: int) -> Path:
        """The link to /dev/null that stands for a GPU.

        Slurm also counts an ordinary file, but sets CUDA_VISIBLE_DEVICES only for a device. A link does not need root.
        """
        return self.folder / "dev" / f"nvidia{index}"


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports, one after another from `first`: slurmctld, slurmdbd, then one for each node."""

    first: int

    @property
    def slurmctld(self) -> int:
        """The port of slurmctld."""
        return self.first

    @property
    def slurmdbd(self) -> int:
        """The port of slurmdbd."""
        return self.first + 1

    def slurmd(self, node_index: int) -> int:
        """The port of a node's slurmd. Nodes count from 0."""
        return self.first + 2 + node_index


def user_name() -> str:
    """The user of the daemons, by name, or by uid if it has no name, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def slurm_conf(
    layout: Layout,
    nodes: Sequence[NodeSpec],
    ports: Ports,
    *,
    accounting: bool,
    cpus_per_node: int,
    slurmd_timeout_s: int,
    settings: Mapping[str, str],
    stand_in: bool = False,
    shards: int = 0,
    backup: bool = False,
) -> str:
    """slurm.conf. `settings` replaces or adds lines by key.

    `backup` names two controllers, each of which listens on the address of its name only.
    `stand_in` gives the nodes the GRES that jobs ask for in place of GPUs (docs/admin/sharing.md), `shards` each GPU so many
    parts that jobs can ask for.
    """
    host = socket.gethostname().split(".")[0]
    run = layout.short / "run"
    types = list(dict.fromkeys(node.gpu_type for node in nodes))
    lines = {
        "ClusterName": "loop",
        # With the address in parentheses nothing needs to resolve the name.
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(ports.slurmctld),
        "SlurmUser": user_name(),
        "SlurmdUser": user_name(),
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # cred_expire: a requeued job waits for its old credential to expire, 120 s by default.
        "AuthInfo": f"socket={layout.munge_socket},cred_expire=5",
        "StateSaveLocation": str(layout.folder / "state"),
        "SlurmdSpoolDir": f"{layout.short}/spool/%n",
        "SlurmctldPidFile": str(run / "slurmctld.pid"),
        "SlurmdPidFile": f"{run}/slurmd.%n.pid",
        "SlurmctldLogFile": str(layout.log / "slurmctld.log"),
        "SlurmdLogFile": f"{layout.log}/slurmd.%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "info",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "SelectType": "select/cons_tres",
        # Memory is allocated only if the spec gives the nodes' memory.
        "SelectTypeParameters": "CR_Core_Memory" if any(node.memory_mb for node in nodes) else "CR_Core",
        "GresTypes": "gpu" + (f",{STAND_IN}" if stand_in else "") + (",shard" if shards else ""),
        # Use the configured CPUs and memory, whatever this machine has.
        "SlurmdParameters": "config_overrides",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=5,bf_interval=5",
        "ReturnToService": "2",
        "JobRequeue": "1",
        "JobFileAppend": "1",
        "KillWait": "5",
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": str(slurmd_timeout_s),
        "MessageTimeout": "10",
        "PropagateResourceLimits": "NONE",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": str(layout.log / "jobcomp.txt"),
        "MaxJobCount": "50000",
    }
    if accounting:
        lines |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "localhost",
            "AccountingStoragePort": str(ports.slurmdbd),
            # Without it, clients of slurmdbd use munge's default socket, which is not ours, and hang.
            "AccountingStoragePass": str(layout.munge_socket),
            "AccountingStorageTRES": ",".join(["gres/gpu", *(f"gres/gpu:{gpu_type}" for gpu_type in types)]),
            "PriorityType": "priority/multifactor",
        }
    if backup:
        lines |= {
            "SlurmctldHost": "\nSlurmctldHost=".join(f"{name}({address})" for name, address in CONTROLLERS.items()),
            "CommunicationParameters": "NoCtldInAddrAny",
            "SlurmctldTimeout": "5",
        }
    text = [f"{key}={value}" for key, value in (lines | dict(settings)).items()]
    text += [
        f"NodeName={node.name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.slurmd(index)} "
        f"CPUs={node.cpus or cpus_per_node} Boards=1 SocketsPerBoard=1 CoresPerSocket={node.cpus or cpus_per_node} "
        f"ThreadsPerCore=1 RealMemory={node.memory_mb or 256000} "
        f"Gres=gpu:{node.gpu_type}:{node.gpus}{f',{STAND_IN}:no_consume:1' if stand_in else ''}"
        f"{f',shard:{shards * node.gpus}' if shards else ''} "
        f"Feature={node.gpu_type} State=UNKNOWN"
        for index, node in enumerate(nodes)
    ]
    for gpu_type in types:
        names = ",".join(node.name for node in nodes if node.gpu_type == gpu_type)
        text.append(f"PartitionName={gpu_type} Nodes={names} MaxTime=INFINITE State=UP")
    text.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(text) + "\n"


def penstock_toml(layout: Layout, spool: Path, socket: Path, run_dir: str | None) -> str:
    """The settings file of a penstockd that manages the cluster. `run_dir` is the agents', None without agents."""
    text = (
        f"[daemon]\nround_s = 5.0\nstate_dir = '{layout.folder}/penstock-state'\n\n[api]\nsocket = '{socket}'\n\n"
        f"[slurm]\npartitions = ['all']\nconf = '{layout.slurm_conf}'\nspool_dir = '{spool}'\n"
    )
    if run_dir is None:
        return text
    return text + f"agents = true\n\n[agent]\nrun_dir = '{run_dir}'\nstate_dir = '{run_dir}-state'\n"


def gres_conf(layout: Layout, nodes: Sequence[NodeSpec], shards: int = 0) -> str:
    """gres.conf. Each GPU is a file that all nodes share, because slurmd refuses a count without files."""
    lines = [
        f"NodeName={node.name} Name=gpu Type={node.gpu_type} "
        f"File={layout.gpu(0) if node.gpus == 1 else layout.folder / f'dev/nvidia[0-{node.gpus - 1}]'}"
        for node in nodes
    ]
    if shards:
        lines += [f"NodeName={node.name} Name=shard Count={shards * node.gpus}" for node in nodes]
    return "\n".join(["AutoDetect=off", *lines]) + "\n"


def slurmdbd_conf(layout: Layout, ports: Ports) -> str:
    """slurmdbd.conf. `localhost` makes the MariaDB client use the socket in MYSQL_UNIX_PORT."""
    return (
        f"AuthType=auth/munge\nAuthInfo=socket={layout.munge_socket}\n"
        f"DbdHost=localhost\nDbdPort={ports.slurmdbd}\nSlurmUser={user_name()}\n"
        f"LogFile={layout.log}/slurmdbd.log\nPidFile={layout.short}/run/slurmdbd.pid\n"
        "StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\nStorageLoc=slurm_acct_db\n"
    )
