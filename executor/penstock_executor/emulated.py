"""`penstock-emulated-trainer`: adaptive training without a GPU, for the demo and the tests.

A real process in a real Slurm job that does everything a training job does but train: it finds out what Slurm gave it,
progresses at the rate that a model of a real training reaches on such GPUs, in compressed time, reports that, saves
checkpoints when asked and when stopped, and begins again where it was. One process, in the batch script, stands for all
ranks of the job. Rates, step times and gradient noise in its reports are the model's and in the model's time; how long
starting and saving take is real time.

In a batch script, `exec` it: Slurm's SIGTERM would end a waiting shell, and with the shell the job::

    sbatch --gres=gpu:2 --requeue --wrap \\
        'exec penstock-emulated-trainer --family bert-squad --work 1e5 --checkpoint-dir ckpt/$SLURM_JOB_ID'

Exit status: 0 when the work is done; 143 (as if ended by SIGTERM) when stopped; 75 when a later run of the job has
taken over; 1 when it cannot run, with the reason on standard error; 2 for wrong options.
"""

from __future__ import annotations

import argparse
import json
import logging
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
from penstock_profiles.wire import Checkpointed, Observation, Started

if TYPE_CHECKING:
    from penstock_profiles.estimators import AnyEstimator

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often the daemon's word and Slurm's signal are looked for: 20 trainers together used 3.7 % of a core
(2 cores, bert-squad, reports every second)."""

SUPERSEDED_EVERY_S = 1.0

DONE, FAILED, SUPERSEDED, STOPPED = 0, 1, 75, 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast the emulated training goes on its allocation, in the model's time."""

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

    def __init__(self, options: argparse.Namespace, client: Client, allocation: Allocation, pace: _Pace) -> None:
        self._options = options
        self._client = client
        self._allocation = allocation
        self._pace = pace
        self._work: float = options.work
        self._checkpoints = Checkpoints(options.checkpoint_dir, client.epoch)
        found = self._checkpoints.latest()
        self._progress = min(float(found.meta["progress"]), self._work) if found else 0.0
        self._steps = self._steps_before = found.step if found else 0
        self._unsaved = False
        self._fraction = 0.0
        self._channel = open_channel(client.environment, utilisation=options.utilisation)

    def run(self, signals: _Signals) -> int:
        """Train to the end, or until stopped; the exit status."""
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
        now = observed = looked = time.monotonic()
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
            if now - looked >= SUPERSEDED_EVERY_S:
                self._stop_if_superseded()
                looked = now
            request = self._client.poll()
            if request is not None:
                self._save(request.id)
                now = time.monotonic()
        self._stop_if_superseded()
        done = self._progress >= self._work
        self._observe()
        # An unsaved end would be trained again if Slurm restarted the job after all.
        saved = not self._unsaved or self._save(None)
        if done:
            self._client.close("completed", self._progress)
            return DONE
        self._client.close("stopped", self._progress, "" if saved else "what came after the last checkpoint is lost")
        return STOPPED

    def _stands_still(self, signals: _Signals) -> bool:
        """Look what the node's agent wants; whether the training stood still at its or Slurm's word, and now goes on."""
        channel, stood = self._channel, signals.paused
        if channel is not None:
            channel.look()
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
        return (self._work - self._progress) / (self._pace.samples_per_s * time_scale)

    def _advance(self, real_s: float) -> None:
        """Train for so long; no more than the work that is left, however late a busy machine comes back to it."""
        pace, left = self._pace, self._work - self._progress
        gained = min(real_s * self._options.time_scale * pace.samples_per_s, left)
        self._progress = self._work if gained >= left * (1 - 1e-9) else self._progress + gained
        self._fraction += gained / pace.samples_per_s / pace.step_time_s
        whole = int(self._fraction)
        self._steps += whole
        self._fraction -= whole
        if self._channel is not None:
            self._channel.count(whole, pace.step_time_s / self._options.time_scale, gained)
        self._unsaved = True

    def _observe(self) -> None:
        steps, self._steps_before = self._steps - self._steps_before, self._steps
        if steps < 1:
            return
        pace = self._pace
        self._client.report(
            Observation(
                gpu_type=self._allocation.gpu_type,
                nodes=self._allocation.nodes,
                gpus=self._allocation.gpus,
                atomic_batch=pace.atomic_batch,
                accumulation_steps=pace.accumulation_steps,
                steps=steps,
                step_time_s=pace.step_time_s,
                sync_time_s=pace.sync_time_s,
                grad_sqr=pace.grad_sqr,
                grad_var=pace.grad_var,
                goodput=pace.samples_per_s,
                progress=self._progress,
            )
        )

    def _save(self, request: str | None) -> bool:
        """Save, and say so; whether it went well. Training stands still meanwhile. Raises Superseded."""
        began = time.monotonic()
        time.sleep(self._options.save_seconds)
        self._stop_if_superseded()
        try:
            self._checkpoints.save(b"", self._steps, {"progress": self._progress})
        except NotSaved as error:
            log.error("epoch=%d %s", self._client.epoch, error)
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
    """SIGTERM, with which Slurm stops and requeues, sets `stop`; SIGUSR2, some sites' warning, means nothing here.

    SIGTSTP sets `paused` until SIGCONT: Slurm suspends with the first and 2 s later SIGSTOP, and resumes with the other.
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
        return _Trainer(options, client, allocation, _pace(options, allocation)).run(signals)
    except Superseded as error:
        log.warning("%s", error)
        return SUPERSEDED
    except (EnvironmentDisagrees, UnknownAllocation, LookupError, ValueError, OSError) as error:
        log.error("%s", error)
        if client is not None:
            client.close("failed", 0.0, str(error))
        return FAILED


def _profiled(options: argparse.Namespace) -> bool:
    """Under `penstock profile`, steps of the model in the model's time; whether that was so."""
    environment = read_environment()
    request = read_request(environment)
    if request is None:
        return False
    from penstock_profiles.estimators import TrainingEstimator
    from penstock_profiles.throughput import step_time

    estimator = _estimator(options)
    if not isinstance(estimator, TrainingEstimator) or request.gpu_type not in estimator.models:
        raise ValueError(f"no model of a step on {request.gpu_type}; give --family, and to penstock profile --gpu-type")
    model, now_s = estimator.models[request.gpu_type], 0.0

    def step(batch: int) -> None:
        nonlocal now_s
        if batch > model.max_atomic_batch:
            raise MemoryError(f"a batch of {batch}, where {model.max_atomic_batch} fit")
        now_s += float(step_time(model.step, 1, 1, batch))

    return profile(step, clock=lambda: now_s, environment=environment)


