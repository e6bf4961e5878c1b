"""When a term is over: worked by hand, on clocks that tell different times."""

from __future__ import annotations

import random

from penstock_scheduler.store.leadership.terms import DRIFT, Sighting, Term, ends_s

LEASE_S = 10.0


def sees(sighting: Sighting, beat: int, now_s: float, **more: object) -> bool:
    sighting.saw(Term(4, beat, "a", **more), now_s)
    return sighting.over(now_s)


def test_a_term_is_over_when_nothing_was_confirmed_for_the_whole_lease():
    b = Sighting("b", LEASE_S)
    assert not sees(b, 1, 100.0)
    assert not sees(b, 1, 109.9)
    assert not sees(b, 2, 110.0)  # a confirmation in the last moment
    assert not sees(b, 2, 120.0)  # exactly the lease: b's clock may be the faster one
    assert sees(b, 2, 120.2)


def test_a_released_term_is_over_at_once_but_only_for_its_successor():
    assert sees(Sighting("b", LEASE_S), 1, 100.0, released=True)
    assert sees(Sighting("b", LEASE_S), 1, 100.0, released=True, successor="b")
    c = Sighting("c", LEASE_S)
    assert not sees(c, 1, 100.0, released=True, successor="b")
    assert sees(c, 1, 111.0, released=True, successor="b")  # b did not come


def test_the_leader_gets_its_whole_lease_again_after_the_database_was_away():
    b = Sighting("b", LEASE_S)
    assert not sees(b, 1, 100.0)
    b.lost_sight()
    assert not b.over(500.0)
    assert not sees(b, 1, 500.0)
    assert sees(b, 1, 511.0)


def test_no_standby_takes_over_while_the_leader_may_write():
    """Whatever the clocks tell, and whatever each message takes: 10,000 histories."""
    rng = random.Random(30)
    for _ in range(10_000):
        leader_offset_s, standby_offset_s = rng.uniform(-1e6, 1e6), rng.uniform(-1e6, 1e6)
        leader_speed, standby_speed = 1 + rng.uniform(-DRIFT, 0) / 2, 1 + rng.uniform(0, DRIFT) / 2
        sent_s = rng.uniform(0, 100)
        read_s = sent_s + rng.expovariate(1.0)  # the standby reads it later than the leader sent it
        b = Sighting("b", LEASE_S)
        b.saw(Term(4, 1, "a"), read_s * standby_speed + standby_offset_s)
        last_write_s = sent_s + LEASE_S * (1 - DRIFT) / leader_speed
        confirmed_s = sent_s * leader_speed + leader_offset_s
        assert ends_s(confirmed_s, LEASE_S) <= last_write_s * leader_speed + leader_offset_s + 1e-6
        assert not b.over(last_write_s * standby_speed + standby_offset_s)
