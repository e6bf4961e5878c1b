"""`penstock config schema` and `penstock config reference`, from an empty folder and with no daemon."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.rounds.policies import REGISTRY, STAGES, settings_model


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", f"unix:{tmp_path}/none.sock")


def test_every_policy_and_stage_has_a_schema():
    for name in (*REGISTRY, *STAGES, "sia:artifact"):
        told = CliRunner().invoke(make_app(), ["config", "schema", name])
        assert told.exit_code == 0, name
        assert set(json.loads(told.output).get("properties", {})) == set(settings_model(name).model_fields), name
    assert "stages" in json.loads(CliRunner().invoke(make_app(), ["config", "schema", "policy"]).output)["properties"]


def test_an_unknown_schema_names_those_there_are():
    error = CliRunner().invoke(make_app(), ["config", "schema", "sai"]).exception
    assert "unknown policy or stage 'sai'" in str(error)
    assert "spec, report, control, policy" in str(error)


def test_the_reference_lists_the_settings_of_all_policies():
    page = CliRunner().invoke(make_app(), ["config", "reference"]).output
    assert "| `stages` | list of text | `[]` |" in page
    for name, (_, model) in {**REGISTRY, **STAGES}.items():
        assert f"## `[policy.{name}]`" in page
        for key in model.model_fields:
            assert f"| `{key}` |" in page
