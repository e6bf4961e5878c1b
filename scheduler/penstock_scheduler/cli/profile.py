"""`penstock profile run`: measure the time of a job's steps on one GPU of this machine, at growing batch sizes.

The job's program calls `penstock_executor.profile`, which reports to a private spool. NVML identifies the GPU.
Where the program does not report its memory, NVML supplies that too, and it shows whether the GPU still works.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from penstock_profiles.nvml import Device, NoNvml, Nvml, Sample, by_job
from penstock_profiles.profiles import Profile, ProfileError, default_folder, profile_file, save_profile
from penstock_profiles.wire import (
    CPU,
    PROFILE_JOB,
    PROFILE_VARIABLE,
    BatchTrial,
    Body,
    Ended,
    Observation,
    ProfileRequest,
    Started,
)
from penstock_scheduler import __version__
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.store.spool import Spool

TICK_S = 0.1

GRACE_S = 5.0
"""Seconds by which the program may exceed the time for measuring, and within which it must exit after that or after
SIGTERM."""

TAIL_LINES = 12
"""Lines of the program's output that are shown when it fails."""


def profile(
    command: list[str] = typer.Argument(help="The job's program and its options, after --."),
    gpu_type: str = typer.Option(
        "", help="Name of the GPU type, as in GRES; 'cpu' to use no GPU. Default: NVML's name."
    ),
    name: str = typer.Option("", help="Name of the job in the profile. Default: the script's name."),
    min_batch: int | None = typer.Option(None, min=1, help="Smallest batch size, samples. Default: the script's."),
    max_batch: int | None = typer.Option(
        None, min=1, help="Largest batch size, samples. Default: the script's, else what fits."
    ),
    seconds: float = typer.Option(15.0, min=0.1, help="Seconds for measuring, from the first step on."),
    start_seconds: float = typer.Option(300.0, min=0.1, help="Seconds until the first step at the latest."),
    out: Path | None = typer.Option(
        None, help="Folder for profiles. Default: penstock/profiles in the XDG state folder."
    ),
) -> None:
    """Run a job's program on one GPU at growing batch sizes and store the time of its steps.

    The program must call penstock_executor.profile, see docs/user/measuring.md.
    """
    console = Console(highlight=False)
    name = name or name_of(command)
    folder = default_folder(os.environ) if out is None else out
    with contextlib.ExitStack() as stack:
        target = _open_target(stack, gpu_type, console)
        gpu_type = gpu_type or target.gpu_type
        run = _ProfiledRun(
            target, ProfileRequest(gpu_type=gpu_type, min_batch=min_batch, max_batch=max_batch, seconds=seconds)
        )
        try:
            profile_file(folder, name, gpu_type)  # a wrong name is an error before anything runs
            with console.status("starting") as status:
                run.run(command, start_seconds, status.update)
            if not run.observations:
                raise PenstockError((run.problem or "not even the smallest batch fits into memory") + run.tail)
            result = run.profile(name)
            path = save_profile(result, folder)
        except ProfileError as error:
            raise PenstockError(str(error)) from None
    console.print(_table(result.observations))
    console.print(f"{name} on {gpu_type}: {result.ended}", soft_wrap=True)
    if run.went_on:
        console.print("the program continued and was stopped; let it exit where profile() returns True", soft_wrap=True)
    console.print(f"stored in {path}", soft_wrap=True)
    if run.problem is not None:
        raise PenstockError(f"{run.problem}; what was measured until then is stored{run.tail}")


def choose_gpu(gpus: tuple[Device, ...], sample: Sample, visible: str | None) -> Device:
    """The first GPU that CUDA_VISIBLE_DEVICES (`visible`; None: unset) shows, else the first without processes.

    Raises:
        PenstockError: there is none.
    """
    there = ", ".join(f"{gpu.uuid} ({gpu.gpu_type})" for gpu in gpus)
    if visible is not None:
        first = visible.split(",")[0]
        shown = [gpu for place, gpu in enumerate(gpus) if first and (first == str(place) or gpu.uuid.startswith(first))]
        if not shown:
            raise PenstockError(f"CUDA_VISIBLE_DEVICES={visible} shows no GPU; unset it, or name one of {there}")
        return shown[0]
    busy = {reading.device.uuid for reading in sample.readings if reading.processes}
    free = [gpu for gpu in gpus if gpu.uuid not in busy]
    if not free:
        raise PenstockError(
            f"every GPU of this machine is in use; run this in a job that has a GPU, or set CUDA_VISIBLE_DEVICES to one of "
            f"{there}"
        )
    return free[0]


