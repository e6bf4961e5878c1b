"""Measures how long a step takes at growing batch sizes: the job's part of `penstock profile run`.

::

    if profile(step, max_batch=4096):  # step(batch) trains one step on `batch` samples, on one GPU
        sys.exit()                     # this was `penstock profile run`: nothing to train

Outside that command, `profile` does nothing and returns False, so the same script trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock_executor.client import Client, connect
from penstock_executor.environment import Environment, read_environment
from penstock_profiles.wire import CPU, PROFILE_JOB, BatchTrial, Observation, ProfileRequest, Started, read

log = logging.getLogger(__name__)

POINTS = 10
"""Number of batch sizes from the smallest to the largest, if that makes the ratio of neighbours at most 2."""

REFINEMENTS = 2
"""Number of batch sizes tried between the largest that fits into memory and the smallest that does not."""

WARM_UP, FEWEST_STEPS, MOST_STEPS = 2, 3, 50
"""For each batch size: steps that are not timed, and the fewest and the most steps that are timed."""

MIB = 2**20

_FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy", "numpy")


def profile(
    step: Callable[[int], object],
    *,
    min_batch: int = 1,
    max_batch: int | None = None,
    synchronize: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    environment: Environment | None = None,
) -> bool:
    """Under `penstock profile run`, time `step` at growing batch sizes, report each, and return True. Else return False.

    The sizes grow by a factor of at most 2, up to `max_batch`, the memory limit or the end of the time that the command
    allows, whichever comes first. If a size does not fit, smaller ones are tried: two, or more until one fits. Call it
    in one process, before `connect`, and exit if it returns True.

    Args:
        step: trains one step (forward, backward and update) on the given number of samples. Called some hundred times.
        min_batch: smallest size, in samples. The command's option has priority, as for `max_batch`.
        max_batch: largest size, in samples; None: up to the memory limit.
        synchronize: waits until the GPU has finished its work. None: PyTorch's own function, if the script has imported
            PyTorch and it sees a GPU; else nothing, and `step` itself must wait.
        clock: time in seconds, for emulated time.
        environment: None: this process's own.

    Raises:
        ValueError: not 1 <= `min_batch` <= `max_batch`, or the command has another version than this library.
        Exception: whatever `step` raises, except that memory has run out.
    """
    environment = read_environment() if environment is None else environment
    request = read_request(environment)
    if request is None:
        return False
    assert environment.profile is not None
    spool = environment.profile.parent
    client = connect(environment=dataclasses.replace(environment, job_id=PROFILE_JOB, spool=spool))
    try:
        smallest = min_batch if request.min_batch is None else request.min_batch
        largest = max_batch if request.max_batch is None else request.max_batch
        if smallest < 1 or (largest is not None and largest < smallest):
            raise ValueError(
                f"min_batch={smallest}, max_batch={largest}: the first must be at least 1, and at most the second"
            )
        device = _device(request.gpu_type)
        if synchronize is not None:
            device = dataclasses.replace(device, synchronize=synchronize)
        client.report(
            Started(
                gpu_type=request.gpu_type,
                gpu_ids={environment.node or "localhost": environment.gpu_ids},
                answers_requests=False,
                versions=_versions(),
            )
        )
        reason = _Profiler(step, device, clock, client, request).run(smallest, largest)
    except Exception as error:
        client.close("failed", 0.0, f"{type(error).__name__}: {error}")
        raise
    client.close("completed", 0.0, reason)
    return True


def read_request(environment: Environment) -> ProfileRequest | None:
    """The request of `penstock profile run`; None if this process does not run under that command.

    Raises:
        ValueError: the request cannot be read.
    """
    if environment.profile is None:
        return None
    try:
        return read(ProfileRequest, environment.profile.read_bytes())
    except FileNotFoundError:
        log.warning("profile=%s does not exist, so nothing is profiled; unset PENSTOCK_PROFILE", environment.profile)
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"request of penstock profile run in {environment.profile}: {error}; the command and this job need the same"
            " version of Penstock"
        ) from None


def batch_sizes(smallest: int, largest: int | None) -> Iterator[int]:
    """Growing batch sizes: each twice the one before, or `POINTS` sizes in geometric steps if those are smaller.

    The last is `largest`. If that is None, the sizes never end.
    """
    ratio = 2.0
    if largest is not None:
        ratio = min(ratio, (largest / smallest) ** (1 / (POINTS - 1)))
    size, last = float(smallest), 0
    while largest is None or last < largest:
        # A small ratio may round to the same size again, as between 4 and 5: then take the next.
        batch = max(round(size), last + 1)
        last = batch if largest is None else min(batch, largest)
        yield last
        size = max(size * ratio, float(last))


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory has run out, on the host or the GPU, by the errors of PyTorch, JAX, TensorFlow and CuPy."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}:
        return True
    phrases = r"out of memory|not enough memory|can't allocate memory|RESOURCE_EXHAUSTED|STATUS_ALLOC_FAILED"
    return isinstance(error, RuntimeError) and re.search(phrases, str(error)) is not None


class _Profiler:
    """Measures one profile."""

    def __init__(
        self,
        step: Callable[[int], object],
        device: _Device,
        clock: Callable[[], float],
        client: Client,
        request: ProfileRequest,
    ) -> None:
        self._step = step
        self._device = device
        self._clock = clock
        self._client = client
        self._gpu_type = request.gpu_type
        self._share_s = request.seconds / (POINTS + REFINEMENTS)
        self._end_s = clock() + request.seconds
        self._fits = 0
        self._too_large: int | None = None
        self._step_time_s = 0.0

    def run(self, smallest: int, largest: int | None) -> str:
        """Measure until there is nothing more to measure; returns the reason why it ended, for people to read."""
        for batch in batch_sizes(smallest, largest):
            if not self._has_time_for(batch):
                return f"the time was over before batch {batch}; allow more with --seconds"
            if not self._try(batch):
                break
        if self._too_large is None:
            return "the largest batch was reached"
        refinements = 0
        while self._too_large - self._fits > 1 and (refinements < REFINEMENTS or not self._fits):
            batch = (self._fits + self._too_large) // 2
            if not self._has_time_for(batch):
                break
            self._try(batch)
            refinements += 1
        return "the memory limit was reached"

    def _has_time_for(self, batch: int) -> bool:
        """Whether there is time to measure a size. Its step takes at most in proportion as long as the last size's.

        Sizes are tried in any case until one has been measured.
        """
        if not self._fits:
            return True
        needed_s = (WARM_UP + FEWEST_STEPS) * self._step_time_s * max(1.0, batch / self._fits)
        return self._clock() + needed_s <= self._end_s

    def _try(self, batch: int) -> bool:
        """Measure one size and report it; returns whether it fits into memory."""
        self._client.report(BatchTrial(atomic_batch=batch))
        try:
            self._device.forget_peak()
            times_s = self._time(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._too_large = batch
            log.info("batch=%d does not fit: %s", batch, error)
        else:
            self._fits, self._step_time_s = batch, statistics.median(times_s)
            self._client.report(
                Observation(
                    gpu_type=self._gpu_type,
                    nodes=1,
                    gpus=1,
                    atomic_batch=batch,
                    steps=len(times_s),
                    step_time_s=self._step_time_s,
                    sync_time_s=0.0,
                    memory_mb=self._device.peak_mb(),
                    progress=0.0,
                )
            )
            return True
        gc.collect()  # memory of the failed step, also in reference cycles, must not count against the next size
        self._client.report(BatchTrial(atomic_batch=batch, out_of_memory=True))
        return False

    def _time(self, batch: int) -> list[float]:
        """Seconds of each timed step. There are as many steps as fit into the size's share of the time, within
        bounds."""
        began_s = self._clock()
        for _ in range(WARM_UP):
            self._step(batch)
        self._device.synchronize()
        times_s: list[float] = []
        while len(times_s) < FEWEST_STEPS or (len(times_s) < MOST_STEPS and self._clock() - began_s < self._share_s):
            before_s = self._clock()
            self._step(batch)
            self._device.synchronize()
            times_s.append(self._clock() - before_s)
        return times_s


@dataclass(frozen=True, slots=True)
class _Device:
    """Functions of the device that the steps run on. For an unknown device they do nothing."""

    synchronize: Callable[[], object] = lambda: None
    forget_peak: Callable[[], object] = lambda: None
    """Reset the peak of memory use."""
    peak_mb: Callable[[], float | None] = lambda: None


def _device(gpu_type: str) -> _Device:
    if gpu_type == CPU:
        return _Device(forget_peak=_forget_host_peak, peak_mb=_host_peak_mb)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return _Device()
    cuda = torch.cuda
    return _Device(cuda.synchronize, cuda.reset_peak_memory_stats, lambda: float(cuda.max_memory_allocated() / MIB))


def _forget_host_peak() -> None:
    # If the kernel refuses, the peak is that since the process began. Growing batches usually exceed it.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _host_peak_mb() -> float | None:
    with contextlib.suppress(OSError):
        if peak_kb := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(peak_kb[1]) / 1024
    return None


def _versions() -> dict[str, str]:
    """Versions of Python and of the frameworks that the script has imported."""
    loaded = {name: sys.modules[name] for name in _FRAMEWORKS if name in sys.modules}
    found = {name: str(module.__version__) for name, module in loaded.items() if hasattr(module, "__version__")}
    return {"python": platform.python_version(), **found}
