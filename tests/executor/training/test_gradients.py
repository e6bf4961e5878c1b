"""Measuring the gradients of steps."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor.training import gradients
from penstock_executor.training.batches import Part
from penstock_executor.training.gradients import GradientMeter, SyncTimer, measure_every


def test_measuring_takes_a_fifth_of_a_hundredth_of_the_time_and_a_twentieth_of_the_steps_at_least():
    """0.1 ms are a fifth of a hundredth of a step of 50 ms. So 0.09 ms fit into each step, 0.48 ms into every fifth."""
    found = [measure_every(seconds, 0.05, settled=True) for seconds in (0.0, 0.00009, 0.00048, 1.0)]
    assert found == [1, 1, 5, 20]


def test_until_there_is_an_estimate_it_takes_a_twenty_fifth_of_the_time_and_a_quarter_of_the_steps_at_least():
    """2 ms are 4 % of a step of 50 ms."""
    assert [measure_every(seconds, 0.05, settled=False) for seconds in (0.0019, 0.0039, 0.0065, 1.0)] == [1, 2, 4, 4]


def test_of_one_gradient_a_step_neighbours_make_a_pair():
    """Steps 0 and 1, 4 and 5, 8 and 9: the gradients 1, 2, 5, 6, 9, 10 of one parameter."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    meter = GradientMeter([parameter], torch.optim.SGD([parameter], lr=0.1), replicas=1)
    meter.every = 4
    found = {}
    for step in range(10):
        meter.begin(step)
        parameter.grad = torch.tensor([step + 1.0])
        norms = meter.after_step(Part(8, 8, 1, 1, last=True), 1.0)
        if norms is not None:
            found[step] = float(norms.local_sqr), float(norms.mean_sqr)
    assert found == {1: (2.5, 2.25), 5: (30.5, 30.25), 9: (90.5, 90.25)}
    assert meter.measured == 3, "what a pair takes is what a measurement takes"


@pytest.mark.parametrize("apart", [1e-1, 1e-3, 1e-4, 1e-6])
def test_of_gradients_that_hardly_differ_the_noise_is_off_by_little_beside_the_gradient_and_never_negative(
    apart: float,
):
    """Their difference is known by way of their product, so to some 1e-6 of the gradient's squared norm.

    A noise as small changes no decision: a batch S times as large is worth (r + 1) / (r / S + 1) steps, with r = noise /
    gradient. For S = 8 and r = 1e-5 that is 1.00001.
    """
    for seed in range(20):
        torch.manual_seed(seed)
        first = torch.randn(30_000)
        second = first + apart * torch.randn(30_000)
        parameter = torch.nn.Parameter(torch.zeros(30_000))
        meter = GradientMeter([parameter], torch.optim.SGD([parameter], lr=0.1), replicas=1)
        norms = None
        for step, parameter.grad in enumerate((first, second)):
            meter.begin(step)
            norms = meter.after_step(Part(8, 8, 1, 1, last=True), 1.0)
        assert norms is not None
        spread = float(norms.local_sqr - norms.mean_sqr)
        true = float((first.double() - second.double()).square().sum()) / 4
        assert spread >= 0
        assert spread == pytest.approx(true, rel=1e-3, abs=1e-6 * float(first.double().square().sum()))


