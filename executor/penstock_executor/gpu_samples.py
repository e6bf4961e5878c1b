"""Samples the job's GPUs on this node by NVML, for reports. Without NVIDIA's library there are no samples."""

from __future__ import annotations

import logging
import os

from penstock_profiles.nvml import NoNvml, Nvml, Reading, Sample

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two samples. NVML averages over at most 1 s, so samples do not cover all the time."""


class GpuSamples:
    """Samples since the last report. One thread uses it.

    Args:
        gpu_ids: indices of the job's GPUs on this node, as Slurm counts them.
        pid: of a process of the job, to recognise its GPUs by. None: this process.
    """

    def __init__(self, gpu_ids: tuple[int, ...], pid: int | None = None) -> None:
        self._ids, self._pid = gpu_ids, os.getpid() if pid is None else pid
        self._nvml: Nvml | None = None
        self._busy: list[float] = []
        self._used_mb: list[float] = []
        try:
            self._nvml = Nvml().__enter__()
        except NoNvml as error:
            log.debug("no samples of GPUs: %s", error)
        except Exception:  # no error of the driver may stop the training
            log.debug("no samples of GPUs", exc_info=True)

    def sample(self) -> None:
        """Take a sample. Takes about a millisecond per GPU, and never raises."""
        if self._nvml is None:
            return
        try:
            for reading in readings_of_job(self._nvml.sample(), self._ids, self._pid):
                if reading.utilisation is not None:
                    self._busy.append(reading.utilisation)
                if reading.used_mb is not None:
                    self._used_mb.append(reading.used_mb)
        except Exception:  # no error of the driver may stop the training
            log.debug("a sample of GPUs failed", exc_info=True)

    def take(self) -> dict[str, float]:
        """Fields for an `Observation`, from the samples since the last call; empty if there are none."""
        found = {}
        if self._busy:
            found["utilisation"] = min(sum(self._busy) / len(self._busy), 1.0)
        if self._used_mb:
            found["device_memory_mb"] = max(self._used_mb)
        self._busy.clear()
        self._used_mb.clear()
        return found

    def close(self) -> None:
        """Close NVML."""
        if self._nvml is not None:
            self._nvml.__exit__()
            self._nvml = None


def readings_of_job(sample: Sample, gpu_ids: tuple[int, ...], pid: int) -> list[Reading]:
    """The readings of a job's GPUs: those on which `pid` computes or, since containers renumber processes, by index.

    If Slurm confines devices, NVML sees only the job's GPUs and counts them from 0: then all readings are the job's.
    """
    mine = [each for each in sample.readings if any(process.pid == pid for process in each.processes or ())]
    if mine and len(gpu_ids) <= len(mine):
        return mine
    if len(sample.readings) > len(gpu_ids):
        return [each for each in sample.readings if each.device.index in gpu_ids]
    return list(sample.readings)
