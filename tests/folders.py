"""Folders for tests that pytest's own will not do for."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that other users may enter. Not pytest's: each pytest that starts as this user shuts that one again."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
