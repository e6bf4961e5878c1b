import gc
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["penstock_loopback.fixtures", "tests.skips"]

settings.register_profile("penstock", deadline=None)  # no test is timed: machines are noisy
settings.load_profile("penstock")

SLOW = (
    *("tests/airflow_provider", "tests/end_to_end", "tests/executor", "tests/slurm_plugin", "tests/loopback"),
    *("tests/scheduler/web", "tests/cloud", "tests/benchmarks", "tests/scheduler/service"),
)
"""Folders in which a file of tests may take minutes."""

LONGEST_TEXT = 6000
"""Characters of a failure after which a test was tried again."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first, in whatever order among themselves: else one worker ends long after the others."""
    slow = [f"{config.rootpath / folder}{os.sep}" for folder in SLOW]

    def rank(item: pytest.Item) -> int:
        path = str(item.path)
        return next((place for place, folder in enumerate(slow) if path.startswith(folder)), len(slow))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and leave the modules and tests out of every later collection of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=False, capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were tried again (`--reruns`), which is not printed otherwise."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.line(report.longreprtext[-LONGEST_TEXT:])