class _Target:
    """The device that the program uses, and NVML's view of it; without `gpu` the program uses no GPU."""

    def __init__(self, environment: Mapping[str, str], nvml: Nvml | None = None, gpu: Device | None = None) -> None:
        self.environment = environment
        """Environment variables that show the program this device only."""
        self.gpu = gpu
        self.gpu_type = gpu.gpu_type if gpu else ""
        self.driver = nvml.driver if nvml else None
        self.xids: list[int] = []
        """Errors of the GPU that the driver logged."""
        self._nvml = nvml

    def used_mb(self, session: int) -> float | None:
        """Memory that a session's processes have on the GPU, MiB; None: unknown. Raises PenstockError if the GPU is
        lost."""
        if self._nvml is None or self.gpu is None:
            return None
        sample = self._nvml.sample()
        for lost in sample.lost:
            if lost.uuid == self.gpu.uuid:
                raise PenstockError(f"GPU {lost.index} ({self.gpu.name}) is lost: {lost.reason}; have its node checked")
        self.xids += [xid for reading in sample.readings if reading.device == self.gpu for xid in reading.xids]
        use = by_job(sample, lambda pid: PROFILE_JOB if _session(pid) == session else None)
        mine = use.get((PROFILE_JOB, self.gpu.uuid))
        return mine.used_mb if mine else None


def _open_target(stack: contextlib.ExitStack, gpu_type: str, console: Console) -> _Target:
    """The device to measure. Raises PenstockError if there is no GPU and `gpu_type` does not name a device."""
    if gpu_type == CPU:
        return _Target({"CUDA_VISIBLE_DEVICES": ""})
    try:
        nvml = stack.enter_context(Nvml())
        sample = nvml.sample()
        if nvml.devices:
            gpu = choose_gpu(nvml.devices, sample, os.environ.get("CUDA_VISIBLE_DEVICES"))
            console.print(f"GPU {gpu.index}: {gpu.name}, type {gpu_type or gpu.gpu_type}", soft_wrap=True)
            return _Target({"CUDA_VISIBLE_DEVICES": gpu.uuid}, nvml, gpu)
        reason = "; ".join(lost.reason for lost in sample.lost) or "the driver lists none"
    except NoNvml as error:
        reason = str(error)
    if not gpu_type:
        raise PenstockError(f"no GPU to measure on: {reason}. Without NVML, name the device, such as --gpu-type cpu")
    return _Target({})


