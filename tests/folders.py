"""Folders for tests that cannot use pytest's own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that other users may enter. pytest's own folder is closed again by each pytest that this user starts."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
