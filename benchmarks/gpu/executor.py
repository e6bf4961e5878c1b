"""Checks of the executor on one NVIDIA GPU. The claims are those of docs/user/executor.md and docs/admin/agent.md."""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.checking import (
    DEVICE,
    GIB,
    HAS_GPU,
    MIB,
    Skip,
    claim,
    figure,
    figures_in,
    memory_mb,
    program,
    synchronize,
)
from benchmarks.gpu.programs import language_loss, language_model
from torch import nn

import penstock_executor as px

STATES_GIB = (2.0,) if HAS_GPU else (0.05,)
MOVED_OUT, MOVED_BACK = "suspended moved_bytes", "resumed moved_bytes"


def _need_gpu() -> None:
    if not HAS_GPU:
        raise Skip("no GPU")


def _ms(step: Callable[[], object], count: int) -> float:
    """Milliseconds a step, over `count` steps and until the GPU has done them."""
    synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return 1000 * (time.perf_counter() - began_s) / count


def nvml() -> None:
    """NVML describes the GPU, its load and the processes on it."""
    _need_gpu()
    from penstock_profiles.nvml import Nvml

    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    with Nvml() as api:
        sample_ms = _ms(api.sample, 20)
        time.sleep(1.2)
        idle = api.sample().readings[0]
        api.gpu_times()
        end_s = time.monotonic() + 4
        while time.monotonic() < end_s:
            for _ in range(20):
                a @ a
            synchronize()
            times = api.gpu_times()
        busy = api.sample().readings[0]
        device, links = busy.device, api.links()
        own = next((each for each in busy.processes or () if each.pid == os.getpid()), None)
        claim(
            bool(device.gpu_type) and (device.memory_mb or 0) > 1000,
            "the GPU has a type and a memory",
            name=device.name,
            gpu_type=device.gpu_type,
            memory_mb=device.memory_mb,
            driver=api.driver,
            links=links,
        )
        claim(
            (busy.utilisation or 0) > 0.9 and (idle.utilisation or 0) < 0.2,
            "its utilisation follows the load",
            busy=busy.utilisation,
            idle=idle.utilisation,
        )
        claim(
            own is not None and own.used_mb is not None,
            "this process is among those on the GPU, with its memory",
            processes=[(each.pid, each.used_mb) for each in busy.processes or ()],
            pid=os.getpid(),
            allocated_mb=torch.cuda.memory_reserved() / MIB,
            device_used_mb=busy.used_mb,
        )
        own_s = sum(seconds for (_, pid), seconds in (times or {}).items() if pid == os.getpid())
        claim(3 < own_s < 5, "the driver counts this process's GPU time: 4 s", seconds=own_s, counted=str(times))
        claim(sample_ms < 20, "a sample takes less than 20 ms", sample_ms=sample_ms)


def limit() -> None:
    """The agent's memory limit holds, can be lowered, and can be lifted."""
    _need_gpu()
    from penstock_executor.training.gpu_memory import held_mb, limit_memory

    def fits(size: int) -> bool:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            return False
        return True

    kept: list[torch.Tensor] = []
    device = torch.device("cuda", 0)
    limit_memory(device, 2048)
    too_much, within = fits(3 * GIB), fits(GIB)
    held = held_mb(device)
    limit_memory(device, 512)
    more = fits(64 * MIB)
    limit_memory(device, 0)
    lifted = fits(3 * GIB)
    claim(
        not too_much and within and not more and lifted,
        "a limit of 2 GiB holds, one below what is in use refuses more, and 0 lifts it",
        held_mb=held,
        nvml_mb=memory_mb(os.getpid()),
    )