def _pretended(options: argparse.Namespace, allocation: Allocation) -> Allocation:
    """Without GPUs from Slurm: `--gpus` of them on the first node."""
    if options.gpu_type is None:
        raise UnknownAllocation(
            "the job has no GPUs; ask Slurm for some (--gres=gpu:1), or pretend: --gpu-type, --gpus"
        )
    node = next(iter(allocation.gpu_ids), "localhost")
    return Allocation(options.gpu_type, {node: tuple(range(options.gpus))})


def _pace(options: argparse.Namespace, allocation: Allocation) -> _Pace:
    """The model's answer for this allocation. Raises ValueError where it cannot run there."""
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
        return _Pace(rate, total / rate, None, max(1, total // gpus), 0)
    step = estimator.models[gpu_type].step
    return _Pace(
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
        raise argparse.ArgumentTypeError(f'{text!r}: {error}; write it as {{"t4": {{"1": 100, "4": 350}}}}') from None


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
        description="Adaptive training without a GPU: progresses at a model's rate on the GPUs that Slurm gave.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--family", help="model family from the catalogue, such as bert-squad")
    model.add_argument(
        "--rates", type=_rates, metavar="JSON", help='samples/s by GPU type and count: {"t4": {"1": 100, "4": 350}}'
    )
    parser.add_argument("--families", type=Path, metavar="FILE", help="the site's own catalogue of families")
    parser.add_argument("--work", type=_positive, required=True, metavar="SAMPLES", help="progress at which it is done")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, metavar="DIR", help="on a shared file system")
    parser.add_argument("--batch-size", type=_count, metavar="SAMPLES", help="initial total batch (the family's)")
    parser.add_argument("--max-batch-size", type=_count, metavar="SAMPLES", help="largest total batch (the family's)")
    parser.add_argument("--fixed-batch", action="store_true", help="the total batch stays at the initial one")
    parser.add_argument("--time-scale", type=_positive, default=20.0, help="emulated seconds in a real one (20)")
    parser.add_argument("--start-seconds", type=_not_negative, default=0.5, help="how long starting takes, real (0.5)")
    parser.add_argument("--save-seconds", type=_not_negative, default=0.3, help="how long saving takes, real (0.3)")
    parser.add_argument("--report-every", type=_positive, default=1.0, metavar="S", help="seconds, real (1)")
    parser.add_argument("--gpu-type", metavar="TYPE", help="where Slurm does not say it")
    parser.add_argument(
        "--utilisation",
        type=_share,
        metavar="SHARE",
        help="part of its GPU that it says it uses alone, 0 to 1 (not said)",
    )
    parser.add_argument("--gpus", type=_count, default=1, help="with --gpu-type, where Slurm gave none (1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
