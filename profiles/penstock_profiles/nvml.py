"""The GPUs of this machine and their use, by NVIDIA's management library (NVML).

::

    with Nvml() as nvml:
        print(nvml.devices)
        uses = by_job(nvml.sample(), job_of_pid)

NVML is called through the module `pynvml` of the distribution `nvidia-ml-py`. The extra `nvml` installs it, and it is
imported only when an `Nvml` is opened. A *device* is what a job can run on: a GPU, or each MIG device of a GPU in MIG
mode. Values that a driver does not report are None, never 0.

Memory is in MiB, as Slurm and nvidia-smi count it, and shares are in [0, 1].
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

from penstock_profiles.gpus import Gpus, UnknownGpuError, load_gpus

MIB = 2**20

SAMPLED_S = 1.0
"""NVML's longest sampling period. A longer time since the sample before was idle."""

REMEMBERED = 256
"""GPU times of fewer processes than this are not searched for processes that have ended."""

OFF_THE_BUS = 79
"""The XID by which the driver reports that a GPU has fallen off the bus."""

OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program causes and that leave the GPU healthy. NVIDIA's device plugin for Kubernetes ignores the same
ones."""

ANCESTORS = (50, 40, 30, 20, 10, 0)
"""NVML's levels of the common ancestor of two GPUs on PCIe (`nvmlGpuTopologyLevel_t`), the farthest first; see
`Nvml.links`."""

SWITCH = "switch"
"""Any NVSwitch at the other end of an NVLink."""

Reason = Literal["package", "library", "driver", "mismatch", "permission", "other"]


class NoNvml(RuntimeError):
    """Nothing can be learnt about the GPUs of this machine. The message has the cause and the remedy; `reason` is the
    cause."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or MIG device."""

    index: int
    """NVML's index of the GPU. For a MIG device, that of the GPU that it is part of."""
    uuid: str
    name: str
    """The product, such as `NVIDIA A100-SXM4-40GB`."""
    gpu_type: str
    """As in the catalogue of GPUs, such as `a100`; see `device_type`."""
    memory_mb: float | None
    """Total memory; None if the device shares the host's."""
    parent: str | None = None
    """UUID of the GPU that a MIG device is part of; None for a whole GPU."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that computes on a device."""

    pid: int
    """The host's process id. Inside a container, the process may have another one."""
    used_mb: float | None
    utilisation: float | None
    """Share of the newest sampling period in which the process kept the device busy."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a device at one moment."""

    device: Device
    used_mb: float | None
    """Memory in use, including the driver's own."""
    utilisation: float | None
    """Share of NVML's last sampling period (1/6 s to 1 s) in which something ran. NVML reports none for a MIG
    device."""
    memory_utilisation: float | None
    """Share of that period in which the device's memory was read or written."""
    processes: tuple[Process, ...] | None
    xids: tuple[int, ...] = ()
    """Errors that the driver has logged since the last sample. For a MIG device, those of the whole GPU."""

    @property
    def free_mb(self) -> float | None:
        """Memory that nothing uses; None: unknown."""
        total_mb = self.device.memory_mb
        return None if total_mb is None or self.used_mb is None else total_mb - self.used_mb


