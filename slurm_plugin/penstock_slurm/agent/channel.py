"""The agent's end of the channel to the jobs on its node: see `penstock_profiles.node_channel`.

A job's folder belongs to its user, so its content is not trusted. The agent reads only regular files of that user,
follows no links, and reads no more of a file than a status can be long.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock_profiles.files import open_regular, write_whole
from penstock_profiles.node_channel import (
    MAX_RANKS,
    MAX_STATUS_BYTES,
    JobControl,
    JobStatus,
    bound_devices,
    control_path,
    devices_file,
    gpus_file,
    job_dir,
    limits_file,
    mps_file,
    statuses_dir,
)
from penstock_profiles.wire import read

log = logging.getLogger(__name__)

RANKS = {f"{rank}.json": rank for rank in range(MAX_RANKS)}
"""Names of the jobs' status files."""

MOST_FILES = 16 * MAX_RANKS
"""Most files that are listed of a job's folder. Statuses beyond them may be missed."""


class Channels:
    """The folders of all jobs, below `folder`. Raises OSError if that cannot be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._statuses: dict[str, tuple[tuple[int, int, int], JobStatus]] = {}

    def open(self, number: int, uid: int) -> None:
        """Make the job's folders if they are missing."""
        statuses = statuses_dir(self.folder, number)
        if statuses.is_dir():
            return
        job_dir(self.folder, number).mkdir(mode=0o755, exist_ok=True)
        statuses.mkdir(mode=0o755)
        if os.geteuid() == 0:
            os.chown(statuses, uid, -1, follow_symlinks=False)

    def close(self, number: int) -> None:
        """Remove the job's folders."""
        self._remove_orders(number)
        with contextlib.suppress(RecursionError):  # a thousand nested folders
            shutil.rmtree(job_dir(self.folder, number), ignore_errors=True)
        below = f"{statuses_dir(self.folder, number)}/"
        self._statuses = {path: each for path, each in self._statuses.items() if not path.startswith(below)}

    def numbers(self) -> list[int]:
        """Jobs that have a folder."""
        return [int(name) for name in os.listdir(self.folder) if name.isdigit()]

    def clear(self, number: int) -> None:
        """Remove the statuses and the control messages of the job's last run."""
        self._remove_orders(number)
        for name in RANKS:
            with contextlib.suppress(OSError):
                (statuses_dir(self.folder, number) / name).unlink(missing_ok=True)

    def go_through(self, number: int, mps: Path | None) -> None:
        """Tell the job, before it is bound, which MPS control daemon it uses; None: none."""
        path = mps_file(self.folder, number)
        if mps is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, f"{mps}\n")

    def by_mps(self, number: int) -> bool:
        """Whether the job uses an MPS control daemon."""
        return mps_file(self.folder, number).exists()

    def limit(self, number: int, variables: Mapping[str, str]) -> None:
        """Tell the job, before it is bound, the variables of its tasks that limit it; empty: none."""
        with contextlib.suppress(OSError):
            self.limiter_cache(number).unlink()  # with the limits of an earlier run
        path = limits_file(self.folder, number)
        if variables:
            write_whole(path, "".join(f"{name}={value}\n" for name, value in variables.items()))
        else:
            path.unlink(missing_ok=True)

    def limiter_cache(self, number: int) -> Path:
        """Where the processes of a job that preloads HAMi-core count their memory together. The job can write there."""
        return statuses_dir(self.folder, number) / "limiter.cache"

    def bind(self, number: int, devices: tuple[int, ...], gpus: Sequence[Path] = ()) -> None:
        """Bind the job to GPUs. `gpus` are the device files of all GPUs of the node by index, if they are known."""
        if gpus:
            write_whole(gpus_file(self.folder, number), "".join(f"{path}\n" for path in gpus))
        write_whole(devices_file(self.folder, number), ",".join(map(str, devices)) + "\n")

    def bound(self, number: int) -> tuple[int, ...]:
        """The GPUs to which the job is bound."""
        return bound_devices(self.folder, number)

    def owner(self, number: int) -> int | None:
        """The job's user."""
        try:
            return statuses_dir(self.folder, number).lstat().st_uid
        except OSError:
            return None

    def tell(self, number: int, control: JobControl) -> None:
        """Send the job a control message."""
        write_whole(control_path(self.folder, number), control.model_dump_json())

    def statuses(self, number: int, uid: int) -> dict[int, JobStatus]:
        """Newest status of each of the job's processes, by rank."""
        try:
            with os.scandir(statuses_dir(self.folder, number)) as entries:
                # Not all files: a job may make as many as it likes.
                there = {entry.name: entry.path for entry in itertools.islice(entries, MOST_FILES)}
        except OSError:
            return {}
        found = {rank: self._read(there[name], uid) for name, rank in RANKS.items() if name in there}
        return {rank: status for rank, status in found.items() if status is not None}

    def _remove_orders(self, number: int) -> None:
        """Remove what the job was told."""
        for name in (devices_file, gpus_file, mps_file, limits_file, control_path):
            with contextlib.suppress(OSError):
                name(self.folder, number).unlink()

    def _read(self, path: str, uid: int) -> JobStatus | None:
        try:
            opened = open_regular(path, uid)
        except OSError:
            return None
        with opened as file:
            about = os.fstat(file.fileno())
            if about.st_size > MAX_STATUS_BYTES:
                return None
            stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
            known = self._statuses.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                status = read(JobStatus, file.read(MAX_STATUS_BYTES))
            except ValueError as error:
                log.debug("status ignored", extra={"text": f"{path}: {error}"})
                return None
        self._statuses[path] = stamp, status
        return status
