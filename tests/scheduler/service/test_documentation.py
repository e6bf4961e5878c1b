"""docs/user/api.md lists the endpoints, the error codes and the bodies that the API has, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_scheduler.api import (
    access_messages,
    health_messages,
    history_messages,
    lease_messages,
    ledger_messages,
    messages,
    model_messages,
    whatif_messages,
)
from penstock_scheduler.daemon.service import app
from tests.scheduler.service.api import serving

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs/user/api.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, as cells."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, dict[str, object]]:
    with serving(tmp_path_factory.mktemp("api")) as api:
        return api.app.openapi()["paths"]


def test_every_endpoint_is_on_the_page(paths):
    listed = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /v1/\S+)`", "\n".join(row[0] for row in table("Endpoints"))))
    there = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {re.sub(r"\{\w+\}", "{}", each) for each in listed - {"GET /v1/openapi.json"}} == {
        re.sub(r"\{\w+\}", "{}", each) for each in there
    }


def test_every_error_code_is_on_the_page():
    listed = {(row[0], code) for row in table("Errors") for code in re.findall(r"`([a-z-]+)`", row[1])}
    folder = Path(app.__file__).parent
    source = "\n".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    used = set(re.findall(r"\b([45]\d\d),\s+\"([a-z-]+)\"", source)) | set(
        re.findall(r"\b(4\d\d): \"([a-z-]+)\"", source)
    )
    assert used >= {("404", "no-such-job"), ("404", "no-such-path"), ("503", "store-away")}, "the patterns find them"
    assert listed == used | {("400", "bad-request")}


def test_every_body_on_the_page_is_one():
    named = {name for row in table("Endpoints") for name in re.findall(r"`([A-Z]\w+)`", row[2])}
    assert named
    modules = (
        messages,
        access_messages,
        health_messages,
        history_messages,
        ledger_messages,
        lease_messages,
        model_messages,
        whatif_messages,
    )
    assert [name for name in sorted(named) if not any(hasattr(module, name) for module in modules)] == []
