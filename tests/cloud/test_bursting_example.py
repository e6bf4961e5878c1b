"""The example in `examples/bursting`, as a new user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.pages import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_the_example_ends_well_and_shows_what_its_readme_says(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    script = ROOT / "examples" / "bursting" / "burst.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=1200)
    told = done.stdout
    assert done.returncode == 0, told + done.stderr
    assert "home ran on t4-00" in told
    assert "away ran on cloud-" in told
    assert "poor ran on t4-00" in told
    launched = re.findall(r"EC2 has launched (\S+) as cloud-", told)
    assert launched == re.findall(r"EC2 has ended (\S+)", told)
    assert len(launched) == 1
    (row,) = re.findall(r"a10g in the cloud +1 +\S+ +(\d\S*)", told)
    assert 0 < float(row) < 1.006, "less than an hour"
    assert "Traceback" not in told + done.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"
