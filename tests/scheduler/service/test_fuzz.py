"""Requests that schemathesis makes from the OpenAPI document."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings

from tests.scheduler import databases
from tests.scheduler.service.api import serving


def fuzz(api, examples: int) -> None:
    """No answer to any request of the document is a 500, and each is of the form that the document says."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{api.url}/v1/openapi.json")
    asked, answers = 0, Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/events":
            continue  # it never ends

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @hypothesis.given(case=operation.as_strategy())
        def check(case):
            nonlocal asked
            asked += 1
            # Reports are their owner's alone to make; job tokens make nothing else.
            roles = ("ada", "job 1") if case.path.endswith("/reports") else ("boss", "oz", "ada", "job 1")
            who = roles[asked // 2 % len(roles)]
            case.headers = dict(case.headers or {}) | {"Authorization": f"Bearer {api.tokens[who]}"}
            case.query = {name: value for name, value in (case.query or {}).items() if name != "wait"}
            if asked % 2:  # no generator finds the job and the round that are there
                there = {"job": "1", "number": 1, "kind": "node", "name": "t4-01"}
                case.path_parameters = {
                    name: there.get(name, value) for name, value in (case.path_parameters or {}).items()
                }
            answer = case.call(base_url=api.url, timeout=30)
            assert answer.status_code < 500, (who, case.method, case.path, answer.text)
            answers[who, answer.status_code // 100] += 1

        check()
    assert {who for who, _ in answers} == {"boss", "oz", "ada", "job 1"}
    assert all(answers[who, 2] for who in ("boss", "oz", "ada", "job 1")), "some are requests that are carried out"
    print(asked, dict(answers))
    return asked


def test_200_generated_requests_meet_no_server_error(tmp_path):
    with serving(tmp_path, requests_per_s=1e6, burst=10**6) as api:
        assert fuzz(api, 12) >= 200


@pytest.mark.long
@pytest.mark.parametrize("where", ["sqlite", "postgresql, separate"])
def test_10000_generated_requests_meet_no_server_error(tmp_path, where):
    with ExitStack() as stack:
        settings: dict[str, Any] = {"requests_per_s": 1e6, "burst": 10**6}
        if where != "sqlite":
            if not databases.available():
                pytest.skip(databases.REASON)
            settings |= {"at": databases.new_database(stack.enter_context(databases.postgresql())), "separate": True}
        api = stack.enter_context(serving(tmp_path, **settings))
        assert fuzz(api, 800) >= 10_000
