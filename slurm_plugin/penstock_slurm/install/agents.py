"""Checks whether jobs can share GPUs: what the agents need from Slurm, and what each node's agent reports."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock_profiles.files import open_regular
from penstock_profiles.nvml import OF_PROGRAMS
from penstock_profiles.wire import read
from penstock_scheduler import __version__
from penstock_scheduler.api.agent_messages import AWAY_S, MAX_BYTES, Lack, NodeStatus, status_file
from penstock_slurm.gateway import CliGateway, SlurmNode, abilities
from penstock_slurm.gateway.abilities import Release
from penstock_slurm.gateway.conf_edits import our_libraries
from penstock_slurm.gateway.local_slurm import constrains_devices
from penstock_slurm.gateway.node_states import OFF
from penstock_slurm.install.answers import Finding
from penstock_slurm.install.plan import InstallTarget
from penstock_slurm.install.units import AGENT, MOUNT
from penstock_slurm.share.agents import STAND_IN_REMEDY, without_stand_in
from penstock_slurm.share.gpu_reservation import NAME as PLACEHOLDER

AWAY = OFF | {"DOWN", "FUTURE", "NOT_RESPONDING", "UNKNOWN"}
"""States of nodes whose agents need not run."""

SHOWN = 8
"""Most nodes that a finding names."""

MIG_TYPE = re.compile(r"(?:^|_)\d+g\.\d+gb")
"""In the GPU types of MIG devices, as AutoDetect=nvml names them: 1g.5gb, a100_3g.20gb."""

ERRORS_S = 86400.0
"""For how long an error of a GPU is shown."""

Trouble = Literal["none", "unreadable", "silent", "ahead", "release"] | Lack

TROUBLES: dict[Trouble, tuple[str, str]] = {
    "none": (
        "has never reported",
        f"on each node: systemctl enable --now {AGENT}; if it runs, `journalctl -u penstock-agent` shows whether it can write "
        "to {spool}, which must be the same folder as on this host",
    ),
    "silent": (
        f"has not reported for {AWAY_S:g} s or more (the longest: {{age}})",
        "on each node: systemctl status penstock-agent; if it runs, the node's clock is late (chronyc tracking) or {spool} is "
        "not mounted",
    ),
    "ahead": ("has a clock ahead of this host's", "set the nodes' clocks by NTP (chronyc tracking)"),
    "unreadable": (
        "writes reports that this version cannot read",
        f"install Penstock {__version__} there, then: systemctl restart penstock-agent",
    ),
    "release": (
        f"is not version {__version__}",
        f"install Penstock {__version__} there, then: systemctl restart penstock-agent",
    ),
    "no-plugin": (
        "finds no penstock.so that Slurm loads and that knows the agent's folder: tasks of jobs that share GPUs would see all "
        "GPUs",
        "on each node: install penstock.so and its line of plugstack.conf as on this host; "
        "`journalctl -u penstock-agent` shows what is wrong",
    ),
    "old-plugin": (
        f"finds a penstock.so that is not version {__version__}",
        "copy this host's to each node; tasks that start later load it",
    ),
    "no-mps": (
        "finds no nvidia-cuda-mps-control in [agent] mps_dir: packs run without MPS",
        "on each node: CUDA_MPS_PIPE_DIRECTORY=DIR nvidia-cuda-mps-control -d, without CUDA_VISIBLE_DEVICES (the agent's unit "
        "does not see folders in /tmp); or remove mps_dir from the settings",
    ),
    "no-limiter": (
        "finds no HAMi-core in [agent] limiter: nothing but the agent keeps jobs of packs to their memory limits",
        "install its libvgpu.so there on each node, writable by root alone; or remove limiter from the settings",
    ),
    "no-devices": (
        "cannot give GPUs to jobs that share them, because Slurm denies them (ConstrainDevices=yes): tasks wait, and then see no "
        "GPU",
        "`journalctl -u penstock-agent` shows why: for `Operation not permitted` or `Read-only file system`, use the unit that "
        "`penstock slurm unit penstock-agent.service --constrain-devices` prints; for a missing device file, set [agent] "
        "gpu_file to gres.conf's File=",
    ),
    "no-nvml": (
        "cannot ask NVIDIA's driver (NVML): it measures neither GPU memory nor GPU time of jobs, and believes what jobs beside "
        "a guaranteed one report",
        "`journalctl -u penstock-agent` shows why; run nvidia-smi on each node, load the driver (modprobe nvidia), and install "
        "nvidia-ml-py beside the agent. The agent looks again every minute",
    ),
    "old-driver": (
        "has a driver of NVIDIA's that cannot checkpoint processes: jobs that do not move off their GPUs are frozen with their "
        "memory there",
        "install driver 570 or later on each node; or remove [agent] cuda_checkpoint from the settings",
    ),
    "no-freezer": (
        "may not freeze jobs: it cannot hold jobs beside a guaranteed one to their shares",
        "`journalctl -u penstock-agent` shows why; use the unit that `penstock slurm unit penstock-agent.service` prints (with "
        "--constrain-devices where Slurm does), which has CAP_KILL and ProtectControlGroups=no",
    ),
    "strangers": (
        "sees processes that belong to no job use GPUs which jobs share: it cannot hold them to a share, so guaranteed jobs "
        "there may be slower than promised",
        "`journalctl -u penstock-agent` names them; end them on the node. With ProctrackType=proctrack/linuxproc a process can "
        "outlive its job: set proctrack/cgroup",
    ),
    "unknown": (
        "cannot find out whether its node lacks anything that sharing needs",
        "`journalctl -u penstock-agent` shows what failed; please report it",
    ),
}
"""What is wrong with the agent, and the remedy. `{spool}` and `{age}` are filled in."""


@dataclass(frozen=True, slots=True)
class AgentFinding:
    """What a node's agent reports. `trouble` is None if nothing is wrong with the agent itself."""

    trouble: Trouble | None
    age_s: float = 0.0
    errors: tuple[tuple[int, int], ...] = ()
    """GPU index and XID of each error."""
    lacks: tuple[Lack, ...] = ()
    """What the agent lacks on its node."""


