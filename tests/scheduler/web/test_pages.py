"""The pages over HTTP: who sees what, and that nothing from outside becomes markup."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock_scheduler.api.health_messages import LeaderHealth, StandbyHealth
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.daemon.service.web.render import safe
from penstock_scheduler.model import Refusal
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ME
from tests.scheduler.web.site import Site, made_up, span_of

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"
PAGES = ("/cluster", "/cluster?type=t4", "/cluster?node=t4-00", "/queue", "/queue?state=running", "/queue?state=refused",
         "/queue?state=ended")  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made_up(tmp_path_factory.mktemp("site"), "t4:3x4,a100:2x8", running=12, waiting=6) as site:
        yield site


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Site]:
    with made_up(tmp_path, "t4:3x4", running=6, waiting=6, private_data=["jobs", "usage"]) as site:
        yield site


def get(site: Site, who: str | None, path: str, **headers: str) -> httpx.Response:
    given = {"Accept": "text/html"} | ({} if who is None else {"Authorization": f"Bearer {site.api.tokens[who]}"})
    return httpx.get(site.api.url + path, headers=given | headers, timeout=60)


def of(site: Site, user: str) -> str:
    """A running job of a user."""
    return next(each.id for each in site.running if each.user == user)


def test_a_page_runs_only_the_scripts_of_the_package(site):
    for path in (*PAGES, "/login", f"/jobs/{of(site, 'ada')}"):
        answer = get(site, "ada", path)
        assert answer.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src", "form-action")} == {
            "'self'"
        }
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|https?://|javascript:", answer.text), (
            path
        )


def test_every_file_that_a_page_names_is_there(site):
    text = get(site, "ada", f"/jobs/{of(site, 'ada')}").text
    names = re.findall(r'(?:src|href)="(/static/[^"]+)"', text)
    assert len(names) >= 7
    for name in names:
        answer = httpx.get(site.api.url + name)  # also without a log-in: the log-in page needs them
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    for name in ("/static/../pages.py", "/static/%2e%2e/pages.py", "/static/none.js", "/static/"):
        assert httpx.get(site.api.url + name).status_code in (401, 404)


def test_who_is_not_logged_in_gets_to_the_log_in_and_back(site):
    answer = get(site, None, "/jobs/12?x=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fjobs%2F12%3Fx%3D1")
    assert 'data-next="/jobs/12"' in get(site, None, "/login?next=%2Fjobs%2F12").text
    link = get(site, None, "/v1/jobs/12/page")  # links in Airflow and in mails
    assert (link.status_code, link.headers["location"]) == (303, "/login?next=%2Fjobs%2F12")
    assert get(site, None, "/v1/jobs/12").status_code == 401  # a program gets JSON
    assert httpx.get(f"{site.api.url}/cluster/live").status_code == 401


@pytest.mark.parametrize("there", ["//evil.example", "/\\evil.example", "https://evil.example", "javascript:alert(1)",
                                   "/login?next=/", "", "/\t/evil.example"])  # fmt: skip
def test_the_log_in_goes_only_to_pages_of_this_site(there):
    assert safe(there) == "/"
    assert safe("/jobs/12?x=1") == "/jobs/12?x=1"


def test_the_old_address_of_a_jobs_page_leads_to_it(site):
    name = of(site, "ada")
    assert get(site, "ada", f"/v1/jobs/{name}/page").headers["location"] == f"/jobs/{name}"
    assert get(site, "ada", f"/v1/jobs/{of(site, 'bob')}/page").status_code == 404


def test_a_job_of_another_user_has_no_page_and_no_stream(site):
    name = of(site, "bob")
    for path in (f"/jobs/{name}", f"/jobs/{name}/live", "/jobs/none"):
        assert get(site, "ada", path).status_code == 404
    assert get(site, "oz", f"/jobs/{name}").status_code == 200


def test_of_other_users_jobs_only_what_squeue_shows_reaches_the_browser(site):
    text = get(site, "ada", "/queue").text
    others = [entry for entry in site.api.board.store.waits() if entry.user != "ada" and entry.code != "refused"]
    assert others
    assert all(f'id="row-{entry.job}"' in text and f"/jobs/{entry.job}" not in text for entry in others)
    mine = [each.id for each in site.waiting if each.user == "ada"]
    assert text.count("starts with") == len(mine)
    assert sorted(re.findall(r'href="/jobs/([^"]+)#explain"', text)) == sorted(mine)
    assert 'id="explain"' in get(site, "ada", f"/jobs/{mine[0]}").text
    assert "give 1 or more" not in get(site, "ada", "/queue?state=refused").text
    assert "give 1 or more" in get(site, "bob", "/queue?state=refused").text
    assert "give 1 or more" in get(site, "oz", "/queue?state=refused").text


def test_with_private_data_other_users_jobs_do_not_reach_the_browser(private):
    others = {each.user for each in (*private.running, *private.waiting)} - {"ada"}
    for path in PAGES:
        text = get(private, "ada", path).text
        assert not any(re.search(rf"\b{user}\b", text) for user in others), path
        assert not [each.id for each in (*private.running, *private.waiting) if each.user != "ada" and each.id in text]
    held = get(private, "ada", "/cluster").text
    assert "hidden-job" in held  # their GPUs are not free
    past = get(private, "ada", "/cluster/at?ago=60").json()
    jobs = set(re.findall(r'data-job="([^"]+)"', "".join(past.values())))
    assert jobs <= {each.id for each in private.running if each.user == "ada"} | {"8002"}
    assert any(user in get(private, "oz", "/cluster").text for user in others)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Site]:
    """A site of its own: its names break other tests' patterns."""
    with made_up(tmp_path, "t4:3x4,a100:2x8", running=12, waiting=6) as site:
        yield site


