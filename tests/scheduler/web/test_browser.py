"""The pages in a real browser: what a person sees and does, without ever loading a page anew."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_scheduler.api.ports import Fate, Owned
from penstock_scheduler.daemon.service.publisher import Publisher
from penstock_scheduler.daemon.service.whatif import WhatIfTasks
from penstock_scheduler.model import Job
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ME
from tests.scheduler.test_whatif import record
from tests.scheduler.web.site import Site, made_up, span_of

PATHS = ("/cluster", "/cluster?type=t4", "/cluster?node=t4-00", "/queue", "/queue?state=running")
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
WAIT_MS = 60_000
"""The machine may be busy."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with made_up(tmp_path / "site", "t4:4x4,a100:2x8", running=8, waiting=6) as site:
        yield site


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, wrong = browser.pages[0], []
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    yield page
    assert wrong == []


def log_in(site: Site, page: Any, who: str, path: str) -> None:
    """As a person does: open a page, and enter a token."""
    page.goto(site.api.url + path)
    page.get_by_label("Token").fill(site.api.tokens[who])
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"**{path.partition('?')[0]}*")


def mark(page: Any) -> None:
    """A mark that is gone once the page has been loaded anew."""
    page.evaluate("window.marked = true")


def is_marked(page: Any) -> bool:
    return bool(page.evaluate("window.marked === true"))


def test_a_job_appears_in_the_queue_starts_moves_and_ends_without_a_reload(site, page):
    log_in(site, page, "ada", "/queue")
    mark(page)
    page.get_by_text("5000").wait_for()
    site.submit(dataclasses.replace(job("6100", user="ada"), name="mine"), text="waits for 2 t4")
    page.locator("#row-6100").get_by_text("waits for 2 t4").wait_for()
    # the same job on its own page, and on the map
    other = page.context.new_page()
    other.set_default_timeout(WAIT_MS)
    other.goto(f"{site.api.url}/jobs/6100")
    mark(other)
    other.locator("#head").get_by_text("queued").wait_for()
    site.start("6100", on("t4", t4_03=2))
    page.locator("#row-6100").wait_for(state="detached")
    other.bring_to_front()
    other.locator("#head").get_by_text("running").wait_for()
    other.locator("#strip rect.block").wait_for()
    # it moves: another span, on another node
    moved = dataclasses.replace(site.running[-1], allocation=on("t4", t4_02=1), restarts=1)
    site.end("6100", "growth", "another configuration is faster")
    site.running.append(moved)
    site.api.board.store.save_spans([span_of(moved, time.time(), run_s=time.time(), cause="growth: it is faster here")])
    site.look()
    other.locator("#spans").get_by_text("another configuration is faster").wait_for()
    other.locator("#spans").get_by_text("without GPUs for").wait_for()
    # it ends
    site.end("6100")
    site.api.submitter.ended["6100"] = fate()
    site.look()
    other.locator("#head").get_by_text("ended COMPLETED").wait_for()
    assert other.locator("#actions button").count() == 0
    assert is_marked(page)
    assert is_marked(other)


def fate() -> Any:
    return Fate("COMPLETED", 0, None)


def test_its_owner_cancels_a_job_and_a_stranger_cannot(site, page):
    new = job("6200", user="ada")
    site.submit(new)
    log_in(site, page, "ada", "/jobs/6200")
    page.get_by_role("button", name="Hold").click()
    page.locator("#message").get_by_text("has ended").wait_for()  # the cluster does not know it
    assert not site.api.submitter.held
    site.api.submitter.owners["6200"] = Owned("ada", 4001, 0, new.submit_s)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Hold").click()
    page.locator("#message").get_by_text("is held").wait_for()
    assert site.api.submitter.held == {"6200": ("ada", False)}
    page.get_by_role("button", name="Release").click()
    page.locator("#message").get_by_text("is released").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.locator("#message").get_by_text("being cancelled").wait_for()
    assert site.api.submitter.cancelled == ["6200"]
    # a stranger, in the same browser after a log-out
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Token").wait_for()
    log_in(site, page, "bob", "/queue")
    page.goto(f"{site.api.url}/jobs/6200")
    assert page.get_by_role("heading").first.text_content() == "There is no such page"
    status = page.evaluate("fetch('/v1/jobs/6200/cancel', {method: 'POST'}).then(answer => answer.status)")
    assert status in (403, 404)
    assert site.api.submitter.cancelled == ["6200"]


def test_a_wrong_token_says_so_and_a_session_that_ends_leads_to_the_log_in(site, page):
    page.goto(f"{site.api.url}/cluster")
    page.get_by_label("Token").fill("penstock_wrong_token")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("unknown or revoked").wait_for()
    page.get_by_label("Token").fill(site.api.tokens["ada"])
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Cluster").wait_for()
    page.context.clear_cookies()
    page.evaluate("source.close(); listen()")  # as when the stream ends and begins again
    page.get_by_label("Token").wait_for()


