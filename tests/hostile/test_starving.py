"""One user floods the site with jobs: no job of other users is kept without GPUs for longer than the bound of `turns`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_scheduler.rounds.policies import REGISTRY, pollux, takes_turns
from penstock_scheduler.rounds.policies.turns import LARGE_TURN_S, TURN_S
from tests.hostile.floods import ROUND_S, Flood, Lived
from tests.scheduler.builders import job, table

PROMISE = sorted(name for name in REGISTRY if takes_turns(name))
"""Policies under which the bound holds."""

LONG_EXAMPLES = 300
"""Of each long search, for each policy."""


@pytest.fixture(autouse=True, scope="module")
def quick_search() -> Iterator[None]:
    """A search that is stopped early has to keep the rules, too."""
    with mock.patch.multiple(pollux, GENERATIONS=10, POPULATION=20):
        yield


SHORT_S = 120.0
"""How long a job of the flood takes on the GPUs that it asks for."""

BOUND_S = TURN_S + SHORT_S + 3 * ROUND_S
"""The job is due; the GPUs become free; and the rounds in which penstockd sees each of these."""


def long_jobs(
    users: int, min_gpus: int = 1, *, submit_s: float = 0.0, weight: float = 1.0, **spec: object
) -> list[Lived]:
    """Jobs that nobody ends, one of each user. The second half comes when the flood is already there."""
    own = {"max_gpus": max(8, min_gpus), **spec}
    return [
        Lived(
            job(
                f"long-{n}",
                user=f"user-{n}",
                submit_s=submit_s if n < (users + 1) // 2 else submit_s + 400.0,
                weight=weight,
                min_gpus=min_gpus,
                **own,
            ),
            1e9,
        )
        for n in range(users)
    ]


def flood(
    count: int, min_gpus: int = 1, *, submit_s: float = 60.0, saves: bool = True, again: int = 0, **fields: object
) -> list[Lived]:
    """Two-minute jobs of one user."""
    own = {"max_gpus": 8, **fields}
    return [
        Lived(
            job(f"short-{n:03d}", user="mallory", submit_s=submit_s, min_gpus=min_gpus, **own),
            SHORT_S * min_gpus,
            saves,
            again,
        )
        for n in range(count)
    ]


def in_accounts() -> list[Lived]:
    """The flood of one user who belongs to many accounts."""
    return [
        dataclasses.replace(lived, job=dataclasses.replace(lived.job, account=f"account-{n % 20}"))
        for n, lived in enumerate(flood(150))
    ]


def boasting() -> list[Lived]:
    """Jobs of which the declared table says that every GPU makes them a million times as fast."""
    boast = table(t4={1: 1.0, 2: 1e6, 4: 1e12, 8: 1e18})
    return [dataclasses.replace(lived, model=boast) for lived in flood(150)]


FLOODS: dict[str, Callable[[], list[Lived]]] = {
    "elastic": lambda: flood(150),
    "elastic, unsaved": lambda: flood(150, saves=False),
    "rigid": lambda: flood(150, max_gpus=1, adaptivity="rigid"),
    "not to be stopped": lambda: flood(150, max_gpus=1, adaptivity="rigid", preemptible=False),
    "of several GPUs": lambda: flood(60, 4, max_gpus=4, adaptivity="rigid", preemptible=False),
    "of all GPUs": lambda: flood(30, 8, max_gpus=8, adaptivity="rigid", preemptible=False),
    "in many accounts": in_accounts,
    "submitted again at once": lambda: flood(24, again=10, max_gpus=1, adaptivity="rigid", saves=False),
    "boasting": boasting,
}


@pytest.mark.parametrize("fair_share", [False, True])
@pytest.mark.parametrize("kind", FLOODS)
@pytest.mark.parametrize("policy", PROMISE)
def test_a_flood_keeps_no_job_without_gpus(policy: str, kind: str, fair_share: bool) -> None:
    """With fair share, the flood's user has the highest factor, and the others the lowest."""
    attack, honest = FLOODS[kind](), long_jobs(3, weight=0.5 if fair_share else 1.0)
    for lived in attack:
        lived.job = dataclasses.replace(lived.job, weight=2.0 if fair_share else 1.0)
    cluster = Flood("t4:2x4", [*honest, *attack], policy)
    cluster.run(1800.0)
    assert max(lived.longest_wait_s for lived in honest) <= BOUND_S
    if kind != "of all GPUs":
        assert any(lived.attained_gpu_s for lived in attack), "the flood goes on beside them"


@pytest.mark.parametrize("policy", PROMISE)
def test_a_job_of_several_gpus_gets_them_at_once(policy: str) -> None:
    """Four GPUs are the equal share of two users. Jobs of one GPU, which may not be stopped, leave them one by one."""
    gang = long_jobs(1, 4, submit_s=300.0)
    attack = flood(120, max_gpus=1, adaptivity="rigid", saves=False)
    cluster = Flood("t4:2x4", [*gang, *attack], policy)
    cluster.run(1800.0)
    assert gang[0].longest_wait_s <= BOUND_S


