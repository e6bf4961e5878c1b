"""A small real training job under Penstock: a NumPy network learns to tell two moons apart.

The marks [1] to [6] show what a script does to use Penstock. The total batch is fixed, so the final weights are the
same to the bit, however often the run is interrupted.
"""

import os

# One process with one thread: it uses one core, and computes in the same order in every run.
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
    """Points (samples, 2) on two interleaved half circles, with noise, and the moon of each: 0 or 1."""
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
        """Activations of each layer; those of the last are log-odds."""
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


class Training:
    """Everything that a checkpoint must hold, and the data."""

    def __init__(self, options):
        self.options, self.step = options, 0
        self.rng = np.random.default_rng(options.seed)
        self.points, self.labels = two_moons(4096, options.seed)
        self.network = Network(self.rng)
        self.sampler = None

    def try_step(self, batch):
        """One step on `batch` samples, for `penstock profile run`."""
        self.network.step(self.points[:batch], self.labels[:batch], self.options.learning_rate)

    def begin(self, saved):
        """Begin to train, from the checkpoint `saved` if there is one."""
        self.sampler = Sampler(len(self.points), self.options.batch_size, self.rng)
        if saved is not None:
            self.step = saved.step
            for name in self.network.weights:
                self.network.weights[name][...] = saved.state[f"weights.{name}"]
                self.network.momentum[name][...] = saved.state[f"momentum.{name}"]
            self.sampler.order[...] = saved.state["order"]
            self.sampler.position = saved.meta["position"]
            self.rng.bit_generator.state = saved.meta["rng"]

    def train(self):
        """One step."""
        batch = self.sampler.next()
        self.network.step(self.points[batch], self.labels[batch], self.options.learning_rate)
        self.step += 1

    def save(self, checkpoints):
        """Write a checkpoint. Raises NotSaved, Superseded."""
        state = {f"weights.{name}": value for name, value in self.network.weights.items()}
        state |= {f"momentum.{name}": value for name, value in self.network.momentum.items()}
        state["order"] = self.sampler.order
        checkpoints.save(state, self.step, {"position": self.sampler.position, "rng": self.rng.bit_generator.state})

    @property
    def progress(self):
        """In samples."""
        return self.step * self.options.batch_size

    @property
    def accuracy(self):
        """Share of the points that the network classifies correctly."""
        return float(np.mean((self.network.forward(self.points)[2] > 0) == (self.labels == 1)))


class Reports:
    """Reports once a second how fast the training is."""

    def __init__(self, run, allocation, training):
        self.run, self.allocation, self.training = run, allocation, training
        self.step, self.time = training.step, time.monotonic()

    def step_done(self):
        """After each step. Raises Superseded."""
        now, training = time.monotonic(), self.training
        if now - self.time < 1:
            return
        step_time_s = (now - self.time) / (training.step - self.step)
        self.run.report(
            Observation(
                gpu_type=self.allocation.gpu_type,
                nodes=1,  # one process computes, whatever Slurm allocated
                gpus=1,
                atomic_batch=training.options.batch_size,
                steps=training.step - self.step,
                step_time_s=step_time_s,
                goodput=training.options.batch_size / step_time_s,
                progress=training.progress,
            )
        )
        self.step, self.time = training.step, now
        if self.run.superseded:
            raise Superseded("a later run of the job has begun")


def train(run, checkpoints, training, stopped):
    """Train until the end or until stopped; returns the exit status."""
    allocation = find_allocation(run.environment, gpu_type="cpu")
    options, total = training.options, training.options.steps * training.options.batch_size

    def save(request=None):
        began = time.monotonic()
        training.save(checkpoints)
        seconds = time.monotonic() - began
        run.report(Checkpointed(request=request, progress=training.progress, seconds=seconds))

    run.report(
        Started(gpu_type=allocation.gpu_type, gpu_ids=allocation.gpu_ids, progress=training.progress, total=total)
    )
    logging.info("epoch %d begins at step %d of %d", run.epoch, training.step, options.steps)
    reports = Reports(run, allocation, training)  # [5] report how fast it is
    try:
        while training.step < options.steps and not stopped:
            training.train()
            reports.step_done()
            request = run.poll()  # [6] does the daemon ask for a checkpoint?
            if request is not None or training.step % options.checkpoint_every == 0:
                try:
                    save(request.id if request else None)
                except NotSaved as error:
                    logging.error("%s", error)
        save()
    except Superseded as error:
        logging.warning("%s", error)
        run.close("superseded", training.progress)
        return 75
    except NotSaved as error:
        logging.error("%s", error)
        run.close("failed", training.progress, str(error))
        return 1
    if training.step < options.steps:
        logging.info("stopped at step %d", training.step)
        run.close("stopped", training.progress)
        return 128 + signal.SIGTERM
    logging.info("done at step %d, accuracy %.4f", training.step, training.accuracy)
    if options.weights is not None:
        np.savez(options.weights, **training.network.weights)
    run.close("completed", total)
    return 0


def main():
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000, help="number of optimiser steps (10000: about 15 s)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=2000, metavar="STEPS")
    parser.add_argument("--weights", type=Path, help="file for the final weights (.npz)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))  # [1] Slurm asks to stop: finish the step, then save
    training = Training(options)
    if profile(training.try_step, max_batch=len(training.points)):  # [2] under `penstock profile run`: measure steps
        return 0
    run = connect(options.checkpoint_dir)  # [3] claim an epoch for this run of the job
    checkpoints = Checkpoints(options.checkpoint_dir, run.epoch)
    training.begin(checkpoints.latest())  # [4] continue from the last run's checkpoint
    return train(run, checkpoints, training, stopped)


if __name__ == "__main__":
    sys.exit(main())
