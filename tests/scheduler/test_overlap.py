"""One release of overlap: what a later release has written is read without the fields that this release does not know."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from penstock_profiles.wire import ControlMessage, UnknownVersion, control_file, read
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.model.records import dump_round, load_round
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from tests.previous.samples import JOB, MESSAGES, OUTCOME
from tests.scheduler.store.test_store import numbered


def later(value: Any) -> Any:
    """The JSON of a value as a later release writes it: each object has a field that this release does not know."""
    if isinstance(value, BaseModel):
        fields = {name: later(getattr(value, name)) for name in type(value).model_fields}
        return fields | {"of_a_later_release": {"x": 1}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: later(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields | {"of_a_later_release": {"x": 1}}
    if isinstance(value, dict):
        return {str(key): later(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [later(each) for each in value]
    return to_jsonable_python(value.value if isinstance(value, enum.Enum) else value)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(getattr(each, "body", each)).__name__)
def test_a_message_of_a_later_release_means_what_this_release_knows_of_it(message):
    assert read(type(message), json.dumps(later(message))) == message
    with pytest.raises(ValidationError, match="of_a_later_release"):
        type(message).model_validate(later(message))  # a sender's typo still fails


@pytest.mark.parametrize(
    "message", [each for each in MESSAGES if hasattr(each, "version")], ids=lambda m: type(m).__name__
)
def test_a_message_of_another_version_is_refused_with_the_remedy(message):
    text = json.dumps(message.model_dump(mode="json") | {"version": 2})
    with pytest.raises(UnknownVersion, match=r"another version than 1.*upgrade the older one of sender and reader"):
        read(type(message), text)


def test_a_report_of_another_version_is_logged_with_the_remedy_and_costs_no_other_report(tmp_path, caplog):
    spool = Spool(tmp_path)
    mine, theirs = MESSAGES[0], MESSAGES[1]
    folder = tmp_path / "7" / "reports"
    folder.mkdir(parents=True)
    newer = theirs.model_dump(mode="json") | {"version": 2}
    (folder / "1.jsonl").write_text(json.dumps(newer) + "\n" + mine.model_dump_json() + "\n")
    with caplog.at_level(logging.WARNING):
        assert spool.read(["7"]) == [mine]
    assert "upgrade the older one" in caplog.records[0].text  # type: ignore[attr-defined]


def test_a_control_message_of_another_version_is_an_error_for_that_job_said_once(tmp_path, caplog):
    spool = Spool(tmp_path)
    message = ControlMessage(job_id="7", epoch=1, round=2)
    for job in "78":
        spool.tell(message.model_copy(update={"job_id": job}))
    control_file(tmp_path, "7").write_text(json.dumps(message.model_dump() | {"version": 2}))
    with caplog.at_level(logging.ERROR):
        assert spool.control("7") is None
        assert spool.control("7") is None
    assert spool.control("8") is not None
    assert [(each.job, "upgrade the older one" in each.text) for each in caplog.records] == [("7", True)]  # type: ignore[attr-defined]


def test_the_documents_of_the_store_are_read_after_a_later_release_has_written_them(tmp_path):
    """An older penstockd goes on with the store of a newer one, whose documents have fields that it does not know."""
    record = numbered(1)
    assert load_round(json.dumps(later(record)), "a round") == load_round(dump_round(record), "a round")
    store = open_store(tmp_path, writer=True)
    store.save_jobs([JOB])
    store.add_outcomes(1.0, [OUTCOME])
    store.add_reports([MESSAGES[0]])  # type: ignore[list-item]
    (outcome,) = store.outcomes()
    with store.write() as db:
        for table, column, document in (
            ("jobs", "view", JOB),
            ("outcomes", "line", outcome),
            ("reports", "report", MESSAGES[0]),
        ):
            db.exec_driver_sql(f"UPDATE {table} SET {column} = ?", (json.dumps(later(document)),))
    assert store.job("7") == JOB
    assert list(store.outcomes()) == [outcome]
    assert list(store.reports()) == [MESSAGES[0]]
    store.close()


@pytest.mark.parametrize("answer", [JOB, Health(status="ok", version="9.9.0")], ids=lambda each: type(each).__name__)
def test_an_answer_of_a_later_api_is_read(answer):
    assert read(type(answer), json.dumps(later(answer))) == answer
