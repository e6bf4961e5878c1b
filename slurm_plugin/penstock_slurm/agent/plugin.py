"""The SPANK plugin on the node, which binds tasks to the GPUs that the agent gives them. Without it they would see all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler import __version__
from penstock_scheduler.errors import PenstockError
from penstock_scheduler.sharing.messages import Lack
from penstock_slurm.install.edits import our_libraries
from penstock_slurm.install.slurm import SlurmCommands, constrains_devices

log = logging.getLogger(__name__)

MARK = f"penstock.so of Penstock {__version__}\0".encode()
"""In penstock.c."""

FETCHED = Path("/run/slurm/conf/plugstack.conf")
"""Where slurmd puts it that has its configuration from slurmctld."""


ASK_EVERY = 40
"""Looks, of which the agent takes one each 15 s. Slurm's answer may have changed after so many."""


class Plugin:
    """That of the node. Slurm is asked now and then where its files are, and they are looked at each time.

    Args:
        commands: of the node's Slurm.
        run_dir: the agent's, as its settings have it.
    """

    def __init__(self, commands: SlurmCommands, run_dir: str) -> None:
        self._commands = commands
        self._run_dir = "" if run_dir == RUN_DIR else run_dir
        self._config: dict[str, str] | None = None
        self._looks = 0

    def trouble(self) -> tuple[Lack, str] | None:
        """What is wrong with it, also in words; None: nothing is, or Slurm has not yet said where to look."""
        if self._config is None or self._looks % ASK_EVERY == 0:
            try:
                self._config = self._commands.config()
            except PenstockError as error:
                log.info("Slurm does not say where plugstack.conf is", extra={"text": str(error)})
                if self._config is None:
                    return None
        self._looks += 1
        said = self._config.get("PlugStackConfig") or Path(self._config["SLURM_CONF"]).parent / "plugstack.conf"
        plugstack = next((path for path in (Path(said), FETCHED) if path.exists()), Path(said))
        return look(plugstack, self._run_dir, self._config.get("PluginDir", ""))

    def constrains(self) -> bool:
        """Whether Slurm constrains devices, as it said when `trouble` asked it last."""
        return self._config is not None and constrains_devices(self._config)


def look(plugstack: Path, run_dir: str, plugin_dir: str) -> tuple[Lack, str] | None:
    """See `Plugin.trouble`; `run_dir` as `set_plugin` has it.

    `plugin_dir` is where Slurm looks for what has no folder, and takes the first that there is: folders, with `:` between them.
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
                return "old-plugin", f"{path} is not of Penstock {__version__}"
    except OSError as error:
        return "no-plugin", f"{error.filename}: {error.strerror}"
    return None


def _lines(plugstack: Path, depth: int = 0) -> Iterator[str]:
    """Those of the file and of the ones that it includes. Raises OSError."""
    for line in plugstack.read_text(errors="replace").splitlines():
        words = line.split("#")[0].split()
        if len(words) == 2 and words[0] == "include" and depth < 4:
            pattern = plugstack.parent / words[1]
            for path in sorted(Path("/").glob(str(pattern.absolute()).lstrip("/"))):
                yield from _lines(path, depth + 1)
        else:
            yield line