def test_markup_from_outside_is_text_everywhere(hostile):
    site = hostile
    users, texts = EVIL[:60], EVIL
    evil = dataclasses.replace(job("66", user=users, account=EVIL), name=EVIL)
    site.submit(evil, text=texts)
    name = of(site, "ada")
    site.api.submitter.jobs[name] = (ME, Submission(command=("x",)))
    site.refused = (*site.refused, Refusal("67", EVIL, EVIL, EVIL))
    running = dataclasses.replace(job("68", user=EVIL, allocation=on("t4", t4_02=1)), name=EVIL)
    site.running.append(running)
    site.api.board.store.save_spans([span_of(running, 1.0, cause=EVIL, end_text=EVIL, gpu_type=EVIL)])
    site.look()
    for path in (
        *PAGES,
        "/site",
        "/jobs/66",
        "/jobs/68",
        "/queue?user=" + EVIL,
        "/cluster?node=" + EVIL,
        "/cluster?type=" + EVIL,
    ):
        text = get(site, "oz", path).text
        assert "<script>alert" not in text, path
        assert "<img" not in text, path
        assert "onerror=alert(2)>" not in text, path
    for path in ("/jobs/<script>alert(1)</script>", "/<script>alert(1)</script>"):
        assert "<script>alert" not in get(site, "oz", path).text


def first_events(site: Site, who: str, path: str, count: int = 1, **headers: str) -> list[str]:
    """The first events of a page's stream."""
    given = {"Authorization": f"Bearer {site.api.tokens[who]}"} | headers
    with httpx.stream("GET", site.api.url + path, headers=given, timeout=60) as answer:
        assert answer.status_code == 200
        found, text = [], ""
        for piece in answer.iter_text():
            text += piece
            *whole, text = text.split("\n\n")
            found += [event for event in whole if "data:" in event]
            if len(found) >= count:
                return found
    raise AssertionError(f"the stream ended after {found}")


def parts(event: str) -> dict[str, str]:
    return json.loads(event.partition("data: ")[2])


def test_a_stream_begins_with_the_page_as_it_is_and_sends_what_changes(site):
    (event,) = first_events(site, "oz", "/queue/live")
    assert set(parts(event)) >= {"rows", "counts", "more", "status"}
    assert site.waiting[0].id in parts(event)["rows"]
    with pytest.raises(httpx.HTTPStatusError):
        get(site, "ada", "/jobs/none/live").raise_for_status()


def test_the_stream_of_a_page_that_was_just_opened_sends_only_what_is_new(site):
    text = get(site, "oz", "/queue").text
    shows = re.search(r'data-shows="([^"]+)"', text)
    assert shows is not None
    site.submit(job("6001", user="ada"))
    (event,) = first_events(site, "oz", f"/queue/live?shows={shows[1]}")
    assert set(parts(event)) == {"rows", "counts"}
    assert "6001" in parts(event)["rows"]


def test_an_error_is_a_page_for_people_and_json_for_programs(site):
    page = get(site, "ada", "/nothing")
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    data = httpx.get(f"{site.api.url}/nothing", headers={"Authorization": f"Bearer {site.api.tokens['ada']}"})
    assert data.json()["error"]["code"] == "no-such-path"
    assert get(site, "job 1", "/cluster").status_code == 403


def test_each_page_says_which_penstockd_leads_where_there_are_several(private, monkeypatch):
    assert "leads" not in get(private, "ada", "/queue").text, "one penstockd needs no such line"
    standbys = [
        StandbyHealth(name="head2", version="0.1.0", seen_age_s=1.0, since_age_s=60.0, lag=3),
        StandbyHealth(name="head3", version="0.1.0", seen_age_s=90.0, since_age_s=600.0, lag=0),
    ]
    leader = LeaderHealth(
        here=True, name="head1", number=4, version="0.1.0", since_age_s=60.0, lease_age_s=0.2, standbys=standbys
    )
    monkeypatch.setattr(private.api.vitals, "leader", lambda: leader)
    shown = ""
    for _ in range(100):
        if "head1 leads since" in (shown := get(private, "ada", "/queue").text):
            break
        time.sleep(0.2)
    assert "(term 4, confirmed within 1 s)" in shown
    assert "head2 stands by, 3 rounds behind." in shown
    assert "head3 has not been heard of for" in shown
