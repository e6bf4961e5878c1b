"""The folder of a loopback cluster: its owner, its lock and its contents."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock_loopback.config import Layout
from penstock_loopback.errors import LoopbackError
from penstock_scheduler.model.nodespec import NodeSpec

STATE_FILE = "penstock-loopback.json"
"""The record of the cluster: its nodes and its daemons' processes."""

_SOCKET_PATH_MAX = 107
# The longest socket is a slurmstepd's: spool/NODE/NODE_JOB.STEP, both numbers of up to 10 digits.
_SOCKET_ROOM = len("/spool/") + len("/_4294967295.4294967295")
_SUBFOLDERS = (
    "etc",
    "state",
    "log",
    "run",
    "dev",
    "spool",
    "db",
    "db-tmp",
    "data",
    "penstock-spool",
    "penstock-state",
    "checkpoints",
)


def default_folder(kind: str = "loopback") -> Path:
    """The default folder of clusters of this kind, one for each user. `/run/user/UID` may not exist."""
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / f"penstock-{kind}-{os.getuid()}"


def claim(folder: Path) -> None:
    """Make the folder if it is missing.

    Raises:
        LoopbackError: the folder cannot hold a cluster: by its name, its owner or other files in it.
    """
    # Slurm's files have no quotes: a blank, comma, # or % in a path would be misread.
    if not re.fullmatch(r"[A-Za-z0-9_./+@-]+", str(folder)):
        raise LoopbackError(f"the folder {str(folder)!r} has characters that slurm.conf cannot hold; choose --dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = not (folder / STATE_FILE).exists() and any(folder.iterdir())
        owner = folder.stat().st_uid
    except OSError as error:
        raise LoopbackError(f"the folder {folder} cannot be used: {error.strerror}; choose --dir") from error
    if owner != os.getuid():
        raise LoopbackError(f"the folder {folder} belongs to user {owner}, not to you; choose --dir")
    if foreign:
        raise LoopbackError(f"the folder {folder} holds other files; give --dir an empty or a new folder")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other `up`s and `down`s. Raises LoopbackError if one is running."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise LoopbackError(f"another `up` or `down` works on {folder}; wait until it has ended") from None
    finally:
        os.close(descriptor)


def choose_layout(folder: Path, nodes: Sequence[NodeSpec]) -> Layout:
    """Remove an earlier cluster's files, and choose where sockets lie: their paths may be too long in `folder`."""
    for name in _SUBFOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    room = _SOCKET_ROOM + 2 * max((len(node.name) for node in nodes), default=0)
    if len(os.fsencode(folder)) + room <= _SOCKET_PATH_MAX:
        return Layout(folder, folder)
    # Not tempfile.gettempdir(): TMPDIR may be the long path itself.
    short = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    short.chmod(0o755)
    return Layout(folder, short)


def make_folders(layout: Layout, nodes: Sequence[NodeSpec]) -> None:
    """Make the folders of daemons and nodes, and the files that stand for GPUs."""
    for name in ("etc", "log", "dev"):
        (layout.folder / name).mkdir()
    for name in ("state", "data", "db-tmp"):
        (layout.folder / name).mkdir(mode=0o700)
    layout.mariadb_socket.parent.mkdir(mode=0o700)
    layout.munge_socket.parent.mkdir()
    for node in nodes:
        (layout.short / "spool" / node.name).mkdir(parents=True)
    for index in range(max((node.gpus for node in nodes), default=0)):
        layout.gpu(index).symlink_to("/dev/null")


def write_secret(path: Path, text: str, mode: int) -> None:
    """Write a new file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
