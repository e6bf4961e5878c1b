"""What the release before has recorded (`record`) is read here, and what this release writes is read there."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from penstock_profiles.wire import read
from penstock_scheduler.cli import make_app
from penstock_scheduler.model import Assignment
from penstock_scheduler.store.schema import FILE
from penstock_scheduler.store.sql import open_store
from penstock_scheduler.store.tables import COMPATIBLE_FROM
from tests.previous.record import schemas
from tests.previous.samples import DOCUMENTS, JOB, MESSAGES, OUTCOME
from tests.scheduler.test_replay import record

HERE = Path(__file__).parent

RECORDED = json.loads((HERE / "messages.json").read_text())
SCHEMAS = json.loads((HERE / "schemas.json").read_text())


def recorded_store(folder: Path) -> str:
    """The recorded store in a file. Returns its schema's revision."""
    with sqlite3.connect(folder / FILE) as db:
        db.executescript((HERE / "store.sql").read_text())
        (revision,) = db.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(revision)


@pytest.mark.parametrize("number", range(len(RECORDED)), ids=lambda number: RECORDED[number]["kind"])
def test_a_recorded_message_is_read(number: int) -> None:
    told = RECORDED[number]
    kind = next(type(each) for each in MESSAGES if type(each).__name__ == told["kind"])
    found = json.loads(read(kind, told["text"]).model_dump_json())
    assert found | json.loads(told["text"]) == found


def test_a_recorded_store_is_upgraded_and_read(tmp_path: Path) -> None:
    recorded_store(tmp_path)
    told = CliRunner().invoke(make_app(), ["db", "upgrade", str(tmp_path)])
    assert told.exit_code == 0, told.exception
    checked = CliRunner().invoke(make_app(), ["db", "check", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
    store = open_store(tmp_path, writer=True)
    last = store.last_round()
    assert last is not None
    with sqlite3.connect(tmp_path / FILE) as db:
        (recorded,) = db.execute("SELECT record FROM rounds").fetchone()
    told = json.loads(zlib.decompress(recorded))["plan"]["assignments"]
    found = TypeAdapter(dict[str, Assignment]).dump_python(last.plan.assignments, mode="json")
    assert {job: found[job] | each for job, each in told.items()} == found
    again = record()  # equal jobs may have changed places since
    assert last.snapshot.jobs == again.snapshot.jobs
    assert last.plan.assignments.keys() == again.plan.assignments.keys()
    assert last.plan.solve is not None
    assert again.plan.solve is not None
    assert last.plan.solve.objective == pytest.approx(again.plan.solve.objective, rel=1e-4)
    assert store.job("7") == JOB
    assert [(line.action, line.stop) for line in store.outcomes()] == [(OUTCOME.action, OUTCOME.stop)]
    assert list(store.reports()) == [each for each in MESSAGES if hasattr(each, "body")]
    store.close()


HARMLESS = {"SaveFailed"}
"""Kinds of reports that a release before may leave out with a line in its log: it goes on as if the job had not sent them."""


def unread(old: Any, new: Any, where: str) -> Iterator[str]:
    """What of the new schema a reader of the old one does not understand, without fields that are new."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    for name in ("properties", "$defs"):
        for key in old.get(name, {}).keys() & new.get(name, {}).keys():
            yield from unread(old[name][key], new[name][key], f"{where}.{key}")
    for key in old.get("required", ()):
        if key not in new.get("properties", {}):
            yield f"{where}: the release before needs {key}"
    if "enum" in old and (more := {*new.get("enum", ())} - {*old["enum"]}):
        yield f"{where}: the release before does not know {sorted(more)}"
    for name in ("type", "const", "$ref"):
        if name in old and name in new and old[name] != new[name]:
            yield f"{where}: {name} was {old[name]} and is {new[name]}"
    for name in ("anyOf", "oneOf"):
        kinds = [json.dumps(each, sort_keys=True) for each in old.get(name, ())]
        harmless = [{"$ref": f"#/$defs/{kind}"} for kind in HARMLESS]
        strange = [each for each in new.get(name, ()) if json.dumps(each, sort_keys=True) not in kinds]
        strange = [each for each in strange if each not in harmless]
        if kinds and strange:
            yield f"{where}: the release before does not know {strange}"


@pytest.mark.parametrize("name", sorted({type(each).__name__ for each in MESSAGES}))
def test_the_release_before_reads_this_releases_messages(name: str) -> None:
    """Or else the message has a new version (docs/developer/release.md)."""
    old, new = SCHEMAS[name], schemas()[name]
    if old["properties"].get("version") == new["properties"].get("version"):
        assert list(unread(old, new, name)) == []


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
def test_the_release_before_reads_this_releases_documents(kind: type, tmp_path: Path) -> None:
    """Or else `COMPATIBLE_FROM` says that it cannot use the store."""
    name = kind.__name__
    if recorded_store(tmp_path) >= COMPATIBLE_FROM:
        assert list(unread(SCHEMAS[name], schemas()[name], name)) == []


def test_what_the_release_before_does_not_understand_is_found() -> None:
    old = schemas()["Report"]
    for change, told in (
        (lambda new: new["$defs"]["Ended"]["properties"]["outcome"]["enum"].append("lost"), "does not know ['lost']"),
        (lambda new: new["properties"].pop("epoch"), "needs epoch"),
        (lambda new: new["properties"]["body"]["oneOf"].append({"$ref": "#/$defs/New"}), "does not know"),
        (lambda new: new["properties"]["job_id"].update(type="integer"), "type was string and is integer"),
    ):
        new = json.loads(json.dumps(old))
        change(new)
        assert any(told in each for each in unread(old, new, "Report")), told
    new = json.loads(json.dumps(old))
    new["properties"]["more"] = {"type": "string"}
    assert list(unread(old, new, "Report")) == []
