"""The settings file that the package ships."""

from __future__ import annotations

import re
from pathlib import Path

from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.rounds.settings import parse_settings
from penstock_slurm.settings import SlurmSettings

EXAMPLE = Path(__file__).parents[2] / "deploy/debian/penstock.toml"


def test_what_a_site_with_several_users_sets_first_works_without_its_comment_sign() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert parse_settings(text, str(EXAMPLE)).section(LimitSettings) == LimitSettings()
    active = re.sub(r"^# (weight = |\[limits\]|gpus_per_user = )", r"\1", text, flags=re.MULTILINE)
    settings = parse_settings(active, str(EXAMPLE))
    assert settings.section(LimitSettings).gpus_per_user == 16
    assert settings.section(SlurmSettings).weight == "fair-share"
