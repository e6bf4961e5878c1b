from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
import threading
import time

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from typer.testing import CliRunner

from penstock_profiles.estimators import LinearEstimator
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import Checkpointed, Observation, Report
from penstock_scheduler.api.access_messages import TokenView
from penstock_scheduler.api.history_messages import QueueEntry
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.messages import JobView, OwnerView
from penstock_scheduler.cli import make_app
from penstock_scheduler.model import Hold, JobSpec, Outcome, Progress, Stop, StopCode
from penstock_scheduler.people.errors import ConfigError, StoreError
from penstock_scheduler.store import schema, tables
from penstock_scheduler.store.opening import open_engine
from penstock_scheduler.store.rounds import summarise
from penstock_scheduler.store.sql import open_store
from penstock_scheduler.store.tables import REVISION
from tests.scheduler.databases import open_submissions
from tests.scheduler.test_replay import record as decide_record

record = functools.cache(decide_record)


def numbered(number: int, time_s: float = 1000.0):
    first = record()
    return dataclasses.replace(first, snapshot=dataclasses.replace(first.snapshot, round=number, time_s=time_s))


def report(sequence: int, job: str = "1", epoch: int = 1) -> Report:
    return Report(job_id=job, epoch=epoch, sequence=sequence, time_s=1.0, body=Checkpointed(progress=1.0, seconds=0.1))


def view(job: str, **fields: object) -> JobView:
    wanted = {"version": 1, "name": "n", "user": "ada", "state": "running", "submit_s": 1.0, "spec": JobSpec()} | fields
    return JobView(id=job, **wanted)


def test_rounds_are_kept_up_to_a_number(store, where):
    for number in (1, 2, 3):
        store.save_round(numbered(number))
    store.save_round(numbered(3, time_s=2000.0))
    reader = open_store(where)
    assert reader.round_numbers() == [1, 2, 3], "round 2 is stored as the difference from round 1"
    assert reader.last_round() == numbered(3, time_s=2000.0)
    assert reader.summaries(None, 2) == [summarise(numbered(3, 2000.0)), summarise(numbered(2))]
    assert [each.round for each in reader.summaries(3, 1)] == [2]
    for number in range(4, 40):
        store.save_round(numbered(number))
        assert len(reader.round_numbers()) <= 4, "two, and at most two from which they differ"
    with pytest.raises(StoreError, match="has no round 1; older rounds are deleted"):
        reader.round(1)
    assert reader.round(38) == numbered(38)
    reader.close()


def test_a_damaged_round_is_passed_over(store):
    store.save_round(numbered(1))
    store.save_round(numbered(2))
    with store.write() as db:
        db.execute(sa.text("UPDATE rounds SET record = :junk WHERE round = 2"), {"junk": b"junk"})
    last = store.last_round()
    assert last is not None
    assert last.snapshot.round == 1


def test_a_report_counts_once(store, where):
    assert store.add_reports([report(0), report(1), report(0)]) == [True, True, False]
    assert store.add_reports([report(1), report(2), report(0, epoch=2)]) == [False, True, True]
    assert store.add_reports([]) == []
    reader = open_store(where)
    assert list(reader.reports("1")) == [report(0), report(1), report(2), report(0, epoch=2)]
    assert list(reader.reports("2")) == []
    assert reader.newest_epoch("1") == 2
    assert reader.newest_epoch("2") is None
    reader.close()


def test_history_is_read_in_order_also_in_parts(store, monkeypatch):
    monkeypatch.setattr("penstock_scheduler.store.database.CHUNK", 2)
    store.add_reports([report(number, job=str(number % 2)) for number in range(7)])
    assert [each.sequence for each in store.reports()] == list(range(7))
    assert [each.sequence for each in store.reports("1")] == [1, 3, 5]
    store.add_outcomes(5.0, [Outcome(Hold("1", 3), Progress.DONE, "done")])
    (line,) = store.outcomes("1")
    assert (line.time_s, line.action, line.progress) == (5.0, Hold("1", 3), Progress.DONE)


