"""Which changes install Penstock's parts into the Slurm of this machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from penstock_profiles.families import load_families
from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.settings import DaemonSettings, Settings
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.gateway import CliGateway
from penstock_slurm.gateway.conf_edits import LineEdit, set_key, set_plugin, with_plugin
from penstock_slurm.gateway.local_slurm import SlurmCommands, admins, allocates_memory, constrains_devices
from penstock_slurm.install import sitefile
from penstock_slurm.install.changes import RECORD, Change
from penstock_slurm.install.units import agent_units, source
from penstock_slurm.settings import SlurmSettings

SYNC_MINUTES = 5


class Schedule(StrEnum):
    """What repeats `penstock slurm sync`."""

    SYSTEMD = "systemd"
    CRON = "cron"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class InstallTarget:
    """The Slurm of this machine, and the settings that say what Penstock manages."""

    settings: Settings
    commands: SlurmCommands
    config: dict[str, str] = field(repr=False)
    folder: Path
    """The folder of slurm.conf and job_submit.lua."""

    @property
    def slurm(self) -> SlurmSettings:
        """Section [slurm]."""
        return self.settings.section(SlurmSettings)

    @property
    def record(self) -> Path:
        """The record of what was installed."""
        return self.folder / RECORD

    @property
    def module(self) -> Path:
        """penstock.lua."""
        return self.folder / "penstock.lua"

    @property
    def site_file(self) -> Path:
        """penstock_site.lua."""
        return self.folder / sitefile.NAME

    @property
    def starts_file(self) -> Path:
        """penstock_starts.lua."""
        return self.folder / sitefile.STARTS

    @property
    def job_submit(self) -> Path:
        """job_submit.lua, the site's or ours."""
        return self.folder / "job_submit.lua"

    @property
    def plugstack(self) -> Path:
        """plugstack.conf."""
        return Path(self.config.get("PlugStackConfig") or self.folder / "plugstack.conf")

    @property
    def run_dir(self) -> str | None:
        """The plugin's argument `run_dir`. None: the site has no agents. "": their folder is the plugin's default."""
        if not self.slurm.agents:
            return None
        folder = self.settings.section(AgentSettings).run_dir
        return "" if folder == RUN_DIR else folder


def open_site(settings: Settings) -> InstallTarget:
    """The Slurm of this machine, with the paths of its files. Raises PenstockError."""
    section = settings.section(SlurmSettings)
    commands = SlurmCommands(section.conf, section.command_timeout_s)
    config = commands.config()
    conf = Path(config["SLURM_CONF"])
    if not conf.is_file():
        raise PenstockError(f"slurmctld's {conf} is not on this machine; run this on slurmctld's host")
    return InstallTarget(settings, commands, config, conf.parent)


def site_text(site: InstallTarget) -> str:
    """penstock_site.lua as it should be now. Raises PenstockError."""
    section = site.slurm
    gateway = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)
    daemon = site.settings.section(DaemonSettings)
    return sitefile.site_lua(
        section,
        gateway.partitions(),
        gateway.nodes(),
        load_families(daemon.families),
        admins(site.config),
        cloud=daemon.cloud is not None,
        memory=allocates_memory(site.config),
    )


def starts_text(site: InstallTarget) -> str:
    """penstock_starts.lua as it should be now: it says nothing if penstockd does not."""
    socket = site.settings.section(ApiSettings).socket
    if not socket.is_socket():
        return sitefile.starts_lua([])
    try:
        from penstock_scheduler.api.client import Client

        with Client(f"unix:{socket}") as penstock:
            return sitefile.starts_lua(penstock.cluster().new_jobs)
    except (ModuleNotFoundError, PenstockError):
        return sitefile.starts_lua([])


def changes(
    site: InstallTarget, plugin: bytes, prefix: Path, schedule: list[Change], settings_file: Path
) -> list[Change]:
    """All changes in a safe order: slurm.conf, which makes slurmctld use the other files, comes last."""
    library = prefix / "penstock.so"
    found = [
        Change(library, plugin, shown=False),
        Change(site.module, (source("lua") / "penstock.lua").read_bytes(), shown=False),
        Change(site.site_file, site_text(site).encode(), shown=False),
    ]
    if not site.job_submit.exists():
        found.append(Change(site.job_submit, (source("lua") / "job_submit.lua").read_bytes(), edits=()))
    text, edits = set_plugin(_read(site.plugstack), str(library), site.run_dir)
    if edits:
        found.append(Change(site.plugstack, text.encode(), tuple(edits)))
    if site.slurm.agents:
        units = agent_units(site.settings, settings_file, constrained=constrains_devices(site.config))
        found += [Change(prefix / name, unit.encode()) for name, unit in units.items()]
    found += schedule
    found.append(_slurm_conf(site))
    return [change for change in found if change.needed]


def own_lua_lacks_ours(site: InstallTarget) -> bool:
    """Whether the site has a job_submit.lua of its own that does not call penstock.lua."""
    return site.job_submit.exists() and "penstock.lua" not in _read(site.job_submit)


def _slurm_conf(site: InstallTarget) -> Change:
    path = Path(site.config["SLURM_CONF"])
    text, edits = _read(path), list[LineEdit]()
    plugins = site.config.get("JobSubmitPlugins", "")
    wanted = {"JobSubmitPlugins": with_plugin(plugins, "lua"), "JobRequeue": "1", "JobFileAppend": "1"}
    for key, value in wanted.items():
        if site.config.get(key) != value:
            text, more = set_key(text, key, value)
            edits += more
    return Change(path, text.encode(), tuple(edits))


def schedule_changes(kind: Schedule, folder: Path | None, settings_file: Path) -> list[Change]:
    """What repeats `penstock slurm sync`: a systemd timer, or a file for cron."""
    command = f"{shutil.which('penstock') or 'penstock'} slurm sync --quiet --config {settings_file.resolve()}"
    if kind is Schedule.CRON:
        text = f"# Keeps job_submit.lua's list of partitions and GPU types.\n*/{SYNC_MINUTES} * * * * root {command}\n"
        return [Change((folder or Path("/etc/cron.d")) / "penstock", text.encode())]
    if kind is Schedule.SYSTEMD:
        service = (
            "[Unit]\nDescription=Keeps job_submit.lua's list of partitions and GPU types\n\n"
            f"[Service]\nType=oneshot\nExecStart={command}\n"
        )
        timer = (
            "[Unit]\nDescription=Runs penstock-sync.service\n\n"
            f"[Timer]\nOnBootSec=1min\nOnUnitActiveSec={SYNC_MINUTES}min\n\n[Install]\nWantedBy=timers.target\n"
        )
        folder = folder or Path("/etc/systemd/system")
        return [
            Change(folder / "penstock-sync.service", service.encode()),
            Change(folder / "penstock-sync.timer", timer.encode()),
        ]
    return []


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
