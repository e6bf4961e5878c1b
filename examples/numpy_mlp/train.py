"""A small real training job under Penstock: a NumPy network that learns to tell two moons apart.

What a script does to take part is marked [1] to [6]. The total batch is fixed, so whatever interrupts the run, the final
weights are bit for bit those of a run that nothing interrupted.
"""

import os

# One process, one thread: the job computes on one core, and in the same order on every run.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import argparse  # noqa: E402
import logging  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from penstock_executor import Checkpoints, NotSaved, Superseded, connect, find_allocation, profile  # noqa: E402
from penstock_profiles.wire import Checkpointed, Observation, Started  # noqa: E402

HIDDEN = 128
MOMENTUM = 0.9


def two_moons(samples, seed):
    """Points (samples, 2) on two interleaved half circles, with noise, and which of the two: 0 or 1."""
    rng = np.random.default_rng(seed)
    moon = rng.integers(0, 2, samples)
    angle = rng.uniform(0, np.pi, samples)
    x = np.where(moon == 0, np.cos(angle), 1 - np.cos(angle))
    y = np.where(moon == 0, np.sin(angle), 0.5 - np.sin(angle))
    return np.stack([x, y], axis=1) + rng.normal(0, 0.15, (samples, 2)), moon.astype(np.float64)


class Network:
    """2 -> HIDDEN -> HIDDEN -> 1, tanh, logistic loss, SGD with momentum."""

    def __init__(self, rng):
        sizes = [(2, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
        self.weights = {}
        for layer, (rows, columns) in enumerate(sizes):
            self.weights[f"w{layer}"] = rng.normal(0, 1 / np.sqrt(rows), (rows, columns))
            self.weights[f"b{layer}"] = np.zeros(columns)
        self.momentum = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def forward(self, points):
        """Activations of each layer; the last are log-odds."""
        w = self.weights
        first = np.tanh(points @ w["w0"] + w["b0"])
        second = np.tanh(first @ w["w1"] + w["b1"])
        return first, second, (second @ w["w2"] + w["b2"])[:, 0]

    def step(self, points, labels, learning_rate):
        """One step of SGD."""
        first, second, log_odds = self.forward(points)
        back2 = ((1 / (1 + np.exp(-log_odds)) - labels) / len(labels))[:, None]
        back1 = (back2 @ self.weights["w2"].T) * (1 - second**2)
        back0 = (back1 @ self.weights["w1"].T) * (1 - first**2)
        for layer, (inputs, back) in enumerate([(points, back0), (first, back1), (second, back2)]):
            for name, gradient in ((f"w{layer}", inputs.T @ back), (f"b{layer}", back.sum(axis=0))):
                self.momentum[name] = MOMENTUM * self.momentum[name] + gradient
                self.weights[name] -= learning_rate * self.momentum[name]


class Sampler:
    """Batches of one shuffled pass over the data after another."""

    def __init__(self, samples, batch, rng):
        self.samples, self.batch, self.rng = samples, batch, rng
        self.order, self.position = rng.permutation(samples), 0

    def next(self):
        """Indices of the next batch."""
        if self.position + self.batch > self.samples:
            self.order, self.position = self.rng.permutation(self.samples), 0
        self.position += self.batch
        return self.order[self.position - self.batch : self.position]


def main():
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000, help="optimiser steps in all (10000: about 15 s)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=2000, metavar="STEPS")
    parser.add_argument("--weights", type=Path, help="where to leave the final weights (.npz)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))  # [1] Slurm's word to stop: finish the step, save

    rng = np.random.default_rng(options.seed)
    points, labels = two_moons(4096, options.seed)
    network = Network(rng)

    def try_step(batch):
        network.step(points[:batch], labels[:batch], options.learning_rate)

    if profile(try_step, max_batch=len(points)):  # [2] under `penstock profile`: how long does a step take
        return 0

    run = connect(options.checkpoint_dir)  # [3] which run of the job this is
    allocation = find_allocation(run.environment, gpu_type="cpu")
    checkpoints = Checkpoints(options.checkpoint_dir, run.epoch)

    sampler, step = Sampler(len(points), options.batch_size, rng), 0
    saved = checkpoints.latest()  # [4] begin where the last run got to
    if saved is not None:
        step = saved.step
        for name in network.weights:
            network.weights[name][...] = saved.state[f"weights.{name}"]
            network.momentum[name][...] = saved.state[f"momentum.{name}"]
        sampler.order[...] = saved.state["order"]
        sampler.position = saved.meta["position"]
        rng.bit_generator.state = saved.meta["rng"]

    def save(request=None):
        began = time.monotonic()
        state = {f"weights.{name}": value for name, value in network.weights.items()}
        state |= {f"momentum.{name}": value for name, value in network.momentum.items()}
        state["order"] = sampler.order
        checkpoints.save(state, step, {"position": sampler.position, "rng": rng.bit_generator.state})
        seconds = time.monotonic() - began
        run.report(Checkpointed(request=request, progress=step * options.batch_size, seconds=seconds))

    total = options.steps * options.batch_size
    run.report(
        Started(
            gpu_type=allocation.gpu_type, gpu_ids=allocation.gpu_ids, progress=step * options.batch_size, total=total
        )
    )
    logging.info("epoch %d begins at step %d of %d", run.epoch, step, options.steps)
    observed_step, observed = step, time.monotonic()
    try:
        while step < options.steps and not stopped:
            batch = sampler.next()
            network.step(points[batch], labels[batch], options.learning_rate)
            step += 1
            now = time.monotonic()
            if now - observed >= 1:  # [5] say how it goes
                step_time_s = (now - observed) / (step - observed_step)
                run.report(
                    Observation(
                        gpu_type=allocation.gpu_type,
                        nodes=1,  # whatever Slurm gave, one process computes
                        gpus=1,
                        atomic_batch=options.batch_size,
                        steps=step - observed_step,
                        step_time_s=step_time_s,
                        goodput=options.batch_size / step_time_s,
                        progress=step * options.batch_size,
                    )
                )
                observed_step, observed = step, now
                if run.superseded:
                    raise Superseded("a later run of the job has begun")
            request = run.poll()  # [6] does the daemon want a checkpoint?
            if request is not None or step % options.checkpoint_every == 0:
                try:
                    save(request.id if request else None)
                except NotSaved as error:
                    logging.error("%s", error)
        save()
    except Superseded as error:
        logging.warning("%s", error)
        run.close("superseded", step * options.batch_size)
        return 75
    except NotSaved as error:
        logging.error("%s", error)
        run.close("failed", step * options.batch_size, str(error))
        return 1
    if step < options.steps:
        logging.info("stopped at step %d", step)
        run.close("stopped", step * options.batch_size)
        return 128 + signal.SIGTERM
    accuracy = float(np.mean((network.forward(points)[2] > 0) == (labels == 1)))
    logging.info("done at step %d, accuracy %.4f", step, accuracy)
    if options.weights is not None:
        np.savez(options.weights, **network.weights)
    run.close("completed", total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
