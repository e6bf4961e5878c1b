"""Slurm's answers of one observation: which jobs are there, which are gone, and what of the answers cannot be read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, cast

import pytest

from penstock_scheduler.model import UnknownValue
from penstock_scheduler.people.errors import ClusterAway, RoundFailed
from penstock_slurm.gateway import ControllerAway, SlurmJob, SlurmReader, SlurmReservation, TimedOut, Unknown, Unread
from penstock_slurm.gateway.node_states import UNLISTED
from penstock_slurm.observe import records
from penstock_slurm.observe.records import CHECKS, DOUBT_S, Absences, Records
from tests.slurm_plugin.test_cluster import Told
from tests.slurm_plugin.test_states import job as slurm_job

HELD_BY = SlurmReservation("r", 1.0, 2.0, ("n0",), True, frozenset())


class Answers(Told):
    """A gateway that says what it is told to, also of reservations."""

    def __init__(self, *listed: SlurmJob, ended: Iterable[SlurmJob] = ()) -> None:
        super().__init__()
        self.listed, self.ended = list(listed), list(ended)
        self.reserved: tuple[SlurmReservation, ...] = ()

    def reservations(self) -> tuple[Any, ...]:
        return self.reserved


def job(id_: str, state: str = "RUNNING", **changes: Any) -> SlurmJob:
    return dataclasses.replace(slurm_job(state), id=id_, **changes)


def read(
    told: Answers,
    managed: Iterable[SlurmJob] = (),
    known: Iterable[str] = (),
    *,
    absences: Absences | None = None,
    now_s: float = 0.0,
    look_back: bool = False,
) -> Records:
    seen = {each.id: each for each in managed}
    reader = cast(SlurmReader, told)
    return records.read(reader, seen, set(known), absences or Absences(), now_s, look_back=look_back)


# --- which jobs are there


def test_a_listed_job_is_there_and_ended_ones_are_not_asked_for():
    one, other = job("1"), job("2")
    told = Answers(one, other)
    found = read(told, [one], {"1"})
    assert (found.jobs, found.gone, found.ended, told.asked) == ((one, other), {}, (), 0)
    assert set(found.partitions) == {"gpu", "debug"}
    assert [node.name for node in found.nodes] == ["n0", "n1"]


def test_a_known_job_that_is_not_listed_has_ended_as_slurm_remembers_or_is_gone():
    end = job("2", "COMPLETED")
    told = Answers(job("1"), ended=[end])
    found = read(told, (), {"1", "2", "3"})
    assert (found.gone, told.asked) == ({"2": end, "3": None}, 1)
    assert found.ended == (job("1"), end)


def test_a_known_job_that_leaves_is_listed_and_gone():
    leaves = job("1", "COMPLETING")
    found = read(Answers(leaves, job("2", "COMPLETING"), job("3")), (), {"1", "3"})
    assert found.gone == {"1": leaves}
    assert len(found.jobs) == 3


def test_ended_jobs_are_asked_for_if_somebody_looks_back():
    end = job("2", "COMPLETED")
    told = Answers(ended=[end])
    assert read(told).ended == ()
    assert (read(told, look_back=True).ended, told.asked) == ((end,), 1)


def test_a_managed_job_that_only_the_second_list_has_is_there_unless_it_has_ended(caplog):
    runs, leaves, ended = job("1"), job("2", "COMPLETING"), job("3", "FAILED")
    told = Answers(ended=[runs, leaves, ended])
    with caplog.at_level(logging.WARNING):
        found = read(told, [job("1"), job("2"), job("3")], {"1", "2", "3"})
    assert sorted(each.id for each in found.jobs) == ["1", "2"]
    assert found.gone == {"2": leaves, "3": ended}
    (line,) = caplog.records
    assert (line.message, line.jobs, line.count) == ("jobs not listed", "1,2", 2)


def test_the_log_names_a_few_of_many_jobs(caplog):
    jobs = [job(str(number)) for number in range(9)]
    with caplog.at_level(logging.WARNING):
        read(Answers(ended=jobs), jobs, {each.id for each in jobs})
    assert (caplog.records[0].jobs, caplog.records[0].count) == ("0,1,2,3,4,5,6,7", 9)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        read(Answers(*jobs), jobs, {each.id for each in jobs})
    assert caplog.records == []


def test_a_managed_job_whose_record_cannot_be_read_stays_as_it_was_last_seen():
    odd = (Unknown("State", "?"),)
    was, now = job("1", cpus=9), job("1", "", unknown=odd)
    assert read(Answers(now), [was]).jobs == (dataclasses.replace(was, unknown=odd),)
    assert read(Answers(now)).jobs == (now,), "it was never seen before"
    known = job("1", "PENDING", unknown=odd)
    assert read(Answers(known), [was]).jobs == (known,)


def test_slurm_that_does_not_answer_is_away():
    told = Answers()
    told.known["1"] = ControllerAway("connection refused", command="squeue")
    with pytest.raises(ClusterAway, match="connection refused"):
        read(told, [job("1")], {"1"})


# --- jobs that no list has


def look(
    told: Answers, jobs: Iterable[SlurmJob], absences: Absences, now_s: float = 0.0, *, complete: bool = True
) -> list[str]:
    managed = {each.id: each for each in jobs}
    found = absences.look(cast(SlurmReader, told), managed, now_s, complete=complete)
    return [each.id for each in found]


def test_a_running_job_is_gone_at_the_second_look_and_a_waiting_one_is_not_asked_for():
    for state, asked in (("RUNNING", ["1", "1"]), ("PENDING", [])):
        told, absences = Answers(), Absences()
        assert look(told, [job("1", state)], absences) == ["1"]
        assert look(told, [job("1", state)], absences) == []
        assert told.checked == asked


def test_a_waiting_job_that_is_not_listed_says_so():
    waits, runs = job("1", "PENDING"), job("2")
    managed = {"1": waits, "2": runs}
    found = Absences().look(cast(SlurmReader, Answers()), managed, 0.0, complete=True)
    assert found == (dataclasses.replace(waits, reason=UNLISTED), runs)


def test_looks_that_are_not_complete_do_not_count():
    absences, waits = Absences(), [job("1", "PENDING")]
    for _ in range(5):
        assert look(Answers(), waits, absences, complete=False) == ["1"]
    assert look(Answers(), waits, absences) == ["1"]
    assert look(Answers(), waits, absences) == []


@pytest.mark.parametrize(("now_s", "stays"), [(DOUBT_S - 0.1, ["1"]), (DOUBT_S, [])])
def test_doubt_ends_after_a_while(now_s: float, stays: list[str]):
    absences, waits = Absences(), [job("1", "PENDING")]
    assert look(Answers(), waits, absences, complete=False) == ["1"]
    assert look(Answers(), waits, absences, now_s, complete=False) == stays
    assert DOUBT_S == 60.0


def test_a_job_that_slurm_has_begins_a_new_absence_afterwards():
    told, absences, runs = Answers(), Absences(), [job("1")]
    assert look(told, runs, absences) == ["1"]
    told.known["1"] = True
    assert look(told, runs, absences, 1000.0) == ["1"], "however long it is not listed"
    told.known["1"] = False
    assert look(told, runs, absences, 2000.0) == ["1"]
    assert look(told, runs, absences, 2001.0) == []


def test_a_job_of_which_slurm_does_not_say_stays_for_a_while():
    told, absences, runs = Answers(), Absences(), [job("1")]
    told.known["1"] = TimedOut("no answer", command="scontrol")
    for now_s in (0.0, 1.0, 2.0, 59.0):
        assert look(told, runs, absences, now_s) == ["1"]
    assert look(told, runs, absences, 60.0) == []


def test_slurm_is_asked_for_a_bounded_number_of_jobs_and_for_no_more_once_it_hangs():
    told, runs = Answers(), [job(str(number)) for number in range(CHECKS + 2)]
    assert len(look(told, runs, Absences())) == CHECKS + 2
    assert told.checked == [str(number) for number in range(CHECKS)]
    hangs = Answers()
    hangs.known["1"] = TimedOut("no answer", command="scontrol")
    look(hangs, runs, Absences())
    assert hangs.checked == ["0", "1"]
    assert CHECKS == 50


def test_a_job_that_was_not_asked_for_is_not_gone_by_looks_alone():
    told, absences, runs = Answers(), Absences(), [job(str(number)) for number in range(CHECKS + 1)]
    look(told, runs, absences)
    assert look(told, runs, absences) == [str(CHECKS)]


@pytest.mark.parametrize(("kind", "stays"), [("job", 1), ("QOS", 0), ("switch", 0)])
def test_only_unread_records_of_jobs_make_a_look_incomplete(kind: str, stays: int):
    told, absences = Answers(), Absences()
    told.lost = (Unread(kind, "?"),)
    waits = [job("1", "PENDING")]
    assert len(read(told, waits, {"1"}, absences=absences).jobs) == 1
    assert len(read(told, waits, {"1"}, absences=absences).jobs) == stays


# --- what cannot be read


def test_nothing_starts_on_the_nodes_of_a_reservation_that_cannot_be_read():
    told = Answers()
    told.reserved = (HELD_BY,)
    assert [node.unknown for node in read(told).nodes] == [(), ()]
    odd = dataclasses.replace(HELD_BY, unknown=(Unknown("Flags", "?"), Unknown("State", "?")))
    told.reserved = (odd, HELD_BY)
    found = read(told)
    why = Unknown("ReservationName", "r, which has Flags=?")
    assert [node.unknown for node in found.nodes] == [(why,), ()]
    assert found.reservations == (odd, HELD_BY)


def test_a_node_keeps_what_is_unknown_of_itself():
    told = Answers()
    own = Unknown("Gres", "?")
    nodes = tuple(dataclasses.replace(node, unknown=(own,)) for node in told.nodes())
    told.nodes = lambda: nodes  # type: ignore[method-assign]
    told.reserved = (dataclasses.replace(HELD_BY, unknown=(Unknown("Flags", "?"),)),)
    first, second = read(told).nodes
    assert first.unknown == (own, Unknown("ReservationName", "r, which has Flags=?"))
    assert second.unknown == (own,)


def test_each_value_is_told_once_with_all_records_that_have_it():
    odd, gone = Unknown("State", "?"), Unknown("Gres", None)
    told = Answers()
    first, second = (dataclasses.replace(node, unknown=(odd, gone)) for node in told.nodes())
    partition = dataclasses.replace(told.partitions()[0], unknown=(odd,))
    found = Records(
        partitions={"gpu": partition},
        nodes=(first, dataclasses.replace(second, unknown=(odd,))),
        jobs=(job("1", unknown=(odd,)), job("2"), job("3", unknown=(odd,))),
        reservations=(dataclasses.replace(HELD_BY, unknown=(odd,)),),
        gone={},
        unread=(
            Unread("job", "x|y"),
            Unread("job", "x|y"),
            Unread("message", "error: x", 3),
            Unread("reader", "it died", 1),
            Unread("zzz", "z"),
        ),
    )
    assert records.unknown_values(found) == (
        UnknownValue("partition", "State", "State=?", ("gpu",)),
        UnknownValue("node", "State", "State=?", ("n0", "n1")),
        UnknownValue("node", "Gres", "no Gres", ("n0",)),
        UnknownValue("reservation", "State", "State=?", ("r",)),
        UnknownValue("job", "State", "State=?", ("1", "3")),
        UnknownValue("job", "record", "record=x|y", ("without a readable name",) * 2),
        UnknownValue("message", "text", "error: x", ("", "", "")),
        UnknownValue("reader", "text", "it died", ("",)),
        UnknownValue("zzz", "record", "record=z", ("without a readable name",)),
    )


def test_slurm_must_have_the_managed_partitions():
    records.expect_partitions(("b",), {"a": 1, "b": 2})
    with pytest.raises(RoundFailed, match="Slurm has no partition c, d; it has a, b"):
        records.expect_partitions(("c", "b", "d"), {"b": 1, "a": 2})


def test_records_are_a_value():
    found = Records({}, (), (), (), {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.jobs = ()  # type: ignore[misc]
    assert not hasattr(found, "__dict__")
