"""Programs that the checks on a GPU start and watch: `python -m benchmarks.gpu.programs NAME ...`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.checking import DEVICE, GIB, HAS_GPU, synchronize
from torch import nn

import penstock_executor as px


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Random rows, the same in each run."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(self.width, generator=torch.Generator().manual_seed(number))


class LanguageModel(nn.Module):
    """GPT-2's size on a GPU (98 million parameters), a toy on a processor."""

    def __init__(self) -> None:
        super().__init__()
        width, heads, layers = (768, 12, 12) if HAS_GPU else (64, 4, 2)
        self.embedding = nn.Embedding(8192, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 8192)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def language_model(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on the device with `fused`, `foreach` (both AdamW) or `sgd`."""
    torch.manual_seed(0)
    model = LanguageModel().to(DEVICE)
    if optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), 1e-3)
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=optimizer == "fused")


def language_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of the next token, in bfloat16."""
    tokens = tokens.to(DEVICE, non_blocking=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        guess = model(tokens[:, :-1]).reshape(-1, 8192)
        return nn.functional.cross_entropy(guess, tokens[:, 1:].reshape(-1))


def state_of(gib: float) -> tuple[nn.Module, int]:
    """A model whose parameters and AdamW state take `gib` GiB together, and its width."""
    width = 4096 if gib >= 1 else 512
    layers = max(round(gib * GIB / 12 / width**2), 1)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return model.to(DEVICE), width


def train(gib: str, kind: str = "plain") -> None:
    """Forty steps; after ten of them slow enough for a signal. kind: plain, fsdp, or a mode of torch.compile."""
    torch.manual_seed(0)
    run = px.start(os.environ.get("CHECKPOINTS"))
    model, width = state_of(float(gib))
    if kind == "fsdp":
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    trained = model if kind in ("plain", "fsdp") else torch.compile(model, mode=kind)
    trained, optimizer, loader = run.prepare(trained, optimizer, Rows(320, width), batch_size=8)
    print("BEGAN", run.steps, flush=True)
    for _ in run.epochs(1):
        for x in loader:
            if kind not in ("plain", "fsdp"):
                torch.compiler.cudagraph_mark_step_begin()
            loss = trained(x.to(DEVICE)).square().mean()
            run.step(loss)
            print("STEP", run.steps, flush=True)
            if run.steps >= 10:
                time.sleep(0.05)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in map(torch.Tensor.detach, model.parameters())]
    print(f"END {sum(float(each.double().sum()) for each in whole):.9f} {float(loss.detach()):.9f}", flush=True)


def shard(model: nn.Module) -> None:
    """Make it an FSDP2 model of one process."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if HAS_GPU else "gloo"
        dist.init_process_group(backend, init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(model)


def save_or_restore(folder: str, gib: str) -> None:
    """Eight steps and a checkpoint, or, if there is one, its restoring; prints figures."""
    model, width = state_of(float(gib))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    run = px.start(folder)
    resident, began_s = _resident_gib("VmRSS"), time.perf_counter()
    model, optimizer, loader = run.prepare(model, optimizer, Rows(64, width), batch_size=8)
    synchronize()
    if run.steps:
        host = _resident_gib("VmHWM") - resident
        print(f"RESTORED restore_s={time.perf_counter() - began_s:.3f} restore_host_gib={host:.2f}", flush=True)
        os._exit(0)
    for _ in run.epochs(1):
        for x in loader:
            run.step(model(x.to(DEVICE)).square().mean())
        _time_pinned_copy(model, optimizer)
        resident = _resident_gib("VmRSS")
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # begin a new high-water mark
    print(f"SAVED save_host_gib={_resident_gib('VmHWM') - resident:.2f}", flush=True)


def _time_pinned_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print how long a copy of the state into pinned memory takes that is there already."""
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values() if t.ndim)]
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=HAS_GPU) for t in tensors]
    synchronize()
    began_s = time.perf_counter()
    for there, here in zip(pinned, tensors, strict=True):
        there.copy_(here.detach(), non_blocking=True)
    synchronize()
    print(f"COPIED pinned_copy_s={time.perf_counter() - began_s:.3f}", flush=True)


def _resident_gib(name: str) -> float:
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 2**20 if found else 0.0


def grow_until_out_of_memory(folder: str) -> None:
    """Trains with growing batches under a limit of 1 GiB, some 150 samples; prints END after 70 s."""
    from penstock_executor.training.gpu_memory import limit_memory

    run = px.start(folder, report_every_s=1)
    limit_memory(run.device, 1024)
    model: nn.Module = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    # The run knows how much memory the GPU has, and not that it may use less: that makes it too bold.
    model, optimizer, loader = run.prepare(model, optimizer, Rows(400_000, 1024), batch_size=64, max_batch_size=262_144)
    began_s = time.monotonic()
    for _ in run.epochs(1):
        for x in loader:
            x = x.to(run.device).repeat_interleave(96, 0)
            run.step((model(x) - 100 * torch.randn_like(x)).square().mean())  # all noise: larger batches pay
            if time.monotonic() - began_s > 70:
                print("END", loader.size, flush=True)
                os._exit(0)


def profiled() -> None:
    """What `penstock profile run` has a script do: measure growing batches."""
    if HAS_GPU:
        torch.cuda.set_per_process_memory_fraction(0.15)
    model, optimizer = language_model("foreach")

    def step(batch: int) -> None:
        language_loss(model, torch.randint(8192, (batch, 129), device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()

    sys.exit(0 if px.profile(step) else 3)


def multiply(seconds: str) -> None:
    """Keeps the GPU busy, without the executor; prints READY when it has begun."""
    a = torch.randn(8192 if HAS_GPU else 256, 8192 if HAS_GPU else 256, device=DEVICE, dtype=torch.bfloat16)
    end_s = time.monotonic() + float(seconds)
    print("READY", flush=True)
    while time.monotonic() < end_s:
        a @ a
        synchronize()


def hold(gib: str) -> None:
    """Holds memory on the GPU and computes with it for 3 s, without the executor; prints SUM ok if it did not change."""
    x = torch.arange(int(float(gib) * GIB / 4), device=DEVICE, dtype=torch.int32)
    right = int(x[::1024].long().sum())
    print("READY", flush=True)
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        if int(x[::1024].long().sum()) != right:
            break
        time.sleep(0.05)
    print("SUM ok" if int(x[::1024].long().sum()) == right else "SUM wrong", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    globals()[sys.argv[1]](*sys.argv[2:])
