"""The Containerfile asks for what the wheel has. `deploy/try-container` builds it and runs the demo in it, by hand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "deploy/Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_containers_start_programs_that_the_wheel_has():
    programs = {entry.split('"')[1] for entry in re.findall(r'ENTRYPOINT \[("[^]]+")\]', CONTAINERFILE)}
    assert programs == {"penstockd", "penstock"}
    assert programs <= set(PROJECT["scripts"])


def test_the_targets_of_the_page_exist():
    targets = set(re.findall(r"^FROM \S+ AS (\w+)", CONTAINERFILE, flags=re.MULTILINE))
    page = (ROOT / "docs/admin/packages.md").read_text()
    assert set(re.findall(r"--target (\w+)", page)) == targets == {"penstockd", "demo"}
