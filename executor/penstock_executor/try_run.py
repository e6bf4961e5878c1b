"""Tries a training script: first undisturbed, then stopped in several ways and continued. Says in words what differs.

    penstock try train.py --epochs=2
    python -m penstock_executor.try_run train.py --epochs=2

The script runs about ten times on this machine, so give it arguments with which it makes some dozens of steps in two or
three epochs. Its own files are written as usual. Its checkpoints go to a temporary folder. The exit status is 1 if
something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock_executor.launch import PRELOADED, end, preload, status_of

if TYPE_CHECKING:
    from penstock_executor.training.trial import Disturbance

EXACT, CLOSE = 1e-6, 1e-2
"""The most by which weights may differ after a stop, as a share of their norm: on as many processes, and on others. Sums in
another order differ little; dropout and BatchNorm differ more. On others, they may also differ by `DEPENDS` times the difference
between whole trainings on one process and on several: that is the noise which the script draws."""

DEPENDS = 2.0

LONG_S = 5.0
"""From this time on, code after the inner loop is named if it answers no requests."""

FAILED_S = 15.0
"""Seconds from the end of a process that failed to that of the others."""

NO_STEP = (
    "the script makes no step after px.start, so it cannot be tried: that takes run.step or run.step_done in a loop over"
    " run.epochs. Hugging Face's and Lightning's trainers, and programs that only report, save in their own ways"
)

SET_CHILD_SUBREAPER = 36
"""Of Linux' <sys/prctl.h>."""

STOPPED, TOO_LONG = 128 + signal.SIGTERM, 124


@dataclass(slots=True)
class TrialRecord:
    """What one training left behind, over its runs."""

    statuses: list[int] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of a step -> its record in the last run that made it."""
    again: int | None = None
    """First step of the run after the stop, if it is known."""
    after_s: list[float] = field(default_factory=list)
    """How long the code after each inner loop took."""
    evaluates: list[int] = field(default_factory=list)
    """Steps after which `run.evaluating` was called."""
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    """Number of a step -> numbers that `run.log` was given after it, in the last run that made it."""
    said: str = ""
    weights: dict[str, Any] | None = None
    """Of each model, once the training has ended; not of a divided one."""


@dataclass(frozen=True, slots=True)
class TriedStop:
    """A disturbance, and on how many processes the script continues; of the kind `none`, a whole training on `first`."""

    name: str
    disturbance: Disturbance
    processes: int = 1
    first: int = 1
    """The processes that are disturbed."""

    @property
    def expected(self) -> int:
        """Exit status of the first run."""
        if self.disturbance.kind == "none":
            return 0
        return 128 + signal.SIGKILL if self.disturbance.kind == "kill" else STOPPED


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock_executor.try_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2, help="to move to (2); 1: do not move")
    parser.add_argument("--seed", type=int, default=0, help="for the steps that are disturbed")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of each run (600)")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the script")
    options = parser.parse_args(arguments)
    return _watched(lambda folder: _tried(folder, options))


def _watched(work: Callable[[Path], int]) -> int:
    """Do work in a group of processes that ends with this process, and in a folder that goes with it. Returns its exit status.

    This process only waits for a signal. A handler's exception could be lost in an import or a destructor, or come between a
    fork and the note of it.
    """
    awaited = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the group become children of this process
    folder = Path(tempfile.mkdtemp(prefix="penstock-try-"))
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # who reads the terminal gets an error, and is not stopped
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        try:
            status = work(folder)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        end(status)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so itself, or has ended
        os.setpgid(pid, pid)
    while (number := signal.sigwait(awaited)) == signal.SIGCHLD:
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(raw)
            break
    else:
        code = -number
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:  # until none of them can write into the folder any more
            os.waitpid(-pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _tried(where: Path, options: argparse.Namespace) -> int:
    """Try the script, with a folder for each of its trainings. Returns the command's exit status."""
    preload(PRELOADED)  # once for all runs, which are forked
    import torch

    from penstock_executor.training.trial import Disturbance

    torch.set_num_threads(1)  # the threads of PyTorch would be lost in what is forked

    def run(scenario: TriedStop) -> TrialRecord:
        folder = Path(tempfile.mkdtemp(dir=where))  # TemporaryDirectory would end with the first forked process
        found = _try(folder, scenario, options)
        shutil.rmtree(folder, ignore_errors=True)
        return found

    whole = run(TriedStop("undisturbed", Disturbance()))
    if whole.statuses != [0] or not whole.steps:
        _say(f"undisturbed: {_failure(whole, options.script) or NO_STEP}")
        return 1
    epochs = len({each["epoch"] for each in whole.steps.values()})
    _say(f"undisturbed: {len(whole.steps)} steps in {epochs} epochs")
    differs, wholes, close = False, {1: whole}, CLOSE
    for scenario in scenarios(whole, options.processes, options.seed, Disturbance):
        if scenario.first not in wholes and scenario.disturbance.kind != "none":
            continue  # the script fails on so many processes
        tried = run(scenario)
        found = compare(wholes.get(scenario.first, whole), tried, scenario, options.script, close)
        result = "as undisturbed"
        if scenario.disturbance.kind == "none" and tried.statuses == [0]:
            wholes[scenario.first] = tried
            depends = _difference(whole.weights, tried.weights)
            close, result = max(CLOSE, DEPENDS * depends), f"the weights differ by {depends:.1g} of their norm"
        differs |= bool(found)
        _say(f"{scenario.name}: {'DIFFERS' if found else result}")
        for line in found or logged_otherwise(wholes.get(scenario.first, whole), tried, scenario):
            _say(f"    {line}")
    longest_s = max(whole.after_s, default=0.0)
    if longest_s > LONG_S and not whole.evaluates:
        _say(
            f"the code after the inner loop takes {longest_s:.0f} s without an answer: use run.evaluating(loader) there"
        )
    return int(differs)


