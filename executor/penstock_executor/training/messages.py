"""Messages of a run to the author of its script."""

from __future__ import annotations

import ast
import linecache
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

MID_EPOCH = (
    "epoch=%d was begun by the last run, and this one makes the rest of it. run.loader yields only that; a loader of the"
    " script's own leaves out run.epoch_steps batches"
)

LEFT = (
    "epoch=%d was left before its end, so that the next run repeats it; if the training is done, call run.finish() and"
    " then leave the loop over run.epochs"
)

COUNTED = (
    "%s:%d counts batches by enumerate. After a stop in mid-epoch the loader yields only the rest of the epoch: if the"
    " number matters, as to a learning rate or to accumulation, write enumerate(loader, loader.first), and loader.first + 1"
    " to count from 1"
)

log = logging.getLogger(__name__)
_told: set[str] = set()


class _Visible(logging.StreamHandler):  # type: ignore[type-arg,unused-ignore]
    """Writes to standard error until the script sets up logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)
            return
        ours = logging.getLogger("penstock_executor")
        ours.removeHandler(self)
        ours.setLevel(logging.NOTSET)


def show_messages(rank: int) -> None:
    """Let messages be seen where the script has set up no logging: rank 0's, and the other processes' warnings."""
    ours = logging.getLogger("penstock_executor")
    if ours.hasHandlers() or ours.level != logging.NOTSET:
        return
    handler = _Visible()
    handler.setFormatter(logging.Formatter("penstock: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def warn_if_counted(*, at_once: bool = False) -> None:
    """Tell once if a loop of the script's own that takes the batches counts them by `enumerate`.

    `at_once`: the loader was only asked for its batches, as by `bar = tqdm(enumerate(loader))`; a loop comes later.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "enumerate" not in _told:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if "-packages" not in file and counts_from_0(linecache.getline(file, line), loop=not at_once):
            _told.add("enumerate")
            log.warning(COUNTED, Path(file).name, line)
        frame = None if at_once else frame.f_back


def counts_from_0(line: str, *, loop: bool = True) -> bool:
    """Whether a line of a script counts by `enumerate` from a fixed number, such as 0 or 1. `loop`: it must be a loop."""
    if not re.search(r"\bfor\b.*\benumerate\(" if loop else r"\benumerate\(", line):
        return False
    try:
        found = list(ast.walk(ast.parse(line.strip() + " pass" * line.rstrip().endswith(":"))))
    except SyntaxError:  # the line is a part of a longer one
        return True
    calls = [each for each in found if isinstance(each, ast.Call) and ast.unparse(each.func) == "enumerate"]
    first = [[*each.args[1:], *(keyword.value for keyword in each.keywords)] for each in calls]
    return any(all(isinstance(each, ast.Constant) for each in values) for values in first)


def warn_if_replaced(handler: Callable[..., None]) -> None:
    """Tell once that another handler of SIGTERM was set since `px.start`."""
    found = signal.getsignal(signal.SIGTERM)
    if found == handler or "SIGTERM" in _told:
        return
    _told.add("SIGTERM")
    log.warning(
        "%r handles SIGTERM since px.start. Unless it calls the handler that it found, this run saves nothing when Slurm"
        " stops it: set your handler before px.start, or call the one that signal.signal returned",
        found,
    )
