"""Keeps the workers of data loaders alive when Slurm signals the job.

Slurm sends SIGTERM and SIGTSTP to every process of a job, also to the workers of each `DataLoader`. PyTorch's workers
die of SIGTERM, and then the training process raises "DataLoader worker is killed by signal" before it can save.

So workers ignore these signals: the training process gets them too, and ends its workers itself. Programs that a worker
starts do not inherit this.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

IGNORED = (signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm sends to all processes of a job, by itself or for `sbatch --signal`."""

FIRST = 1000
"""Priority among what `multiprocessing` does when a process exits, whether Python or `multiprocessing` started it."""

_workers: WeakSet[BaseProcess] = WeakSet()
_ends_workers: set[int] = set()
"""Ids of the processes that call `end_workers` when they exit: a child of such a process does not."""


def protect_workers() -> None:
    """From now on, the workers of every `DataLoader` of this process ignore the signals of `IGNORED`.

    A script has data loaders of its own, such as one for validation, and other training loops make theirs when they need
    them, so none but the run's own could be changed one by one. Nor can the signals be ignored before a worker starts:
    PyTorch sets a handler for SIGTERM in each worker, which only its `worker_init_fn` can replace. A blocked signal
    would stay blocked in all programs that the script starts. So this changes the class, for loaders with workers only.
    Calling it again does nothing.
    """
    _protect(DataLoader)
    stateful = sys.modules.get("torchdata.stateful_dataloader")
    if stateful is not None:
        _protect(stateful.StatefulDataLoader)


def _protect(kind: Any) -> None:
    original = kind.__iter__
    if getattr(original, "protects_workers", False):
        return

    @functools.wraps(original)
    def protected(loader: Any) -> Any:
        if loader.num_workers == 0:
            return original(loader)
        if not isinstance(loader.worker_init_fn, _Protected):
            loader.worker_init_fn = _Protected(loader.worker_init_fn)
        before = set(multiprocessing.active_children())
        with _blocked():
            made = original(loader)
        _workers.update(set(multiprocessing.active_children()) - before)
        if os.getpid() not in _ends_workers:
            _ends_workers.add(os.getpid())
            Finalize(None, end_workers, exitpriority=FIRST)
        return made

    protected.protects_workers = True  # type: ignore[attr-defined]
    kind.__iter__ = protected


def end_workers() -> None:
    """End the workers that are left. When the process exits, Python would send them SIGTERM and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler reports a worker that was killed
    for worker in list(_workers):
        if worker.is_alive():
            worker.kill()


class _Protected:
    """A `worker_init_fn` that runs in a worker: ignores the signals, then calls the script's own function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        for number in IGNORED:
            signal.signal(number, ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        if self._then is not None:
            self._then(worker)


def survive_warnings() -> None:
    """Some sites send SIGUSR2 as a warning before a time limit; by default it would end the process."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, ignore)


def ignore(_number: int, _frame: object) -> None:
    """A handler in place of SIG_IGN, which programs that the process starts would inherit."""


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Block the signals in this thread: workers inherit that, so that none reaches them before they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
