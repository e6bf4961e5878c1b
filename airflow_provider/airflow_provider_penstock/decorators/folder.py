"""The files of `@task.penstock` in the folder that workers and nodes share: private, and deleted once they are not needed.

A task has one folder for all tries of a generation. Only the worker's user may use it. Where jobs run as another user, the site
gives the shared folder a group of both users and the setgid bit (`chmod 2770`); the group may then use the task's folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from importlib import resources
from pathlib import Path

from airflow_provider_penstock.decorators.run import write

CALL = ("call.pkl", "made_by.json", "run.py")
TAKEN = "taken"
"""Folder with an empty file for each task whose outcome was read, named as the task's folder."""
KEEP_S = 7 * 86400.0
"""A result is kept for this long after it was read. If a worker dies before it has told Airflow, the next try reads it again."""
SWEEP_S = 3600.0
"""Least time between two searches for results to delete."""


class TaskFolder:
    """One task's files below `shared_folder`."""

    def __init__(self, shared_folder: str, name: str) -> None:
        """`name` is the same for all tries that may share a job."""
        self._shared = Path(shared_folder)
        self._taken = self._shared / TAKEN
        self._marker = self._taken / name
        self.path = self._shared / name

    @classmethod
    def at(cls, path: str) -> TaskFolder:
        """The folder with this path."""
        return cls(str(Path(path).parent), Path(path).name)

    def put(self, call: bytes, made_by: bytes) -> None:
        """Write what the job needs. Raises OSError, and PermissionError if another user could change it."""
        self._shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        shared = self._shared.stat()
        if shared.st_mode & stat.S_IWOTH and not shared.st_mode & stat.S_ISVTX:
            raise PermissionError(
                f"every user may replace files in {self._shared}, and so run code as the job's user; "
                f"chmod o-w {self._shared}"
            )
        make_private(self.path)
        self._marker.unlink(missing_ok=True)
        write(self.path / "run.py", resources.files(__package__).joinpath("run.py").read_bytes())
        write(self.path / "made_by.json", made_by)
        write(self.path / "call.pkl", call)

    def take(self) -> None:
        """Delete what the job needed, and let a later task delete the rest. Errors change nothing for the task."""
        with contextlib.suppress(OSError):
            for name in CALL:
                (self.path / name).unlink(missing_ok=True)
            make_private(self._taken)
            self._marker.touch()
            self._sweep()

    def _sweep(self) -> None:
        """Delete the folders whose results were read long ago."""
        swept, now_s = self._taken / ".swept", time.time()
        if swept.exists() and now_s - swept.stat().st_mtime < SWEEP_S:
            return
        swept.touch()
        for marker in os.scandir(self._taken):
            if marker.name != swept.name and now_s - marker.stat().st_mtime > KEEP_S:
                shutil.rmtree(self._shared / marker.name, ignore_errors=True)
                Path(marker.path).unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder for its owner, or for its group as well if the folder above has the setgid bit.

    Raises PermissionError if another user has made it.
    """
    is_of_group = bool(folder.parent.stat().st_mode & stat.S_ISGID)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat(follow_symlinks=False)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if is_own:
        folder.chmod(0o2770 if is_of_group else 0o700)
    elif not (is_of_group and stat.S_ISDIR(found.st_mode) and found.st_gid == folder.parent.stat().st_gid):
        raise PermissionError(f"{folder} belongs to another user, who could replace its files; delete it")
