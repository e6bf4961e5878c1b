"""The core of a run: what its processes agree on, and the state that its checkpoints hold. It has no opinion on the
loop, the optimisers or the gradients.

docs/user/executor.md, "A loop of your own", shows a training loop that uses it. `training.run.TrainingRun` adds a loop
that also chooses the batch size and the learning rate.
"""

from __future__ import annotations

import atexit
import logging
import math
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch

from penstock_executor.allocation import Allocation
from penstock_executor.checkpoint import Checkpoints
from penstock_executor.client import ReportSchedule
from penstock_executor.environment import read_environment, read_ranks
from penstock_executor.giving_up import tell
from penstock_executor.node_channel import Channel
from penstock_executor.training import completion
from penstock_executor.training.arguments import Settings, whole
from penstock_executor.training.batches import BatchSize
from penstock_executor.training.consensus import COST_CHECKED_EVERY, Consensus, Vote, stride_of
from penstock_executor.training.gradients import PendingNorms
from penstock_executor.training.loader import Loader
from penstock_executor.training.loop_timer import LoopTimer
from penstock_executor.training.messages import LEFT, MID_EPOCH, warn_if_replaced
from penstock_executor.training.processes import Group, leave
from penstock_executor.training.reporter import Reporter, failed
from penstock_executor.training.saving import CannotSave, Saver, random_states
from penstock_executor.training.state import TrainingState, newest_checkpoint
from penstock_executor.training.status import BEGIN_ANEW, STOPPED, SUPERSEDED
from penstock_executor.training.suspension import Suspension, stand_still
from penstock_executor.training.workers import protect_workers, survive_warnings
from penstock_profiles.wire import LONGEST_TEXT, Body, Checkpointed, Observation, Result, SaveFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

LONG_EPOCH_S = 10.0
"""From this length of a pass on, the state before its last step is saved: a kill during an evaluation costs one step."""

RETRY_S = 60.0
"""Seconds after which a run tries to save again if the last checkpoint could not be written."""