def test_the_map_shows_a_job_on_hover_and_goes_from_type_to_node_to_gpu_with_the_keyboard(site, page):
    log_in(site, page, "ada", "/cluster")
    cell = page.locator("#map [data-job]").first
    cell.hover()
    page.locator("#tip").wait_for(state="visible")
    assert cell.get_attribute("data-job") in page.locator("#tip").inner_text()
    first = page.locator("#map a.node").first
    first.focus()
    page.keyboard.press("ArrowRight")
    named = page.evaluate("document.activeElement.querySelector('.name').textContent")
    assert named == page.locator("#map a.node .name").nth(1).text_content()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"Node {named}").wait_for()
    assert page.locator("#gpus li").count() == 8


def test_the_slider_replays_the_day_and_comes_back(site, page):
    log_in(site, page, "oz", "/cluster")
    before = page.locator("#map").inner_html()
    slider = page.get_by_role("slider", name="Time")
    slider.fill("-1440")
    page.get_by_text("Penstock's jobs as they were").wait_for()
    page.locator('#map [data-job="1000"]').first.wait_for(state="detached")
    slider.fill("0")
    page.locator('#map [data-job="1000"]').first.wait_for()
    assert page.locator("#map").inner_html().count("data-job") == before.count("data-job")


def test_with_n_gpus_of_a_type_the_page_says_how_fast_and_until_when(site, page):
    name = site.waiting[0].id
    log_in(site, page, "oz", f"/jobs/{name}")
    text = page.locator("#what-text")
    text.wait_for()
    was = text.inner_text()
    page.get_by_label("GPUs", exact=True).fill("3")
    page.wait_for_function("was => document.getElementById('what-text').textContent !== was", arg=was)
    assert "samples/s" in text.inner_text()


def test_the_output_follows_live(site, page):
    name = next(each for each in site.running if each.user == "ada").id
    file = site.api.submitter.folder / f"{name}.out"
    file.write_text("step 1\n")
    site.api.submitter.jobs[name] = (ME, None)
    log_in(site, page, "ada", f"/jobs/{name}")
    page.locator("#log").get_by_text("step 1").wait_for()
    with file.open("a") as more:
        more.write("<b>step 2</b>\n")
    page.locator("#log").get_by_text("<b>step 2</b>").wait_for()  # as text


def test_a_restart_of_the_api_leaves_no_gap_and_nothing_twice(tmp_path, page):
    with made_up(tmp_path / "site", "t4:4x4", running=4, waiting=3, separate=True) as site:
        log_in(site, page, "ada", "/queue")
        mark(page)
        page.locator("#row-5000").wait_for()
        site.api.process.kill()
        page.get_by_text("The connection is lost").wait_for()
        site.submit(job("6300", user="ada"), text="waits while nobody listens")
        site.api.process.start()
        page.locator("#row-6300").get_by_text("waits while nobody listens").wait_for()
        page.locator("#connection").wait_for(state="hidden")
        assert (
            page.locator("#rows tr").count()
            == 4
            == page.evaluate("new Set([...document.querySelectorAll('#rows tr')].map(e => e.id)).size")
        )
        # penstockd is away: the page says so, and when it is back
        site.api.publisher.stop()
        page.get_by_text("penstockd has been silent since").wait_for()
        again = Publisher(site.api.board, site.api.publisher._chosen, site.api.publisher._tokens)
        again.start()
        page.get_by_text("penstockd has been silent since").wait_for(state="detached")
        assert is_marked(page)
        again.stop()


def test_an_admin_drains_a_node_pauses_the_rounds_and_chooses_the_policy(site, page):
    page.on("dialog", lambda dialog: dialog.accept())
    log_in(site, page, "boss", "/site")
    mark(page)
    form = page.locator("form[data-send='POST /v1/drains']").first
    form.get_by_label("Node").select_option("t4-01")
    form.get_by_label("Why").fill("a <b>fan</b>")
    form.get_by_role("button", name="Drain").click()
    page.locator("#drains").get_by_text("a <b>fan</b>").wait_for()
    assert [drain.name for drain in site.api.client("boss").drains()] == ["t4-01"]
    page.get_by_role("button", name="End the drain").click()
    page.get_by_text("Nothing is drained by Penstock").wait_for()
    page.get_by_role("button", name="Pause the rounds").click()
    page.get_by_text("An admin has paused the rounds").wait_for()
    assert site.api.changes["paused"] is True
    page.get_by_role("button", name="Resume the rounds").click()
    page.get_by_role("button", name="Pause the rounds").wait_for()
    choice = page.locator("form[data-send='PUT /v1/policy']")
    choice.get_by_label("Policy").select_option("las")
    choice.get_by_role("button", name="Choose").click()
    page.get_by_text("las decides").wait_for()
    assert is_marked(page)


