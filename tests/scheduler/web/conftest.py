"""A browser: Debian's chromium, driven by Playwright. Nothing is downloaded, and it talks to loopback addresses only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--js-flags=--expose-gc",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


def open_browser(playwright: Any, folder: Path, width: int = 1440, height: int = 900, **more: Any) -> Any:
    """A browser with an empty profile in this folder."""
    return playwright.chromium.launch_persistent_context(
        str(folder), executable_path=CHROMIUM, args=list(FLAGS), viewport={"width": width, "height": height}, **more
    )


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as playwright:
        context = open_browser(playwright, tmp_path / "profile")
        try:
            yield context
        finally:
            context.close()
