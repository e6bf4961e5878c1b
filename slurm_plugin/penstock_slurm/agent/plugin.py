"""The SPANK plugin on the node, which binds tasks to the GPUs of their job. Without it they would see all GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler import __version__
from penstock_scheduler.api.agent_messages import Lack
from penstock_scheduler.people.errors import PenstockError
from penstock_slurm.gateway.conf_edits import our_libraries
from penstock_slurm.gateway.local_slurm import SlurmCommands, constrains_devices

log = logging.getLogger(__name__)

MARK = f"penstock.so of Penstock {__version__}\0".encode()
"""As penstock.c contains it."""

FETCHED = Path("/run/slurm/conf/plugstack.conf")
"""Where slurmd puts the file if it fetches its configuration from slurmctld."""

ASK_EVERY = 40
"""Number of checks after which Slurm is asked again. The agent checks every 15 s."""


class Plugin:
    """The plugin on the node. Slurm is asked now and then where its files are; the files are checked each time.

    Args:
        commands: commands of the node's Slurm.
        run_dir: the agent's `run_dir`, as in its settings.
    """

    def __init__(self, commands: SlurmCommands, run_dir: str) -> None:
        self._commands = commands
        self._run_dir = "" if run_dir == RUN_DIR else run_dir
        self._config: dict[str, str] | None = None
        self._checks = 0

    def trouble(self) -> tuple[Lack, str] | None:
        """What is wrong with the plugin, with a sentence; None: nothing, or Slurm has not said yet where its files
        are."""
        if self._config is None or self._checks % ASK_EVERY == 0:
            try:
                self._config = self._commands.config()
            except PenstockError as error:
                log.info("Slurm does not say where plugstack.conf is", extra={"text": str(error)})
                if self._config is None:
                    return None
        self._checks += 1
        said = self._config.get("PlugStackConfig") or Path(self._config["SLURM_CONF"]).parent / "plugstack.conf"
        plugstack = next((path for path in (Path(said), FETCHED) if path.exists()), Path(said))
        return check(plugstack, self._run_dir, self._config.get("PluginDir", ""))

    def constrains(self) -> bool:
        """Whether Slurm constrains devices, as it said when `trouble` last asked."""
        return self._config is not None and constrains_devices(self._config)


def check(plugstack: Path, run_dir: str, plugin_dir: str) -> tuple[Lack, str] | None:
    """What is wrong with the plugin: see `Plugin.trouble`.

    Args:
        plugstack: plugstack.conf.
        run_dir: the plugin's argument `run_dir`; "": the default.
        plugin_dir: Slurm's PluginDir: folders, separated by `:`, in which a plugin without a folder is searched.
    """
    try:
        libraries = our_libraries("\n".join(_lines(plugstack)), run_dir)
        if not libraries:
            argument = f" with run_dir={run_dir}" if run_dir else ""
            return "no-plugin", f"{plugstack} has no line for penstock.so{argument}"
        for library in libraries:
            paths = [Path(folder, library) for folder in plugin_dir.split(":")]
            path = next((path for path in paths if path.exists()), paths[0])
            if MARK not in path.read_bytes():
                return "old-plugin", f"{path} is not from Penstock {__version__}"
    except OSError as error:
        return "no-plugin", f"{error.filename}: {error.strerror}"
    return None


def _lines(plugstack: Path, depth: int = 0) -> Iterator[str]:
    """Lines of the file and of the files that it includes. Raises OSError."""
    for line in plugstack.read_text(errors="replace").splitlines():
        words = line.split("#")[0].split()
        if len(words) == 2 and words[0] == "include" and depth < 4:
            pattern = plugstack.parent / words[1]
            for path in sorted(Path("/").glob(str(pattern.absolute()).lstrip("/"))):
                yield from _lines(path, depth + 1)
        else:
            yield line