def test_an_operator_asks_what_would_be_and_sees_it_beside_what_happened(tmp_path, page):
    record(tmp_path / "recorded")
    with made_up(tmp_path / "site", "t4:2x4", running=2, waiting=2) as site:
        site.api.app.state.api._whatif = WhatIfTasks(str(tmp_path / "recorded"))
        log_in(site, page, "oz", "/site")
        form = page.locator("#whatif")
        form.get_by_label("Period").select_option("")
        form.get_by_label("Policy").select_option("fifo")
        form.get_by_label("Add nodes").fill("no<b>nodes</b>")
        form.get_by_role("button", name="Replay").click()
        page.locator("#message").get_by_text("no<b>nodes</b>").wait_for()
        form.get_by_label("Add nodes").fill("a100:1x4")
        form.get_by_role("button", name="Replay").click()
        page.locator("#replays").get_by_text("fifo, with a100:1x4 more (oz): done").wait_for(timeout=300_000)
        row = page.locator("#replays tr").filter(has_text="average time from submission to end")
        task = site.api.client("oz")._json("GET", "/v1/whatif")[0]["id"]
        figures = site.api.client("oz").whatif_task(task).result["policies"]
        shown = [float(text.split()[0]) for text in row.locator("td.n").all_inner_texts()]
        assert shown == [pytest.approx(figures[name]["mean"]["avg_jct_h"], rel=0.01) for name in figures]
        page.get_by_role("button", name="Forget").click()
        row.wait_for(state="detached")
        site.api.app.state.api._whatif.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(site, page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{site.api.url}/login")
    found = {"/login": violations(page)}
    log_in(site, page, "boss", "/cluster")
    running = next(each.id for each in site.running)
    for path in (
        "/cluster",
        "/cluster?type=t4",
        "/cluster?node=t4-00",
        "/queue",
        "/queue?state=running",
        f"/jobs/{running}",
        "/site",
    ):
        page.goto(site.api.url + path)
        page.wait_for_timeout(300)
        found[path] = violations(page)
    assert {path: bad for path, bad in found.items() if bad} == {}


def violations(page: Any) -> list[str]:
    """What axe-core finds on a page, of serious or critical impact."""
    with contextlib.suppress(Exception):
        page.wait_for_load_state("load")
    page.evaluate(AXE.read_text())
    results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]} {each['nodes'][0].get('failureSummary', '')[:300]}"
        for each in results["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.long
def test_200_s_of_updates_leak_no_memory(site, page):
    log_in(site, page, "ada", "/queue")
    cdp = page.context.new_cdp_session(page)

    def used_mib() -> float:
        page.evaluate("gc()")
        cdp.send("HeapProfiler.collectGarbage")
        metrics = {each["name"]: each["value"] for each in cdp.send("Performance.getMetrics")["metrics"]}
        return metrics["JSHeapUsedSize"] / 2**20 + metrics["Nodes"] / 10_000

    cdp.send("Performance.enable")
    figures, until_s, number = [], time.monotonic() + 200, 0
    while time.monotonic() < until_s:
        number += 1
        new: Job = job(str(70_000 + number), user="ada")
        site.submit(new)
        site.waiting = [each for each in site.waiting if each.id != str(70_000 + number - 5)]
        store = site.api.board.store
        gone = [entry for entry in store.waits() if entry.job == str(70_000 + number - 5)]
        store.save_waits([], {(entry.job, entry.since_s): time.time() for entry in gone})
        site.look()
        page.locator(f"#row-{new.id}").wait_for()
        if number % 10 == 0:
            figures.append(used_mib())
    half = len(figures) // 2
    assert len(figures) >= 6
    assert min(figures[half:]) < 1.15 * min(figures[:half]) + 1.0, figures


def test_a_chart_says_its_newest_figures_until_somebody_points_at_it(site, page):
    log_in(site, page, "oz", "/site")
    legend = page.locator("figure.chart[data-lines='running,queued'] .u-legend")
    legend.get_by_text("60 jobs").wait_for()  # as in the site's samples
    page.locator("figure.chart[data-lines='running,queued'] .u-over").hover()
    page.mouse.move(0, 0)
    legend.get_by_text("60 jobs").wait_for()


def test_on_a_phone_no_page_is_wider_than_the_screen(site, page):
    page.set_viewport_size({"width": 390, "height": 844})
    log_in(site, page, "boss", "/cluster")
    for path in (*PATHS, f"/jobs/{site.running[0].id}", "/site"):
        page.goto(site.api.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    page.goto(site.api.url + "/queue")
    # a name is broken at a hyphen or not at all
    assert (
        page.evaluate(
            "Math.min(...[...document.querySelectorAll('#rows .job-name')].map(each => each.getBoundingClientRect().width))"
        )
        > 40
    )
