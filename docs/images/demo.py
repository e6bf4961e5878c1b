"""Draws the README's picture: the two Gantt charts of a report of the demo, in Debian's Chromium.

    script/demo
    python docs/images/demo.py demo-report/index.html

Look at the picture; it is written beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image
from playwright.sync_api import sync_playwright
from tests.scheduler.web.conftest import open_browser


def main() -> None:
    """Draw it."""
    target = Path(__file__).with_suffix(".png")
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as browsers:
        context = open_browser(browsers, Path(profile), 1160, 900)
        page = context.pages[0]
        page.goto(Path(sys.argv[1]).resolve().as_uri())
        first, last = page.locator("h2").first.bounding_box(), page.locator("svg").nth(1).bounding_box()
        top, foot = first["y"] - 8, last["y"] + last["height"]
        page.screenshot(path=target, full_page=True, clip={"x": 0, "y": top, "width": 1160, "height": foot - top})
        context.close()
    Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)


if __name__ == "__main__":
    main()
