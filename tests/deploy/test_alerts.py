"""Each alert rule fires, by Prometheus' own promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "deploy/prometheus/penstock-alerts.yaml"
CASES = Path(__file__).parent / "penstock-alerts.test.yaml"


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    cases = CASES.read_text()
    assert alerts
    for alert in alerts:
        assert f"name: {alert} fires\n" in cases
        assert f"name: {alert} is silent\n" in cases


def test_the_alerts_fire_and_are_silent_as_the_cases_say():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH (Debian: prometheus, about 100 MB; script/test does not install it)")
    for words in (["check", "rules", str(RULES)], ["test", "rules", str(CASES)]):
        done = subprocess.run([promtool, *words], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