@st.composite
def floods(draw: st.DrawFn) -> tuple[str, list[Lived], list[Lived]]:
    nodes, size = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    users = draw(st.integers(1, 3))
    share = nodes * size // (users + 1)
    honest = []
    for n in range(users if share else 0):
        least = draw(st.sampled_from([gpus for gpus in (1, 2, 4) if gpus <= min(share, size)]))
        kind = draw(st.sampled_from(["adaptive", "strong-scaling", "rigid"]))
        each = job(
            f"long-{n}",
            user=f"user-{n}",
            submit_s=draw(st.sampled_from([0.0, 60.0, 500.0])),
            min_gpus=least,
            max_gpus=least if kind == "rigid" else 64,
            adaptivity=kind,
            weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
        )
        honest.append(Lived(each, 1e9))
    attack = []
    weight, saves = draw(st.sampled_from([0.5, 1.0, 2.0])), draw(st.booleans())
    preemptible, kind = draw(st.booleans()), draw(st.sampled_from(["adaptive", "rigid"]))
    again = draw(st.sampled_from([0, 5]))
    least = draw(st.sampled_from([gpus for gpus in (1, 2, size) if gpus <= size]))
    for n in range(draw(st.integers(5, 60))):
        each = job(
            f"short-{n:03d}",
            user="mallory",
            submit_s=draw(st.sampled_from([0.0, 60.0])),
            min_gpus=least,
            max_gpus=least if kind == "rigid" else 64,
            adaptivity=kind,
            weight=weight,
            preemptible=preemptible,
        )
        attack.append(Lived(each, SHORT_S * least, saves, again))
    return f"t4:{nodes}x{size}", honest, attack


@pytest.mark.parametrize("policy", PROMISE)
@settings(max_examples=10, derandomize=True)
@given(floods())
def test_the_bound_holds_for_every_flood(policy: str, drawn: tuple[str, list[Lived], list[Lived]]) -> None:
    the_bound_holds(policy, *drawn)


@pytest.mark.long
@pytest.mark.parametrize("policy", PROMISE)
@settings(max_examples=LONG_EXAMPLES)
@given(floods())
def test_the_bound_holds_for_many_floods(policy: str, drawn: tuple[str, list[Lived], list[Lived]]) -> None:
    the_bound_holds(policy, *drawn)


def the_bound_holds(policy: str, nodes: str, honest: list[Lived], attack: list[Lived]) -> None:
    cluster = Flood(nodes, [*honest, *attack], policy)
    cluster.run(1800.0)
    for lived in honest:
        assert lived.longest_wait_s <= BOUND_S, lived.job.id


@st.composite
def crowds(draw: st.DrawFn) -> tuple[str, list[Lived]]:
    """Jobs that nobody ends, of users who want different GPUs."""
    jobs = [
        Lived(
            job(
                f"job-{n:02d}",
                user=draw(st.sampled_from(["ada", "bob", "cleo", "dan"])),
                submit_s=draw(st.sampled_from([0.0, 120.0, 700.0])),
                min_gpus=(least := draw(st.sampled_from([1, 1, 2, 4, 8]))),
                max_gpus=draw(st.sampled_from([least, 8, 64])) if least < 8 else 64,
                gpu_types=draw(st.sampled_from([None, ["t4"], ["a100"]])),
            ),
            1e9,
        )
        for n in range(draw(st.integers(4, 14)))
    ]
    return draw(st.sampled_from(["t4:2x4,a100:1x8", "t4:1x8,a100:1x4", "t4:1x2,a100:1x2"])), jobs


@pytest.mark.parametrize("policy", PROMISE)
@settings(max_examples=3, derandomize=True)
@given(crowds())
def test_turns_do_not_stop_jobs_in_circles(policy: str, drawn: tuple[str, list[Lived]]) -> None:
    turns_end(policy, *drawn)


@pytest.mark.long
@pytest.mark.parametrize("policy", PROMISE)
@settings(max_examples=LONG_EXAMPLES)
@given(crowds())
def test_turns_do_not_stop_jobs_in_circles_in_many_crowds(policy: str, drawn: tuple[str, list[Lived]]) -> None:
    turns_end(policy, *drawn)


def turns_end(policy: str, nodes: str, jobs: list[Lived]) -> None:
    """Nothing changes after the first 12 minutes, but that jobs age and that large ones are due after an hour. From then on,
    turns stop no job more often than once in `LARGE_TURN_S`.
    """
    cluster = Flood(nodes, jobs, policy)
    quiet_s = 700.0 + LARGE_TURN_S + TURN_S
    cluster.run(quiet_s)
    early = len(cluster.stop_texts)
    cluster.run(quiet_s + 2400.0)
    turns = Counter(each.id for each, _, text in cluster.stop_texts[early:] if "has been without GPUs" in text)
    assert all(count <= 1 for count in turns.values()), turns