@dataclass(frozen=True, slots=True)
class Lost:
    """A device that no longer answers."""

    index: int
    uuid: str | None
    """None if the device was lost before it could be read."""
    reason: str
    xids: tuple[int, ...] = ()
    """As in `Reading`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All devices at one moment. Each is in exactly one of the two fields."""

    readings: tuple[Reading, ...]
    lost: tuple[Lost, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """The use of one device by one job."""

    used_mb: float | None
    utilisation: float | None


def device_type(product: str, catalogue: Gpus) -> str:
    """The GPU type of a product: `a100` for `NVIDIA A100-SXM4-40GB`, `a100_1g.5gb` for a MIG device of it.

    A product that is not in the catalogue keeps the name that Slurm's AutoDetect gives it.
    """
    whole, _, slice_ = product.partition(" MIG ")
    try:
        name = catalogue.type_of(whole)
    except UnknownGpuError:
        name = "_".join(whole.lower().split())
    return f"{name}_{slice_}" if slice_ else name


def by_job(sample: Sample, job_of: Callable[[int], str | None]) -> dict[tuple[str, str], Use]:
    """Memory and utilisation by job and device (its UUID), for the jobs that `job_of` knows.

    Args:
        sample: from `Nvml.sample`.
        job_of: returns the job of a process, None if it belongs to no job.

    A job's memory is None if that of one of its processes is unknown. Its utilisation is the device's if the job is
    alone on the device. Else it is the sum over the job's processes, and None if that of one of them is unknown.
    """
    uses = {}
    for reading in sample.readings:
        jobs: dict[str | None, list[Process]] = {}
        for process in reading.processes or ():
            jobs.setdefault(job_of(process.pid), []).append(process)
        for job, processes in jobs.items():
            if job is not None:
                utilisation = reading.utilisation if len(jobs) == 1 else _sum(p.utilisation for p in processes)
                uses[job, reading.device.uuid] = Use(_sum(process.used_mb for process in processes), utilisation)
    return uses


def _sum(parts: Iterator[float | None]) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


class Nvml:
    """NVML, open during a `with` block. The devices are those at its beginning.

    Args:
        catalogue: GPU types by product; None: the catalogue that comes with Penstock.

    Raises:
        NoNvml: at `with`, if the package, library, driver or permission is missing. A driver without GPUs is no error:
            `devices` is empty.
    """

    def __init__(self, catalogue: Gpus | None = None) -> None:
        self._catalogue = load_gpus() if catalogue is None else catalogue
        self.devices: tuple[Device, ...] = ()
        self.driver: str | None = None
        """Version of the driver."""

    def __enter__(self) -> Self:
        self._api: Any = _open()
        self._handles: list[tuple[Device, Any]] = []
        self._unreachable: list[Lost] = []
        self._index_of: dict[int | None, int] = {}
        self._off_the_bus: set[int] = set()
        self._asked_us: dict[str, int] = {}
        self._counted_us: dict[str, int] = {}
        self._gpu_s: dict[tuple[str, int], float] = {}
        self._forget_at = REMEMBERED
        self._events: Any = None
        try:
            self._find_devices()
            self.driver = self._ask(self._api.nvmlSystemGetDriverVersion)
        except BaseException as error:
            self._api.nvmlShutdown()
            if isinstance(error, self._api.NVMLError):
                raise _does_not_work(error) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._api.nvmlEventSetFree(self._events)
        self._api.nvmlShutdown()

    def sample(self) -> Sample:
        """Read every device once. A device that fails is listed as lost, and the others are still read."""
        xids = self._new_xids()
        self._off_the_bus |= {index for index, codes in xids.items() if OFF_THE_BUS in codes}
        readings, lost = [], [*self._unreachable]
        for device, handle in self._handles:
            codes = tuple(xids.get(device.index, ()))
            if device.index in self._off_the_bus:
                reason = f"XID {OFF_THE_BUS}: the GPU has fallen off the bus"
                lost.append(Lost(device.index, device.uuid, reason, codes))
                continue
            try:
                readings.append(self._read(device, handle, codes))
            except self._api.NVMLError as error:
                lost.append(Lost(device.index, device.uuid, str(error), codes))
        return Sample(tuple(readings), tuple(lost))

    def gpu_times(self) -> dict[tuple[str, int], float] | None:
        """GPU time by device (its UUID) and process, s, since this was first called; None: the driver does not count
        it, as for MIG devices and some virtual GPUs.

        Call it at least once a second: NVML keeps only the newest sampling period (1/6 s to 1 s). Processes that have
        ended are forgotten in time. Until then, a new process with the number of one goes on from its GPU time.
        """
        api, counted = self._api, False
        for device, handle in self._handles:
            if device.parent is not None:
                return None
            try:
                entries = api.nvmlDeviceGetProcessUtilization(handle, self._counted_us.get(device.uuid, 0))
            except api.NVMLError as error:
                counted = counted or error.value == api.NVML_ERROR_NOT_FOUND  # no process used the GPU
                continue
            counted = True
            before_us = self._counted_us.get(device.uuid)
            newest_us = max((entry.timeStamp for entry in entries), default=before_us or 0)
            self._counted_us[device.uuid] = newest_us
            for entry in entries if before_us is not None else ():
                seconds = min((entry.timeStamp - before_us) / 1e6, SAMPLED_S)
                key = device.uuid, entry.pid
                self._gpu_s[key] = self._gpu_s.get(key, 0.0) + max(seconds, 0.0) * entry.smUtil / 100
        if len(self._gpu_s) >= self._forget_at:
            self._gpu_s = {key: seconds for key, seconds in self._gpu_s.items() if Path(f"/proc/{key[1]}").exists()}
            self._forget_at = max(2 * len(self._gpu_s), REMEMBERED)
        return dict(self._gpu_s) if counted else None

    def links(self) -> tuple[tuple[int, ...], ...]:
        """How well each pair of GPUs is connected: a row and a column for each of NVML's indexes. Higher is better.

        0: unknown, or a GPU with itself. 1 to 6: over PCIe, by the nearest common ancestor: the system (1), a NUMA
        node, a host bridge, several switches, one switch, their board (6). 6 + n: by n NVLinks that are up. For two
        GPUs on NVSwitches, n is the smaller of their numbers of links to switches.

        Empty if there are MIG devices, since several of them have the same index.
        """
        if any(device.parent is not None for device in self.devices):
            return ()
        handles = {device.index: handle for device, handle in self._handles}
        ends = {index: self._nvlink_ends(handle) for index, handle in handles.items()}

        def link(a: int, b: int) -> int:
            if a == b or a not in handles or b not in handles:
                return 0
            nvlinks = ends[a][self._bus_id(handles[b])] + min(ends[a][SWITCH], ends[b][SWITCH])
            return len(ANCESTORS) + nvlinks if nvlinks else self._over_pcie(handles[a], handles[b])

        size = range(max(handles, default=-1) + 1)
        return tuple(tuple(link(min(a, b), max(a, b)) for b in size) for a in size)

    def _nvlink_ends(self, handle: Any) -> Counter[str]:
        """The other ends of a GPU's NVLinks that are up, with their counts: `SWITCH`, or an address on PCIe."""
        api, ends = self._api, Counter[str]()
        for number in range(api.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(api.NVMLError):  # the GPU has no such link, or the driver does not report it
                if api.nvmlDeviceGetNvLinkState(handle, number) != api.NVML_FEATURE_ENABLED:
                    continue
                kind = self._ask(api.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number)
                if kind == api.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    ends[SWITCH] += 1
                else:
                    ends[api.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId.lower()] += 1
        return ends

    def _bus_id(self, handle: Any) -> str:
        """A GPU's address on PCIe; empty if unknown."""
        with contextlib.suppress(self._api.NVMLError):
            return str(self._api.nvmlDeviceGetPciInfo(handle).busId).lower()
        return ""

    def _over_pcie(self, one: Any, other: Any) -> int:
        """1 to 6, as in `links`; 0 if unknown."""
        with contextlib.suppress(self._api.NVMLError):
            level = self._api.nvmlDeviceGetTopologyCommonAncestor(one, other)
            return ANCESTORS.index(level) + 1 if level in ANCESTORS else 0
        return 0

    def _find_devices(self) -> None:
        api = self._api
        count, refused = api.nvmlDeviceGetCount(), 0
        for index in range(count):
            try:
                whole = api.nvmlDeviceGetHandleByIndex(index)
                slices = list(self._mig_handles(whole))
                mig_mode = self._ask(api.nvmlDeviceGetMigMode, whole)
                uuid = api.nvmlDeviceGetUUID(whole)
                found = [(self._describe(index, handle, uuid), handle) for handle in slices]
                if not (mig_mode and mig_mode[0]):
                    found = [(self._describe(index, whole), whole)]
            except api.NVMLError_NoPermission:  # this is how Slurm's cgroups hide the GPUs of other jobs
                refused += 1
                continue
            except api.NVMLError as error:
                self._unreachable.append(Lost(index, None, str(error)))
                continue
            self._handles += found
            self._index_of[_address(whole)] = index
            self._watch(whole)
        if count and refused == count:
            raise NoNvml(
                "permission",
                f"this process may see none of the {count} GPUs of this machine; run it inside the job that has them",
            )
        self.devices = tuple(device for device, _ in self._handles)

    def _mig_handles(self, whole: Any) -> Iterator[Any]:
        for number in range(self._ask(self._api.nvmlDeviceGetMaxMigDeviceCount, whole) or 0):
            handle = self._ask(self._api.nvmlDeviceGetMigDeviceHandleByIndex, whole, number)
            if handle is not None:
                yield handle

    def _describe(self, index: int, handle: Any, parent: str | None = None) -> Device:
        name = self._api.nvmlDeviceGetName(handle)
        memory = self._ask(self._api.nvmlDeviceGetMemoryInfo, handle)
        return Device(
            index=index,
            uuid=self._api.nvmlDeviceGetUUID(handle),
            name=name,
            gpu_type=device_type(name, self._catalogue),
            memory_mb=memory.total / MIB if memory else None,
            parent=parent,
        )

    def _read(self, device: Device, handle: Any, xids: tuple[int, ...]) -> Reading:
        memory = self._ask(self._api.nvmlDeviceGetMemoryInfo, handle)
        busy = self._ask(self._api.nvmlDeviceGetUtilizationRates, handle) if device.parent is None else None
        return Reading(
            device=device,
            used_mb=memory.used / MIB if memory else None,
            utilisation=busy.gpu / 100 if busy else None,
            memory_utilisation=busy.memory / 100 if busy else None,
            processes=self._processes(device, handle),
            xids=xids,
        )

    def _processes(self, device: Device, handle: Any) -> tuple[Process, ...] | None:
        """The processes on a device; None if unknown."""
        found = self._ask(self._api.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if found is None:  # drivers before 510 have only this one
            found = self._ask(self._api.nvmlDeviceGetComputeRunningProcesses_v2, handle)
        if found is None:
            return None
        shares = self._shares(device, handle)
        return tuple(
            Process(
                pid=process.pid,
                used_mb=None if process.usedGpuMemory is None else process.usedGpuMemory / MIB,
                utilisation=None if shares is None else shares.get(process.pid, 0.0),
            )
            for process in found
        )

    def _shares(self, device: Device, handle: Any) -> dict[int, float] | None:
        """Utilisation by process in the newest period; None if there is no new period. NVML leaves out idle
        processes."""
        if device.parent is not None:
            return None
        since_us = self._asked_us.get(device.uuid, 0)
        found = self._ask(self._api.nvmlDeviceGetProcessUtilization, handle, since_us)
        if not found:
            return None
        self._asked_us[device.uuid] = max(entry.timeStamp for entry in found)
        return {entry.pid: entry.smUtil / 100 for entry in sorted(found, key=lambda entry: entry.timeStamp)}

    def _watch(self, whole: Any) -> None:
        """Subscribe to the XIDs of a GPU, if its driver supports that."""
        api = self._api
        with contextlib.suppress(api.NVMLError):
            if api.nvmlDeviceGetSupportedEventTypes(whole) & api.nvmlEventTypeXidCriticalError:
                if self._events is None:
                    self._events = api.nvmlEventSetCreate()
                api.nvmlDeviceRegisterEvents(whole, api.nvmlEventTypeXidCriticalError, self._events)

    def _new_xids(self) -> dict[int, list[int]]:
        """XIDs since the last call, by the GPU's index."""
        xids: dict[int, list[int]] = {}
        while self._events is not None:
            try:
                event = self._api.nvmlEventSetWait_v2(self._events, 0)
            except self._api.NVMLError:  # a timeout: there are no more. If a GPU is lost, reading it says why
                break
            index = self._index_of.get(_address(event.device))
            if index is not None:
                xids.setdefault(index, []).append(event.eventData)
        return xids

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """NVML's answer; None if the device, driver or user does not support the call. Raises NVMLError if the device
        fails."""
        api = self._api
        try:
            return question(*arguments)
        except api.NVMLError as error:
            # pynvml raises NVML_SUCCESS for an empty list of processes.
            if error.value in (
                api.NVML_SUCCESS,
                api.NVML_ERROR_NOT_SUPPORTED,
                api.NVML_ERROR_NO_PERMISSION,
                api.NVML_ERROR_NOT_FOUND,
                api.NVML_ERROR_FUNCTION_NOT_FOUND,
            ):
                return None
            raise


def _address(handle: Any) -> int | None:
    """The address behind an NVML handle, which identifies it; None for a null pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _open() -> ModuleType:
    """`pynvml`, with NVML initialised. Raises NoNvml."""
    try:
        api = importlib.import_module("pynvml")
    except ImportError:
        raise NoNvml("package", "the Python package nvidia-ml-py is not installed; pip install nvidia-ml-py") from None
    try:
        # Without this flag, a working driver without GPUs would be an error.
        api.nvmlInitWithFlags(api.NVML_INIT_FLAG_NO_GPUS)
    except api.NVMLError as error:
        reasons: dict[int, tuple[Reason, str]] = {
            api.NVML_ERROR_LIBRARY_NOT_FOUND: (
                "library",
                "the driver's library libnvidia-ml.so.1 was not found; run this on a node with NVIDIA GPUs and their"
                " driver, and in a container enable GPU support",
            ),
            api.NVML_ERROR_DRIVER_NOT_LOADED: (
                "driver",
                "NVIDIA's driver is installed but not loaded; ask the node's admin to load it (modprobe nvidia)",
            ),
            api.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "mismatch",
                "NVIDIA's library and the loaded driver have different versions; reboot the node after a driver update,"
                " and in a container use the host's library",
            ),
            api.NVML_ERROR_FUNCTION_NOT_FOUND: (
                "mismatch",
                "NVIDIA's library is too old for the Python package nvidia-ml-py; update the driver",
            ),
            api.NVML_ERROR_NO_PERMISSION: (
                "permission",
                "this user may not use NVIDIA's driver; run this inside a job that has GPUs, or ask the node's admin"
                " for"
                " access to /dev/nvidiactl",
            ),
        }
        if error.value in reasons:
            raise NoNvml(*reasons[error.value]) from None
        raise _does_not_work(error) from None
    return api


def _does_not_work(error: Exception) -> NoNvml:
    return NoNvml("other", f"NVML does not work: {error}; run nvidia-smi on this node for details")
