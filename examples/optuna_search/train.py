"""One trial: a classifier of two moons on random features, and its accuracy after each epoch.

The marks [1] to [3] show what a script does to be a trial. It may be stopped at any epoch, and continues from there.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

import numpy as np  # noqa: E402

from penstock_executor import Checkpoints, connect, find_allocation  # noqa: E402
from penstock_profiles.wire import Checkpointed, Result, Started  # noqa: E402

SAMPLES, BATCH = 2048, 64


def moons(samples, rng):
    """Points (samples, 2) on two interleaved half circles, with noise, and the moon of each: -1 or 1."""
    label = rng.integers(0, 2, samples)
    angle = rng.uniform(0, np.pi, samples)
    x = np.where(label == 0, np.cos(angle), 1 - np.cos(angle))
    y = np.where(label == 0, np.sin(angle), 0.5 - np.sin(angle))
    return np.stack([x, y], axis=1) + rng.normal(0, 0.2, (samples, 2)), 2.0 * label - 1


def main():
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True, help="learning rate")
    parser.add_argument("--width", type=float, required=True, help="width of the random features")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--epoch-s", type=float, default=0.0, help="shortest time of an epoch, in seconds")
    options = parser.parse_args()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))

    run = connect(options.checkpoints)  # [1] claim an epoch for this run, and continue from the last
    checkpoints = Checkpoints(options.checkpoints, run.epoch)
    saved = checkpoints.latest()
    weights, epoch = (saved.state["weights"], saved.step) if saved is not None else (np.zeros(200), 0)
    gpus = find_allocation(run.environment, gpu_type=None if run.environment.gpus_on_node else "cpu")
    run.report(
        Started(
            gpu_type=gpus.gpu_type,
            gpu_ids=gpus.gpu_ids,
            progress=epoch * SAMPLES,
            total=options.epochs * SAMPLES,
        )
    )

    rng = np.random.default_rng(0)
    direction, shift = rng.normal(0, 1 / options.width, (2, len(weights))), rng.uniform(0, 2 * np.pi, len(weights))
    (points, labels), (test_points, test_labels) = moons(SAMPLES, rng), moons(SAMPLES, rng)
    features, test_features = np.cos(points @ direction + shift), np.cos(test_points @ direction + shift)

    while epoch < options.epochs and not stopped and not run.superseded:
        began = time.monotonic()
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        for batch in order.reshape(-1, BATCH):
            margin = labels[batch] * (features[batch] @ weights)
            weights = weights + options.rate * ((labels[batch] * (margin < 1)) @ features[batch]) / BATCH
        epoch += 1
        time.sleep(max(began + options.epoch_s - time.monotonic(), 0))
        accuracy = float(np.mean(np.sign(test_features @ weights) == test_labels))
        print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
        run.report(Result(metric=accuracy, progress=epoch * SAMPLES))  # [2] with PyTorch: run.report(accuracy)
        began = time.monotonic()
        checkpoints.save({"weights": weights}, epoch, {})
        request = run.poll()  # [3] if the daemon has asked for a checkpoint, answer with its id
        run.report(
            Checkpointed(
                request=request.id if request else None,
                progress=epoch * SAMPLES,
                seconds=time.monotonic() - began,
            )
        )
    if run.superseded:
        return 75
    run.close("completed" if epoch >= options.epochs else "stopped", epoch * SAMPLES)
    return 0 if epoch >= options.epochs else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
