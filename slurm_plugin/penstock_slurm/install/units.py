"""The systemd units of penstockd, of the API and of the nodes, with the site's paths.

`slurm_plugin/systemd` has the units for the default settings. This module replaces and adds lines.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler.api.messages import DEFAULT_SOCKET
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.settings import Settings
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.settings import SlurmSettings

DAEMON, AGENT, MOUNT = "penstockd.service", "penstock-agent.service", "run-penstock.mount"

API, API_SOCKET = "penstock-api.service", "penstock-api.socket"

STATE_DIR = "/var/lib/penstock"


def daemon_unit(settings_file: Path) -> str:
    """The unit of penstockd."""
    return _unit(DAEMON, _command("penstockd", settings_file))


def api_units(settings: Settings, settings_file: Path) -> dict[str, str]:
    """The units of penstock-api, file name -> text; none if the settings name no user for it."""
    api = settings.section(ApiSettings)
    if api.embedded or api.user is None:
        return {}
    changed = _command("penstock-api", settings_file) | {"User=penstock-api": f"User={api.user}"}
    path = str(api.socket).replace("%", "%%")
    return {API: _unit(API, changed), API_SOCKET: _unit(API_SOCKET, {str(DEFAULT_SOCKET): path})}


CONSTRAINED = {
    # cgroup v1 needs CAP_SYS_ADMIN, and so does loading a program for v2 (or CAP_BPF, which kernels before 5.8 lack). To show
    # which program is attached, kernels before 6.7 need CAP_NET_ADMIN.
    "CapabilityBoundingSet=": "CapabilityBoundingSet=CAP_SYS_ADMIN CAP_NET_ADMIN ",
    # Kernels before 5.11 count programs as locked memory.
    "SystemCallFilter=@system-service": "SystemCallFilter=@system-service bpf\nLimitMEMLOCK=infinity",
}
"""The lines that differ if the agent opens GPUs in device cgroups."""


def agent_units(settings: Settings, settings_file: Path, *, constrained: bool) -> dict[str, str]:
    """The units of the nodes, file name -> text: the agent's, and with the default `run_dir` that of its file system.

    `constrained`: whether Slurm constrains devices.
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
        # systemd permits writing only to folders that exist; "+" runs the command without the unit's restrictions
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
    """The innermost folder whose name does not depend on the node."""
    parts = Path(folder).parts
    depth = next((index for index, part in enumerate(parts) if "%n" in part), len(parts))
    return str(Path(*parts[:depth]))


def _unit(name: str, changed: dict[str, str]) -> str:
    text = (source("systemd") / name).read_text(encoding="utf-8")
    for before, after in changed.items():
        assert before in text, f"{name} has {before!r}"
        text = text.replace(before, after)
    return text


_PACKAGE = Path(__file__).parent.parent


def source(name: str) -> Path:
    """The folder `spank`, `lua` or `systemd`: inside an installed package, or beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def build_plugin(slurm_cflags: str = "", *, name: str = "penstock.so", werror: bool = False) -> bytes:
    """penstock.so, or cloud_runner.so for gateway nodes, compiled against the headers of the Slurm on this machine.

    Raises:
        PenstockError: make, a compiler or Slurm's headers are missing, with the names of Debian's packages.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-build-") as folder:
        build = Path(folder) / "spank"
        shutil.copytree(source("spank"), build, ignore=shutil.ignore_patterns("*.so", "check_flags"))
        command = ["make", "-C", str(build), name, f"SLURM_CFLAGS={slurm_cflags}"]
        try:
            done = subprocess.run(
                [*command, "WERROR=-Werror"] if werror else command, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise PenstockError("make is not installed; install make, gcc and libslurm-dev (Debian's names)") from None
        if done.returncode != 0:
            raise PenstockError(
                f"{name} cannot be built; is gcc installed, and are Slurm's headers (Debian: libslurm-dev)? "
                f"--slurm-cflags=-I/opt/slurm/include names another folder. The end of make's output:\n{done.stderr[-1500:]}"
            )
        return (build / name).read_bytes()
