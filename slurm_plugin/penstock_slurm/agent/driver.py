"""NVML of the agent's node, also where NVIDIA's driver is loaded after the agent has started."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from penstock_profiles.nvml import NoNvml, Nvml
from penstock_scheduler.people.errors import ConfigError, PenstockError

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 60.0
"""How often NVML is tried again where a GPU of NVIDIA's has none."""

PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""Vendor, and class of GPUs."""

DEVICES = Path("/proc/devices")
"""Names the drivers of devices that are loaded."""


class Driver:
    """NVML, if it can be opened.

    Args:
        node: Slurm's name of the node.

    Raises:
        ConfigError: GPUs are divided into MIG devices.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._loaded_before = _is_loaded()
        self.nvml: Nvml | None = None
        """None: it cannot be opened."""
        self.lack = ""
        """Why there is none although the node has a GPU of NVIDIA's; "": nothing is amiss."""
        self._said = ""
        self._open()

    def has_come(self) -> bool:
        """Whether NVML could not be opened before, and is now. It is tried once in `LOOK_AGAIN_S`.

        Raises:
            PenstockError: the agent must be started again: the driver was loaded meanwhile, and a service of systemd may
                use only devices whose driver was there when it was started.
        """
        if not self.lack or time.monotonic() < self._look_s:
            return False
        self._open()
        if self.nvml is None and _is_loaded() and not self._loaded_before:
            raise PenstockError(f"NVIDIA's driver was loaded after the agent had started, which ends now: {self._said}")
        return self.nvml is not None

    def close(self) -> None:
        """Close NVML."""
        if self.nvml is not None:
            self.nvml.__exit__()

    def _open(self) -> None:
        self._look_s = time.monotonic() + LOOK_AGAIN_S
        try:
            nvml = Nvml().__enter__()
        except NoNvml as error:
            if str(error) != self._said:
                log.info("no samples of GPUs", extra={"text": str(error)})
            self._said = str(error)
            self.lack = self._said if _has_gpu() else ""
            return
        if any(reading.device.parent is not None for reading in nvml.sample().readings):
            nvml.__exit__()
            raise ConfigError(
                f"GPUs of {self._node} are divided into MIG devices, which Slurm binds to one job each; jobs cannot share "
                "them, so no agent runs there: systemctl disable --now penstock-agent"
            )
        self.nvml, self.lack = nvml, ""


def _has_gpu() -> bool:
    """Whether the node has a GPU of NVIDIA's, with or without a driver."""
    return any(
        _line(device / "vendor") == NVIDIA and _line(device / "class").startswith(DISPLAY) for device in PCI.glob("*")
    )


def _is_loaded() -> bool:
    """Whether NVIDIA's driver is loaded."""
    try:
        return any(line.split()[1:2] in (["nvidia"], ["nvidia-frontend"]) for line in DEVICES.read_text().splitlines())
    except OSError:
        return False


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