def overhead() -> None:
    """What `run.step` costs over a plain step: blocks of both in turns, since the machine's speed changes."""
    steps, rounds, batch = (12, 5, 256) if HAS_GPU else (3, 2, 4)  # the GPU, not the processor, sets the speed
    data = torch.utils.data.TensorDataset(torch.randint(8192, (100_000 if HAS_GPU else 2_000, 129)))
    for kind in ("fused", "foreach", "sgd"):
        plain, plain_mb = _plain_step(kind, data, batch)
        _forget_memory()
        held = torch.cuda.memory_allocated() if HAS_GPU else 0
        run: Any = px.start(tempfile.mkdtemp())
        model, optimizer = language_model(kind)
        model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=batch)
        next(iter(run.epochs(1)))
        batches = iter(loader)

        def ours(run: Any = run, model: Any = model, batches: Any = batches) -> None:
            run.step(language_loss(model, next(batches)[0]))

        _ms(ours, 40)  # so that Adam's factors are there
        ours_mb = (torch.cuda.max_memory_allocated() - held) / MIB if HAS_GPU else 0.0
        measurements, found = run._measurements, {}
        found["first"] = _ratio(plain, ours, steps, rounds)
        measured_every, waits = run.measured_every, _waits(ours, 3 * steps)
        for name, every in (("never_measured", 10**9), ("one_in_20", 20)):
            measurements.measure_every = lambda _step_s, every=every: every  # else the run sets it again
            measurements.meter.every = every
            _ms(ours, 2)
            found[name] = _ratio(plain, ours, 20, rounds - 1)
        figure(
            f"{kind}: a step, times a plain one",
            plain_ms=_ms(plain, steps),
            measured_every=measured_every,
            **found,
            waits_a_step=waits,
            more_mb=ours_mb - plain_mb,
        )
        if HAS_GPU:
            claim(found["first"] <= 1.05, f"{kind}: at most 5 % in the first 500 steps", ratio=found["first"])
            claim(found["one_in_20"] <= 1.01, f"{kind}: at most 1 % after them", ratio=found["one_in_20"])
        run._closed = True
        del run, model, optimizer, loader, batches, ours, measurements, plain
        _forget_memory()


