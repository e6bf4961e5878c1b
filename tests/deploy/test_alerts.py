"""Each alert rule fires, by Prometheus' own promtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.scheduler.service.api import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES, DASHBOARD = DEPLOY / "prometheus/penstock-alerts.yaml", DEPLOY / "grafana/penstock.json"
CASES = Path(__file__).parent / "penstock-alerts.test.yaml"


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    cases = CASES.read_text()
    assert alerts
    for alert in alerts:
        assert f"name: {alert} fires\n" in cases
        assert f"name: {alert} is silent\n" in cases


def promtool(*words: str, given: str | None = None) -> str:
    """What promtool says. Fails unless it is content."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not on PATH (Debian: prometheus, about 100 MB; script/test does not install it)")
    done = subprocess.run([program, *words], check=False, capture_output=True, text=True, input=given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_alerts_fire_and_are_silent_as_the_cases_say():
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(CASES))


def test_prometheus_can_read_the_queries_of_the_dashboard(tmp_path):
    """As recording rules, because promtool reads no dashboards."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    assert rules
    (tmp_path / "rules.yaml").write_text(
        json.dumps({"groups": [{"name": "dashboard", "rules": rules}]})
    )  # JSON is YAML
    promtool("check", "rules", str(tmp_path / "rules.yaml"))


@pytest.mark.parametrize("separate", [False, True], ids=["embedded", "separate"])
def test_promtool_finds_nothing_against_the_metrics(tmp_path, separate):
    with serving(tmp_path, separate=separate) as api:
        headers = {"Authorization": f"Bearer {api.tokens['ada']}"}
        scraped = httpx.get(f"{api.url}/v1/metrics", headers=headers, timeout=60).text
    assert ("penstock_api_daemon_up 1.0" in scraped) == separate
    assert promtool("check", "metrics", given=scraped) == ""
