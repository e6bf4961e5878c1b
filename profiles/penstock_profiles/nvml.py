"""What the GPUs of this machine are and do, as NVIDIA's management library (NVML) tells it.

::

    with Nvml() as nvml:
        print(nvml.devices)
        uses = by_job(nvml.sample(), job_of_pid)

NVML is reached through the module `pynvml` of the distribution `nvidia-ml-py`, which the extra `nvml` installs and which
is imported only when an `Nvml` is opened. A *device* is what a job can run on: a GPU or, of a GPU in MIG mode, each of its
MIG devices instead. What a driver does not tell is None, never an invented 0.

Memory is in MiB, as Slurm and nvidia-smi count it, and shares are in [0, 1].
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Self

from penstock_profiles.gpus import Gpus, UnknownGpuError, load_gpus

MIB = 2**20

OFF_THE_BUS = 79
"""The XID by which the driver says that a GPU has gone."""

OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that are the fault of one program, after which the GPU is well: those by which NVIDIA's device plugin for Kubernetes
gives up no GPU."""

ANCESTORS = (50, 40, 30, 20, 10, 0)
"""NVML's levels of what two GPUs have in common on PCIe (`nvmlGpuTopologyLevel_t`), the farthest first; see `Nvml.links`."""

SWITCH = "switch"
"""An NVSwitch at the other end of an NVLink: which one is no matter."""

Reason = Literal["package", "library", "driver", "mismatch", "permission", "other"]