def scenarios(whole: TrialRecord, processes: int, seed: int, disturbance: Any) -> list[TriedStop]:
    """What is tried with a script that makes these steps."""
    of_epochs: dict[int, list[int]] = {}
    for step, record in sorted(whole.steps.items()):
        of_epochs.setdefault(record["epoch"], []).append(step)
    epochs = sorted(of_epochs)
    early, middle = of_epochs[epochs[0]], of_epochs[epochs[len(epochs) // 2]]
    choose = random.Random(seed)  # noqa: S311
    found = []
    if len(middle) > 1:
        step = choose.choice(middle[:-1])
        found.append(TriedStop(f"a stop in mid-epoch, after step {step}", disturbance("stop", step)))
        killed = choose.choice(middle[:-1])
        found.append(TriedStop(f"kill -9 in mid-epoch, after step {killed}", disturbance("kill", killed)))
        if processes > 1:
            found.append(TriedStop(f"undisturbed on {processes} processes", disturbance(), first=processes))
            moved = f"a stop after step {step}, continued on {processes} processes"
            found.append(TriedStop(moved, disturbance("stop", step), processes))
            back = f"SIGTERM to all of {processes} processes after step {step}, continued on 1"
            found.append(TriedStop(back, disturbance("stop", step), first=processes))
            gone = f"kill -9 of one of {processes} processes after step {killed}, continued on {processes}"
            found.append(TriedStop(gone, disturbance("kill", killed), processes, processes))
    if len(epochs) > 1:
        found.append(TriedStop(f"a stop in an epoch's last step, {early[-1]}", disturbance("stop", early[-1])))
    if whole.evaluates:
        found.append(TriedStop("a stop in an evaluation", disturbance("evaluation", whole.evaluates[0])))
    return found


def compare(
    whole: TrialRecord, tried: TrialRecord, scenario: TriedStop, script: str, close: float = CLOSE
) -> list[str]:
    """What differs from the undisturbed training, in words, with what to change; [] if the two are equal.

    `close`: the most by which weights may differ on another number of processes, as a share of their norm.
    """
    moved, same = scenario.disturbance.kind == "none", scenario.first == scenario.processes
    if tried.statuses[0] != scenario.expected and (moved or tried.statuses[0] == TOO_LONG):
        return [f"it fails: {_failure(tried, script)}"]
    if tried.statuses[0] != scenario.expected:
        replaced = _line(tried.said, "handles SIGTERM since")
        return [f"the stop ended in status {tried.statuses[0]} and not {scenario.expected}", *replaced]
    if not moved and tried.statuses[1:] != [0]:
        return [f"the next run fails: {_failure(tried, script)}"]
    counted = _line(tried.said, "counts batches by ")
    for number in sorted(whole.steps.keys() | tried.steps.keys()):
        if number not in whole.steps or number not in tried.steps:
            return [f"the training makes {len(tried.steps)} steps and not {len(whole.steps)}", *counted]
        a, b = whole.steps[number], tried.steps[number]
        at = f"in step {number}, epoch {a['epoch']}"
        if found := _step_differs(a, b, at, counted, moved=moved):
            return found
        before = number <= scenario.disturbance.step and (tried.again is None or number < tried.again)
        share = EXACT if same or before else close
        by = _apart(a, b, exact=share == EXACT)
        if not moved and not by <= share:
            return _weights_differ(at, by, counted, before=before)
    difference = _difference(whole.weights, tried.weights)
    if moved or difference <= (EXACT if same else close):
        return []
    return _weights_differ("at the end", difference, counted, before=False)


def logged_otherwise(whole: TrialRecord, tried: TrialRecord, scenario: TriedStop) -> list[str]:
    """The first number in the log that differs, in words. It is no mistake: sums over an epoch begin anew after a stop."""
    if scenario.first != scenario.processes:
        return []
    for step in sorted(whole.logged.keys() & tried.logged.keys()):
        for name, number in whole.logged[step].items():
            other = tried.logged[step].get(name, math.nan)
            if not math.isclose(number, other, rel_tol=EXACT, abs_tol=1e-12) and not math.isnan(number):
                return [
                    f"note: after step {step}, the log has {name}={other:.6g} and not {number:.6g}. A sum over an epoch begins "
                    "anew after a stop in mid-epoch, unless run.keep or state={...} holds it"
                ]
    return []


def _apart(a: dict[str, Any], b: dict[str, Any], *, exact: bool) -> float:
    """How far the weights of two steps are apart, as a share of their norm. `sign` shows any change, but not how large it is."""
    marks = ("norm", "sign") if exact else ("norm",)
    return float(max(abs(a[mark] - b[mark]) for mark in marks) / (a["norm"] or 1.0))


def _step_differs(a: dict[str, Any], b: dict[str, Any], at: str, counted: list[str], *, moved: bool) -> list[str]:
    """Whether step `b` of a tried run has other samples or learning rates than `a`, or other weights on each process."""
    if (a["epoch"], a["in_epoch"], a["samples"]) != (b["epoch"], b["in_epoch"], b["samples"]):
        return [
            f"{at}: {b['samples']} samples as step {b['in_epoch']} of epoch {b['epoch']}, and not {a['samples']}",
            "let run.loader or run.prepare give the batches, or leave out those that are done by run.epoch_steps",
        ]
    if len(a["rates"]) != len(b["rates"]) or not all(map(_near, a["rates"], b["rates"])):
        saved = counted or ["pass the schedule to run.prepare (scheduler=...) or run.keep, so that it is saved"]
        fixed = ["the batch is the same on any number of processes: leave their number out of the learning rate"]
        return [
            f"{at}: the learning rates are {_short(b['rates'])} and not {_short(a['rates'])}",
            *(fixed if moved else saved),
        ]
    if b["apart"] > EXACT:
        return [
            f"{at}: the processes' weights differ by {b['apart']:.1g} of their norm",
            "average the gradients: wrap the model in DistributedDataParallel, and call that in the step",
        ]
    return []


def _weights_differ(at: str, by: float, counted: list[str], *, before: bool) -> list[str]:
    found = [f"{at}: the weights differ by {by:.1g} of their norm"]
    if before:
        return [
            *found,
            "they did so before the stop, so two runs of the script differ: seed the generators of PyTorch, NumPy and Python",
        ]
    unsaved = "what the step uses is not all saved: pass it to run.keep, or to run.prepare as state={...}"
    return [*found, unsaved, *counted]


def _difference(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float:
    """Of the final weights, as a share of their norm; 0 if they are not known."""
    import torch

    apart = norm = 0.0
    for model in one or {} if other else {}:
        assert one is not None
        assert other is not None
        for name, value in one[model].items():
            if torch.is_tensor(value) and value.is_floating_point():
                apart += float((value.double() - other[model][name].double()).square().sum())
                norm += float(value.double().square().sum())
    return math.sqrt(apart / norm) if norm else 0.0


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EXACT, abs_tol=1e-15)


def _short(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)


def _line(said: str, words: str) -> list[str]:
    """The first line that Penstock has said with these words."""
    return [line.removeprefix("penstock: ") for line in said.splitlines() if words in line][:1]


def _failure(tried: TrialRecord, script: str) -> str:
    """Why the last run failed: where in the script, and the error; empty: it did not."""
    if tried.statuses[-1] == 0:
        return ""
    if tried.statuses[-1] == TOO_LONG:
        return "it had not ended when its time was over: let it make fewer steps, or give it more time by --timeout"
    plain = re.sub(r"\x1b\[[\d;]*m", "", tried.said)  # without a terminal's colours
    lines = [line for line in plain.splitlines() if line.strip()]
    places = re.findall(rf'File "(?:[^"]*/)?{re.escape(Path(script).name)}", line (\d+)', tried.said)
    where = f"{Path(script).name}, line {places[-1]}: " if places else ""
    errors = [line for line in lines if re.match(r"(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception|Exit)\b", line)]
    error = re.sub(r"^\[rank\d+\]: ", "", (errors or lines or ["no word"])[-1])
    return f"{where}{error} (status {tried.statuses[-1]})"


def _try(folder: Path, scenario: TriedStop, options: argparse.Namespace) -> TrialRecord:
    """Run the script, disturb it, and continue it."""
    from penstock_executor.training.trial import Disturbance

    tried = TrialRecord()
    (folder / "said").touch()
    runs = [(scenario.disturbance, scenario.first)]
    if scenario.disturbance.kind != "none":
        runs.append((Disturbance(), scenario.processes))
    first: list[str] = []
    for disturbance, processes in runs:
        first = _lines(folder / "steps.jsonl")
        tried.statuses.append(_run(folder, disturbance, processes, options))
        if tried.statuses[-1] != (scenario.expected if len(tried.statuses) == 1 else 0):
            break
    tried.said = (folder / "said").read_text(errors="replace")
    for number, record in enumerate(map(json.loads, _lines(folder / "steps.jsonl"))):
        if "step" in record:
            tried.steps[record["step"]] = record
            if number >= len(first) and tried.again is None:
                tried.again = record["step"]
        elif "logs" in record:
            tried.logged.setdefault(record["logs"], {}).update(record["numbers"])
        elif "after_s" in record:
            tried.after_s.append(record["after_s"])
        else:
            tried.evaluates.append(record["evaluates"])
    if (folder / "final.pt").exists():
        import torch

        tried.weights = torch.load(folder / "final.pt", map_location="cpu", weights_only=False)
    return tried


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _run(folder: Path, disturbance: Disturbance, processes: int, options: argparse.Namespace) -> int:
    """One run of the script. Its exit status is that of the process that failed first, else that of all.

    `TOO_LONG`: it did not end in the time that the command gives each run.
    """
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    sys.stdout.flush()
    pids = set()
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            _begin(folder, disturbance, rank, processes, port, options)
        pids.add(pid)
    status, until_s = 0, time.monotonic() + options.timeout
    while pids:
        pid, raw = _any_of(pids)
        if pid:
            pids.discard(pid)
            code = os.waitstatus_to_exitcode(raw)
            code = code if code >= 0 else 128 - code
            if code and not status:
                status, until_s = code, min(until_s, time.monotonic() + FAILED_S)
        elif time.monotonic() > until_s:
            status = status or TOO_LONG
            for each in pids:
                os.kill(each, signal.SIGKILL)
        else:
            time.sleep(0.02)
    return status


def _any_of(pids: set[int]) -> tuple[int, int]:
    for each in pids:
        pid, raw = os.waitpid(each, os.WNOHANG)
        if pid:
            return pid, raw
    return 0, 0


def _begin(
    folder: Path, disturbance: Disturbance, rank: int, processes: int, port: int, options: argparse.Namespace
) -> NoReturn:
    """In a new process: be the script."""
    for name in [each for each in os.environ if each.startswith(("SLURM", "PENSTOCK"))]:
        del os.environ[name]
    place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with (folder / "said").open("ab") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    import torch

    from penstock_executor.training.trial import install

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(cores // processes, 1)))
    install(folder, disturbance)
    end(status_of(options.script, options.arguments, module=False))


def _say(text: str) -> None:
    sys.stdout.write(f"penstock: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
