"""`deploy/requirements.lock`: what root installs with Penstock. `tests/packages` installs it and runs a job with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = ("slurm", "postgresql", "login", "milp", "nvml", "cloud")
OWN = "penstock-scheduler"


def entries() -> list[tuple[Requirement, list[str]]]:
    """Each pinned package, and its hashes."""
    words = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))
    found = [line.partition("--hash") for line in words.splitlines()]
    return [(Requirement(name), re.findall(r"sha256:[0-9a-f]{64}", "".join(rest))) for name, *rest in found]


def wanted() -> list[Requirement]:
    """What the extras and the build ask for, without our own extras within extras."""
    extras, found = [*EXTRAS], [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in extras:
        for text in PROJECT["project"]["optional-dependencies"][extra]:
            asked = Requirement(text)
            if asked.name == OWN:
                extras += [each for each in asked.extras if each not in extras]
            else:
                found.append(text)
    return [Requirement(text) for text in found]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_lock_has_a_version_for_whatever_the_project_asks_for(python: str):
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pinned: dict[str, str] = {}
    for entry, _ in entries():
        if entry.marker is None or Marker(str(entry.marker)).evaluate(here):
            ((operator, version),) = ((each.operator, each.version) for each in entry.specifier)
            assert operator == "=="
            assert pinned.setdefault(canonicalize_name(entry.name), version) == version, "one version for each Python"
    for asked in wanted():
        version = pinned.get(canonicalize_name(asked.name), "")
        assert version, f"{asked.name} is not in the lock; run script/lock"
        assert asked.specifier.contains(version), f"the lock has {asked.name} {version}; run script/lock"


def test_each_package_has_hashes_and_no_host_is_named():
    assert len(entries()) > 40
    for entry, hashes in entries():
        assert hashes, entry
        assert entry.url is None
    assert "://" not in TEXT
    assert not re.search(r"^\s*--(?!hash)|^-", TEXT, flags=re.MULTILINE), "pip's options would name an index"


@pytest.mark.parametrize(
    "place", ["docs/admin/install.md", "docs/admin/packages.md", "deploy/debian/rules", "deploy/Containerfile"]
)
def test_what_root_installs_is_in_the_lock(place: str):
    lines = re.sub(r"\\\n", " ", (ROOT / place).read_text()).replace("&&", "\n").splitlines()
    installs = [
        line for line in lines if re.search(r"\bpip install\b", line) and "`" not in line and "what jobs" not in line
    ]
    ours = installs[1:]
    assert len(ours) == (2 if place == "deploy/Containerfile" else 1), "the lock, then Penstock, then the demo's tools"
    assert all("--no-deps" in line for line in installs)
    assert "--require-hashes" in installs[0]
    assert "requirements.lock" in installs[0]
