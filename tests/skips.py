"""A run in which a test skips for a reason that is not on the list fails. Without PENSTOCK_ALLOWED_SKIPS nothing is checked.

PENSTOCK_ALLOWED_SKIPS names the list, such as `.ci/allowed-skips`: regular expressions, one on a line, each below a comment
that says why the tests may skip. An expression must match the whole reason.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

NOT_ALLOWED = pytest.StashKey[Counter[str]]()


def allowed(text: str) -> list[re.Pattern[str]]:
    """The expressions of a list. Raises ValueError for one without a comment above it."""
    found, explained = [], False
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if line.startswith("#"):
            explained = True
        elif not line:
            explained = False
        elif explained:
            found.append(re.compile(line))
        else:
            raise ValueError(f"line {number} has no comment above it that says why: {line}")
    return found


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a file of tests, was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a reason is not on the list."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not (path := os.environ.get("PENSTOCK_ALLOWED_SKIPS")):
        return  # a worker of pytest-xdist reports to the process that has the terminal
    patterns = allowed(Path(path).read_text(encoding="utf-8"))
    reasons = Counter(reason(report) for report in reporter.stats.get("skipped", []))
    refused = Counter({why: n for why, n in reasons.items() if not any(each.fullmatch(why) for each in patterns)})
    session.config.stash[NOT_ALLOWED] = refused
    if refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the reasons that are not on the list."""
    refused = config.stash.get(NOT_ALLOWED, None)
    if not refused:
        return
    terminalreporter.section("skipped for a reason that is not on the list", red=True)
    for why, number in refused.most_common():
        terminalreporter.write_line(f"{number} skipped: {why}")
    terminalreporter.write_line(
        f"Install what is missing, or add the reason to {os.environ['PENSTOCK_ALLOWED_SKIPS']} and say why."
    )