def read_status(spool: Path, node: str, now_s: float) -> AgentFinding:
    """What a node's agent reports in the spool."""
    try:
        with open_regular(status_file(spool, node)) as file:
            status = read(NodeStatus, file.read(MAX_BYTES))
    except OSError:
        return AgentFinding("none")
    except ValueError:
        return AgentFinding("unreadable")
    age_s = now_s - status.time_s
    fresh = {(each.device, each.xid) for each in status.xids if now_s - each.time_s < ERRORS_S}
    errors = tuple(sorted(each for each in fresh if each[1] not in OF_PROGRAMS))
    if age_s >= AWAY_S:
        return AgentFinding("silent", age_s, errors)
    if age_s <= -AWAY_S:
        return AgentFinding("ahead", errors=errors)
    trouble: Trouble | None = None if status.release == __version__ else "release"
    return AgentFinding(trouble, age_s, errors, status.lacks)


def judge(nodes: Iterable[SlurmNode], spool: Path, now_s: float) -> Iterator[Finding]:
    """One finding for all agents without trouble, and one for each trouble of agents or nodes.

    Args:
        nodes: of the managed partitions.
        spool: `[slurm] spool_dir`.
        now_s: this machine's clock, seconds since the epoch.
    """
    # On nodes whose GPUs are all MIG devices, no agent runs.
    gpu_nodes = [node for node in nodes if sum(node.gpus.values()) and not all(map(MIG_TYPE.search, node.gpus))]
    there = {node.name: read_status(spool, node.name, now_s) for node in gpu_nodes if not node.state & AWAY}
    wrong: dict[Trouble, dict[str, float]] = {}
    for name, seen in sorted(there.items()):
        for trouble in (*([seen.trouble] if seen.trouble is not None else []), *seen.lacks):
            wrong.setdefault(trouble, {})[name] = seen.age_s
    well = sum(seen.trouble is None for seen in there.values())
    down = len(gpu_nodes) - len(there)
    if well or not wrong:
        rest = f"; {down} more are down or powered down" if down else ""
        yield Finding(f"the agents of {well} of {len(there)} nodes with GPUs report{rest}")
    for trouble, ages_s in wrong.items():
        text, remedy = TROUBLES[trouble]
        age = f"{max(ages_s.values()):.0f} s"
        yield Finding(f"the agent of {some(list(ages_s))} {text.format(age=age)}", remedy.format(spool=spool))
    errors = [f"XID {xid} of GPU {gpu} of {name}" for name, seen in sorted(there.items()) for gpu, xid in seen.errors]
    if errors:
        yield Finding(
            f"NVIDIA's driver reported errors within a day: {some(errors)}",
            "on the node: journalctl -k | grep NVRM; look the XID up in NVIDIA's list; drain the node if a GPU is broken",
        )


