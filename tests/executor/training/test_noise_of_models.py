"""The measured noise of common models and optimisers, against the gradients of single samples."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch
from torch import nn

from penstock_executor.training.batches import Part
from penstock_executor.training.gradients import GradientMeter
from penstock_executor.training.preconditioning import FLOOR
from penstock_profiles.noise import Moments, NoiseEstimator

SAMPLES, BATCH, STEPS, BEFORE = 256, 16, 800, 60


class LanguageModel(nn.Module):
    """Embedding, two layers, and a head that shares no weights. Few tokens are common and most are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)).mean(1))


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 8)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), x, (x[:, 0] > 1).long()


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 1, 6, 6)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    return model, x, (x[:, 0, 0, 0] > 1).long()


def language_model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    # Of the 400 tokens, only half occur in the samples of the first steps.
    tokens = torch.from_numpy(np.random.default_rng(2).zipf(1.3, (SAMPLES, 6)) % 200)
    tokens[SAMPLES // 2 :] += 200 * (torch.rand(SAMPLES // 2, 6) < 0.1)
    return LanguageModel(), tokens, (tokens[:, 0] % 7 == 0).long()


def factor_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """1 / (sqrt(v) + eps), with the floor, and 0 where there was no gradient."""
    state = optimizer.state[parameter]
    if "exp_avg_sq" not in state:
        return torch.ones_like(parameter)
    v = state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))
    floor = FLOOR * v[v > 0].mean()
    return torch.where(v > 0, 1 / (v.clamp(min=floor).sqrt() + 1e-8), 0.0)


@pytest.mark.parametrize("micro_steps", [1, 4], ids=["by pairs", "by micro-steps"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("make", [mlp, cnn, pytest.param(language_model, marks=pytest.mark.long)])
def test_it_is_that_of_single_samples(make, kind: str, micro_steps: int):
    """The optimiser sees half of the samples, and then the model stands still, so that the truth is known.

    It has hardly learned: a gradient that is not small beside its noise can be told from it in 800 steps."""
    torch.set_num_threads(1)  # on a busy machine, threads wait for each other for most of the time
    torch.manual_seed(1)
    model, x, y = make()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=1e-3)
        if kind == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-5)
    )
    loss_of, parameters = nn.CrossEntropyLoss(), list(model.parameters())
    for _ in range(BEFORE):
        chosen = torch.randint(SAMPLES // 2, (BATCH,))
        optimizer.zero_grad()
        loss_of(model(x[chosen]), y[chosen]).backward()
        optimizer.step()

    factors = [factor_of(optimizer, each) for each in parameters]
    rows = []
    for sample in range(SAMPLES):
        optimizer.zero_grad()
        loss_of(model(x[sample : sample + 1]), y[sample : sample + 1]).backward()
        rows.append(torch.cat([(p.grad * f).reshape(-1) for p, f in zip(parameters, factors, strict=True)]).double())
    single = torch.stack(rows)
    mean = single.mean(0)
    true_sqr, true_var = float(mean @ mean), float((single - mean).square().sum() / SAMPLES / BATCH)

    meter, noise = GradientMeter(parameters, optimizer, 1), NoiseEstimator()
    share = BATCH // micro_steps
    for step in range(STEPS):
        meter.begin(step)
        optimizer.zero_grad()
        chosen = torch.randint(SAMPLES, (BATCH,))
        for number, mine in enumerate(chosen.split(share), 1):
            part = Part(share, BATCH, 1, micro_steps, last=number == micro_steps)
            (loss_of(model(x[mine]), y[mine]) * part.weight).backward()
            if not part.last:
                meter.after_micro_step(part)
        norms = meter.after_step(part, 1.0)
        if norms is not None:
            local_sqr, mean_sqr = float(norms.local_sqr), float(norms.mean_sqr)
            noise.update(Moments(local_sqr, min(mean_sqr, local_sqr), norms.count, norms.consecutive), 1.0)
    assert noise.noise is not None
    assert noise.noise.grad_var == pytest.approx(true_var, rel=0.15)
    assert noise.noise.grad_sqr == pytest.approx(true_sqr, rel=0.15)