def test_the_newest_observations_of_a_job(store):
    def seen(sequence: int) -> Report:
        body = Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=1.0, progress=sequence)
        return report(sequence).model_copy(update={"body": body})

    store.add_reports([seen(0), report(1), seen(2), seen(3)])
    assert store.observations("1", 2) == [seen(2), seen(3)]


def test_which_jobs_were_measured_since_a_row_and_which_have_profiles(store):
    row, jobs = store.observed_since(None)
    assert (row, jobs) == (0, frozenset())
    body = Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=1.0, progress=1)
    store.add_reports([report(0), report(1, job="2").model_copy(update={"body": body})])
    row, jobs = store.observed_since(row)
    assert jobs == {"2"}, "the other job has measured nothing"
    assert store.observed_since(row) == (row, frozenset())
    assert store.profiled() == frozenset()
    store.save_profile(
        "ada", Profile(job="train", gpu_type="t4", measured_s=1.0, versions={}, ended="", observations=(body,))
    )
    assert store.profiled() == {("ada", "train")}


def test_jobs_are_found_and_paged(store):
    store.save_jobs([view("1"), view("2", user="bob", key="k"), view("3", state="ended", end_s=9.0)])
    store.save_jobs([view("1", version=2, state="ended", name="new")])
    assert store.job("1") == view("1", version=2, state="ended", name="new")
    assert store.job("9") is None

    def found(**query: object) -> list[str]:
        return [job.id for _, job in store.jobs(**query)]

    assert found() == ["3", "2", "1"]
    assert found(user="ada") == ["3", "1"]
    assert found(states=["running"]) == ["2"]
    assert found(key="k") == ["2"]
    assert found(name="new") == ["1"]
    (number, _), _ = store.jobs(limit=2)
    assert found(after=number, limit=1) == ["2"]


def test_a_key_is_for_one_submission_of_one_user(store):
    assert store.begin_submission("ada", "k", "d1") == ("d1", None)
    assert store.begin_submission("ada", "k", "d2") == ("d1", None)
    assert store.begin_submission("bob", "k", "d3") == ("d3", None)
    assert sorted(open_submissions(store)) == [("ada", "k"), ("bob", "k")]
    store.end_submission("ada", "k", "7")
    store.end_submission("bob", "k", None)
    assert open_submissions(store) == []
    assert store.begin_submission("ada", "k", "d1") == ("d1", "7")
    assert store.begin_submission("bob", "k", "d4") == ("d4", None)


def line(key: str, user: str = "ada") -> LedgerLine:
    return LedgerLine(
        id=0, key=key, time_s=1.0, account="a", user=user, job="1", kind="gpu-seconds", amount=2.5, text="t4"
    )


def test_a_charge_counts_once_and_with_its_job(store):
    store.save_jobs([view("1")], [line("a"), line("b", "bob")])
    store.charge([line("a"), line("c")])
    assert [entry.key for entry in store.ledger()] == ["c", "b", "a"]
    assert [entry.key for entry in store.ledger(user="ada", limit=1)] == ["c"]
    first = store.ledger()[-1]
    assert first == line("a").model_copy(update={"id": first.id})


def test_tokens_audit_controls_models_and_profiles(store):
    token = TokenView(
        id="x", user="ada", role="user", job=None, created_s=1.0, expires_s=2.0, revoked=False, note="for tests"
    )
    store.add_token(token, "digest")
    assert store.tokens("x") == [(token, "digest")]
    store.revoke_token("x")
    assert store.tokens()[0][0].revoked
    store.note("ada", "user", "POST /v1/jobs", "7", allowed=False, text="x" * 2000)
    (entry,) = store.audit()
    assert (entry.user, entry.action, entry.allowed, len(entry.text)) == ("ada", "POST /v1/jobs", False, 1000)
    assert store.control("paused") is None
    store.set_control("paused", True)
    store.set_control("paused", False)
    assert store.control("paused") is False
    assert store.model("1") is None
    store.add_model("1", 1.0, LinearEstimator())
    assert store.model("1") == LinearEstimator()
    seen = Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=1.0, progress=0)
    profile = Profile(job="n", gpu_type="t4", measured_s=1.0, versions={}, ended="", observations=(seen,))
    store.save_profile("ada", profile)
    store.save_profile("ada", profile.model_copy(update={"ended": "again"}))
    assert [each.ended for each in store.profiles("ada", "n")] == ["again"]
    assert store.profiles("bob") == []


