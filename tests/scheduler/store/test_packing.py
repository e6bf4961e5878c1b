"""Rounds in the store: the newest is whole, the others differ from a key round, and all are read as they were saved."""

from __future__ import annotations

import dataclasses
import random

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.model import Placement, Share
from penstock_scheduler.model.records import RoundRecord, UnreadableRound, dump_round
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store import packing
from penstock_scheduler.store.sql import open_store
from tests.scheduler.test_replay import record


def days_rounds(count: int) -> list[RoundRecord]:
    """Rounds in which jobs begin, end and change places."""
    first, random_ = record(), random.Random(7)
    template, rounds = first.snapshot.jobs[0], []
    jobs = {str(n): dataclasses.replace(template, id=str(n), name=f"job {n}") for n in range(100)}
    attained = dict.fromkeys(jobs, 0.0)
    for number in range(1, count + 1):
        for _ in range(random_.randrange(3)):
            jobs.pop(random_.choice(list(jobs)))
            jobs[str(1000 + number)] = dataclasses.replace(template, id=str(1000 + number))
        chosen = random_.choice(list(jobs))
        where = Placement("t4", "p", (Share(f"n{number % 5}", 2),))
        jobs[chosen] = dataclasses.replace(jobs[chosen], restarts=number, target=where)
        attained = {
            job: attained.get(job, 0.0) + (60.0 if random_.random() < 0.99 else random_.random()) for job in jobs
        }
        snapshot = dataclasses.replace(
            first.snapshot,
            round=number,
            time_s=1e9 + 60.1 * number,
            jobs=tuple(jobs.values()),
            ended_gpu_s={job: {"t4": seconds} for job, seconds in attained.items()},
        )
        rounds.append(dataclasses.replace(first, snapshot=snapshot))
    return rounds


@pytest.fixture
def saved(where):
    """A store in which a day's rounds were saved one by one."""
    store = open_store(where, writer=True)
    rounds = days_rounds(40)
    for each in rounds:
        store.save_round(each)
    yield store, rounds
    store.close()


def rows(store):
    with store.read() as db:
        return db.execute(sa.text("SELECT round, key_round, length(record) FROM rounds ORDER BY round")).all()


def test_every_round_is_read_to_the_byte_and_takes_less(saved, where):
    store, rounds = saved
    reader = open_store(where)
    for each in rounds:
        number = each.snapshot.round
        assert reader.round_json(number) == store.round_json(number) == dump_round(each)
        assert reader.round(number) == each
    reader.close()
    sizes = {number: size for number, _, size in rows(store)}
    keys = {key for _, key, _ in rows(store)} - {None}
    assert len(keys) <= 8, "few key rounds"
    assert sum(sizes.values()) < 20 * sizes[1], "40 rounds take less than 20 whole ones"


def test_the_newest_round_needs_no_other(saved):
    """penstockd starts from it: a damaged key round must not make it start from an older plan."""
    store, rounds = saved
    with store.write() as db:
        db.execute(sa.text("UPDATE rounds SET record = :junk WHERE round < 40"), {"junk": b"junk"})
    assert store.last_round() == rounds[-1]


def test_a_damaged_or_replaced_key_round_is_told_and_never_leads_to_another_round(saved):
    store, rounds = saved
    other = dataclasses.replace(rounds[0], snapshot=dataclasses.replace(rounds[0].snapshot, time_s=5.0))
    with store.write() as db:
        db.execute(sa.text("UPDATE rounds SET record = :r WHERE round = 1"), {"r": packing.pack(dump_round(other))})
    with pytest.raises(UnreadableRound, match=r"round 2 in .* its key round is another one than when it was saved"):
        store.round(2)
    with store.write() as db:
        db.execute(sa.text("DELETE FROM rounds WHERE round = 1"))
    with pytest.raises(UnreadableRound, match=r"round 2 in .* round 1, from which it differs, is not there"):
        store.round(2)


def test_a_new_writer_begins_with_a_whole_round(saved, where):
    store, rounds = saved
    found = rows(store)
    store.close()
    again = open_store(where, writer=True)
    more = [
        dataclasses.replace(each, snapshot=dataclasses.replace(each.snapshot, round=number))
        for number, each in enumerate(rounds[:3], 40)
    ]
    for each in more:  # the first one replaces round 40
        again.save_round(each)
    assert [row[:2] for row in rows(again)[-4:]] == [(39, found[-2][1]), (40, None), (41, 40), (42, None)]
    for each in (*rounds[:39], *more):
        assert again.round(each.snapshot.round) == each
    again.close()


def test_a_round_that_could_not_be_saved_is_saved_at_the_next_try(saved):
    store, rounds = saved
    last = rounds[-1]
    new = dataclasses.replace(last, snapshot=dataclasses.replace(last.snapshot, round=41))
    with store.write() as db:
        db.execute(sa.text("ALTER TABLE rounds RENAME TO away"))
    with pytest.raises(StoreError):
        store.save_round(new)
    with store.write() as db:
        db.execute(sa.text("ALTER TABLE away RENAME TO rounds"))
    store.save_round(new)
    for each in (*rounds, new):
        assert store.round(each.snapshot.round) == each


def test_a_round_that_cannot_be_led_to_exactly_is_whole():
    """-0.0 equals 0.0, but is another text."""
    key = packing.KeyRound(1, {"a": 0.0, "b": "x" * 200}, 10_000)
    assert packing.pack_difference(key, 2, b'{"a":-0.0,"b":"' + b"x" * 200 + b'"}') is None
    assert packing.pack_difference(key, 2, b'{"a":1.0,"b":"' + b"x" * 200 + b'"}') is not None


def test_a_writer_that_another_has_replaced_meanwhile_trusts_nothing_that_it_remembers(saved):
    """Of several penstockd on one database, this one led, then another did, and now this one does again."""
    store, rounds = saved
    last = rounds[-1]
    theirs = dataclasses.replace(last, snapshot=dataclasses.replace(last.snapshot, time_s=5.0))
    with store.write() as db:
        change = "UPDATE rounds SET record = :r, time_s = 5.0 WHERE round = 40"
        db.execute(sa.text(change), {"r": packing.pack(dump_round(theirs))})
    new = dataclasses.replace(last, snapshot=dataclasses.replace(last.snapshot, round=41))
    store.save_round(new)
    assert store.round(40) == theirs
    assert store.round(41) == new
    assert [row[:2] for row in rows(store)[-2:]] == [(40, None), (41, None)]


def test_replay_decides_a_round_again_that_is_stored_as_a_difference(where):
    first, store = record(), open_store(where, writer=True)
    policy, _ = make_policy(first.policy)
    for number in range(1, 4):
        snapshot = dataclasses.replace(first.snapshot, round=number, time_s=first.snapshot.time_s + 60.0 * number)
        store.save_round(RoundRecord(snapshot, first.policy, policy.decide(snapshot)))
    assert [row[:2] for row in rows(store)] == [(1, None), (2, 1), (3, None)]
    store.close()
    told = CliRunner().invoke(make_app(), ["rounds", "replay", "2", "--state", where])
    assert told.exit_code == 0, told.output
    assert "round 2: 7 jobs" in told.output
    assert "the same plan" in told.output