def _plain_step(kind: str, data: Any, batch: int) -> tuple[Callable[[], None], float]:
    """A plain step, and the most GPU memory that it takes, in MiB."""
    model, optimizer = language_model(kind)
    batches = iter(torch.utils.data.DataLoader(data, batch, shuffle=True))

    def step() -> None:
        language_loss(model, next(batches)[0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    _ms(step, 10)
    return step, torch.cuda.max_memory_allocated() / MIB if HAS_GPU else 0.0


def _ratio(plain: Callable[[], object], ours: Callable[[], object], steps: int, rounds: int) -> float:
    """Median over the rounds of what our step takes, times the plain one."""
    return statistics.median(_ms(ours, steps) / _ms(plain, steps) for _ in range(rounds))


def _forget_memory() -> None:
    """Give back what nothing uses any more, and begin a new peak."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _waits(step: Callable[[], object], steps: int) -> float | None:
    """How often a step makes the processor wait for the GPU."""
    if not HAS_GPU:
        return None
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen) / steps


def noise() -> None:
    """The gradient noise against the gradients of single samples, in each precision."""
    from torch.func import functional_call, grad, vmap

    samples = 2048
    for mode in ("fp32", "bf16", "fp16"):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3)
        y = torch.randint(4, (samples,), generator=generator)
        x = torch.randn(4, 20)[y] * 0.25 + torch.randn(samples, 20, generator=generator)
        bare = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4)).to(DEVICE)
        first = {name: each.detach().clone() for name, each in bare.named_parameters()}
        scaler = torch.amp.GradScaler(DEVICE.type) if mode == "fp16" and HAS_GPU else None
        run = px.start(tempfile.mkdtemp())
        data = torch.utils.data.TensorDataset(x, y)
        model, _, loader = run.prepare(
            bare, torch.optim.SGD(bare.parameters(), 0.0), data, batch_size=32, scaler=scaler
        )
        kind = torch.float16 if mode == "fp16" else torch.bfloat16
        for _ in run.epochs(10 if HAS_GPU else 2):
            for a, b in loader:
                with torch.autocast(DEVICE.type, kind, enabled=mode != "fp32" and HAS_GPU):
                    loss = nn.functional.cross_entropy(model(a.to(DEVICE)), b.to(DEVICE))
                run.step(loss)

        def loss_of(p: Any, a: torch.Tensor, b: torch.Tensor, bare: nn.Module = bare) -> torch.Tensor:
            return nn.functional.cross_entropy(functional_call(bare, p, (a[None],)), b[None])

        single = vmap(grad(loss_of), (None, 0, 0))(first, x.to(DEVICE), y.to(DEVICE))
        gradients = torch.cat([each.reshape(samples, -1) for each in single.values()], 1).double()
        mean = gradients.mean(0)
        variance = float(((gradients - mean) ** 2).sum() / (samples - 1) / 32)
        found = run.noise
        assert found is not None
        off = abs(found.grad_sqr / float(mean @ mean) - 1), abs(found.grad_var / variance - 1)
        claim(max(off) < 0.1, f"{mode}: within 10 %", off_sqr=off[0], off_var=off[1], steps=run.steps)


def checkpoint() -> None:
    """How long training stands still for a checkpoint, and what continuing takes."""
    for gib in STATES_GIB:
        with tempfile.TemporaryDirectory(dir=os.environ.get("OUT")) as folder:
            found: dict[str, float] = {}
            for _ in range(2):
                with program("save_or_restore", folder, gib) as one:
                    one.rest()
                    found |= figures_in(one.lines, "COPIED", "SAVED", "RESTORED", "checkpoint written")
        claim(
            found.get("pause_s", 99.0) < 1.5 * found.get("pinned_copy_s", 0.0) + 0.05,
            f"{gib:g} GiB: the pause is near that of a copy into pinned memory",
            **found,
        )


def suspend() -> None:
    """A job that is suspended gives its GPU memory back, and continues as if it had not been."""
    for gib in STATES_GIB:
        ends = []
        with program("train", gib) as one:
            ends.append(one.until("END "))
        with program("train", gib) as one:
            one.until("STEP 10")
            before = memory_mb(one.pid)
            one.process.send_signal(signal.SIGTSTP)
            one.until(MOVED_OUT)
            time.sleep(1)
            during = memory_mb(one.pid)
            one.process.send_signal(signal.SIGCONT)
            one.until(MOVED_BACK)
            ends.append(one.until("END "))
        found = figures_in(one.lines, MOVED_OUT) | {"back_s": figures_in(one.lines, MOVED_BACK)["back_s"]}
        fast = gib != 2 or max(found["out_s"], found["back_s"]) < 1
        whole = not HAS_GPU or found["moved_bytes"] > 0.9 * gib * GIB
        claim(fast and whole, f"{gib:g} GiB: moved out and back (2 GiB: in less than 1 s each way)", **found)
        figure(f"{gib:g} GiB: GPU memory by NVML", before_mb=before, suspended_mb=during)
        claim(ends[0] == ends[1], f"{gib:g} GiB: the parameters are as if it had not been suspended", ends=ends)


def copies() -> None:
    """What moving 4 GiB between the GPU and the host takes, in the ways that there are."""
    _need_gpu()
    there = torch.randint(255, (4 * GIB,), dtype=torch.uint8, device=DEVICE)
    synchronize()

    def timed(what: Callable[[], Any]) -> tuple[Any, float]:
        began_s = time.perf_counter()
        made = what()
        synchronize()
        return made, 4 * GIB / (time.perf_counter() - began_s) / 1e9

    pageable, first = timed(there.cpu)
    _, again = timed(lambda: pageable.copy_(there))
    _, back = timed(lambda: there.copy_(pageable))
    pinned, making = timed(lambda: torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True))
    _, out = timed(lambda: pinned.copy_(there, non_blocking=True))
    _, pinned_back = timed(lambda: there.copy_(pinned, non_blocking=True))
    api = torch.cuda.cudart()
    bare = torch.empty(4 * GIB, dtype=torch.uint8)
    _, registering = timed(lambda: api.cudaHostRegister(bare.data_ptr(), bare.numel(), 0))
    api.cudaHostUnregister(bare.data_ptr())
    touched = torch.zeros(4 * GIB, dtype=torch.uint8)
    _, registering_touched = timed(lambda: api.cudaHostRegister(touched.data_ptr(), touched.numel(), 0))
    api.cudaHostUnregister(touched.data_ptr())
    staging = [torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    fresh = torch.empty(4 * GIB, dtype=torch.uint8)

    def through_staging() -> None:
        events = [torch.cuda.Event(), torch.cuda.Event()]
        parts = list(zip(fresh.split(64 * MIB), there.split(64 * MIB), strict=True))
        for number, (_, source) in enumerate(parts):
            if number >= 2:
                events[number % 2].synchronize()
                parts[number - 2][0].copy_(staging[number % 2])
            staging[number % 2].copy_(source, non_blocking=True)
            events[number % 2].record()
        synchronize()
        for number in (len(parts) - 2, len(parts) - 1):
            parts[number][0].copy_(staging[number % 2])

    _, staged = timed(through_staging)
    _, staged_again = timed(through_staging)
    figure(
        "4 GiB, GB/s",
        to_pageable=first,
        to_pageable_that_was_used=again,
        from_pageable=back,
        allocating_pinned=making,
        to_pinned=out,
        from_pinned=pinned_back,
        registering=registering,
        registering_that_was_used=registering_touched,
        through_pinned_staging=staged,
        through_pinned_staging_again=staged_again,
        threads=torch.get_num_threads(),
        huge_pages=Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
    )


def fsdp() -> None:
    """A model that `fully_shard` has sharded is saved, continued and suspended."""
    size = 1.0 if HAS_GPU else 0.05
    with tempfile.TemporaryDirectory(dir=os.environ.get("OUT")) as folder:
        with program("train", size, "fsdp", CHECKPOINTS=folder) as one:
            one.until("STEP 10")
            one.process.send_signal(signal.SIGTERM)
            status = one.rest()
        with program("train", size, "fsdp", CHECKPOINTS=folder) as one:
            began = one.until("BEGAN")
            end = one.until("END ")
        claim(
            status == 143 and int(began.split()[1]) >= 10,
            "saved in shards on SIGTERM, and continued",
            began=began,
            end=end,
            status=status,
        )
    with program("train", size, "fsdp") as one:
        one.until("STEP 10")
        one.process.send_signal(signal.SIGTSTP)
        one.until(MOVED_OUT)
        time.sleep(0.5)
        one.process.send_signal(signal.SIGCONT)
        one.until(MOVED_BACK)
        one.until("END ")
        moved = figures_in(one.lines, MOVED_OUT)
        claim(not HAS_GPU or moved["moved_bytes"] > 0.9 * size * GIB, "suspended and resumed", **moved)


def out_of_memory() -> None:
    """A job that runs out of GPU memory begins again with fewer samples."""
    _need_gpu()
    with tempfile.TemporaryDirectory(dir=os.environ.get("OUT")) as folder:
        with program("grow_until_out_of_memory", folder) as one:
            status = one.rest()
        noted = sorted(path.name for path in Path(folder).glob("short-of-memory/*"))
    claim(
        status == 0 and any(line.startswith("END") for line in one.lines) and bool(noted),
        "a real out-of-memory error: begun again with fewer samples, to a good end",
        status=status,
        noted=noted,
        last=one.lines[-3:],
    )


def duty() -> None:
    """Steps under a duty cycle, and beside a process that is stopped."""
    from penstock_executor.node_channel import Channel
    from penstock_profiles.files import write_whole
    from penstock_profiles.node_channel import JobControl, control_path, statuses_dir

    size, kind = (8192, torch.bfloat16) if HAS_GPU else (512, torch.float32)
    a = torch.randn(size, size, device=DEVICE, dtype=kind)
    alone = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statuses_dir(folder, 1).mkdir(parents=True)
        for share in (1.0, 0.75, 0.5, 0.25):
            write_whole(control_path(folder, 1), JobControl(number=int(share * 100), compute=share).model_dump_json())
            channel, steps, active_s = Channel(folder, 1, finish=synchronize), 0, 0.0
            channel.poll()
            began_s = time.monotonic()
            while time.monotonic() < began_s + 3:
                step_s = time.monotonic()
                for _ in range(10):
                    a @ a
                synchronize()
                active_s += time.monotonic() - step_s
                channel.begin()
                channel.step_done(1, time.monotonic() - step_s)
                steps += 1
            alone = alone or steps
            busy = active_s / (time.monotonic() - began_s)
            claim(
                abs(busy - share) < 0.05,
                f"at a compute share of {share:g}, so much of the time",
                busy=busy,
                of_the_steps_alone=steps / alone,
            )
    if HAS_GPU:
        _beside_a_stopped_process()


def _beside_a_stopped_process() -> None:
    with program("multiply", 3600) as other:
        other.until("READY")
        beside = _rate(3)
        other.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        stopped, kept_mb = _rate(3), memory_mb(other.pid)
        other.process.send_signal(signal.SIGCONT)
    alone = _rate(3)
    claim(
        stopped / alone > 0.95,
        "a process beside one that is stopped has the whole GPU",
        beside_one_that_runs=beside / alone,
        beside_one_that_is_stopped=stopped / alone,
        stopped_keeps_mb=kept_mb,
    )


def _rate(seconds: float) -> float:
    """Products of large matrices a second."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    count, began_s = 0, time.monotonic()
    while time.monotonic() - began_s < seconds:
        a @ a
        synchronize()
        count += 1
    return count / (time.monotonic() - began_s)


def profile() -> None:
    """`penstock profile run` measures growing batches up to the memory limit."""
    from penstock_profiles.wire import PROFILE_VARIABLE, ProfileRequest

    request = ProfileRequest(
        gpu_type="gpu" if HAS_GPU else "cpu", seconds=15 if HAS_GPU else 3, max_batch=None if HAS_GPU else 64
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(request.model_dump_json())
        began_s = time.monotonic()
        with program("profiled", **{PROFILE_VARIABLE: f"{folder}/request.json"}) as one:
            status = one.rest()
        took_s = time.monotonic() - began_s
        lines = [line for path in Path(folder).glob("**/*.jsonl") for line in path.read_text().splitlines()]
    bodies = [said.get("body", said) for said in map(json.loads, lines)]
    points = [
        (each["atomic_batch"], round(1000 * each["step_time_s"], 2), each.get("memory_mb"))
        for each in bodies
        if each.get("step_time_s")
    ]
    claim(
        status == 0 and len(points) >= (5 if HAS_GPU else 2) and took_s < 60,
        "batches (samples, ms, MiB) until memory ran out, within a minute",
        points=points,
        did_not_fit=[each["atomic_batch"] for each in bodies if each.get("out_of_memory")],
        took_s=took_s,
    )


def compiled() -> None:
    """A model of torch.compile is measured without compiling anew."""
    run: Any = px.start(tempfile.mkdtemp())
    model, optimizer = language_model("foreach")
    tokens = torch.utils.data.TensorDataset(torch.randint(8192, (4000, 33)))
    whole: Any = torch.compile(model, backend="inductor" if HAS_GPU else "aot_eager")
    whole, optimizer, loader = run.prepare(whole, optimizer, tokens, batch_size=8)
    next(iter(run.epochs(1)))
    batches = iter(loader)

    def step() -> None:
        run.step(language_loss(whole, next(batches)[0]))

    def graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))

    for _ in range(40):  # so that Adam's factors are there
        step()
    before, run._measurements.meter.every = graphs(), 3
    for _ in range(12):
        step()
    claim(graphs() == before, "measured and unmeasured steps in turn compile nothing anew", graphs=before)
    run._closed = True


def cuda_graphs() -> None:
    """A model that runs as CUDA graphs survives a suspension."""
    _need_gpu()
    ends = []
    for suspended in (False, True):
        with program("train", 0.02, "reduce-overhead") as one:
            one.until("STEP 12")
            if suspended:
                one.process.send_signal(signal.SIGTSTP)
                one.until(MOVED_OUT)
                one.process.send_signal(signal.SIGCONT)
                one.until(MOVED_BACK)
            ends.append(one.until("END "))
    claim(ends[0] == ends[1], "CUDA graphs: after a suspension they read the parameters that were moved", ends=ends)


def callback() -> None:
    """What the callback of Hugging Face and Lightning costs a short step."""
    from penstock_executor.integrations.training_monitor import TrainingMonitor

    model, optimizer = language_model("foreach")
    monitor = TrainingMonitor(
        Path(tempfile.mkdtemp()),
        samples_per_step=4,
        atomic_batch=4,
        steps=0,
        total_steps=None,
        report_every_s=30,
        device=DEVICE,
    )
    tokens, steps = torch.randint(8192, (4 if HAS_GPU else 2, 65)), 0

    def step() -> None:
        language_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def watched() -> None:
        nonlocal steps
        step()
        steps += 1
        monitor.step_done(steps)

    count = 60 if HAS_GPU else 5
    _ms(step, count // 5)
    ratio = _ratio(step, watched, count, 5)
    figure("a short step with the callback, times one without", plain_ms=_ms(step, count), ratio=ratio)
    if HAS_GPU:
        claim(ratio < 1.02, "less than 2 % of a short step", ratio=ratio)
    monitor.end()


CHECKS: dict[str, Callable[[], None]] = {
    "nvml": nvml,
    "limit": limit,
    "noise": noise,
    "overhead": overhead,
    "copies": copies,
    "checkpoint": checkpoint,
    "suspend": suspend,
    "fsdp": fsdp,
    "out-of-memory": out_of_memory,
    "duty": duty,
    "profile": profile,
    "compiled": compiled,
    "cuda-graphs": cuda_graphs,
    "callback": callback,
}
