"""`penstock-emulated-trainer`: adaptive training without a GPU, for the demo and the tests.

It is a real process in a real Slurm job, and does everything that a training job does except train. It finds out what
Slurm allocated, progresses at the rate that a model of a real training reaches on such GPUs, in compressed time,
reports that progress, saves checkpoints when asked and when stopped, and continues from its checkpoint. One process, in
the batch script, stands for all ranks of the job. Rates, step times and gradient noise in its reports come from the
model, in the model's time. The times of starting and saving are real.

In a batch script, start it with `exec`: Slurm's SIGTERM would end a waiting shell, and with the shell the job::

    sbatch --gres=gpu:2 --requeue --wrap \\
        'exec penstock-emulated-trainer --family bert-squad --work 1e5 --checkpoint-dir ckpt/$SLURM_JOB_ID'

Exit status: 0: the work is done. 1: it cannot run; the reason is on standard error. 2: wrong options. 75: a later run
of the job has begun. 143: it was stopped, as if ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.checkpoint import Checkpoints, NotSaved, Superseded
from penstock_executor.client import Client, connect
from penstock_executor.environment import EnvironmentDisagrees, read_environment
from penstock_executor.node_channel import open_channel
from penstock_executor.profiling import profile, read_request
from penstock_profiles.wire import LONGEST_TEXT, Checkpointed, Observation, SaveFailed, Started

if TYPE_CHECKING:
    from penstock_profiles.estimators import AnyEstimator

log = logging.getLogger(__name__)

SAVE_AGAIN_S = 5.0
"""Seconds until a checkpoint that could not be written is tried again."""

TICK_S = 0.1
"""Seconds between two checks for requests and signals. 20 trainers together used 3.7 % of a core (2 cores, bert-squad,
reports every second)."""

SUPERSEDED_EVERY_S = 1.0

DONE, FAILED, SUPERSEDED, STOPPED = 0, 1, 75, 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast the emulated training progresses on its allocation, in the model's time."""

    samples_per_s: float
    """Progress, in samples of the initial batch size."""
    step_time_s: float
    sync_time_s: float | None
    atomic_batch: int
    accumulation_steps: int
    grad_sqr: float | None = None
    grad_var: float | None = None


class _Trainer:
    """One run."""

    def __init__(self, options: argparse.Namespace, client: Client, allocation: Allocation, speed: _Speed) -> None:
        self._options = options
        self._client = client
        self._allocation = allocation
        self._speed = speed
        self._work: float = options.work
        self._checkpoints = Checkpoints(options.checkpoint_dir, client.epoch)
        found = self._checkpoints.latest()
        self._progress = min(float(found.meta["progress"]), self._work) if found else 0.0
        self._steps = self._steps_before = found.step if found else 0
        self._unsaved = False
        self._fraction = 0.0
        self._channel = open_channel(client.environment, utilisation=options.utilisation)

    def run(self, signals: _Signals) -> int:
        """Train to the end, or until stopped; returns the exit status."""
        self._client.report(
            Started(
                gpu_type=self._allocation.gpu_type,
                gpu_ids=self._allocation.gpu_ids,
                progress=self._progress,
                total=self._work,
            )
        )
        log.info("epoch=%d progress=%.0f begins", self._client.epoch, self._progress)
        try:
            status = self._train(signals)
        except Superseded as error:
            log.warning("epoch=%d progress=%.0f %s", self._client.epoch, self._progress, error)
            self._client.close("superseded", self._progress)
            return SUPERSEDED
        log.info("epoch=%d progress=%.0f ends status=%d", self._client.epoch, self._progress, status)
        return status

    def _train(self, signals: _Signals) -> int:
        options = self._options
        _sleep_until(time.monotonic() + options.start_seconds, signals)
        now = observed = checked = time.monotonic()
        save_again_s = math.inf
        while not signals.stop and self._progress < self._work:
            time.sleep(min(TICK_S, self._left_s()))
            if self._stands_still(signals):
                now = time.monotonic()
                continue
            before, now = now, time.monotonic()
            self._advance((now - before) * (self._channel.compute if self._channel is not None else 1.0))
            if now - observed >= options.report_every:
                self._observe()
                observed = now
            if now - checked >= SUPERSEDED_EVERY_S:
                self._stop_if_superseded()
                checked = now
            request = self._client.poll()
            if request is not None or now >= save_again_s:
                saved = self._save(request.id if request is not None else None)
                now = time.monotonic()
                save_again_s = math.inf if saved else now + SAVE_AGAIN_S
        self._stop_if_superseded()
        done = self._progress >= self._work
        self._observe()
        # Without a checkpoint of the end, the job would train it again if Slurm restarted it.
        saved = not self._unsaved or self._save(None)
        if done:
            self._client.close("completed", self._progress)
            return DONE
        self._client.close("stopped", self._progress, "" if saved else "what came after the last checkpoint is lost")
        return STOPPED

    def _stands_still(self, signals: _Signals) -> bool:
        """Stand still if the node's agent or Slurm asks for it; returns whether the training stood still."""
        channel, stood = self._channel, signals.paused
        if channel is not None:
            channel.poll()
            request = channel.request
            if request is not None:
                stood, signals.continued = True, False
                channel.suspended(request)
                while not signals.stop and channel.wants(request) and not signals.continued:
                    time.sleep(TICK_S)
        while signals.paused and not signals.stop:
            time.sleep(TICK_S)
        if stood and channel is not None:
            channel.resumed()
        return stood

    def _left_s(self) -> float:
        """Real seconds of work left."""
        time_scale: float = self._options.time_scale
        return (self._work - self._progress) / (self._speed.samples_per_s * time_scale)

    def _advance(self, real_s: float) -> None:
        """Train for `real_s` seconds of real time, or until the work is done."""
        speed, left = self._speed, self._work - self._progress
        gained = min(real_s * self._options.time_scale * speed.samples_per_s, left)
        self._progress = self._work if gained >= left * (1 - 1e-9) else self._progress + gained
        self._fraction += gained / speed.samples_per_s / speed.step_time_s
        whole = int(self._fraction)
        self._steps += whole
        self._fraction -= whole
        if self._channel is not None:
            self._channel.count(whole, speed.step_time_s / self._options.time_scale, gained)
        self._unsaved = True

    def _observe(self) -> None:
        steps, self._steps_before = self._steps - self._steps_before, self._steps
        if steps < 1:
            return
        speed = self._speed
        self._client.report(
            Observation(
                gpu_type=self._allocation.gpu_type,
                nodes=self._allocation.nodes,
                gpus=self._allocation.gpus,
                atomic_batch=speed.atomic_batch,
                accumulation_steps=speed.accumulation_steps,
                steps=steps,
                step_time_s=speed.step_time_s,
                sync_time_s=speed.sync_time_s,
                grad_sqr=speed.grad_sqr,
                grad_var=speed.grad_var,
                goodput=speed.samples_per_s,
                progress=self._progress,
            )
        )

    def _save(self, request: str | None) -> bool:
        """Save a checkpoint and report it; returns whether it succeeded. Training pauses meanwhile. Raises
        Superseded."""
        began = time.monotonic()
        time.sleep(self._options.save_seconds)
        self._stop_if_superseded()
        try:
            self._checkpoints.save(b"", self._steps, {"progress": self._progress})
        except NotSaved as error:
            log.error("epoch=%d %s", self._client.epoch, error)
            self._client.report(SaveFailed(request=request, text=str(error)[:LONGEST_TEXT]))
            return False
        self._unsaved = False
        self._client.report(
            Checkpointed(request=request, progress=self._progress, seconds=time.monotonic() - began),
        )
        return True

    def _stop_if_superseded(self) -> None:
        if self._client.superseded:
            raise Superseded("a later run of the job has begun")


