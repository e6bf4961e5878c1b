"""Whether jobs can share GPUs here: what agents need of Slurm, and what each node's agent tells of itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from penstock_profiles.files import open_regular
from penstock_profiles.nvml import OF_PROGRAMS
from penstock_scheduler import __version__
from penstock_scheduler.sharing.messages import AWAY_S, MAX_BYTES, Lack, NodeStatus, status_file
from penstock_slurm.agents import CLEARS_ON, STAND_IN_REMEDY, without_stand_in
from penstock_slurm.gateway import SlurmNode, open_gateway
from penstock_slurm.gpu_reservation import NAME as PLACEHOLDER
from penstock_slurm.install.edits import our_libraries
from penstock_slurm.install.findings import Finding
from penstock_slurm.install.plan import InstallTarget
from penstock_slurm.install.units import AGENT, MOUNT

AWAY = frozenset({"DOWN", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "UNKNOWN"})
"""States of nodes on which nobody is expected to run."""

SHOWN = 8
"""Nodes that are named."""

ERRORS_S = 86400.0
"""How long an error of a GPU is told."""

Trouble = Literal["none", "unreadable", "silent", "ahead", "release"] | Lack

TROUBLES: dict[Trouble, tuple[str, str]] = {
    "none": (
        "has never told anything",
        f"on each: systemctl enable --now {AGENT}; if it runs, `journalctl -u penstock-agent` says whether it can write "
        "to {spool} there, which must be the same folder as here",
    ),
    "silent": (
        f"has told nothing for {AWAY_S:g} s or more (the longest: {{age}})",
        "on each: systemctl status penstock-agent; if it runs, the node's clock is late (chronyc tracking) or {spool} is away",
    ),
    "ahead": ("has a clock ahead of this one's", "set the nodes' clocks by NTP (chronyc tracking)"),
    "unreadable": (
        "tells what this version does not understand",
        f"install Penstock {__version__} there, then: systemctl restart penstock-agent",
    ),
    "release": (
        f"is not of Penstock {__version__}",
        f"install Penstock {__version__} there, then: systemctl restart penstock-agent",
    ),
    "no-plugin": (
        "finds no penstock.so that Slurm loads there and that looks for the agent where it is: tasks of jobs that share would "
        "see all GPUs",
        "on each: penstock.so and its line of plugstack.conf, which are the same as here; "
        "`journalctl -u penstock-agent` there says what is wrong",
    ),
    "old-plugin": (
        f"finds a penstock.so there that is not of Penstock {__version__}",
        "copy that of this host to each; tasks that start from then on load it",
    ),
    "no-mps": (
        "finds no nvidia-cuda-mps-control in [agent] mps_dir: packs there run without it",
        "on each: CUDA_MPS_PIPE_DIRECTORY=DIR nvidia-cuda-mps-control -d, without CUDA_VISIBLE_DEVICES; the agent's unit does "
        "not see folders in /tmp; or take mps_dir out of the settings",
    ),
    "no-devices": (
        "cannot open GPUs to jobs that share, to which Slurm denies them (ConstrainDevices=yes): their tasks wait for them, and "
        "then see none",
        "`journalctl -u penstock-agent` there says why: `Operation not permitted` and `Read-only file system` want the unit that "
        "`penstock slurm unit penstock-agent.service --constrain-devices` prints; a device file that is not there wants [agent] "
        "gpu_file as gres.conf's File=",
    ),
}
"""What the agent does, and the remedy. `{spool}` and `{age}` are filled in."""


@dataclass(frozen=True, slots=True)
class AgentFinding:
    """What can be told of a node's agent by its status; `trouble` None: the agent is well."""

    trouble: Trouble | None
    age_s: float = 0.0
    errors: tuple[tuple[int, int], ...] = ()
    """GPU and XID."""
    lacks: tuple[Lack, ...] = ()
    """What the agent finds wrong with its node."""


