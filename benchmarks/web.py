"""Load of the web pages: many viewers of a large site, beside one real browser.

    python benchmarks/web.py [--nodes a100:512x8] [--jobs 2000] [--viewers 200] [--changes 4] [--seconds 60]

penstock-api serves, in a process of its own; the site behind it is made up (`tests/scheduler/web/site.py`): every second some
jobs end, as many of those that wait start on their GPUs, and as many are submitted. Half of the viewers look at the cluster, a
quarter at the queue, the others at a job or at the site: each is a connection that reads the page and then its stream. Debian's
Chromium opens the page of the cluster with an empty cache, before the viewers come and again beside them.

All times but `put` are processor time, so that they hold on a machine with other load. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from benchmarks.service import cpu_s, resident_mb
from playwright.async_api import async_playwright
from tests.scheduler.builders import job
from tests.scheduler.web.conftest import CHROMIUM, FLAGS
from tests.scheduler.web.site import USERS, Site, fill, in_states, made_up

from penstock_scheduler.safety import open_files
from penstock_scheduler.simulator import nodes_from_spec

SETTLE_S = 15.0
"""From the last viewer until the measurement begins."""
LOADS = 3
"""Loads of the page in the browser, each with an empty cache."""

WAIT_MS = 600_000
"""The machine may be busy."""

MEASURE = """() => {
  window.took = [];
  const before = window.put;
  window.put = (parts) => {
    const began = performance.now();
    before(parts);
    document.body.offsetHeight; // with style and layout
    window.took.push(performance.now() - began);
  };
}"""


class Churn(threading.Thread):
    """Changes the site once a second until `stop` is set."""

    def __init__(self, site: Site, changes: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._site, self._changes, self._random = site, changes, random.Random(seed)
        self.stop = threading.Event()
        self.changed = 0
        self.failed = ""

    def run(self) -> None:
        """Change it."""
        number = 100_000
        while not self.stop.wait(1.0):
            try:
                for _ in range(self._changes):
                    old = self._random.choice([each for each in self._site.running if each.allocation is not None])
                    self._site.end(old.id)
                    assert old.allocation is not None
                    self._site.start(self._random.choice(self._site.waiting).id, old.allocation)
                    number += 1
                    self._site.submit(job(str(number), user=self._random.choice(USERS)))
                    self.changed += 1
            except Exception as error:
                self.failed = repr(error)
                raise


class Viewer:
    """One open page."""

    def __init__(self, url: str, token: str, path: str) -> None:
        self._url, self._path = url, path
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "text/html"}
        self.events: list[float] = []
        """When its events came."""
        self.bytes = 0
        self.reloads = 0
        self.trouble = ""

    async def watch(self) -> None:
        """Read the page and its events, as a browser does, until cancelled."""
        async with httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=None) as http:
            while True:
                text = (await http.get(self._path)).text
                live, shows = (re.search(rf'data-{name}="([^"]*)"', text) for name in ("live", "shows"))
                if live is None or shows is None:
                    self.trouble = text[:200]
                    return
                address = live[1].replace("&amp;", "&")
                address += ("&" if "?" in address else "?") + f"shows={shows[1]}"
                async with http.stream("GET", address) as stream:
                    async for line in stream.aiter_lines():
                        self.bytes += len(line)
                        if line.startswith("event: parts"):
                            self.events.append(time.monotonic())
                        elif line.startswith("event: reload"):
                            self.reloads += 1
                            break
                        elif line.startswith("event: trouble"):
                            self.trouble = line


def tree_s(marker: str) -> float:
    """Processor time of all processes whose command line has the marker."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                if marker.encode() in (entry / "cmdline").read_bytes():
                    total += cpu_s(int(entry.name))
    return total


async def first_paints(browsers: Any, site: Site, folder: Path, server: int, path: str) -> list[dict[str, float]]:
    """Processor time until the page has been painted for the first time, of the server and of the browser."""
    found = []
    for number in range(LOADS):
        profile = folder / f"profile-{number}-{time.monotonic_ns()}"
        context = await open_browser(browsers, profile)
        page = context.pages[0]
        await log_in(page, site, "oz", "/login")  # an empty page with the style and the scripts of all
        await page.goto("about:blank")
        await asyncio.sleep(1)
        before = cpu_s(server), tree_s(str(profile))
        await page.goto(site.api.url + path, wait_until="load")
        while not await page.evaluate("performance.getEntriesByName('first-contentful-paint').length"):
            await asyncio.sleep(0.01)
        found.append({"server_s": cpu_s(server) - before[0], "browser_s": tree_s(str(profile)) - before[1]})
        await context.close()
    return found


async def open_browser(browsers: Any, profile: Path) -> Any:
    """A browser with an empty profile."""
    context = await browsers.chromium.launch_persistent_context(
        str(profile),
        executable_path=CHROMIUM,
        args=list(FLAGS),
        viewport={"width": 1440, "height": 900},
        timeout=WAIT_MS,
    )
    context.set_default_timeout(WAIT_MS)
    return context


async def log_in(page: Any, site: Site, who: str, path: str) -> None:
    """Log in without showing a page with a map."""
    await page.goto(site.api.url + path)
    body = json.dumps({"token": site.api.tokens[who]})
    order = "body => fetch('/v1/session', {method: 'POST', headers: {'Content-Type': 'application/json'}, body})"
    await page.evaluate(f"{order}.then(answer => answer.status)".replace("body =>", "(body) =>", 1), body)


