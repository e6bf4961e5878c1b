import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock_profiles import wire

finite = st.floats(0, 1e15)
names = st.text(min_size=1, max_size=12)
bodies = st.one_of(
    st.builds(
        wire.Started,
        gpu_type=names,
        gpu_ids=st.dictionaries(names, st.lists(st.integers(0, 15), max_size=8).map(tuple), max_size=3),
        progress=finite,
        total=st.none() | st.floats(1, 1e15),
        answers_requests=st.booleans(),
        versions=st.dictionaries(names, names, max_size=3),
    ),
    st.builds(
        wire.Observation,
        gpu_type=names,
        nodes=st.integers(1, 64),
        gpus=st.integers(1, 512),
        atomic_batch=st.integers(1, 4096),
        accumulation_steps=st.integers(0, 32),
        steps=st.integers(1, 1000),
        step_time_s=st.floats(1e-6, 1e4),
        sync_time_s=st.none() | finite,
        grad_sqr=st.none() | finite,
        grad_var=st.none() | finite,
        goodput=st.none() | finite,
        memory_mb=st.none() | finite,
        progress=finite,
    ),
    st.builds(wire.BatchTrial, atomic_batch=st.integers(1, 4096), out_of_memory=st.booleans()),
    st.builds(wire.Checkpointed, request=st.none() | names, progress=finite, seconds=finite),
    st.builds(
        wire.Ended,
        outcome=st.sampled_from(["completed", "stopped", "superseded", "failed"]),
        progress=finite,
        text=st.text(max_size=40),
    ),
)
reports = st.builds(
    wire.Report,
    job_id=names,
    epoch=st.integers(0, 99),
    sequence=st.integers(0, 10**6),
    time_s=finite,
    body=bodies,
)
controls = st.builds(
    wire.ControlMessage,
    job_id=names,
    epoch=st.integers(0, 99),
    round=st.integers(0, 10**6),
    gpu_type=st.none() | names,
    nodes=st.none() | st.integers(1, 64),
    gpus=st.none() | st.integers(1, 512),
    request=st.none() | st.builds(wire.Request, id=names, asked_s=finite),
)

OBSERVATION = {
    "kind": "observation",
    "gpu_type": "t4",
    "nodes": 1,
    "gpus": 2,
    "atomic_batch": 32,
    "steps": 10,
    "step_time_s": 0.25,
    "progress": 640.0,
}
REPORT = {"job_id": "7", "epoch": 0, "sequence": 3, "time_s": 1.7e9, "body": OBSERVATION}


@given(reports)
def test_a_report_round_trips_on_one_line(report):
    line = report.model_dump_json()
    assert "\n" not in line
    assert wire.Report.model_validate_json(line) == report


@given(controls)
def test_a_control_round_trips(control):
    assert wire.ControlMessage.model_validate_json(control.model_dump_json()) == control


def test_the_example_is_a_report():
    assert wire.Report.model_validate(REPORT).body.kind == "observation"


def test_unknown_fields_are_refused_at_every_level():
    for bad in (REPORT | {"extra": 1}, REPORT | {"body": OBSERVATION | {"steptime": 1}}):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            wire.Report.model_validate(bad)
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        wire.ControlMessage.model_validate({"job_id": "7", "epoch": 0, "round": 1, "pause": True})


@pytest.mark.parametrize("field", ["step_time_s", "sync_time_s", "grad_sqr", "grad_var", "goodput", "progress"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_numbers_that_are_no_measurement_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        wire.Report.model_validate(REPORT | {"body": OBSERVATION | {field: value}})


@pytest.mark.parametrize("field", ["nodes", "gpus", "atomic_batch", "steps"])
def test_counts_start_at_1(field):
    with pytest.raises(ValidationError, match=field):
        wire.Report.model_validate(REPORT | {"body": OBSERVATION | {field: 0}})


def test_nan_in_the_text_itself_is_refused():
    line = wire.Report.model_validate(REPORT).model_dump_json()
    with pytest.raises(ValidationError, match="step_time_s"):
        wire.Report.model_validate_json(line.replace('"step_time_s":0.25', '"step_time_s":NaN'))


def test_a_newer_version_and_an_unknown_kind_are_refused():
    with pytest.raises(ValidationError, match="version"):
        wire.Report.model_validate(REPORT | {"version": 2})
    with pytest.raises(
        ValidationError, match="'checkpointed', 'save_failed', 'suspended', 'resumed', 'result', 'ended'"
    ):
        wire.Report.model_validate(REPORT | {"body": OBSERVATION | {"kind": "gossip"}})
    with pytest.raises(ValidationError, match="checkpoint"):
        wire.Request.model_validate({"id": "a", "kind": "dance", "asked_s": 0})


def test_messages_are_frozen():
    report = wire.Report.model_validate(REPORT)
    with pytest.raises(ValidationError, match="frozen"):
        report.epoch = 1


@pytest.mark.parametrize("job_id", ["../x", "..", ".", "", "a/b", "/etc", "a\\b", "a\n", "a\0b", "~"])
def test_a_job_id_cannot_lead_out_of_the_spool(job_id):
    with pytest.raises(ValueError, match="job id"):
        wire.job_folder(Path("spool"), job_id)


@pytest.mark.parametrize("job_id", ["123", "123_4", "123+1"])
def test_ids_of_slurm_name_folders(job_id):
    spool = Path("spool")
    assert wire.job_folder(spool, job_id) == spool / job_id
    assert wire.control_file(spool, job_id) == spool / job_id / "control.json"
    assert wire.reports_file(spool, job_id, 3) == spool / job_id / "reports" / "3.jsonl"


def test_claimed_epochs_are_numbers_in_order(tmp_path):
    assert wire.claimed_epochs(tmp_path, "7") == []
    folder = wire.reports_folder(tmp_path, "7")
    folder.mkdir(parents=True)
    for epoch in range(1, 12):
        (folder / f"{epoch}.jsonl").touch()
    for name in ("12.jsonl.tmp", "x.jsonl", "4.json", ".jsonl"):
        (folder / name).touch()
    assert wire.claimed_epochs(tmp_path, "7") == list(range(1, 12))


def test_messages_that_give_up_no_nodes_have_no_fields_for_that():
    """Releases of before 24 November 2026 refuse fields that they do not know, and such a message is for all runs."""
    told = (
        wire.Request(id="1-1", asked_s=1.0).model_dump_json(),
        wire.Started(gpu_type="t4", gpu_ids={}).model_dump_json(),
    )
    assert not any(name in text for name in ("keep_nodes", "gives_up_nodes", "left_nodes", "restarts") for text in told)
    asked = wire.Request(id="1-1", asked_s=1.0, keep_nodes=("n0",))
    left = wire.Started(gpu_type="t4", gpu_ids={}, gives_up_nodes=True, left_nodes=("n1",), restarts=0)
    assert (wire.read(wire.Request, asked.model_dump_json()), wire.read(wire.Started, left.model_dump_json())) == (
        asked,
        left,
    )
