"""Draws the pictures of the web pages in Debian's Chromium, at three widths: those of a made-up site, and a job of a playground.

    penstock playground up; sleep 300
    python docs/images/web.py FOLDER http://127.0.0.1:PORT TOKEN JOB

FOLDER gets each page at each width, light and dark: look at all of them. The documentation's are written beside this
file; they are cut to a screen, and have 256 colours.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image
from playwright.sync_api import sync_playwright
from tests.scheduler.web.conftest import open_browser
from tests.scheduler.web.site import made_up

WIDTHS = (1440, 800, 390)
PAGES = {
    "cluster": "/cluster",
    "type": "/cluster?type=a100",
    "node": "/cluster?node=a100-01",
    "queue": "/queue",
    "running": "/queue?state=running",
    "site": "/site",
}
HERE = Path(__file__).parent


def draw(browsers: Any, profiles: Path, folder: Path, url: str, token: str, pages: Mapping[str, str]) -> None:
    """Each page in light and in dark, at each width."""
    for width in WIDTHS:
        context = open_browser(browsers, profiles / f"{abs(hash(url))}-{width}", width, 900 if width > 400 else 844)
        page = context.pages[0]
        page.goto(f"{url}/login")
        page.screenshot(path=folder / f"login-{width}.png")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/cluster*")
        for name, path in pages.items():
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.goto(url + path)
                page.wait_for_timeout(1500)
                mark = "" if scheme == "light" else "-dark"
                page.screenshot(path=folder / f"{name}-{width}{mark}.png", full_page=True)
                if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                    sys.stderr.write(f"{name} at {width}: the page is {wide} wide\n")
        context.close()


def save(name: str, pictures: Sequence[Path], tall: int, gap: int = 24) -> None:
    """Pictures side by side as one of the documentation's, the upper `tall` rows of each."""
    shown = [Image.open(path).convert("RGB") for path in pictures]
    shown = [each.crop((0, 0, each.width, min(tall, each.height))) for each in shown]
    whole = Image.new(
        "RGB",
        (sum(each.width for each in shown) + gap * (len(shown) - 1), max(each.height for each in shown)),
        "#d0d5dd",
    )
    left = 0
    for each in shown:
        whole.paste(each, (left, 0))
        left += each.width + gap
    whole.quantize(256).save(HERE / f"{name}.png", optimize=True)


def main() -> None:
    """Draw all of them."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as browsers:
        profiles = Path(temporary)
        with made_up(profiles / "site") as site:
            draw(browsers, profiles, folder, site.api.url, site.api.tokens["boss"], PAGES)
        url, token, job = sys.argv[2:5]
        draw(browsers, profiles, folder, url, token, {"job": f"/jobs/{job}"})
    for name in ("cluster", "queue", "site"):
        save(f"web-{name}", [folder / f"{name}-1440.png"], 1150)
    save("web-job", [folder / "job-1440.png"], 1660)
    save("web-tablet", [folder / "job-800-dark.png", folder / "node-800.png"], 1000)
    save("web-phone", [folder / f"{name}-390.png" for name in ("cluster", "queue", "job")], 844)


if __name__ == "__main__":
    main()
