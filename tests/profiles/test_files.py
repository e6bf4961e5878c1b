"""Files that other processes write or read at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_profiles.files import NoRegularFile, open_regular


def test_what_is_no_file_is_refused_and_nothing_stays_open(tmp_path: Path):
    """With a folder in place of a file, a job could make its node's agent run out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(NoRegularFile):
            open_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
