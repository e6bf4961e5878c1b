"""A real Prometheus for the tests of GPUs' use."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_loopback.machine import free_ports


class ServeSamples(Protocol):
    """See `prometheus`."""

    def __call__(self, samples: str = "", exporter: str = "") -> str: ...


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[ServeSamples]:
    """serve(samples, exporter): address of a Prometheus that has these samples and asks an exporter (host:port) each second."""
    server, tool = map(shutil.which, ("prometheus", "promtool"))
    if server is None or tool is None:
        pytest.skip("promtool is not on PATH (Debian: prometheus, about 100 MB; script/test does not install it)")
    running: list[subprocess.Popen[bytes]] = []

    def serve(samples: str = "", exporter: str = "") -> str:
        given, settings, data, port = (
            tmp_path / "samples",
            tmp_path / "prometheus.yml",
            tmp_path / "data",
            free_ports(1),
        )
        if samples:
            given.write_text(samples + "# EOF\n")
            words = ("tsdb", "create-blocks-from", "openmetrics", str(given), str(data))
            subprocess.run([tool, *words], check=True, capture_output=True)
        scrape = {"job_name": "gpus", "scrape_interval": "1s", "static_configs": [{"targets": [exporter]}]}
        settings.write_text(json.dumps({"scrape_configs": [scrape] if exporter else []}))  # JSON is YAML
        options = {
            "config.file": settings,
            "storage.tsdb.path": data,
            "storage.tsdb.retention.time": "99y",
            "web.listen-address": f"127.0.0.1:{port}",
        }
        with (tmp_path / "log").open("wb") as log:
            words = tuple(f"--{name}={value}" for name, value in options.items())
            running.append(subprocess.Popen([server, *words], stderr=log))
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return httpx.get(f"{url}/-/ready").status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(ready, 60, "Prometheus", details=lambda: (tmp_path / "log").read_text()[-2000:])
        return url

    yield serve
    for each in running:
        each.kill()
        each.wait()
