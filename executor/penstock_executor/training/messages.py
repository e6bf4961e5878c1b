"""Messages of a run to the author of its script."""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import itertools
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, GeneratorType

MID_EPOCH = (
    "epoch=%d was begun by the last run, and this one makes the rest of it. run.loader yields only that; a loader of the"
    " script's own leaves out run.epoch_steps batches"
)

LEFT = (
    "epoch=%d was left before its end, so that the next run repeats it. If no error follows and the training is done, call"
    " run.finish() and then leave the loop over run.epochs"
)

COUNTED = (
    "%s:%d counts batches by %s. After a stop in mid-epoch the loader yields only the rest of the epoch: if the"
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


def warn_if_counted(first: int, *, begins_right: bool) -> None:
    """Tell once if the script counts the batches of the calling generator from too low a number.

    Args:
        first: number of the batch that comes next, in its epoch.
        begins_right: whether the script has asked for it.
    """
    if "enumerate" in _told:
        return
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    try:
        place = _counting(frames, first, begins_right=begins_right)
    except Exception as error:  # it looks at objects of the script, which may do anything: the training goes on
        log.debug("the counts of batches are not known: %r", error)
        return
    if place is not None:
        _told.add("enumerate")
        log.warning(COUNTED, *place)


def _counting(frames: Sequence[FrameType], first: int, *, begins_right: bool) -> tuple[str, int, str] | None:
    """The file and the line of the script that count the batches from too low a number, and by which function."""
    if begins_right and not first:
        return None
    counts = counts_of(frames)
    if first:
        counts = {by: number for by, number in counts.items() if number < min(first, 2)}
    if not counts or (not first and "enumerate" not in counts):
        return None
    scripts = [each for each in frames[1:] if "-packages" not in each.f_code.co_filename] or frames[1:]
    sources = {each: _source(each) for each in scripts}
    place = next((each for each in scripts if "enumerate(" in sources[each]), scripts[0])
    if not first and not counts_from_0(sources[place]):
        return None
    return Path(place.f_code.co_filename).name, place.f_lineno, min(counts)


def counts_of(frames: Sequence[FrameType]) -> dict[str, int]:
    """What counts the batches of the generator `frames[0]`, called by the other frames: `enumerate` or `zip`, and its lowest
    number.

    The source may say it in many ways, such as `batches = enumerate(tqdm(loader))` in another line, or another function, than
    the loop. The iterators themselves say it exactly: a generator that asks for the batch is on the stack.
    """
    running = {id(each) for each in frames}
    steppers = [each for each in frames if each.f_code.co_name == "__next__"]
    owners = {id(each.f_locals[each.f_code.co_varnames[0]]) for each in steppers}

    def leads_here(iterator: object) -> bool:
        if isinstance(iterator, GeneratorType):
            return id(iterator.gi_frame) in running
        return id(iterator) in owners or any(leads_here(each) for each in _inner(iterator))

    found: dict[str, int] = {}
    for each in gc.get_objects():
        if type(each) not in (enumerate, zip) or not leads_here(each):
            continue
        given = 1  # those before the batches have given their first number already
        for it in _inner(each) if isinstance(each, zip) else [each]:
            given = 0 if leads_here(it) else given
            number = _next_number(it)
            if number is not None:
                found[type(each).__name__] = min(found.get(type(each).__name__, number), number - given)
    return found


def _inner(iterator: object) -> list[object]:
    """The iterators from which one of C takes, in order."""
    found = gc.get_referents(iterator) if type(iterator).__module__ in ("builtins", "itertools") else []
    parts = [part for each in found for part in (each if isinstance(each, tuple) else (each,))]
    return [each for each in parts if hasattr(type(each), "__next__")]


def _next_number(iterator: object) -> int | None:
    """What a count gives next; None: it is none, or at its end."""
    if isinstance(iterator, enumerate):
        return int(iterator.__reduce__()[1][1])
    if isinstance(iterator, itertools.count):
        return int(repr(iterator)[6:-1].split(",")[0])
    return next(copy.copy(iterator), None) if isinstance(iterator, type(iter(range(1)))) else None


def _source(frame: FrameType) -> str:
    try:
        return inspect.getsource(frame.f_code)
    except OSError:
        return ""


def counts_from_0(source: str) -> bool:
    """Whether the source of a function counts by `enumerate` from a fixed number, such as 0 or 1."""
    try:
        found = list(ast.walk(ast.parse("if 1:\n" * source[:1].isspace() + source)))
    except SyntaxError:  # a part of a longer statement
        return "enumerate(" in source
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