def test_parts_of_two_replicas_add_up_to_the_whole_models_norms():
    """Own gradients (3, 4) and (1, 0), one parameter a process: mean (2, 2). mean|g_i|^2 = (25 + 1) / 2, |g_bar|^2 = 8.

    Halves of them on each of two processes; the first parameter's are 9 / 2 and 1 / 2, of the mean 4 / 2 and 4 / 2.
    """
    local, mean = [], []
    for own, averaged in ((3.0, 2.0), (4.0, 2.0), (1.0, 2.0), (0.0, 2.0)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        meter = GradientMeter([parameter], torch.optim.SGD([parameter], lr=0.1), replicas=2, averaged=True)
        meter.begin(0)
        parameter.grad = torch.tensor([own])
        meter.record_own_gradients()
        parameter.grad.fill_(averaged)
        norms = meter.after_step(Part(8, 16, 2, 1, last=True), 1.0)
        assert (norms.count, norms.consecutive) == (2, False)
        local.append(float(norms.local_sqr))
        mean.append(float(norms.mean_sqr))
    assert local == [4.5, 8, 0.5, 0]
    assert (sum(local), sum(mean)) == (13, 8)


def test_a_step_that_is_not_measured_has_nothing_of_ours_in_its_backward_pass(monkeypatch: pytest.MonkeyPatch):
    parameter = torch.nn.Parameter(torch.ones(2))
    meter = GradientMeter([parameter], torch.optim.SGD([parameter], lr=0.1), replicas=2, averaged=True)
    meter.every = 2
    register, registered, hooks = torch.Tensor.register_post_accumulate_grad_hook, [], []
    monkeypatch.setattr(
        torch.Tensor,
        "register_post_accumulate_grad_hook",
        lambda tensor, hook: (registered.append(hook), register(tensor, hook))[1],
    )
    for step in range(3):
        registered.clear()
        meter.begin(step)
        with meter.before_average():
            hooks.append(len(registered))
            parameter.sum().backward()
        meter.after_step(Part(8, 16, 2, 1, last=True), 1.0)
        meter.cost.take_s()
        parameter.sum().backward()
        assert meter.cost.take_s() == 0, "the hooks are gone"
    assert hooks == [1, 0, 1]
    assert meter.measured == 2


class Event:
    """The part of a CUDA event that `SyncTimer` needs."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.done = at_s, False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_s - self.at_s) * 1000


def test_steps_that_are_not_measured_do_not_move_the_end_of_one_that_was(monkeypatch: pytest.MonkeyPatch):
    """Measured: waited from second 1.0 to 1.25, which the GPU reaches only when the next step has ended, at 2.25."""
    events = [Event(1.0), Event(1.25), Event(2.25)]
    marks = iter(events)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: next(marks))
    timer = SyncTimer()
    timer.begin(cuda=True)
    timer.end()
    assert timer.take_s() is None
    timer.end()
    for event in events:
        event.done = True
    assert timer.take_s() == 0.25
    assert timer.take_s() is None


def test_what_measuring_costs_on_a_gpu_is_known_once_the_gpu_has_done_it(monkeypatch: pytest.MonkeyPatch):
    events = [Event(1.0), Event(1.5), Event(9.0), Event(9.25)]
    waiting = list(events)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: waiting.pop(0))
    cost = gradients.Stopwatch()
    for _ in range(2):
        with cost.running(cuda=True):
            pass
    events[1].done = True
    assert cost.take_s() is None
    events[3].done = True
    assert cost.take_s() == 0.75
    assert cost.take_s() == 0
    done = Event(2.0)
    done.done = True
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: done)
    for _ in range(1000):  # of all processes, only the first takes the time
        with cost.running(cuda=True):
            pass
    assert len(cost._spans) <= gradients.MOST_SPANS


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_gradient_is_kept_once_and_compared_part_by_part(monkeypatch: pytest.MonkeyPatch, chunk: int):
    """One parameter gets no gradient, as an expert that no token was sent to. The second step has other gradients."""
    monkeypatch.setattr(gradients, "CHUNK", chunk)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (1,))]
    meter = GradientMeter(parameters, torch.optim.SGD(parameters, lr=0.1), replicas=1)
    found = []
    for step, scale in enumerate((1.0, 3.0)):
        meter.begin(step)
        for parameter in parameters[:2]:
            parameter.grad = torch.full_like(parameter, scale)
        found.append(meter.after_step(Part(8, 8, 1, 1, last=True), 1.0))
    assert found[0] is None
    # Seven values of 1, then of 3: squares 7 and 63, and of their mean, 2, 28.
    assert (float(found[1].local_sqr), float(found[1].mean_sqr)) == (35, 28)
    assert meter._kept.numel() == 8
    parameters[0].grad = torch.full((2, 2), float("inf"))
    meter.begin(2)
    meter.after_micro_step(Part(4, 8, 1, 2, last=False))
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    meter.begin(3)
    meter.after_micro_step(Part(4, 8, 1, 2, last=False))
    assert float(meter._local_sqr) == 28, "what overflowed before is forgotten"


def test_steps_of_a_fused_adam_are_read_from_the_gpu_at_once():
    """Each reading waits for all that the GPU has to do. Meta tensors stand for those on a GPU."""
    from penstock_executor.training.preconditioning import Preconditioner

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert Preconditioner(parameters, optimizer)._steps() == [1, 1, 0]
