"""Lets a process of its own estimate when jobs start and end, and puts what it finds onto the board."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import IO

from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.simulator.estimates import NOTES, EstimatesOrder, Found

log = logging.getLogger(__name__)

FIRST_S = 60.0
"""Time from the start of penstockd to that of the process: it loads for seconds, and penstockd has more urgent work then."""
AGAIN_S = 300.0
"""Time until a process that has ended is started again."""


class Estimator:
    """Runs the process from `start` to `stop`. Rounds never wait for it: a thread reads what it prints.

    Args:
        order: what the process is to do.
        board: gets the estimates.
        first_s: seconds until the process is started.
    """

    def __init__(self, order: EstimatesOrder, board: Board, first_s: float = FIRST_S) -> None:
        self._order, self._board, self._first_s = order, board, first_s
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="estimates", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, with the process."""
        self._stopping.set()
        if (process := self._process) is not None:
            process.kill()  # it writes nothing but its answer
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = self._first_s
        while not self._stopping.wait(pause_s):
            try:
                status = self._follow()
            except OSError as error:
                log.error("estimates cannot be made", extra={"text": str(error)})
            else:
                if not self._stopping.is_set():
                    log.error("the process of estimates ended; it is started again", extra={"status": status})
            pause_s = AGAIN_S

    def _follow(self) -> int:
        """Run the process until it ends. Returns its exit status."""
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock_scheduler.simulator.estimates.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = process
        if self._stopping.is_set():
            process.kill()
        with process:
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            try:
                process.stdin.write(self._order.model_dump_json() + "\n")
                process.stdin.flush()
                self._read(process.stdout)
            except BrokenPipeError:
                pass  # it ended at once, and its exit status says so
        return process.returncode

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            found = Found.model_validate_json(line)
            self._board.estimates = found.estimates
            if found.notes is not None:
                try:
                    self._board.store.set_control(NOTES, found.notes)
                except StoreError as error:  # the next ones come in an hour
                    log.warning("how often estimates held cannot be noted", extra={"text": str(error)})
