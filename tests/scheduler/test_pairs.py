"""What is learned of pairs of jobs while they share GPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.colocation import Colocation, Pair
from penstock_profiles.estimators import TableEstimator
from penstock_profiles.families import Families
from penstock_scheduler.api.ports import ClusterParts, RoundListener
from penstock_scheduler.daemon.penstockd import make_loop
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.pairs import PAIRS, kind_of, open_pairs
from penstock_scheduler.model import JobSpec, JobUse, KnownPair, PackSeen, SharingState, Snapshot
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.loop import RoundSurroundings
from penstock_scheduler.rounds.settings import parse_settings
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from penstock_scheduler.simulator.agents import SharingKind, SimulatedAgents
from tests.scheduler.builders import job, snapshot


def test_what_was_seen_is_learned_told_and_still_known_after_a_restart(tmp_path: Path) -> None:
    state = snapshot("t4:1x1", [job("1"), job("2")])
    uses = {"1": JobUse("a", 0.5), "2": JobUse("b", 0.5)}
    seen = SharingState(uses=uses, seen=(PackSeen(("1", "2"), "t4", (0.8, 0.6)),))
    told = open_pairs(tmp_path / "pairs.json").on(dataclasses.replace(state, sharing=seen))
    assert told.sharing is not None
    assert told.sharing.pairs == (KnownPair("t4", "a", "b", 0.8), KnownPair("t4", "b", "a", 0.6))
    later = open_pairs(tmp_path / "pairs.json").on(dataclasses.replace(state, sharing=SharingState(uses=uses)))
    assert later.sharing is not None
    assert later.sharing.pairs == told.sharing.pairs
    assert open_pairs(tmp_path / "other.json").on(state) is state, "no jobs share GPUs"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text("{")
    with pytest.raises(ConfigError, match="the speeds of pairs"):
        open_pairs(tmp_path / "pairs.json")


def of_two(*seen: PackSeen) -> Snapshot:
    """Jobs of the kinds `a` and `b`, and what was seen of them."""
    uses = {"1": JobUse("a", 0.5), "2": JobUse("b", 0.5)}
    state = snapshot("t4:1x1", [job("1"), job("2")])
    return dataclasses.replace(state, sharing=SharingState(uses=uses, seen=seen))


def known(told: Snapshot) -> dict[tuple[str, str], float]:
    assert told.sharing is not None
    return {(pair.mine, pair.theirs): pytest.approx(pair.share) for pair in told.sharing.pairs}


def test_a_table_holds_until_a_pair_is_measured_and_is_not_kept(tmp_path: Path) -> None:
    """It counts for one measurement: 1.0 by the table and 0.6 as seen are 0.8. What was measured before counts alone."""
    path = tmp_path / PAIRS
    one, other = ("t4", "a", "b"), ("t4", "b", "a")
    table = Colocation({one: Pair(share=1.0, weight=8.0), other: Pair(share=0.5), ("t4", "a", "a"): Pair(share=0.7)})
    pairs = open_pairs(path, table)
    assert known(pairs.on(of_two())) == {("a", "b"): 1.0, ("b", "a"): 0.5, ("a", "a"): 0.7}
    told = pairs.on(of_two(PackSeen(("1", "2"), "t4", (0.6, 0.5))))
    assert known(told) == {("a", "b"): 0.8, ("b", "a"): 0.5, ("a", "a"): 0.7}
    assert known(open_pairs(path).on(of_two())) == {("a", "b"): 0.8, ("b", "a"): 0.5}, "without the table"
    assert known(open_pairs(path, table).on(of_two())) == known(told)


def test_the_daemon_begins_with_the_sites_table(tmp_path: Path) -> None:
    """Gavel's form: a net alone makes 10 iterations/s, beside another 8."""
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps({"t4": {"net": {"null": 10.0, "net": [8.0, 8.0]}}}))
    settings = parse_settings(
        f"[policy]\nname = 'gandiva'\n[daemon]\nstate_dir = '{tmp_path}'\npairs = '{file}'\n[policy.gandiva]\n", "here"
    )
    clock, spec = SimulatedClock(), JobSpec(max_gpus=1)
    jobs = [
        SimulatedJob(each, each, spec, EstimatedJob(TableEstimator({"t4": {1: 1.0}}), 1000.0, 1.0), 0.0)
        for each in "ab"
    ]
    agents = SimulatedAgents(dict.fromkeys("ab", SharingKind("net", 0.9)), Colocation())
    cluster = SimulatedCluster(nodes_from_spec("t4:1x1"), jobs, clock, agents=agents)
    parts = ClusterParts(cluster, agents=cluster)
    rounds: list[RoundRecord] = []

    class Recorder(RoundListener):
        def decided(self, record: RoundRecord) -> None:
            rounds.append(record)

    site = RoundSurroundings(listeners=(Recorder(),))
    loop = make_loop(settings, clock, MemoryStore(), parts, SpecModels(Families(), 30.0), site)
    loop.tick()
    assert rounds[0].snapshot.sharing is not None
    assert rounds[0].snapshot.sharing.pairs == (KnownPair("t4", "net", "net", 0.8),)


def test_jobs_without_a_family_are_of_their_users_kind() -> None:
    """Else what ada's `train.sh` does to others would decide for bob's."""
    ada, bob = (dataclasses.replace(job("1", user=user), name="train.sh") for user in ("ada", "bob"))
    assert kind_of(ada) != kind_of(bob)
    same = [dataclasses.replace(each, spec=JobSpec(model_family="bert-squad")) for each in (ada, bob)]
    assert [kind_of(each) for each in same] == ["bert-squad"] * 2
