"""A job's page: what it shows, and that nothing from outside gets into it as markup."""

from __future__ import annotations

import html.parser

import httpx
import pytest

from penstock_scheduler.messages import AllocationView, ExplanationView, JobView, LogPart, OutcomeView
from penstock_scheduler.model import JobSpec
from penstock_scheduler.service.page import Held, held, render
from tests.scheduler.service.api import serving

TWO = AllocationView(gpu_type="t4", gpus=2, nodes={"n1": 2})
FOUR = AllocationView(gpu_type="a100", gpus=4, nodes={"n2": 4})


def outcome(time_s: float, action: str, where: AllocationView | None, progress: str = "done") -> OutcomeView:
    return OutcomeView(time_s=time_s, round=1, job="1", action=action, progress=progress, allocation=where)


def view(**fields: object) -> JobView:
    return JobView(
        id="1", version=1, user="ada", submit_s=0.0, spec=JobSpec(), **{"name": "n", "state": "running"} | fields
    )


PAST = [
    outcome(10, "start", TWO, "under-way"),
    outcome(20, "start", TWO),
    outcome(50, "migrate", FOUR),
    outcome(70, "hold", None),
]


def test_the_periods_with_gpus_come_from_the_actions_that_were_done():
    moved = [Held(20, 50, TWO), Held(50, 70, FOUR)]
    assert held(view(state="queued"), PAST, 100.0) == moved
    assert held(view(), PAST[:2], 100.0) == [Held(20, 100, TWO)]
    assert held(view(state="ended", end_s=60.0), PAST[:3], 100.0) == [Held(20, 50, TWO), Held(50, 60, FOUR)]
    assert held(view(allocation=TWO, start_s=5.0), [], 100.0) == [Held(5, 100, TWO)]


class Elements(html.parser.HTMLParser):
    """All elements of a page, with those that are left open."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


def test_names_and_output_of_a_job_are_escaped():
    evil = "</pre><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    job = view(name=evil, account=evil, ended=evil)
    part = LogPart(offset=0, next=1, size=1, text=evil, ended=False)
    where = AllocationView(gpu_type=evil, gpus=1, nodes={evil: 1})
    past = [outcome(1, evil, where), outcome(2, "start", where)]
    text = render(job, ExplanationView(job=job, code="x", text=evil, lines=[evil]), past, part, now_s=10.0)
    elements = Elements()
    elements.feed(text)
    assert not {"script", "img", "link", "iframe"} & set(elements.names)
    assert elements.names.count("rect") == 2
    assert text.count("&lt;script&gt;") >= 6


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_the_page_shows_state_explanation_and_output_to_its_owner(api, tmp_path):
    (tmp_path / "1.out").write_text("first\n" + "x" * 20_000 + "\nlast line\n")
    with httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {api.tokens['ada']}"}) as http:
        answer = http.get("/v1/jobs/1/page")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for text in ("Job 1 runs", "2 t4 on t4-00", "last line", "<rect"):
        assert text in answer.text
    assert "first\n" not in answer.text


def test_a_browser_is_asked_for_a_password_which_is_a_token_and_for_nothing_but_pages(api):
    asked = httpx.get(f"{api.url}/v1/jobs/1/page")
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith("Basic ")
    given = ("whoever", api.tokens["ada"])
    assert "Job 1" in httpx.get(f"{api.url}/v1/jobs/1/page", auth=given).text
    assert httpx.get(f"{api.url}/v1/jobs/1/page", auth=("ada", "guess")).status_code == 401
    for method, path in (("GET", "/v1/jobs/1"), ("POST", "/v1/jobs/1/cancel"), ("POST", "/v1/jobs/1/page")):
        refused = httpx.request(method, f"{api.url}{path}", auth=given)
        assert not refused.is_success
        assert "www-authenticate" not in refused.headers
