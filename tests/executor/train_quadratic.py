"""A problem with known gradient noise: each sample's gradient is w - x, with x around 0, so its mean and covariance are known.

    train_quadratic.py FOLDER STEPS [--optimizer adam] [--max-atomic N] [--mixed]

The learning rate is 0, so w stays at 1 and the true gradient is w. Writes FOLDER/noise.json.
"""

import argparse
import atexit
import json
import math
import os
from pathlib import Path

import torch

import penstock_executor as px

SIGMA, PARAMETERS, BATCH = 3.0, 40, 16


class Draws(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.x = SIGMA * torch.randn(size, PARAMETERS, generator=torch.Generator().manual_seed(5))
        self.x -= self.x.mean(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


class Point(torch.nn.Module):
    """Its parameters are in two tensors, to test the sum over several."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(PARAMETERS // 4))
        self.two = torch.nn.Parameter(torch.ones(PARAMETERS - PARAMETERS // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # |w - x|^2 / 2 without what does not depend on w; a product, which autocast computes in half precision.
        w = torch.cat([self.one, self.two])
        return w.square().sum() / 2 - torch.nn.functional.linear(x, w[None]).float().mean()


def fail_in_a_group() -> None:
    """A process that ends with gloo's threads is aborted now and then, so that a complete job counts as failed."""
    if torch.distributed.is_initialized():
        os._exit(9)


def main() -> None:
    atexit.register(fail_in_a_group)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--max-atomic", type=int)
    parser.add_argument("--mixed", action="store_true", help="autocast, and a loss scale that overflows at first")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = px.start()
    model = Point()
    kind = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.Adam
    model, _, loader = run.prepare(
        model,
        kind(model.parameters(), lr=0.0),
        Draws(options.steps * BATCH),
        batch_size=BATCH,
        max_atomic_batch=options.max_atomic,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100) if options.mixed else None,
    )
    for _ in run.epochs(1):
        for x in loader:
            with torch.autocast("cpu", torch.float16, enabled=options.mixed):
                loss = model(x)
            run.step(loss)
    noise = run.noise
    assert noise is not None
    found = {"grad_sqr": noise.grad_sqr, "grad_var": noise.grad_var}
    # Adam divides each coordinate by the root mean square of its own gradient: of all, the same.
    unit = 1.0 if options.optimizer == "sgd" else 1 + SIGMA**2 / BATCH
    true = {"grad_sqr": PARAMETERS / unit, "grad_var": PARAMETERS * SIGMA**2 / BATCH / unit}
    if run.rank == 0:
        left_out = options.steps - run.progress / BATCH
        (options.folder / "noise.json").write_text(json.dumps({"found": found, "true": true, "left_out": left_out}))
    assert all(math.isfinite(value) for value in found.values())


if __name__ == "__main__":
    main()
