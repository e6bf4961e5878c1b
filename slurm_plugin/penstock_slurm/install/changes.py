"""Changes to files: shown as a diff, made with a backup, recorded beside slurm.conf, and taken back.

The record, penstock-install.json, says of each file what it was and what we made of it. A file that is still as we left it
goes back byte for byte; of one that was changed since, our lines alone are taken out again.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock_scheduler.errors import PenstockError
from penstock_slurm.install.edits import LineEdit, undo

RECORD = "penstock-install.json"
BACKUP_SUFFIX = ".before-penstock"


@dataclass(frozen=True, slots=True)
class Change:
    """A file as it shall be. `edits` None: the file is wholly ours, and goes when we go. `shown`: its diff is of interest."""

    path: Path
    after: bytes
    edits: tuple[LineEdit, ...] | None = None
    shown: bool = True

    def before(self) -> bytes | None:
        """What the file holds now; None if there is none."""
        return self.path.read_bytes() if self.path.exists() else None

    @property
    def needed(self) -> bool:
        """Whether the file is not yet as it shall be."""
        return self.before() != self.after

    def diff(self) -> str:
        """What would change, for people."""
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
    """What the record holds of one file."""

    backup: Path | None = None
    edits: list[LineEdit] | None = None
    sha256: str = ""
    folders: list[Path] = []
    """That were made for it, the innermost first."""


_Entries = TypeAdapter(dict[Path, Entry])


def apply(changes: Sequence[Change], record: Path) -> None:
    """Make the changes, in order; what was there before the first installation is kept beside each file.

    Raises:
        PenstockError: a file cannot be written; those before it stay changed and recorded.
    """
    entries = _load(record)
    for change in changes:
        if not change.needed:
            continue
        known = change.path in entries
        entry = entries.setdefault(change.path, Entry(edits=None if change.edits is None else []))
        entry.folders += [folder for folder in change.path.parents if not folder.exists()]
        try:
            if not known and change.path.exists() and change.edits is not None:
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
    """What taking back one file means; `after` None: delete it. `told` is for the admin to do by hand."""

    path: Path
    after: bytes | None
    told: str = ""


def plan_undo(record: Path) -> list[Undo]:
    """The way back, the last change first.

    Raises:
        PenstockError: nothing is recorded there.
    """
    entries = _load(record)
    if not entries:
        raise PenstockError(f"{record} records no installation; was it made with another --config?")
    found = []
    for path, entry in reversed(entries.items()):
        if entry.edits is None or not path.exists():
            found.append(Undo(path, None))
            continue
        now, backup = path.read_bytes(), entry.backup
        if hashlib.sha256(now).hexdigest() == entry.sha256:
            found.append(Undo(path, backup.read_bytes() if backup else None))
            continue
        text, lost = undo(now.decode(), entry.edits)
        told = "".join(f"{path}: the line {edit.after!r} is not there any more; look yourself\n" for edit in lost)
        found.append(Undo(path, None if not text and not backup else text.encode(), told))
    return found


def take_back(undos: Sequence[Undo], record: Path) -> None:
    """Carry out `plan_undo`'s list for some files and strike them from the record, with their backups and folders made for them.

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
                with contextlib.suppress(OSError):  # somebody has put something there
                    folder.rmdir()
            write(record, _Entries.dump_json(entries, indent=1))
            if not entries:
                record.unlink()
        except OSError as error:
            raise PenstockError(f"{error.filename or step.path}: {error.strerror}; run this as root") from None


def write(path: Path, content: bytes) -> None:
    """Replace a file whole; its mode and owner stay, a new one is for everybody to read. Raises OSError."""
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