class _Signals:
    """Handles signals. SIGTERM, by which Slurm stops and requeues a job, sets `stop`.

    SIGTSTP sets `paused` until SIGCONT comes: Slurm suspends with SIGTSTP and 2 s later SIGSTOP, and resumes with
    SIGCONT. SIGUSR2, which some sites send as a warning, is ignored.
    """

    def __init__(self) -> None:
        self.stop = self.paused = self.continued = False
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGTSTP, self._on_stop)
        signal.signal(signal.SIGCONT, self._on_continue)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _on_term(self, _number: int, _frame: object) -> None:
        self.stop = True

    def _on_stop(self, _number: int, _frame: object) -> None:
        self.paused = True

    def _on_continue(self, _number: int, _frame: object) -> None:
        self.paused, self.continued = False, True


def _sleep_until(end: float, signals: _Signals) -> None:
    while not signals.stop and (left := end - time.monotonic()) > 0:
        time.sleep(min(TICK_S, left))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    signals = _Signals()
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s level=%(levelname)s %(message)s", force=True
    )
    client = None
    try:
        if _profiled(options):
            return DONE
        client = connect(options.checkpoint_dir)
        environment = client.environment
        allocation = find_allocation(environment, options.gpu_type)
        if not allocation.gpus:
            allocation = _pretended(options, allocation)
        return _Trainer(options, client, allocation, _speed(options, allocation)).run(signals)
    except Superseded as error:
        log.warning("%s", error)
        return SUPERSEDED
    except (EnvironmentDisagrees, UnknownAllocation, LookupError, ValueError, OSError) as error:
        log.error("%s", error)
        if client is not None:
            client.close("failed", 0.0, str(error))
        return FAILED


def _profiled(options: argparse.Namespace) -> bool:
    """Under `penstock profile run`, report steps of the model, in the model's time. Returns whether this was the case."""
    environment = read_environment()
    request = read_request(environment)
    if request is None:
        return False
    from penstock_profiles.estimators import TrainingEstimator
    from penstock_profiles.throughput import step_time

    estimator = _estimator(options)
    if not isinstance(estimator, TrainingEstimator) or request.gpu_type not in estimator.models:
        raise ValueError(
            f"there is no model of a step on {request.gpu_type}; set --family here, and --gpu-type of penstock profile run"
        )
    model, now_s = estimator.models[request.gpu_type], 0.0

    def step(batch: int) -> None:
        nonlocal now_s
        if batch > model.max_atomic_batch:
            raise MemoryError(
                f"a batch of {batch} samples does not fit into memory; at most {model.max_atomic_batch} do"
            )
        now_s += float(step_time(model.step, 1, 1, batch))

    return profile(step, clock=lambda: now_s, environment=environment)


