"""Limits on the size and the rate of requests."""

from __future__ import annotations

import httpx

from penstock_scheduler.daemon.service.guard import Bucket
from tests.scheduler.service.api import serving


def test_requests_over_a_limit_are_refused(tmp_path):
    with serving(tmp_path, requests_per_s=0.01, burst=20, submissions_per_hour=1) as api:
        headers = {"Authorization": f"Bearer {api.tokens['me']}"}

        def post(body: bytes) -> httpx.Response:
            return httpx.post(
                f"{api.url}/v1/jobs", content=body, headers=headers | {"Content-Type": "application/json"}
            )

        assert post(b"x" * (3 * 1024 * 1024)).status_code == 413
        assert post(b'{"command": ["a"]}').status_code == 201
        late = post(b'{"command": ["b"]}')
        assert (late.status_code, late.json()["error"]["code"]) == (429, "too-many")
        for _ in range(20):
            late = post(b"{}")
        assert late.status_code == 429
        assert int(late.headers["Retry-After"]) > 1


def test_a_bucket_fills_again():
    """Two at once, then one every half second."""
    now_s = 0.0
    bucket = Bucket(2.0, 2, lambda: now_s)
    assert [bucket.take("ada") for _ in range(3)] == [0.0, 0.0, 0.5]
    assert bucket.take("bob") == 0.0
    now_s = 0.5
    assert [bucket.take("ada"), bucket.take("ada")] == [0.0, 0.5]
