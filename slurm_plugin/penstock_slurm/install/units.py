"""The systemd units of penstockd and of what runs on the nodes, with the paths of this site.

`slurm_plugin/systemd` has them as they are where nothing is set otherwise; here lines are exchanged, and few added.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler.settings import Settings
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.install.sources import source
from penstock_slurm.settings import SlurmSettings

DAEMON, AGENT, MOUNT = "penstockd.service", "penstock-agent.service", "run-penstock.mount"

STATE_DIR = "/var/lib/penstock"


def daemon_unit(settings_file: Path) -> str:
    """penstockd's."""
    return _unit(DAEMON, _command("penstockd", settings_file))


CONSTRAINED = {
    # cgroup v1 asks for CAP_SYS_ADMIN, and so does a program for v2 to be loaded (or for CAP_BPF, which is not there before 5.8);
    # to say which one is attached kernels before 6.7 ask for CAP_NET_ADMIN.
    "CapabilityBoundingSet=": "CapabilityBoundingSet=CAP_SYS_ADMIN CAP_NET_ADMIN ",
    "ProtectControlGroups=yes": "ProtectControlGroups=no",
    # Programs count as locked memory before 5.11.
    "SystemCallFilter=@system-service": "SystemCallFilter=@system-service bpf\nLimitMEMLOCK=infinity",
}
"""What the agent may do beside where it opens GPUs in device cgroups."""


def agent_units(settings: Settings, settings_file: Path, *, constrained: bool) -> dict[str, str]:
    """File name -> text: of the agent, and of the file system on its `run_dir` where that is the usual one.

    `constrained`: Slurm constrains devices.
    """
    agent = settings.section(AgentSettings)
    written = [str(settings.section(SlurmSettings).spool_dir)]
    changed = _command("penstock-agent", settings_file)
    if agent.run_dir != RUN_DIR:
        written.append(_above_nodes(agent.run_dir))
        changed |= {"RuntimeDirectory=penstock\n": "", "RuntimeDirectoryPreserve=yes\n": ""}
    if _above_nodes(agent.state_dir) != STATE_DIR:
        written.append(_above_nodes(agent.state_dir))
        changed["StateDirectory=penstock\n"] = ""
    if own := " ".join(path.replace("%", "%%") for path in written[1:]):
        # systemd lets a unit write only where there is something already; "+": before it is shut in
        changed["ExecStart="] = f"ExecStartPre=+/bin/mkdir -p {own}\nExecStart="
    if constrained:
        changed |= CONSTRAINED
    paths = " ".join(f"-{path.replace('%', '%%')}" for path in written)
    units = {AGENT: _unit(AGENT, changed | {"-/var/spool/penstock": paths})}
    if agent.run_dir == RUN_DIR:
        units[MOUNT] = _unit(MOUNT, {})
    return units


def _command(program: str, settings_file: Path) -> dict[str, str]:
    return {
        f"/usr/bin/env {program}": shutil.which(program) or f"/usr/bin/env {program}",
        "/etc/penstock/penstock.toml": str(settings_file.resolve()),
    }


def _above_nodes(folder: str) -> str:
    """The folder that does not depend on the node's name, in which the agent makes its own."""
    parts = Path(folder).parts
    depth = next((index for index, part in enumerate(parts) if "%n" in part), len(parts))
    return str(Path(*parts[:depth]))


def _unit(name: str, changed: dict[str, str]) -> str:
    text = (source("systemd") / name).read_text(encoding="utf-8")
    for before, after in changed.items():
        assert before in text, f"{name} has {before!r}"
        text = text.replace(before, after)
    return text