def _pretended(options: argparse.Namespace, allocation: Allocation) -> Allocation:
    """An allocation of `--gpus` GPUs on the first node, if Slurm allocated none."""
    if options.gpu_type is None:
        raise UnknownAllocation(
            "the job has no GPUs; request some from Slurm (--gres=gpu:1), or emulate them with --gpu-type and --gpus"
        )
    node = next(iter(allocation.gpu_ids), "localhost")
    return Allocation(options.gpu_type, {node: tuple(range(options.gpus))})


def _speed(options: argparse.Namespace, allocation: Allocation) -> _Speed:
    """The speed on this allocation, by the model. Raises ValueError if the job cannot run there."""
    import numpy as np

    from penstock_profiles.estimators import TrainingEstimator
    from penstock_profiles.throughput import step_time, sync_time

    estimator = _estimator(options)
    gpu_type, nodes, gpus = allocation.gpu_type, allocation.nodes, allocation.gpus
    rate = float(estimator.goodput(gpu_type, np.array(nodes), np.array(gpus)))
    if rate <= 0:
        raise ValueError(f"{options.family or '--rates'} cannot run on {gpus} GPUs of type {gpu_type} on {nodes} nodes")
    batch = estimator.best_batch(gpu_type, nodes, gpus)
    if batch is None or not isinstance(estimator, TrainingEstimator):
        total = options.batch_size or gpus
        return _Speed(rate, total / rate, None, max(1, total // gpus), 0)
    step = estimator.models[gpu_type].step
    return _Speed(
        samples_per_s=rate,
        step_time_s=float(step_time(step, nodes, gpus, batch.atomic_batch, batch.accumulation_steps)),
        sync_time_s=float(sync_time(step, nodes, gpus)),
        atomic_batch=batch.atomic_batch,
        accumulation_steps=batch.accumulation_steps,
        grad_sqr=estimator.grad_sqr,
        grad_var=estimator.grad_var,
    )


def _estimator(options: argparse.Namespace) -> AnyEstimator:
    from penstock_profiles.estimators import TableEstimator

    if options.rates is not None:
        return TableEstimator(options.rates)
    from penstock_profiles.families import load_families

    family = load_families(options.families)[options.family]
    return family.estimator(options.batch_size, options.max_batch_size, options.fixed_batch)


def _rates(text: str) -> dict[str, dict[int, float]]:
    try:
        return {
            gpu_type: {int(gpus): float(rate) for gpus, rate in rates.items()}
            for gpu_type, rates in json.loads(text).items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f'{text!r}: {error}; the form is {{"t4": {{"1": 100, "4": 350}}}}') from None


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 1")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock-emulated-trainer",
        description="Emulates adaptive training without a GPU, at a model's rate on the GPUs that Slurm allocated.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--family", help="model family from the catalogue, such as bert-squad")
    model.add_argument(
        "--rates",
        type=_rates,
        metavar="JSON",
        help='samples/s by GPU type and number of GPUs: {"t4": {"1": 100, "4": 350}}',
    )
    parser.add_argument("--families", type=Path, metavar="FILE", help="the site's own catalogue of families")
    parser.add_argument(
        "--work", type=_positive, required=True, metavar="SAMPLES", help="progress at which the job is done"
    )
    parser.add_argument(
        "--checkpoint-dir", type=Path, required=True, metavar="DIR", help="for checkpoints, on a shared file system"
    )
    parser.add_argument("--batch-size", type=_count, metavar="SAMPLES", help="initial total batch (the family's)")
    parser.add_argument("--max-batch-size", type=_count, metavar="SAMPLES", help="largest total batch (the family's)")
    parser.add_argument("--fixed-batch", action="store_true", help="keep the total batch at its initial size")
    parser.add_argument("--time-scale", type=_positive, default=20.0, help="emulated seconds per real second (20)")
    parser.add_argument(
        "--start-seconds", type=_not_negative, default=0.5, metavar="S", help="real seconds that starting takes (0.5)"
    )
    parser.add_argument(
        "--save-seconds", type=_not_negative, default=0.3, metavar="S", help="real seconds that saving takes (0.3)"
    )
    parser.add_argument(
        "--report-every", type=_positive, default=1.0, metavar="S", help="real seconds between two reports (1)"
    )
    parser.add_argument("--gpu-type", metavar="TYPE", help="GPU type, if Slurm does not report one")
    parser.add_argument(
        "--utilisation",
        type=_share,
        metavar="SHARE",
        help="share of its GPU that it reports to use when it runs alone, 0 to 1 (not reported)",
    )
    parser.add_argument(
        "--gpus", type=_count, default=1, help="with --gpu-type: number of GPUs, if Slurm allocated none (1)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
