"""What a review found in turns: the time that one user's jobs take of a round, which no other job gets."""

from __future__ import annotations

import time

import pytest

from penstock_scheduler.model import NodeChoice
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.pools import Pools, place_of
from penstock_scheduler.rounds.policies.turns import TURN_S
from tests.scheduler.builders import on, snapshot
from tests.scheduler.policies.test_turns import NOW_S, decided, full, short, waits

ALIKE: dict[str, object] = {}
WAYS = {
    "types that the site has not": lambda n: {"excluded_gpu_types": (f"x{n}",)},
    "one of several types, and others": lambda n: {"gpu_types": ("t4", f"x{n}")},
    "only types that the site has not": lambda n: {"gpu_types": (f"x{n}",)},
    "node choices": lambda n: {"nodes": NodeChoice(exclude=frozenset([f"x{n}"]))},
    "node choices that differ": lambda n: {
        "nodes": NodeChoice(exclude=frozenset([f"t4-{n % 32:02}", f"t4-{n // 32:02}"]))
    },
}
"""Ways in which each job of a user asks for its GPUs in words of its own."""


def took_s(jobs: int, own: object) -> float:
    """CPU seconds of one round in which a user has so many due jobs, and another user one."""
    held = [short(f"m{n}", f"t4_{n // 8:02}", user="bob") for n in range(256)]
    due = [waits(f"e{n}", TURN_S + n, user="eve", **(own(n) if callable(own) else ALIKE)) for n in range(jobs)]
    state = snapshot("t4:32x8", [*held, *due, waits("ada", TURN_S)], time_s=NOW_S)
    began_s = time.process_time()
    decided(state)
    return time.process_time() - began_s


@pytest.mark.parametrize("way", WAYS)
def test_jobs_that_ask_in_words_of_their_own_cost_a_round_no_more_than_others(way: str) -> None:
    """Each way of asking was compared with each other one: 1,500 took 4.5 s of every round."""
    assert took_s(1000, WAYS[way]) < 3 * took_s(1000, ALIKE) + 0.3


@pytest.mark.parametrize("policy", ["sia", "pollux"])
def test_types_that_the_site_has_not_change_no_turn(policy: str) -> None:
    """Nor what is tried for a user's next job, where there is no room for the first."""
    plans = []
    for own in (lambda _: {}, WAYS["types that the site has not"], WAYS["one of several types, and others"]):
        due = [waits(f"a{n}", TURN_S + n, min_gpus=2, **own(n)) for n in range(5)]
        plans.append(make_policy(policy)[0].decide(full(*due, waits("c", TURN_S, user="cleo"))))
    assert plans[0].stops
    assert all((each.assignments, each.stops) == (plans[0].assignments, plans[0].stops) for each in plans)


def test_all_queued_jobs_of_a_user_tell_what_the_user_waits_for() -> None:
    """ada's pool is the t4. cleo waits for an a100 and, with another job, for either; dan for no GPU of the site."""
    due, other = waits("a", TURN_S, gpu_types=("t4",)), waits("b", TURN_S, gpu_types=("t4", "x"))
    wants = [
        waits("c0", 1.0, user="cleo", gpu_types=("a100",)),
        waits("c1", 1.0, user="cleo", gpu_types=("x", "t4", "a100")),
        waits("d", 1.0, user="dan", gpu_types=("x",)),
        waits("e", 1.0, user="eve", gpu_types=("a100",)),
    ]
    held = short("m", "t4_00")
    where = place_of(held)
    assert where is not None
    pools = Pools(snapshot("t4:1x4,a100:1x2", [due, other, *wants, held]), [(held, where)])
    assert pools.of(due).users == ["ada", "cleo", "mallory"]
    assert (pools.of(due).gpus, pools.of(due).share) == (4, 4 / 3)
    assert pools.of(other) is pools.of(due), "the site has no x"
    assert pools.of(wants[0]).users == ["cleo", "eve"]
    assert pools.of(wants[1]).users == ["ada", "cleo", "eve", "mallory"]
    assert pools.of(wants[2]).gpus == 0
    pools.count("mallory", on("t4", t4_00=2), 1)
    assert [pools.of(job).held["mallory"] for job in (due, *wants[:3])] == [3, 0, 3, 0]