class Run:
    """One run of a job, on one of its processes. Attributes are for reading."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        checkpoints: Checkpoints | None,
        settings: Settings,
        gpus: Allocation,
        run_epoch: int,
        channel: Channel | None = None,
    ) -> None:
        self.rank, self.world, self.device = group.rank, group.world, device
        self.gpus_per_replica, self.replicas = group.gpus_per_replica, group.replicas
        self.replica, self.place = group.replica, group.place
        """The replica of the model that this process belongs to, and the part of the model that this process holds."""
        self.replica_group = group.replica_group
        """The processes of this replica, for the pipeline; None if it has only one."""
        self.run_epoch = run_epoch
        """The run's number among all runs of the job: an older run writes no checkpoints (`penstock_profiles.wire`)."""
        self.steps = 0
        """Optimiser steps so far, over all runs."""
        self._steps_before_epoch = 0
        self.progress = 0.0
        """In samples, over all runs."""
        self.epoch = 0
        """Passes over the data that are done."""
        self.reporter: Reporter | None = None
        self._group, self._settings, self._gpus = group, settings, gpus
        self._channel = channel
        if channel is not None:
            channel.urgent = self._has_news
        self._saver = Saver(checkpoints) if checkpoints is not None else None
        self._consensus = Consensus(group)
        self._state = TrainingState(group, {})
        self._pass_is_over = False
        """Whether the script is in the code that follows the last step of a pass. No checkpoint is written there."""
        self._late_norms: PendingNorms | None = None
        """Of that step. The processes vote on them after that code."""
        self._saved_progress: float | None = None
        """Of the newest checkpoint; None if there is none, as far as this process knows."""
        self._long_epochs = True
        """Whether the state before the last step of a pass is saved, because passes are long."""
        self._holds = False
        """Whether `_state` is that of the training, not the empty one."""
        self._loader: Loader | None = None
        self._position = 0
        """Samples of the epoch that the last run had done."""
        self._first_step = 0
        """`steps` when this run began."""
        self._stop = self._closed = self._completed = False
        self._saved_s = time.monotonic()
        self._times = LoopTimer()
        self._reports = ReportSchedule(settings.report_every_s, self._saved_s)
        self._count = self._finished = 0
        """Passes that the script asked `epochs` for, and those of a training that `finish` has ended."""
        signal.signal(signal.SIGTERM, self._on_term)
        protect_workers()
        self._suspension = Suspension(settings.host_cap_bytes)
        survive_warnings()
        self._excepthook, sys.excepthook = sys.excepthook, self._on_error

    # What a loop calls.

    def loader(
        self, dataset: Any, *, batch_size: int, shuffle: bool = True, drop_last: bool = False, **loader: Any
    ) -> Loader:
        """The batches of this process. No sample is lost or repeated in an epoch, however often the job moves.

        The step takes `batch_size` samples over all processes, whatever their number. If their number does not divide
        it, batches differ by one sample. `loader.part.weight` is the factor on a batch's mean loss with which the mean
        over all processes is that over the step's samples.

        Args:
            dataset: with `__len__` and `__getitem__`, or a `Stream`.
            batch_size: samples of a step, over all processes.
            shuffle: whether each epoch has another order.
            drop_last: leave out the last step of an epoch if it would be smaller.
            loader: further arguments of `torch.utils.data.DataLoader`.

        Raises:
            ValueError: an argument that Penstock chooses itself.
        """
        size = BatchSize(batch_size, -(-batch_size // self.replicas))
        self._loader = self._new_loader(dataset, size, shuffle, drop_last, loader)
        return self._loader

    def keep(self, **objects: Any) -> bool:
        """Hold these objects in every checkpoint, and load the newest one. All processes call it once.

        Args:
            objects: name -> an object with `state_dict` and `load_state_dict`, such as a model (also one that DDP
                wraps), an optimiser, a schedule or a moving average. They must be the same on all processes. Those that
                are None are left out.

        Returns:
            Whether there was a checkpoint. `steps`, `epoch` and `progress` are then those of that checkpoint.

        Raises:
            CannotSave: an object has a state that could not be loaded again.
            RuntimeError: it was called before.
            ValueError: a model is sharded. `TrainingRun.prepare` takes those.
        """
        self._hold(TrainingState(self._group, {name: whole(each, name) for name, each in objects.items()}))
        found = self._restore()
        self._restart_clock()
        return found is not None

    def epochs(self, count: int, *, samples: float | None = None) -> Iterator[int]:
        """The passes over the data, from the one that the last run was in. The end of each is saved.

        The code after the inner loop belongs to its pass: no run begins between the last step and that code. Requests wait
        for its end. If the run is killed meanwhile, the next one begins before the last step. To stop earlier, as by a
        metric, call `finish` and leave the loop. `samples`: of a pass, over all processes, if neither `loader` nor `prepare`
        knows them. Penstock then sees how much is left.

        Raises:
            RuntimeError: another program of this Slurm job has completed this training, and nothing is left to do.
        """
        if self._over(count) and self._saver is not None and self.steps == self._first_step:
            completion.refuse_anothers(self._saver.checkpoints.folder, self._group, self.steps)
        self._completed, self._count = False, count
        self._put_started(self._total(count) if samples is None else count * float(samples))
        while not self._over(count):
            if self._loader is not None:
                self._loader.epoch = self.epoch
            self._restore_random()
            self._restart_clock()
            began_s = time.monotonic()
            try:
                yield self.epoch
            except GeneratorExit:
                if not self._closed and self.rank == 0:
                    log.warning(LEFT, self.epoch)
                raise
            if self._completed:
                return
            self._end_pass()
            self._act()
            self.save()
            self._long_epochs = self._group.from_first(time.monotonic() - began_s >= LONG_EPOCH_S)
            late, self._late_norms = self._late_norms, None
            self._vote(late)  # with the requests of the time since the last step
            self._act()
        self._complete()

    def finish(self) -> None:
        """Say that the training is done before its last pass, and save it: a later run has nothing left to do.

        All processes call it, and leave the loop over `epochs`, as by `break`.
        """
        self._finished = self._count
        self._end_pass()
        self.save()
        self._complete()

    def step_done(self, samples: int | None = None) -> None:
        """Say that a step is over; then save, stop or stand still if the processes agreed on it.

        All processes call it after every step, when nothing that belongs to the step is left to do.

        Args:
            samples: of the step, over all processes. None: those of the batches of `loader` since the last step.

        Raises:
            SystemExit: the run was asked to stop and has saved (143), or a later run of the job has begun (75).
            RuntimeError: `keep` was not called.
        """
        if not self._holds and self._saver is not None:
            raise RuntimeError("run.step_done() before run.keep(...): checkpoints would hold nothing of the training")
        if samples is None:
            if self._loader is None:
                raise ValueError("run.step_done() counts the samples of run.loader; without that, pass their number")
            samples = self._loader.take_all()
            self._loader.position += samples
        self.steps += 1
        self.progress += samples
        if self._channel is not None:
            self._channel.finish()
        self._after_step(samples, self._times.add(samples))

    def evaluating(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of an evaluation. Requests are served between them; else they wait for the next step.

        All processes call it when all that belongs to the step is done, each with batches of its own, or with `()`. If the
        run is stopped in the code after the inner loop, the next one repeats the last step, and evaluates from the
        beginning. If it is stopped in mid-epoch, it saves, and the next one does not repeat the evaluation.
        """
        self._finish_step()
        answers = self._is_between_steps and (self._holds or self._saver is None)
        for batch in batches:
            if answers:
                self._act()
                self._vote(evaluating=True)
            yield batch
        others = answers
        while others:  # their evaluations take longer
            self._act()
            self._vote()
            others = self._act()
        self._restart_clock()

    @property
    def epoch_steps(self) -> int:
        """Steps of this epoch that are done. A loop with a loader of its own leaves out so many batches."""
        return self.steps - self._steps_before_epoch

    def save(self) -> None:
        """Save a checkpoint; all processes call it after the same step. Training goes on while it is written."""
        if self._saver is None:
            return
        began_s = time.monotonic()
        if self._pass_is_over:  # the next run begins before the last step
            self._saver.wait()
            if self._saved_progress is not None and self._saver.failure is None and (asked := self._take_request()):
                self._put(Checkpointed(request=asked, progress=self._saved_progress, seconds=0.0))
            return
        answered = self._take_request()
        self._saved_s = began_s
        states = self._group.gather(random_states())
        if self._state.writes:
            self._saver.wait()
            self._saver.tell = lambda text: self._put(SaveFailed(request=answered, text=text[:LONGEST_TEXT]))
            try:
                state, piece = self._state.collect(states)
            except CannotSave as error:
                self._saver.fail(error)
                return
            progress, steps = self.progress, self.steps
            pause_s = time.monotonic() - began_s

            def saved(seconds: float) -> None:
                self._saved_progress = progress
                self._put(Checkpointed(request=answered, progress=progress, seconds=pause_s + seconds))
                log.info("step=%d checkpoint written pause_s=%.3f write_s=%.3f", steps, pause_s, seconds)

            self._saver.save(state, self.steps, self._meta(), saved, piece)
        self._restart_clock()  # saving is no part of the next step

    def log(self, **values: object) -> None:
        """Write `values` to the log, once for all processes."""
        if self.rank == 0:
            log.info("epoch=%d step=%d %s", self.epoch, self.steps, " ".join(f"{k}={v}" for k, v in values.items()))

    def report(self, metric: float, *, minimize: bool = False) -> None:
        """Report the metric that the model has reached, once for all processes. A search compares its trials by it.

        Never waits. A metric that is not finite is only logged, so that a trial that diverges keeps its last result.
        `minimize`: less is better, as of a loss.
        """
        self.log(metric=metric)
        if self.rank == 0 and math.isfinite(metric):
            self._put(Result(metric=-float(metric) if minimize else float(metric), progress=self.progress))

    # What a loop with more opinions adds to.

    def _over(self, count: int) -> bool:
        """Whether the training of `count` passes is done."""
        return self._finished >= count or self._done(count)

    def learn(self, body: Body) -> None:
        """Called in the reporter's thread with each report that was sent."""

    def _done(self, count: int) -> bool:
        """Whether `count` passes over the data are done."""
        return self.epoch >= count

    def _total(self, count: int) -> float | None:
        """Progress after `count` passes; None: unknown."""
        samples = self._loader.epoch_samples if self._loader is not None else None
        return float(count * samples) if samples else None

    def _end_pass(self) -> None:
        self._pass_is_over, self.epoch = False, self.epoch + 1
        self._steps_before_epoch = self.steps
        if self._loader is not None:
            self._loader.position = 0
        self._end_epoch()

    def _end_epoch(self) -> None:
        """Drop what a loop that was left in mid-step has begun."""

    def _finish_step(self) -> None:
        """Called when an evaluation begins: the script has done all that belongs to the step."""

    @property
    def _is_between_steps(self) -> bool:
        """Whether no step is begun, as far as the loader shows."""
        return self._loader is None or self._loader.between_steps

    def _add_to(self, vote: Vote) -> Vote:
        """On rank 0: add to a vote what all processes must know besides requests."""
        step_s = self._times.mean_s
        if self.world > 1 and self.steps % COST_CHECKED_EVERY == 0 and step_s is not None:
            return vote._replace(vote_every=stride_of(max(step_s, 1e-9)))
        return vote

    def _apply(self, vote: Vote, norms: PendingNorms | None) -> None:
        """Apply what the processes agreed on, except requests. `norms` are those of this process's vote."""
        if vote.vote_every:
            self._consensus.stride = int(vote.vote_every)

    def _observation(self) -> Observation | None:
        """What the steps since the last report took; None if there were none."""
        return self._times.take_observation(self._gpus, self._group, self.progress)

    def _restart_clock(self) -> None:
        """Time since the last step is no part of the next one."""
        self._times.restart()

    def _meta(self) -> dict[str, Any]:
        """What a checkpoint says about the run, as JSON can hold it."""
        return {
            "epoch": self.epoch,
            "epoch_steps": self.epoch_steps,
            "finished": self._finished,
            "position": self._loader.position if self._loader is not None else 0,
            "progress": self.progress,
            "gpus": self._configuration,
            "gpus_per_replica": self.gpus_per_replica,
        }

    def _after_error(self, error: BaseException) -> None:
        """The run has failed with this error, and has reported it."""

    # State.

    def _new_loader(
        self, dataset: Any, size: BatchSize, shuffle: bool, drop_last: bool, options: Mapping[str, Any], **hooks: Any
    ) -> Loader:
        place, seed = (self.replica, self.replicas), self._settings.seed
        hooks["begin"] = lambda: self._restore_random() if self._loader is not None and self._loader.position else None
        pass_: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "position": self._position, "drop_last": drop_last}
        return Loader(dataset, size, place, **pass_, **hooks, **options)

    def _hold(self, state: TrainingState) -> None:
        if self._holds:
            raise RuntimeError("the run holds its state already: call run.prepare or run.keep, one of them, once")
        self._state, self._holds = state, True
        state.check()
        if self._saver is not None and state.divided:
            self._saver.group = self._group.another(self.gpus_per_replica if self.gpus_per_replica > 1 else None)
            self._saver.parts = self.gpus_per_replica > 1

    def _restore(self) -> Mapping[str, Any] | None:
        """Continue from the newest checkpoint; what it says about its run (`_meta`), or None if there is none."""
        saver = self._saver
        found = newest_checkpoint(self._group, saver.checkpoints) if saver is not None else None
        if saver is None or found is None:
            return None
        self._state.restore(found, saver.group, self.device)
        meta = found.meta
        self.steps, self.epoch, self.progress = found.step, meta["epoch"], meta["progress"]
        self._saved_progress = self.progress
        # Checkpoints of before November 2026 do not say these.
        self._steps_before_epoch, self._finished = self.steps - meta.get("epoch_steps", 0), meta.get("finished", 0)
        self._first_step, self._position = self.steps, meta["position"]
        if self._loader is not None:
            self._loader.position = self._position
        log.info("step=%d epoch=%d position=%d continues", self.steps, self.epoch, self._position)
        if meta.get("epoch_steps", 0) and self.rank == 0:
            log.info(MID_EPOCH, self.epoch)
        return meta

    def _restore_random(self) -> None:
        """Before the first step: the script and its loaders may have drawn from the generators since they were
        restored."""
        if self.steps == self._first_step:
            self._state.restore_random()

    @property
    def _configuration(self) -> list[Any]:
        return [self._gpus.gpu_type, self._gpus.nodes, self.world]

    @property
    def _save_again_s(self) -> float:
        """Seconds from one regular checkpoint to the next; fewer if it could not be written, such as on a full disk."""
        failed = self._saver is not None and self._saver.failure is not None
        return min(self._settings.checkpoint_every_s, RETRY_S if failed else math.inf)

    @property
    def _owes_a_checkpoint(self) -> bool:
        """Whether the run has to show that it can save: Penstock moves no job that has not."""
        saves = self._saver is not None and not self._saver.busy
        return saves and self._saved_progress is None and self.reporter is not None and self.reporter.has_daemon

    # What the processes agree on.

    def _after_step(self, samples: int, active_s: float, norms: PendingNorms | None = None) -> None:
        """All processes call it between two steps: act on the vote cast before, and cast the next.

        Args:
            samples: of the step.
            active_s: seconds that it took.
            norms: of the gradients, for the vote.
        """
        self._put_started()  # the loop does not use `epochs`
        left = self._loader.samples_left if self._loader is not None else None
        self._late_norms, self._pass_is_over = norms if left == 0 else None, left == 0
        if left != 0:  # else the code after the loop comes first
            self._act()
            if norms is not None or self.steps % self._consensus.stride == 0:
                self._vote(norms)
            if left is not None and left <= samples and self._long_epochs:
                self.save()
        warn_if_replaced(self._on_term)
        if self._channel is not None:
            self._channel.step_done(samples, active_s)
            self._restart_clock()  # a pause is no part of the next step

    def _vote(self, norms: PendingNorms | None = None, *, evaluating: bool = False) -> None:
        """Cast this process's vote.

        The norms are those of the step before: on a GPU, this step's may not be computed yet, and nothing waits for
        them.
        """
        vote = Vote(stop=self._stop, suspend=self._suspension.requested, evaluating=evaluating)
        if norms is not None:
            local_sqr, mean_sqr = norms.read().tolist()
            vote = vote._replace(local_sqr=local_sqr, mean_sqr=mean_sqr)
        if self.rank == 0:
            vote = self._with_requests(vote)
        self._consensus.cast(vote, norms)
        if self.world == 1 and vote.urgent:
            self._act()

    def _with_requests(self, vote: Vote) -> Vote:
        """On rank 0: add what the daemon and the node's agent ask for and what is due; report if it is time."""
        now_s = time.monotonic()
        request = self.reporter.request if self.reporter is not None else None
        asked, gives_up = request and request.kind, request is not None and bool(request.keep_nodes)
        if asked is None and self._channel is not None and self._channel.request is not None:
            asked = "suspend"
        saver = self._saver
        due = saver is not None and not saver.busy and now_s - self._saved_s >= self._save_again_s
        reports = self._reports.due(now_s)
        due |= reports and self._owes_a_checkpoint
        superseded = any(each is not None and each.superseded for each in (saver, self.reporter))
        save = due or (asked == "checkpoint" and not gives_up)
        vote = vote._replace(save=save, move_out=asked == "suspend", give_up=gives_up, superseded=superseded)
        vote = self._add_to(vote)
        if reports:
            observation = self._observation()
            if observation is not None:
                self._put(observation)
        return vote

    def _has_news(self) -> bool:
        """Whether this process has received something that all processes must learn in the next step."""
        asked = self.reporter is not None and (self.reporter.request is not None or self.reporter.superseded)
        return self._stop or self._suspension.requested or asked

    def _act(self) -> bool:
        """Apply the decision of the processes' last vote. Returns whether one of them was in an evaluation."""
        result = self._consensus.result()
        if result is None:
            return False
        vote, norms = result
        self._apply(vote, norms)
        if vote.superseded:
            self._leave("superseded", SUPERSEDED)
        if vote.stop:
            self.save()
            self._wait()
            self._leave("stopped", STOPPED)
        if vote.give_up:
            self._give_up_nodes()
        elif vote.save:
            self.save()
        if vote.suspend or vote.move_out:
            askers = self._group, self._channel, self.reporter
            stand_still(self._suspension, *askers, self._state.tensors(), requested=bool(vote.move_out))
            self._restart_clock()
        return bool(vote.evaluating)

    def _give_up_nodes(self) -> None:
        """Save, and end this run; the next one begins on the nodes that stay. If it cannot be saved, train on: the daemon sees
        no answer. All processes call it after the same step."""
        kept: tuple[str, ...] = self._group.from_first(self.reporter.kept_nodes() if self.reporter is not None else ())
        if not kept or self._saver is None:
            return
        self.save()
        self._saver.wait()
        if self._group.from_first(self._saver.failure is None and not self._saver.superseded):
            if read_ranks().local_rank == 0:
                tell(kept)
            self._leave("stopped", BEGIN_ANEW)

    # Reports, and the end of the run.

    def _take_request(self) -> str | None:
        return self.reporter.take_request() if self.reporter is not None else None

    def _put(self, body: Body) -> None:
        if self.reporter is not None:
            self.reporter.put(body)

    def _put_started(self, total: float | None = None) -> None:
        if self.reporter is not None:
            self.reporter.put_started(self._gpus, self.progress, total, saves=self._saver is not None)

    def _complete(self) -> None:
        self._wait()
        self._close("completed")
        self._completed = True
        atexit.register(self._note_completed)
        # After whatever the script still does with the other processes. Gloo's threads may abort a process that ends with them.
        atexit.register(leave)

    def _wait(self) -> None:
        """Wait until the last save is on disk, or has failed."""
        if self._saver is not None:
            self._saver.wait()

    def _note_completed(self) -> None:
        """Called when the process ends."""
        if self.rank == 0 and self._completed and self._saver is not None:
            completion.note(self._saver.checkpoints.folder, read_environment(), self.steps)

    def _close(self, outcome: Any, text: str = "") -> None:
        if not self._closed:
            self._closed = True
            if self.reporter is not None:
                self.reporter.close(outcome, self.progress, text)

    def _leave(self, outcome: str, status: int) -> None:
        """End this process; all the others do the same."""
        failure = self._saver.failure if self._saver is not None else None
        self._completed = False
        self._group.barrier()
        self._close(outcome, str(failure or ""))
        leave()
        raise SystemExit(status)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In place of Python's own hook: report that the run fails."""
        self._completed = False
        folder = self._saver.checkpoints.folder if self._saver is not None else None
        self._close("failed", failed(self._group, self.run_epoch, folder, self.progress, error))
        self._excepthook(kind, error, trace)
        self._after_error(error)

    def _on_term(self, _number: int, _frame: object) -> None:
        self._stop = True