def test_usage_by_partition_also_of_jobs_whose_partition_is_not_known(store):
    store.save_jobs([view("1", end_s=9.0, partition="night"), view("2", end_s=9.0)])
    with store.write() as db:  # a view as it was before partitions were kept
        old = JobView.model_dump_json(view("2", end_s=9.0), exclude={"partition"})
        db.execute(sa.text("UPDATE jobs SET view = :old WHERE job = '2'"), {"old": old})
    charge = {"id": 0, "time_s": 9.0, "account": "", "user": "ada", "kind": "gpu-seconds", "text": "t4"}
    corrected = {**charge, "key": "c", "job": "1", "amount": -3.0}
    store.charge([LedgerLine(key=job, job=job, amount=10.0, **charge) for job in "123"] + [LedgerLine(**corrected)])
    found = {(each.name, each.jobs, each.amount) for each in store.used("partition", 0.0, 10.0)}
    assert found == {("night", 1, 7.0), ("", 2, 20.0)}
    assert store.used("partition", 0.0, 9.0) == store.used("user", 0.0, 10.0, "bob") == []


def test_what_is_old_goes_and_the_ledger_stays(store):
    """Kept for a day: at 200,000 s, what ended at 100,000 s goes, what ended at 150,000 s stays."""
    ended = {"old": 100_000.0, "new": 150_000.0, "runs": None}
    store.save_jobs([view(job, end_s=end_s) for job, end_s in ended.items()], [line("old")])
    store.add_reports([report(0, job) for job in ended])
    store.save_round(numbered(100, time_s=200_000.0))
    assert {each.job_id for each in store.reports()} == {"new", "runs"}
    assert store.job("old") is None
    assert store.job("new") is not None
    assert len(store.ledger()) == 1


def test_owners_and_keys_go_a_while_after_their_jobs_and_never_before(store, monkeypatch):
    """Kept for a day. The owner of a job whose history has gone stays for another day."""
    monkeypatch.setattr("time.time", lambda: 20_000.0)
    store.save_jobs([view("old", state="ended", end_s=100_000.0), view("runs")])
    jobs = {"old": "old", "runs": "runs", "refused": None}
    for name, job in jobs.items():
        store.save_owner("ada", OwnerView(name=name, generation="g", attempt=1, job=job, lease_s=60))
        store.begin_submission("ada", name, "digest")
        store.end_submission("ada", name, job)
    store.begin_submission("ada", "unanswered", "digest")
    assert [owner.job for _, owner in store.leased_owners()] == ["runs"], "only live jobs have a lease"

    def owners() -> set[str]:
        return {name for name in jobs if store.owner("ada", name) is not None}

    store.save_round(numbered(100, time_s=106_000.0))
    assert owners() == set(jobs), "nothing is a day old"
    store.save_round(numbered(200, time_s=190_000.0))
    assert owners() == {"old", "runs"}
    assert (store.submission("ada", "old"), store.submission("ada", "runs")) == (None, "runs")
    assert open_submissions(store) == []
    store.save_round(numbered(300, time_s=280_000.0))
    assert owners() == {"runs"}


def test_one_writer_only(store, where):
    with pytest.raises(StoreError, match="in use by another penstockd"):
        open_store(where, writer=True)
    store.close()
    open_store(where, writer=True).close()


@pytest.mark.parametrize("where", ["postgresql"], indirect=True)
def test_a_process_that_has_just_left_is_waited_for(where):
    """A server may notice late that a connection is closed."""
    first = open_store(where, writer=True)
    threading.Timer(1.0, first.close).start()
    open_store(where, writer=True).close()


def test_writers_in_threads_lose_nothing(store):
    def write(thread: int) -> None:
        for number in range(20):
            store.add_reports([report(number, str(thread))])

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.reports())) == 80