class NoNvml(RuntimeError):
    """Nothing can be learnt about GPUs on this machine. The message says why and what would help; `reason` is the why."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or MIG device."""

    index: int
    """NVML's index of the GPU, of a MIG device that of the GPU that it is part of."""
    uuid: str
    name: str
    """The product, such as `NVIDIA A100-SXM4-40GB`."""
    gpu_type: str
    """As in the catalogue of GPUs, such as `a100`; see `device_type`."""
    memory_mb: float | None
    """All of its memory; None where it shares the host's."""
    parent: str | None = None
    """UUID of the GPU that a MIG device is part of; None for a whole GPU."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that computes on a device."""

    pid: int
    """As the host counts it: inside a container the same process may have another."""
    used_mb: float | None
    utilisation: float | None
    """Share of the newest sampling period in which it kept the device busy."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A device at one moment."""

    device: Device
    used_mb: float | None
    """All memory in use, the driver's own included."""
    utilisation: float | None
    """Share of NVML's last sampling period (1/6 s to 1 s) in which something ran. NVML has none of a MIG device."""
    memory_utilisation: float | None
    """Share of that period in which its memory was read or written."""
    processes: tuple[Process, ...] | None
    xids: tuple[int, ...] = ()
    """Errors that the driver logged since the sample before, on a MIG device those of the whole GPU."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A device that answers no more."""

    index: int
    uuid: str | None
    """None if it was lost before it could say."""
    reason: str
    xids: tuple[int, ...] = ()
    """As of a device that answers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All devices at one moment, each in one of the two."""

    readings: tuple[Reading, ...]
    lost: tuple[Lost, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """What one job does to one device."""

    used_mb: float | None
    utilisation: float | None


def device_type(product: str, catalogue: Gpus) -> str:
    """The GPU type of a product: `a100` for `NVIDIA A100-SXM4-40GB`, `a100_1g.5gb` for a MIG device of it.

    A product that the catalogue does not have goes by the name that Slurm's AutoDetect gives it.
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
        sample: what `Nvml.sample` gave.
        job_of: the job of a process, None if it is of no job.

    A job's memory is None if that of one of its processes is unknown. Its utilisation is the device's where it is alone on
    the device, else the sum of its processes', and None if one of those is unknown.
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
    """NVML, open from `with` to the end of the block. The devices are those at its begin.

    Args:
        catalogue: names the types of products; None: the one that comes with Penstock.

    Raises:
        NoNvml: at `with`: no package, library, driver or permission. A driver without GPUs is no error: `devices` is empty.
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
        """Read every device once. A device that fails is among the lost, and the others are read all the same."""
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

    def links(self) -> tuple[tuple[int, ...], ...]:
        """How well each two GPUs are connected: a row and a column for each of NVML's indexes, a greater number is better.

        0: not known, and a GPU with itself. 1 to 6: over PCIe, where the nearest that the two have in common is the system (1), a
        NUMA node, a host bridge, several switches, one switch, their board (6). 6 + n: by n NVLinks that are up. Two GPUs on
        NVSwitches count as connected by as many as the one has that has fewer of them there.

        Empty where there are MIG devices, of which several have one index.
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
        """What is at the other ends of a GPU's NVLinks that are up, and how often: `SWITCH`, or an address on PCIe."""
        api, ends = self._api, Counter[str]()
        for number in range(api.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(api.NVMLError):  # this GPU has no such link, or nobody says
                if api.nvmlDeviceGetNvLinkState(handle, number) != api.NVML_FEATURE_ENABLED:
                    continue
                kind = self._ask(api.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number)
                if kind == api.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    ends[SWITCH] += 1
                else:
                    ends[api.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId.lower()] += 1
        return ends

    def _bus_id(self, handle: Any) -> str:
        """A GPU's address on PCIe; empty if nobody says."""
        with contextlib.suppress(self._api.NVMLError):
            return str(self._api.nvmlDeviceGetPciInfo(handle).busId).lower()
        return ""

    def _over_pcie(self, one: Any, other: Any) -> int:
        """1 to 6, as `links` has it; 0 if nobody says."""
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
            except api.NVMLError_NoPermission:  # Slurm's cgroups hide the GPUs of other jobs in this way
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
                f"the driver lets this process see none of this machine's {count} GPUs; run it inside the job that has them",
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
        """None if nobody says."""
        found = self._ask(self._api.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if found is None:  # drivers before 510 have this one alone
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
        """By process, the share of the newest period; None without a new period. NVML leaves out those that idled."""
        if device.parent is not None:
            return None
        since_us = self._asked_us.get(device.uuid, 0)
        found = self._ask(self._api.nvmlDeviceGetProcessUtilization, handle, since_us)
        if not found:
            return None
        self._asked_us[device.uuid] = max(entry.timeStamp for entry in found)
        return {entry.pid: entry.smUtil / 100 for entry in sorted(found, key=lambda entry: entry.timeStamp)}

    def _watch(self, whole: Any) -> None:
        """Have XIDs of the GPU told, where its driver does that."""
        api = self._api
        with contextlib.suppress(api.NVMLError):
            if api.nvmlDeviceGetSupportedEventTypes(whole) & api.nvmlEventTypeXidCriticalError:
                if self._events is None:
                    self._events = api.nvmlEventSetCreate()
                api.nvmlDeviceRegisterEvents(whole, api.nvmlEventTypeXidCriticalError, self._events)

    def _new_xids(self) -> dict[int, list[int]]:
        """XIDs since the last call, by index of the GPU."""
        xids: dict[int, list[int]] = {}
        while self._events is not None:
            try:
                event = self._api.nvmlEventSetWait_v2(self._events, 0)
            except self._api.NVMLError:  # a timeout: there is none. Of a lost GPU, reading it says more
                break
            index = self._index_of.get(_address(event.device))
            if index is not None:
                xids.setdefault(index, []).append(event.eventData)
        return xids

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """NVML's answer; None where this device, driver or user gets none. Raises NVMLError: the device fails."""
        api = self._api
        try:
            return question(*arguments)
        except api.NVMLError as error:
            # pynvml raises even NVML_SUCCESS, for an empty list of processes' utilisation.
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
    """What tells one NVML handle from another; None of a null pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _open() -> ModuleType:
    """`pynvml`, with NVML initialised. Raises NoNvml."""
    try:
        api = importlib.import_module("pynvml")
    except ImportError:
        raise NoNvml(
            "package", "the Python package nvidia-ml-py is not installed; pip install 'penstock[nvml]'"
        ) from None
    try:
        # Without this flag, a working driver without GPUs would be an error.
        api.nvmlInitWithFlags(api.NVML_INIT_FLAG_NO_GPUS)
    except api.NVMLError as error:
        reasons: dict[int, tuple[Reason, str]] = {
            api.NVML_ERROR_LIBRARY_NOT_FOUND: (
                "library",
                "the driver's library libnvidia-ml.so.1 is not to be found; run this on a node with NVIDIA GPUs and their"
                " driver, and in a container start that with its GPU support",
            ),
            api.NVML_ERROR_DRIVER_NOT_LOADED: (
                "driver",
                "NVIDIA's driver is installed but not loaded; have the node's admin load it (modprobe nvidia)",
            ),
            api.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "mismatch",
                "NVIDIA's library and the loaded driver have different versions; after a driver update have the node"
                " rebooted, and in a container use the host's library",
            ),
            api.NVML_ERROR_FUNCTION_NOT_FOUND: (
                "mismatch",
                "NVIDIA's library is too old for the Python package nvidia-ml-py; have the driver updated",
            ),
            api.NVML_ERROR_NO_PERMISSION: (
                "permission",
                "this user may not talk to NVIDIA's driver; run it inside a job that has GPUs, or have the node's admin"
                " open /dev/nvidiactl to you",
            ),
        }
        if error.value in reasons:
            raise NoNvml(*reasons[error.value]) from None
        raise _does_not_work(error) from None
    return api


def _does_not_work(error: Exception) -> NoNvml:
    return NoNvml("other", f"NVML does not work: {error}; nvidia-smi on this node may say more")
