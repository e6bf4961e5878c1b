"""The web pages in a real browser, beside a real Slurm: what a person sees and does is what happens to the jobs."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from typing import Any

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import DrainOrder
from tests.end_to_end.site import Site
from tests.scheduler.web.conftest import browser

__all__ = ["browser"]

pytestmark = pytest.mark.slurm

WAIT_MS = 240_000
"""The machine may be busy."""


@pytest.fixture
def web(loopback: LoopbackCluster, make_site: Callable[..., Site]) -> tuple[Site, str, Client]:
    """A site with pages, their address, and a client of an admin's."""
    site = make_site(loopback)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    site.api |= {"listen": address}
    site.start()
    return site, f"http://{address}", Client(f"unix:{site.state}/api.sock")


def log_in(page: Any, url: str, penstock: Client, user: str) -> None:
    token = penstock.create_token(TokenOrder(user=user)).token
    page.goto(f"{url}/queue")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Queue").wait_for()


@pytest.mark.long
def test_a_job_is_seen_live_from_sbatch_to_its_end_whatever_happens_to_penstockd(
    web: tuple[Site, str, Client], browser: Any
) -> None:
    site, url, penstock = web
    page = browser.pages[0]
    page.set_default_timeout(WAIT_MS)
    bystander = site.submit(3000, max_gpus=1)
    wait_for(lambda: site.starts(bystander), 120, "the bystander to start", details=site.tail)
    log_in(page, url, penstock, getpass.getuser())
    page.evaluate("window.marked = true")
    penstock.pause(paused=True)
    job = site.submit(90, max_gpus=1, gpu_types=["t4"])
    page.locator(f"#row-{job}").wait_for()
    own = page.context.new_page()
    own.set_default_timeout(WAIT_MS)
    own.goto(f"{url}/jobs/{job}")
    own.evaluate("window.marked = true")
    own.locator("#head").get_by_text("queued").wait_for()
    penstock.pause(paused=False)
    own.locator("#head").get_by_text("running").wait_for()
    first = own.locator("#head a").first.text_content()
    page.bring_to_front()
    page.locator(f"#row-{job}").wait_for(state="detached")
    own.bring_to_front()
    # penstockd dies, and is started again: the page connects again
    site.kill()
    own.get_by_text("The connection is lost").wait_for()
    site.start()
    own.locator("#connection").wait_for(state="hidden")
    # it moves
    penstock.drain(DrainOrder(kind="node", name=first, why="a test"))
    own.locator("#spans").get_by_text("restart: without GPUs for").wait_for()
    own.wait_for_function("first => document.querySelector('#head a')?.textContent !== first", arg=first)
    own.locator("#head").get_by_text("ended COMPLETED").wait_for()
    assert own.evaluate("window.marked === true")
    assert page.evaluate("window.marked === true")
    assert own.locator("#spans tbody tr").count() == 2 == len(site.starts(job))
    assert site.states(job, bystander) == {job: "COMPLETED", bystander: "RUNNING"}
    assert len(site.starts(bystander)) == 1
    penstock.end_drain("node", first)


def test_the_owner_cancels_a_real_job_and_a_stranger_cannot(web: tuple[Site, str, Client], browser: Any) -> None:
    site, url, penstock = web
    page = browser.pages[0]
    page.set_default_timeout(WAIT_MS)
    page.on("dialog", lambda dialog: dialog.accept())
    mine, other = site.submit(3000, max_gpus=1), site.submit(3000, max_gpus=1)
    wait_for(lambda: site.starts(mine) and site.starts(other), 120, "both jobs to start", details=site.tail)
    log_in(page, url, penstock, "somebody")
    page.goto(f"{url}/jobs/{mine}")
    page.get_by_role("heading", name="There is no such page").wait_for()
    status = page.evaluate(f"fetch('/v1/jobs/{mine}/cancel', {{method: 'POST'}}).then(answer => answer.status)")
    assert status in (403, 404)
    page.context.clear_cookies()
    log_in(page, url, penstock, getpass.getuser())
    assert site.states(mine, other) == {mine: "RUNNING", other: "RUNNING"}
    page.goto(f"{url}/jobs/{mine}")
    page.get_by_role("button", name="Cancel").click()
    page.locator("#head").get_by_text("ended CANCELLED").wait_for()
    assert site.states(mine, other) == {mine: "CANCELLED", other: "RUNNING"}