def test_a_store_of_the_release_before_is_upgraded_with_its_data(where, next_release):
    old = open_store(where, writer=True)
    old.save_round(record())
    old.add_reports([report(0)])
    old.close()
    before, after = REVISION, next_release()
    with pytest.raises(
        StoreError, match=f"has the schema {before}, this version needs {after}; run penstock db upgrade"
    ):
        open_store(where)
    done = CliRunner().invoke(make_app(), ["db", "upgrade", where])
    assert done.exit_code == 0, done.output
    assert f"from schema {before} to {after}" in done.output
    opened = open_store(where)
    assert opened.last_round() == record()
    assert opened.summaries(None, 5) == [summarise(record())]
    assert list(opened.reports()) == [report(0)]
    opened.close()


def test_a_store_from_before_the_first_release_is_refused_and_stays_as_it_is(where):
    open_store(where, writer=True).close()
    engine, _, lock = open_engine(where, lock=True)
    with engine.connect().execution_options(penstock_write=True) as db, db.begin():
        db.execute(sa.text("UPDATE alembic_version SET version_num = '0006'"))
    lock.close()
    engine.dispose()
    with pytest.raises(StoreError, match="run penstock db upgrade"):
        open_store(where, writer=True)
    told = CliRunner().invoke(make_app(), ["db", "upgrade", where])
    assert "the schema 0006 is of a development version from before the first release" in str(told.exception)
    with pytest.raises(StoreError, match="has the schema 0006"):
        open_store(where)


def test_migrations_lead_to_the_tables_of_the_code(store):
    assert schema.differences(store.engine) == []
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


def test_an_export_has_every_row_and_no_secret(store, where):
    store.save_round(numbered(1))
    store.add_reports([report(0)])
    token = TokenView(id="x", user="ada", role="user", job=None, created_s=1.0, expires_s=2.0, revoked=False, note="")
    store.add_token(token, "not-to-be-seen")
    done = CliRunner().invoke(make_app(), ["db", "export", where])
    rows = [json.loads(row) for row in done.output.splitlines()]
    assert [row["table"] for row in rows] == ["compatibility", "leadership", "reports", "rounds", "tokens"]
    assert rows[3]["record"]["policy"]["name"] == "sia"
    assert "not-to-be-seen" not in done.output


def test_a_full_disk_is_an_error_and_later_all_is_well(tmp_path):
    """SQLite's own limit on the file's size answers as a full disk does."""
    store = open_store(tmp_path, writer=True)
    store.add_reports([report(0)])
    store.close()
    store = open_store(tmp_path, writer=True)

    def pages(count: int) -> None:
        store.engine.dispose()
        sa.event.listen(store.engine, "connect", lambda db, _: db.execute(f"PRAGMA max_page_count={count}"))

    pages(1)
    with pytest.raises(StoreError, match="full; free some space, running jobs are not affected"):
        store.add_reports([report(number) for number in range(1000)])
    assert list(store.reports()) == [report(0)], "all or nothing"
    pages(10**6)
    assert store.add_reports([report(0), report(1)]) == [False, True]
    store.close()