async def updates(browsers: Any, site: Site, folder: Path, path: str, seconds: float) -> dict[str, float]:
    """What updates of an open page cost in the browser."""
    context = await open_browser(browsers, folder / f"profile-{time.monotonic_ns()}")
    page = context.pages[0]
    await log_in(page, site, "oz", "/login")
    await page.goto(site.api.url + path)
    await page.evaluate(MEASURE)
    cdp = await context.new_cdp_session(page)
    await cdp.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def metrics() -> dict[str, float]:
        return {each["name"]: each["value"] for each in (await cdp.send("Performance.getMetrics"))["metrics"]}

    before = await metrics()
    await asyncio.sleep(seconds)
    after, took = await metrics(), await page.evaluate("window.took")
    await context.close()
    parts = {
        "main_thread": "TaskDuration",
        "script": "ScriptDuration",
        "style": "RecalcStyleDuration",
        "layout": "LayoutDuration",
    }
    spent_ms = {f"{name}_ms_each": 1000 * (after[key] - before[key]) / max(len(took), 1) for name, key in parts.items()}
    return {
        "updates": len(took),
        "put_p50_ms": round(statistics.median(took or [0.0]), 1),
        "put_p95_ms": round(sorted(took or [0.0])[int(len(took) * 0.95)], 1) if took else 0.0,
        "put_max_ms": round(max(took or [0.0]), 1),
        **{name: round(value, 1) for name, value in spent_ms.items()},
    }


async def measure(site: Site, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, one after the other."""
    server = site.api.process.process.pid  # type: ignore[union-attr]
    assert server is not None
    chance, found = random.Random(arguments.seed), {}
    async with async_playwright() as browsers:
        found["first_paint_alone"] = await first_paints(browsers, site, folder, server, "/cluster")
        churn = Churn(site, arguments.changes, arguments.seed)
        churn.start()
        viewers = [
            Viewer(site.api.url, site.api.tokens[who], path)
            for who, path in drawn_viewers(site, arguments.viewers, chance)
        ]
        tasks = [asyncio.create_task(viewer.watch()) for viewer in viewers]
        await asyncio.sleep(SETTLE_S)
        began_s, changed = time.monotonic(), churn.changed
        before_s = cpu_s(server)
        shown = await updates(browsers, site, folder, "/cluster", arguments.seconds)
        length_s = time.monotonic() - began_s
        found |= {
            "api_cores": round((cpu_s(server) - before_s) / length_s, 3),
            "api_memory_mb": round(resident_mb(server), 1),
            "browser": shown,
            "changes_per_s": round((churn.changed - changed) / length_s, 2),
        }
        for kind in ("/cluster", "/queue", "/jobs", "/site"):
            mine = [viewer for viewer in viewers if viewer._path.startswith(kind)]
            count = [sum(at >= began_s for at in viewer.events) for viewer in mine]
            found[f"events_per_min_{kind[1:]}"] = round(60 * statistics.mean(count or [0]) / length_s, 1)
            found[f"kb_per_viewer_{kind[1:]}"] = round(statistics.mean([each.bytes for each in mine] or [0]) / 1000, 1)
        found["reloads"] = sum(viewer.reloads for viewer in viewers)
        found["first_paint_beside"] = await first_paints(browsers, site, folder, server, "/cluster")
        churn.stop.set()
        found["failed"] = churn.failed or next((viewer.trouble for viewer in viewers if viewer.trouble), "")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def drawn_viewers(site: Site, count: int, chance: random.Random) -> list[tuple[str, str]]:
    """(who, page) of each viewer."""
    found = []
    for number in range(count):
        kind = ("/cluster", "/queue", "/cluster", "/jobs")[number % 4] if number % 20 else "/site"
        who = (
            ("oz", "boss")[number % 2] if kind in ("/jobs", "/site") else ("ada", "bob", "oz", "boss")[number // 4 % 4]
        )
        found.append((who, f"/jobs/{chance.choice(site.running).id}" if kind == "/jobs" else kind))
    return found


def summary(paints: Sequence[dict[str, float]]) -> str:
    """The first paint in words."""
    both = [each["server_s"] + each["browser_s"] for each in paints]
    parts = [statistics.median(each[name] for each in paints) for name in ("server_s", "browser_s")]
    return f"{statistics.median(both):.2f} s (server {parts[0]:.2f}, browser {parts[1]:.2f}; most {max(both):.2f})"


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="a100:512x8")
    parser.add_argument("--jobs", type=int, default=2000, help="running and waiting")
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument(
        "--changes", type=int, default=4, help="jobs that end, start and are submitted in a second, each"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    open_files.raise_limit()
    nodes = in_states(nodes_from_spec(arguments.nodes))
    running = len(fill(nodes, arguments.jobs)[0])
    with tempfile.TemporaryDirectory(prefix="penstock-web-") as name:
        settings = {"requests_per_s": 1e9, "separate": True}
        waiting = arguments.jobs - running
        with made_up(Path(name) / "site", arguments.nodes, arguments.jobs, waiting, **settings) as site:
            found = asyncio.run(measure(site, Path(name), arguments))
    found |= {
        "gpus": sum(node.gpus for node in nodes),
        "kinds": dict(Counter(running=running, waiting=waiting)),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
    } | vars(arguments)
    print(f"first paint alone:  {summary(found['first_paint_alone'])}")
    print(f"first paint beside: {summary(found['first_paint_beside'])}")
    print(f"an update: {found['browser']}")
    print(f"penstock-api: {found['api_cores']} cores with {arguments.viewers} viewers")
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