class _ProfiledRun:
    """One run of the program and its reports."""

    def __init__(self, target: _Target, request: ProfileRequest) -> None:
        self._target = target
        self._request = request
        self._batch: int | None = None
        self._peak_mb: float | None = None
        self._versions: dict[str, str] = {}
        self._too_large: int | None = None
        self._end: Ended | None = None
        self.observations: list[Observation] = []
        self.problem: str | None = None
        """Why the profile is incomplete; None if it is complete."""
        self.tail = ""
        """The end of the program's output, if there was a problem."""
        self.went_on = False
        """Whether the program continued after `profile`."""

    def run(self, command: list[str], start_seconds: float, say: Callable[[str], object]) -> None:
        """Run the program to its end, or stop it. None of its processes is left afterwards."""
        with tempfile.TemporaryDirectory(prefix="penstock-profile-") as name:
            folder = Path(name)
            request, output = folder / "request.json", folder / "output"
            request.write_text(self._request.model_dump_json(), encoding="utf-8")
            environment = os.environ | self._target.environment | {PROFILE_VARIABLE: str(request)}
            try:
                with running(command, environment, output) as child:
                    self._follow(child, Spool(folder), start_seconds, say)
            except PenstockError as error:
                self.problem, self.tail = str(error), tail_of(output)

    def profile(self, name: str) -> Profile:
        """The profile; there must be at least one observation."""
        gpu, driver = self._target.gpu, self._target.driver
        return Profile(
            job=name,
            gpu_type=self._request.gpu_type,
            device=gpu.name if gpu else None,
            device_memory_mb=gpu.memory_mb if gpu else None,
            measured_s=time.time(),
            versions={
                "penstock": __version__,
                **({"driver": driver} if driver else {}),
                **self._versions,
            },
            ended=self.problem or (self._end.text if self._end else ""),
            too_large_batch=self._too_large,
            observations=tuple(sorted(self.observations, key=lambda seen: seen.atomic_batch)),
        )

    def _follow(
        self, child: subprocess.Popen[bytes], spool: Spool, start_seconds: float, say: Callable[[str], object]
    ) -> None:
        """Read reports until the program ends or its time is over. Raises PenstockError if the profile is
        incomplete."""
        until_s = time.monotonic() + start_seconds

        def listen() -> None:
            nonlocal until_s
            for report in spool.read([PROFILE_JOB]):
                self._hear(report.body)
                if isinstance(report.body, Started | Ended):
                    more_s = self._request.seconds if isinstance(report.body, Started) else 0.0
                    until_s = time.monotonic() + more_s + GRACE_S

        while True:
            status = status_of(child)  # before reading, so that its last report is not missed
            listen()
            try:
                used_mb = self._target.used_mb(child.pid)
            except PenstockError:
                listen()  # its measurements from before the GPU was lost
                raise
            if used_mb is not None:
                self._peak_mb = max(used_mb, self._peak_mb or 0.0)
            late = time.monotonic() > until_s
            if status is not None or late:
                self._judge(status, start_seconds)
                return
            say("starting" if self._batch is None else f"batch {self._batch}, {len(self.observations)} measured")
            time.sleep(TICK_S)

    def _hear(self, body: Body) -> None:
        match body:
            case Started():
                self._versions = body.versions
            case BatchTrial(out_of_memory=True):
                self._too_large = body.atomic_batch  # the last of several is the smallest
            case BatchTrial():
                self._batch, self._peak_mb = body.atomic_batch, None
            case Observation():
                memory_mb = self._peak_mb if body.memory_mb is None else body.memory_mb
                self.observations.append(body.model_copy(update={"memory_mb": memory_mb}))
            case Ended():
                self._end = body

    def _judge(self, status: int | None, start_seconds: float) -> None:
        """Raise PenstockError unless the program has completed its measurements. `status` None: it still runs."""
        if self._end is not None and self._end.outcome == "completed":
            self.went_on = status is None
            return
        at = "" if self._batch is None else f" at batch {self._batch}"
        xids = f"; the driver logged XID {', '.join(map(str, self._target.xids))}" if self._target.xids else ""
        if self._end is not None:
            raise PenstockError(f"the program failed{at}: {self._end.text}{xids}")
        if status is None and at:
            raise PenstockError(
                f"the program was still{at} {GRACE_S:g} s after its {self._request.seconds:g} s for measuring and was "
                "stopped; give it more time with --seconds"
            )
        if status is None:
            raise PenstockError(
                f"the program did not call penstock_executor.profile within {start_seconds:g} s and was stopped; "
                "add the call (docs/user/measuring.md), or give it more time with --start-seconds"
            )
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if at:
            raise PenstockError(f"the program {how}{at}{xids}")
        raise PenstockError(f"the program {how} and did not call penstock_executor.profile; see docs/user/measuring.md")


@contextlib.contextmanager
def running(command: list[str], environment: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program in a session of its own. The end of the block, Ctrl-C and SIGTERM end its process group."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        try:
            with output.open("wb") as file:
                child = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise PenstockError(f"{command[0]} cannot be run: {error.strerror}") from None
        try:
            yield child
        finally:
            _stop(child)
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the process group. Its leader is reaped last, because until then no other process gets the group's pid."""
    try:
        os.killpg(child.pid, signal.SIGTERM)
        until_s = time.monotonic() + GRACE_S
        while status_of(child) is None and time.monotonic() < until_s:
            time.sleep(TICK_S)
    finally:  # also after a second Ctrl-C
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def status_of(child: subprocess.Popen[bytes]) -> int | None:
    """As `child.poll()`, but without reaping the process."""
    found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def tail_of(output: Path) -> str:
    """The end of the program's output, "" if there is none."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    return "".join(f"\n  | {line}" for line in lines[-TAIL_LINES:])


def name_of(command: list[str]) -> str:
    """The name of the script or module, else of the program."""
    for before, word in zip(["", *command], command, strict=False):
        if word.endswith(".py") or before == "-m":
            return Path(word).name.removesuffix(".py")
    return Path(command[0]).name


def _table(observations: tuple[Observation, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("BATCH", "STEP ms", "SAMPLES/s", "MEMORY MiB"):
        table.add_column(heading, justify="right")
    for seen in observations:
        table.add_row(
            str(seen.atomic_batch),
            f"{1000 * seen.step_time_s:,.2f}",
            f"{seen.atomic_batch / seen.step_time_s:,.1f}",
            "-" if seen.memory_mb is None else f"{seen.memory_mb:,.0f}",
        )
    return table