def test_a_locked_file_is_an_error_and_later_all_is_well(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "BUSY_S", 0.2)
    store = open_store(tmp_path, writer=True)
    other = sqlite3.connect(tmp_path / schema.FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began_s = time.monotonic()
    with pytest.raises(StoreError, match="locked"):
        store.add_reports([report(0)])
    assert time.monotonic() - began_s < 10
    assert store.last_round() is None, "a reader does not wait"
    other.execute("ROLLBACK")
    other.close()
    assert store.add_reports([report(0)]) == [True]
    store.close()


def test_a_store_that_cannot_be_is_said_early(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"set \[daemon\] state_dir"):
        open_store(tmp_path / "file" / "state", writer=True)
    with pytest.raises(StoreError, match="give the daemon's state_dir"):
        open_store(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"\[daemon\] store: .*postgresql\+psycopg"):
        open_store("nosuch://there")
    with pytest.raises(StoreError, match="check that the server is up"):
        open_store("postgresql+psycopg://penstock@127.0.0.1:1/penstock?connect_timeout=2", writer=True)
    (tmp_path / schema.FILE).write_text("this is no database, and long enough to be taken for one")
    with pytest.raises(StoreError, match="not a database"):
        open_store(tmp_path, writer=True)


def test_the_audit_log_is_bounded_and_refusals_push_out_only_refusals(where, monkeypatch):
    monkeypatch.setattr("penstock_scheduler.store.rounds.REFUSED_KEPT", 3)
    store = open_store(where, writer=True, keep_audit_days=10)
    now_s = time.time()
    store.note("ada", "user", "cancel", "jobs/1", allowed=True)
    for number in range(9):
        store.note("eve", "user", "cancel", f"jobs/{number}", allowed=False)
    store.note("ada", "user", "cancel", "jobs/2", allowed=True)
    store.save_round(numbered(100, time_s=now_s + 9 * 86_400))
    assert [(each.user, each.target[-1]) for each in store.audit()] == [
        ("ada", "2"), ("eve", "8"), ("eve", "7"), ("eve", "6"), ("ada", "1")
    ]  # fmt: skip
    store.save_round(numbered(200, time_s=now_s + 10.1 * 86_400))
    assert store.audit() == []
    store.close()


def test_waits_of_jobs_that_were_only_ever_refused_go_after_the_same_time(where):
    """Job 7 was refused and is gone; job 8 is still refused; job 9 is managed, and its history is kept whole."""
    store = open_store(where, writer=True, keep_days=10)

    def refused(job: str, since_s: float) -> QueueEntry:
        return QueueEntry(position=None, job=job, name="n", user="ada", submit_s=1.0, since_s=since_s, code="refused")

    store.save_jobs([view("9")])
    store.save_waits([refused("7", 1.0), refused("8", 1.0), refused("8", 5.0), refused("9", 1.0)], {})
    store.save_waits([], {("7", 1.0): 2.0, ("8", 1.0): 5.0, ("9", 1.0): 2.0})

    def there() -> list[tuple[str, float]]:
        with store.read() as db:
            return sorted((row.job, row.since_s) for row in db.execute(tables.waits.select()))

    store.save_round(numbered(100, time_s=9 * 86_400.0))
    assert there() == [("7", 1.0), ("8", 1.0), ("8", 5.0), ("9", 1.0)]
    store.save_round(numbered(200, time_s=10.1 * 86_400))
    assert there() == [("8", 5.0), ("9", 1.0)]
    store.close()


def test_a_job_is_set_aside_with_all_of_its_history(store):
    """Its outcomes, reports, spans, charges, submission and owner have its new id; those of other jobs stay."""
    store.begin_submission("ada", "night", "d")
    store.end_submission("ada", "night", "7")
    store.begin_submission("ada", "day", "d")
    store.end_submission("ada", "day", "7")
    for name, key in (("dag", "night"), ("other-dag", "day")):
        store.save_owner("ada", OwnerView(name=name, generation="1", attempt=1, job="7", key=key))
    store.save_jobs([view("7", key="night"), view("17")])
    for name in ("7", "17"):
        stop = Stop(StopCode.GAIN, 'it says "job":"7"')
        store.add_outcomes(1.0, [Outcome(Hold(name, 1), Progress.DONE, "", stop)])
        store.add_reports([report(0, name)])
    former = view("7@x", state="ended", end_s=9.0, ended="UNKNOWN", key="night")
    line = LedgerLine(
        id=0, key="k", time_s=9.0, account="", user="ada", job="7", kind="gpu-seconds", amount=5.0, text="t4"
    )
    store.set_aside("7", former, [line])
    store.set_aside("7", former, [line])
    assert store.job("7") is None
    assert store.job("7@x") == former
    assert [each.action.job for each in store.outcomes()] == ["7@x", "17"]
    assert {each.stop.text for each in store.outcomes()} == {'it says "job":"7"'}
    assert sorted(each.job_id for each in store.reports()) == ["17", "7@x"]
    assert (store.submission("ada", "night"), store.submission("ada", "day")) == ("7@x", "7")
    assert (store.owner("ada", "dag").job, store.owner("ada", "other-dag").job) == ("7@x", "7")
    assert (store.owner_of("7@x"), store.owner_of("7")) == (("ada", "dag"), ("ada", "other-dag"))
    assert [(each.job, each.amount) for each in store.ledger()] == [("7@x", 5.0)]
    assert store.ended_unknown(0.0, 10) == []