def look(spool: Path, node: str, now_s: float) -> AgentFinding:
    """A node's agent, by its status in the spool."""
    try:
        with open_regular(status_file(spool, node)) as file:
            status = NodeStatus.model_validate_json(file.read(MAX_BYTES))
    except OSError:
        return AgentFinding("none")
    except ValidationError:
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
    """One finding of all agents that are well, and one for each thing that is wrong with them or with their nodes.

    Args:
        nodes: of the managed partitions.
        spool: `[slurm] spool_dir`.
        now_s: by this machine's clock, s since 1970.
    """
    gpu_nodes = [node for node in nodes if sum(node.gpus.values())]
    there = {node.name: look(spool, node.name, now_s) for node in gpu_nodes if not node.state & AWAY}
    wrong: dict[Trouble, dict[str, float]] = {}
    for name, seen in sorted(there.items()):
        for trouble in (*([seen.trouble] if seen.trouble is not None else []), *seen.lacks):
            wrong.setdefault(trouble, {})[name] = seen.age_s
    well = sum(seen.trouble is None for seen in there.values())
    down = len(gpu_nodes) - len(there)
    if well or not wrong:
        rest = f"; {down} more are down" if down else ""
        yield Finding(f"the agents of {well} of {len(there)} nodes with GPUs report{rest}")
    for trouble, ages_s in wrong.items():
        text, remedy = TROUBLES[trouble]
        age = f"{max(ages_s.values()):.0f} s"
        yield Finding(f"the agent of {_some(list(ages_s))} {text.format(age=age)}", remedy.format(spool=spool))
    errors = [f"XID {xid} of GPU {gpu} of {name}" for name, seen in sorted(there.items()) for gpu, xid in seen.errors]
    if errors:
        yield Finding(
            f"NVIDIA's driver told within a day: {_some(errors)}",
            "on the node: journalctl -k | grep NVRM, and what NVIDIA's list of XIDs says; drain it if a GPU is broken",
        )


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def check_agents(site: InstallTarget, *, on_nodes: bool) -> Iterator[Finding]:
    """What jobs that share need, where `[slurm] agents` is on; with `on_nodes` also of the nodes. Raises PenstockError."""
    section = site.slurm
    if not section.agents:
        return
    gateway = open_gateway("cli", conf=section.conf, timeout_s=section.command_timeout_s)
    nodes = [node for node in gateway.nodes() if not set(section.partitions).isdisjoint(node.partitions)]
    if gateway.version() > CLEARS_ON:
        lacking = without_stand_in(nodes, section.partitions)
        remedy = f"{', '.join(lacking[:SHOWN])}{' and more' if len(lacking) > SHOWN else ''}: {STAND_IN_REMEDY}"
        yield Finding("jobs can ask for something else in place of GPUs", remedy if lacking else "")
    yield Finding('backend = "cli"', "" if section.backend == "cli" else "set it in [slurm]: sharing has no other yet")
    plugstack = site.plugstack.read_text() if site.plugstack.exists() else ""
    told = our_libraries(plugstack, site.run_dir)
    remedy = "run `penstock slurm install --apply`, then copy the line to the nodes"
    yield Finding("plugstack.conf says where the agents are", "" if told else remedy)
    if on_nodes:
        yield from judge(nodes, section.spool_dir, time.time())


def to_do_on_nodes(site: InstallTarget, prefix: Path) -> str:
    """What to bring to the nodes, in words."""
    mount = "" if site.run_dir else f" {MOUNT}"
    units = " and ".join(str(prefix / name) for name in (AGENT, *mount.split()))
    return (
        "on each node whose jobs share GPUs: this version of Penstock, the settings file,\n"
        f"  {prefix / 'penstock.so'} with the line in {site.plugstack},\n"
        f"  {units} in /etc/systemd/system;\n"
        f"  then: systemctl daemon-reload && systemctl enable --now{mount} {AGENT}\n"
        "  and here: penstock slurm check"
    )


def to_undo_on_nodes(site: InstallTarget) -> Iterator[str]:
    """What is left of sharing after an uninstall, in words; nothing where there are no agents. Raises PenstockError."""
    section = site.slurm
    folder = section.spool_dir / "agents"
    if not section.agents and not folder.is_dir():
        return
    gateway = open_gateway("cli", conf=section.conf, timeout_s=section.command_timeout_s)
    placeholders = [job.id for job in gateway.jobs() if job.name == PLACEHOLDER]
    if placeholders:
        jobs = " ".join(placeholders)
        yield f"jobs {PLACEHOLDER} that hold GPUs for jobs that share: {jobs}; let those end, then scancel these"
    named = " ".join((AGENT, *([] if site.run_dir else [MOUNT])))
    yield f"on each node with an agent: systemctl disable --now {named}, and delete what is named"
    yield f"delete {folder} when no agent runs any more"
