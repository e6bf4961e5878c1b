"""`[cloud] share`: the folder through which penstockd, slurmctld's programs and cloud nodes tell each other something."""

from __future__ import annotations

import json
import logging
import os
import pwd
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_scheduler.model import JobId

log = logging.getLogger(__name__)

ALIVE = "alive"
"""The daemon's sign of life in the share. Only the file's modification time matters."""

NOTICES = "notices"
"""Folder in the share with a file for each node that the provider is about to reclaim."""

DETACHED = "detached"
"""Folder with a file for each detached job. It has the cloud runner's links, and only the job's user can read it."""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request of Slurm about its cloud nodes.

    Attributes:
        resume: whether it needs the nodes; else it does not need them any more.
        jobs: Slurm's number of each job that waits for nodes -> these nodes.
        nodes: all nodes of the request.
    """

    resume: bool
    jobs: Mapping[str, Sequence[str]]
    nodes: Sequence[str]


class SharedFolder:
    """The folder. Trouble with it is logged and stops nothing."""

    def __init__(self, folder: Path, users: Sequence[str] = ()) -> None:
        """Args:
        folder: the folder.
        users: users besides root and this process's own to whom it may belong, such as slurmctld's.
        """
        self._folder = folder
        self._users = users
        self._undeleted: set[Path] = set()

    def trouble(self) -> str:
        """Why others could speak in the name of Slurm or of instances, with the remedy; empty: they cannot."""
        try:
            folders = (self._folder, *(each for each in sorted(self._folder.iterdir()) if each.is_dir()))
            found = {str(each): each.stat() for each in folders}
        except OSError:
            return ""
        could = "could end runs by false notices and requests"
        if open_ := [name for name, of in found.items() if of.st_mode & stat.S_IWOTH]:
            return (
                f"everybody can write {', '.join(open_)}, and {could}; chmod o-w {' '.join(open_)}; slurmctld's user must "
                "still write it"
            )
        known = {0, os.geteuid(), *(uid for user in self._users if (uid := _uid(user)) is not None)}
        if strange := [name for name, of in found.items() if of.st_uid not in known]:
            whom = ", ".join(sorted({_name(found[name].st_uid) for name in strange}))
            return (
                f"{', '.join(strange)} belongs to {whom}, who {could}; chown root {' '.join(strange)}, or name slurmctld's "
                "user in [cloud] share_users"
            )
        return ""

    def say_alive(self) -> None:
        """Tell the cloud nodes that penstockd is alive."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ALIVE).touch()
        except OSError as error:
            log.warning("the daemon's sign of life for cloud nodes cannot be written", extra={"text": str(error)})

    def requests(self) -> Iterator[NodeRequest]:
        """The requests of Slurm's resume and suspend programs. Each is deleted once it has been handled."""
        for kind in ("resume", "suspend"):
            try:
                files = sorted({*(self._folder / kind).glob("*.json")} - self._undeleted)
            except OSError as error:
                log.warning("Slurm's requests for cloud nodes cannot be read", extra={"text": str(error)})
                return
            for file in files:
                try:
                    asked = json.loads(file.read_text(encoding="utf-8"))
                    request = NodeRequest(kind == "resume", dict(asked["jobs"]), [str(name) for name in asked["nodes"]])
                except (OSError, ValueError, KeyError, TypeError) as error:
                    log.warning("unreadable request is dropped", extra={"file": str(file), "text": str(error)})
                else:
                    yield request
                self._delete(file)

    def notices(self, nodes: Sequence[str]) -> list[str]:
        """Those of these nodes that the provider is about to reclaim."""
        try:
            return [name for name in nodes if (self._folder / NOTICES / name).exists()]
        except OSError as error:
            log.warning("notices of interruption cannot be read", extra={"text": str(error)})
            return []

    def forget_notices(self, nodes: Sequence[str]) -> None:
        """Delete the notices of these nodes."""
        for name in nodes:
            self._delete(self._folder / NOTICES / name)

    def write_links(self, job: JobId, links: Mapping[str, str], uid: int) -> None:
        """Write the links of a job's cloud runner, for its user alone. Raises OSError."""
        file = self._folder / DETACHED / f"{job}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.parent.chmod(0o711)
        beside = file.with_suffix(".new")
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(links))
            if os.geteuid() == 0:
                os.fchown(descriptor, uid, -1)
        beside.rename(file)

    def drop_links(self, job: JobId) -> None:
        """Delete the links of a job's cloud runner."""
        self._delete(self._folder / DETACHED / f"{job}.json")

    def _delete(self, file: Path) -> None:
        """Delete a file, or else never read it again: by then, its nodes may belong to other jobs."""
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self._undeleted.add(file)
            log.warning("cannot be deleted", extra={"file": str(file), "text": str(error)})


def _uid(user: str) -> int | None:
    """A user's id; None: this machine does not know the user."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
