"""The store as plain files, for one daemon on one host.

::

    STATE/rounds/00000042.json   one decided round each, written beside and renamed, so that it is whole or absent
    STATE/outcomes.jsonl         what became of the actions, a line each, only appended
    STATE/reports.jsonl          what jobs reported, a line each, only appended
    STATE/lock                   held by the one process that writes
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from penstock_profiles.wire import Report
from penstock_scheduler.errors import StoreError
from penstock_scheduler.model import Action, Outcome, Progress
from penstock_scheduler.records import RoundRecord, UnreadableRound, dump_round, load_round

log = logging.getLogger(__name__)


class OutcomeLine(BaseModel):
    """A line of outcomes.jsonl."""

    time_s: float
    action: Action
    progress: Progress
    text: str = ""


_REPORT = TypeAdapter(Report)


class FileStore:
    """The store; see the module.

    Args:
        folder: made if it is not there.
        keep_rounds: newest rounds that are kept.
        writer: whether this process writes. Only one may: a second one is a StoreError.
    """

    def __init__(self, folder: Path, *, keep_rounds: int = 10_000, writer: bool = False) -> None:
        self.folder = folder
        self._rounds = folder / "rounds"
        self._keep_rounds = keep_rounds
        if not writer:
            if not folder.is_dir():
                raise StoreError(f"{folder} is not there; give the daemon's state_dir")
            return
        try:
            self._rounds.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{folder} is in use by another penstockd; stop it, or give this one its own state_dir"
            ) from None
        except OSError as error:
            raise StoreError(
                f"{folder}: {error.strerror}; set [daemon] state_dir to a folder that penstockd may write"
            ) from None
        self._cut_torn_lines()

    def last_round(self) -> RoundRecord | None:
        """The newest round that can be read; one that cannot is logged and passed over."""
        for number in reversed(self.round_numbers()):
            try:
                return self.round(number)
            except UnreadableRound as error:
                log.warning("round passed over", extra={"text": str(error)})
        return None

    def round_numbers(self) -> list[int]:
        """Numbers of the rounds that are kept, ascending."""
        try:
            names = os.listdir(self._rounds)
        except OSError as error:
            raise StoreError(f"{self._rounds}: {error.strerror}; give the daemon's state_dir") from None
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())

    def round(self, number: int) -> RoundRecord:
        """One round. Raises StoreError if it is not there, UnreadableRound if it is damaged."""
        path = self._round_file(number)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from None
        return load_round(text, str(path))

    def save_round(self, record: RoundRecord) -> None:
        """Keep a round: on disk, whole, when this returns."""
        path = self._round_file(record.snapshot.round)
        beside = path.with_suffix(".tmp")
        try:
            with beside.open("wb") as file:
                file.write(dump_round(record))
                file.flush()
                os.fsync(file.fileno())
            beside.rename(path)
            old = record.snapshot.round - self._keep_rounds
            if old > 0:
                self._round_file(old).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; free some space, running jobs are not affected") from None

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append to outcomes.jsonl."""
        lines = [
            OutcomeLine(
                time_s=time_s, action=outcome.action, progress=outcome.progress, text=outcome.text
            ).model_dump_json()
            for outcome in outcomes
        ]
        self._append("outcomes.jsonl", lines)

    def add_reports(self, reports: Sequence[Report]) -> None:
        """Append to reports.jsonl."""
        self._append("reports.jsonl", [report.model_dump_json() for report in reports])

    def outcomes(self) -> Iterator[OutcomeLine]:
        """The history of actions, oldest first."""
        for line in self._lines("outcomes.jsonl"):
            yield OutcomeLine.model_validate_json(line)

    def reports(self) -> Iterator[Report]:
        """The history of reports, in the order in which they came."""
        for line in self._lines("reports.jsonl"):
            yield _REPORT.validate_json(line)

    def _round_file(self, number: int) -> Path:
        return self._rounds / f"{number:08d}.json"

    def _append(self, name: str, lines: Sequence[str]) -> None:
        path = self.folder / name
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; free some space, running jobs are not affected") from None

    def _lines(self, name: str) -> Iterator[str]:
        try:
            with (self.folder / name).open(encoding="utf-8") as file:
                for line in file:
                    if line.endswith("\n"):
                        yield line
        except FileNotFoundError:
            return

    def _cut_torn_lines(self) -> None:
        """A line that a crash cut short would swallow the next one: end the file at its last whole line."""
        for name in ("outcomes.jsonl", "reports.jsonl"):
            path = self.folder / name
            if path.exists() and (size := path.stat().st_size):
                with path.open("r+b") as file:
                    file.seek(max(size - 1_000_000, 0))
                    tail = file.read()
                    if not tail.endswith(b"\n"):
                        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
