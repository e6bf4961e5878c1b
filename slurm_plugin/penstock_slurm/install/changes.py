"""Changes to files: shown as a diff, made with a backup, recorded beside slurm.conf, and undone.

The record, penstock-install.json, has each file's backup and edits. A file that is still as the installation
left it is restored byte for byte. From a file that has changed since, only the installation's lines are removed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock_scheduler.people.errors import PenstockError
from penstock_slurm.gateway.conf_edits import LineEdit, undo

RECORD = "penstock-install.json"
BACKUP_SUFFIX = ".before-penstock"


@dataclass(frozen=True, slots=True)
class Change:
    """A file as it should be. `edits` is None for a file of Penstock's own. An uninstall deletes it, or restores the file that
    was in its place."""

    path: Path
    after: bytes
    edits: tuple[LineEdit, ...] | None = None
    shown: bool = True
    """Whether `diff` shows the lines, or only the name."""

    def before(self) -> bytes | None:
        """The file's content now; None if there is no file."""
        return self.path.read_bytes() if self.path.exists() else None

    @property
    def needed(self) -> bool:
        """Whether the file is not yet as it should be."""
        return self.before() != self.after

    def diff(self) -> str:
        """What would change, as a unified diff."""
        before = self.before()
        if not self.shown:
            return f"{'replace' if before else 'new file'}: {self.path} ({len(self.after)} bytes)\n"
        old = "" if before is None else before.decode(errors="replace")
        name = "/dev/null" if before is None else str(self.path)
        lines = difflib.unified_diff(
            old.splitlines(), self.after.decode().splitlines(), name, str(self.path), lineterm="", n=1
        )
        return "\n".join(lines) + "\n"


class Entry(BaseModel):
    """The record of one file."""

    backup: Path | None = None
    edits: list[LineEdit] | None = None
    sha256: str = ""
    folders: list[Path] = []
    """Folders that were made for the file, the innermost first."""


_Entries = TypeAdapter(dict[Path, Entry])


def apply(changes: Sequence[Change], record: Path) -> None:
    """Make the changes in order. A backup of each file from before the first installation is kept beside it.

    Raises:
        PenstockError: a file cannot be written. The files before it stay changed and recorded.
    """
    entries = _load(record)
    for change in changes:
        if not change.needed:
            continue
        known = change.path in entries
        entry = entries.setdefault(change.path, Entry(edits=None if change.edits is None else []))
        entry.folders += [folder for folder in change.path.parents if not folder.exists()]
        try:
            if not known and change.path.exists():
                entry.backup = change.path.with_name(change.path.name + BACKUP_SUFFIX)
                shutil.copy2(change.path, entry.backup)
            write(change.path, change.after)
            if entry.edits is not None:
                entry.edits += change.edits or ()
            entry.sha256 = hashlib.sha256(change.after).hexdigest()
            write(record, _Entries.dump_json(entries, indent=1))
        except OSError as error:
            raise PenstockError(f"{error.filename or change.path}: {error.strerror}; run this as root") from None


@dataclass(frozen=True, slots=True)
class Undo:
    """How to undo the change of one file. `after` is None to delete it. `message` is what the admin must do by hand."""

    path: Path
    after: bytes | None
    message: str = ""


def plan_undo(record: Path) -> list[Undo]:
    """How to undo all recorded changes, the last one first.

    Raises:
        PenstockError: nothing is recorded there.
    """
    entries = _load(record)
    if not entries:
        raise PenstockError(f"{record} records no installation; was it made with another --config?")
    found = []
    for path, entry in reversed(entries.items()):
        backup = entry.backup
        if entry.edits is None or not path.exists():
            found.append(Undo(path, backup.read_bytes() if backup and entry.edits is None else None))
            continue
        now = path.read_bytes()
        if hashlib.sha256(now).hexdigest() == entry.sha256:
            found.append(Undo(path, backup.read_bytes() if backup else None))
            continue
        text, lost = undo(now.decode(), entry.edits)
        message = "".join(f"{path}: the line {edit.after!r} is missing; check the file yourself\n" for edit in lost)
        found.append(Undo(path, None if not text and not backup else text.encode(), message))
    return found


def timers(undos: Sequence[Undo]) -> Iterator[str]:
    """The steps before the units of timers are deleted."""
    for step in undos:
        if step.path.suffix == ".timer":
            yield f"before the files go: systemctl disable --now {step.path.name}"


def carry_out(undos: Sequence[Undo], record: Path) -> None:
    """Undo changes, and remove the files' backups, folders and entries in the record.

    Raises:
        PenstockError: a file cannot be written or deleted.
    """
    entries = _load(record)
    for step in undos:
        entry = entries.pop(step.path)
        try:
            if step.after is None:
                step.path.unlink(missing_ok=True)
            else:
                write(step.path, step.after)
            if entry.backup is not None:
                entry.backup.unlink(missing_ok=True)
            for folder in entry.folders:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
            write(record, _Entries.dump_json(entries, indent=1))
            if not entries:
                record.unlink()
        except OSError as error:
            raise PenstockError(f"{error.filename or step.path}: {error.strerror}; run this as root") from None


def write(path: Path, content: bytes) -> None:
    """Replace a file at once. Its mode and owner stay; a new file is readable by all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.penstock-new")
    new.write_bytes(content)
    if path.exists():
        shutil.copymode(path, new)
        os.chown(new, path.stat().st_uid, path.stat().st_gid)
    else:
        new.chmod(0o644)
    new.replace(path)


def _load(record: Path) -> dict[Path, Entry]:
    try:
        return _Entries.validate_json(record.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise PenstockError(f"{record} cannot be read: {error}; the backups end in {BACKUP_SUFFIX}") from None
