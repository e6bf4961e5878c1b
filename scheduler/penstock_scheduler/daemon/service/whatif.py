"""Replays of recorded history, each in a process of its own: what happens behind `POST /v1/whatif`.

The process is the command `penstock simulate whatif`, so both give the same figures. It has the lowest priority and limits on
memory and processor time, and one runs at a time: rounds go on beside it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from penstock_scheduler.api.whatif_messages import WhatIfOrder, WhatIfTask
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.store.leadership.site_clock import site_time_s

LONGEST_S = 1800.0
"""Time after which a process is ended."""
KEPT = 20
"""Newest tasks that are kept."""
ERROR_CHARACTERS = 2000


@dataclass
class _Running:
    """A task and its process."""

    task: WhatIfTask
    process: subprocess.Popen[str]
    timer: threading.Timer


class WhatIfTasks:
    """The tasks of a penstockd.

    Args:
        store: its store, a folder or a URL.
        longest_s: see `LONGEST_S`.
    """

    def __init__(self, store: str, longest_s: float = LONGEST_S) -> None:
        self._store, self._longest_s = store, longest_s
        self._tasks: OrderedDict[str, WhatIfTask] = OrderedDict()
        self._running: _Running | None = None
        self._lock = threading.Lock()

    def begin(self, order: WhatIfOrder, user: str, policy: PolicyChoice, prices: dict[str, float]) -> WhatIfTask:
        """Begin a task.

        Args:
            policy: that decides now.
            prices: GPU type -> price of a GPU-hour at the site.

        Raises:
            Refusal: 409, one runs already.
        """
        with self._lock:
            if self._running is not None:
                text = f"{self._running.task.user} runs one already, and there is one at a time; wait, or cancel it"
                text = f"{text} with DELETE /v1/whatif/{self._running.task.id}"
                raise Refusal(409, "busy", text)
            task = WhatIfTask(
                id=secrets.token_hex(8),
                user=user,
                order=order,
                state="running",
                fraction=0.0,
                step="starts",
                begun_s=site_time_s(),
            )
            answer = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # the thread closes it
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "penstock_scheduler.cli",
                    "simulate",
                    "whatif",
                    *arguments(order, policy, prices),
                ],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=os.environ | {"PENSTOCK_STORE": self._store},
            )
            timer = threading.Timer(self._longest_s, self._too_long, (task.id,))
            timer.daemon = True
            self._running = _Running(task, process, timer)
            self._keep(task)
            timer.start()
        threading.Thread(target=self._follow, args=(task.id, process, answer), name="whatif", daemon=True).start()
        return task

    def all(self) -> list[WhatIfTask]:
        """All tasks without their results, the newest first."""
        with self._lock:
            return [task.model_copy(update={"result": None}) for task in reversed(self._tasks.values())]

    def task(self, task: str) -> WhatIfTask:
        """A task. Raises Refusal 404."""
        with self._lock:
            return self._found(task)

    def remove(self, task: str) -> WhatIfTask:
        """Cancel a task, or forget one that has ended. Raises Refusal 404."""
        with self._lock:
            found = self._found(task)
            if found.state != "running":
                return self._tasks.pop(task)
            return self._end(task, state="cancelled")

    def close(self) -> None:
        """End what runs."""
        with self._lock:
            if self._running is not None:
                self._end(self._running.task.id, state="cancelled")

    def _found(self, task: str) -> WhatIfTask:
        if task not in self._tasks:
            text = f"there is no task {task[:50]}: penstockd keeps the newest {KEPT}, and none over a restart"
            raise Refusal(404, "no-such-task", text)
        return self._tasks[task]

    def _keep(self, task: WhatIfTask) -> None:
        self._tasks[task.id] = task
        while len(self._tasks) > KEPT:
            self._tasks.popitem(last=False)

    def _end(self, task: str, **changes: object) -> WhatIfTask:
        """Note that the running task has ended, and end its process. Needs the lock."""
        ended = self._tasks[task].model_copy(update={"ended_s": site_time_s(), "step": "", **changes})
        self._keep(ended)
        if self._running is not None and self._running.task.id == task:
            self._running.timer.cancel()
            self._running.process.kill()
            self._running = None
        return ended

    def _too_long(self, task: str) -> None:
        with self._lock:
            if self._running is not None and self._running.task.id == task:
                text = (
                    f"it took more than {self._longest_s / 60:.0f} minutes; replay a shorter period or fewer policies"
                )
                self._end(task, state="failed", error=text)

    def _follow(self, task: str, process: subprocess.Popen[str], answer: IO[str]) -> None:
        """Read how far the process is, and then what it has found."""
        told = ""
        with process, answer:
            assert process.stderr is not None, "it is a pipe"
            for line in process.stderr:
                progress = _progress(line)
                if progress is None:
                    told = (told + line)[-ERROR_CHARACTERS:]
                    continue
                with self._lock:
                    if self._tasks[task].state == "running":
                        self._tasks[task] = self._tasks[task].model_copy(update=progress)
            status = process.wait()
            answer.seek(0)
            text = answer.read()
        with self._lock:
            if task not in self._tasks or self._tasks[task].state != "running":
                return
            if status == 0:
                self._end(task, state="done", fraction=1.0, result=json.loads(text))
            else:
                error = told.strip().removeprefix("penstock: ") or f"its process ended with status {status}"
                self._end(task, state="failed", error=error)


def _progress(line: str) -> dict[str, object] | None:
    """Fields of a task from a line of the process; None: the line says something else."""
    if not line.startswith('{"fraction"'):
        return None
    found = json.loads(line)
    return {"fraction": float(found["fraction"]), "step": str(found["step"])}


def arguments(order: WhatIfOrder, policy: PolicyChoice, prices: dict[str, float]) -> Sequence[str]:
    """The arguments of `penstock simulate whatif`. Each value is in one word with its option, so that it cannot be taken
    for an option."""
    found = ["--task", "--json", f"--seeds={order.seeds}"]
    found += [f"--policy={','.join(order.policies)}"] if order.policies else [f"--choice={policy.model_dump_json()}"]
    named = {"--add-nodes": order.add_nodes, "--remove-nodes": order.remove_nodes, "--like": order.like}
    found += [f"{name}={value}" for name, value in named.items() if value]
    times = {"--from": order.from_s, "--to": order.to_s}
    found += [f"{name}={value!r}" for name, value in times.items() if value is not None]
    if prices:
        found.append("--prices=" + ",".join(f"{name}={price}" for name, price in prices.items()))
    return found