def some(names: Sequence[str]) -> str:
    """The first few names."""
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def check_cgroups(config: Mapping[str, str], release: Release) -> Iterator[Finding]:
    """Check that agents find the cgroups in which Slurm constrains the devices of jobs, if it does."""
    if not constrains_devices(config):
        return
    found = release.cgroups_have_job_ids or config.get("CgroupJobIdPaths", "no").lower() == "yes"
    remedy = (
        "set CgroupJobIdPaths=yes in cgroup.conf (Slurm 26.05.2 or later); it counts for jobs that start afterwards"
    )
    yield Finding("agents find the cgroups of jobs", "" if found else remedy)


def check_processes(config: Mapping[str, str]) -> Finding:
    """Check that Slurm freezes and ends all processes of a job, also those that have left its process tree."""
    found = config.get("ProctrackType", "unknown")
    remedy = (
        f"it is {found}: a process that leaves its job's process tree (env -i setsid) is then neither suspended nor seen, and "
        "goes on using a GPU that another job has by then. Set ProctrackType=proctrack/cgroup in slurm.conf, and restart "
        "slurmctld and the slurmds while no job runs"
    )
    what = "Slurm suspends all processes of a job (ProctrackType=proctrack/cgroup)"
    return Finding(what, "" if found == "proctrack/cgroup" else remedy)


def check_agents(site: InstallTarget, *, on_nodes: bool) -> Iterator[Finding]:
    """Check what jobs that share GPUs need, if `[slurm] agents` is on; with `on_nodes` also the nodes. Raises PenstockError."""
    section = site.slurm
    if not section.agents:
        return
    gateway = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)
    nodes = [node for node in gateway.nodes() if not set(section.partitions).isdisjoint(node.partitions)]
    release = abilities.release(gateway.version())
    yield from check_cgroups(site.config, release)
    if not release.empty_tres_clears_gpus:
        lacking = without_stand_in(nodes, section.partitions)
        remedy = f"{', '.join(lacking[:SHOWN])}{' and more' if len(lacking) > SHOWN else ''}: {STAND_IN_REMEDY}"
        yield Finding("the nodes have the GRES that jobs that share GPUs ask for", remedy if lacking else "")
    plugstack = site.plugstack.read_text() if site.plugstack.exists() else ""
    found = our_libraries(plugstack, site.run_dir)
    remedy = "run `penstock slurm install --apply`, then copy the line to the nodes"
    yield Finding("plugstack.conf names the agents' folder", "" if found else remedy)
    if on_nodes:
        yield check_processes(site.config)
        yield from judge(nodes, section.spool_dir, time.time())


def to_do_on_nodes(site: InstallTarget, prefix: Path, settings_file: Path) -> str:
    """The commands of docs/admin/sharing-setup.md for the nodes, with this site's paths."""
    plugin, units = prefix / "penstock.so", [*([] if site.run_dir else [MOUNT]), AGENT]
    return "\n    ".join(
        (
            f"on each node whose jobs share GPUs, with the files of this host ({prefix} has the units):",
            f"pip install --require-hashes --no-deps -r requirements.lock   # where ExecStart of {AGENT} expects it",
            "pip install --no-deps ./penstock_scheduler-*.whl              # the wheel of this version",
            f"install -D -m 644 {settings_file.name} {settings_file.resolve()}",
            f"install -D -m 644 {plugin.name} {plugin}   # and the line in {site.plugstack}",
            f"cp {' '.join(units)} /etc/systemd/system/",
            f"systemctl daemon-reload && systemctl enable --now {' '.join(units)}",
        )
    )


def to_undo_on_nodes(site: InstallTarget) -> Iterator[str]:
    """What the admin must remove after an uninstall; nothing without agents. Raises PenstockError."""
    section = site.slurm
    folder = section.spool_dir / "agents"
    if not section.agents and not folder.is_dir():
        return
    gateway = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)
    placeholders = [job.id for job in gateway.jobs() if job.name == PLACEHOLDER]
    if placeholders:
        jobs = " ".join(placeholders)
        yield f"jobs {PLACEHOLDER} hold GPUs for jobs that share them: {jobs}; let the sharing jobs end, then scancel these"
    named = " ".join((AGENT, *([] if site.run_dir else [MOUNT])))
    yield f"on each node with an agent: systemctl disable --now {named}, and delete these files"
    yield f"delete {folder} once no agent runs"
