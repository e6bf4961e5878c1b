"""The agent's saved state, and how a restarted agent continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_scheduler.model import Pack, SharedGpus
from penstock_scheduler.rounds.sharing.control import ControlSettings, ShareControl, Steps, advance
from penstock_scheduler.rounds.sharing.node import Account, Group
from penstock_slurm.agent.state import LocalJob, SavedState, StateFile, load

from .node import Node, alone, steps


def test_an_agent_that_starts_again_goes_on_without_a_daemon(make_node: Callable[..., Node]):
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (3,), slice_s=0.5)
    node.until(lambda: "suspended" in node.states().values() and "running" in node.states().values(), "time slice")
    before = node.agent.status()
    shutil.rmtree(node.spool)
    node.start()
    after = node.agent.status()
    assert (after.history, after.order, node.states()) == (
        before.history,
        before.order,
        {j.job: j.state for j in before.jobs},
    )
    had = [steps(node, 1), steps(node, 2)]
    node.until(lambda: steps(node, 1) > had[0] + 20 and steps(node, 2) > had[1] + 20, "time slices without a daemon")
    assert set(node.devices().values()) == {(3,)}


def test_a_state_of_another_boot_is_not_taken_up(tmp_path: Path):
    before = load(tmp_path / "state.json", "a")
    StateFile(tmp_path / "state.json").save(before)
    assert load(tmp_path / "state.json", "a") == before
    assert load(tmp_path / "state.json", "b").history != before.history


OTHER_EVIDENCE = {"cycles": 3.0, "mean": 0.02, "squares": 0.1, "variance": 1e-4}


OTHER_TRIED = {"share": 0.3, "evidence": OTHER_EVIDENCE}


@pytest.mark.parametrize(
    "changed",
    [
        {"good": 0.2, "seen": []},
        {"good": OTHER_TRIED, "bad": OTHER_TRIED},
        {"good": {"share": 0.3}},
        {"good": {"share": 0.3, "evidence": {}}},
        {"base": {"count": 3, "mean_s": 0.1, "squares": 0.0, "least_s": 0.1}},
        {},
    ],
    ids=["control", "evidence", "no evidence", "less evidence", "steps", "same release"],
)
def test_from_another_releases_state_only_the_search_for_a_share_restarts(tmp_path: Path, changed: dict[str, object]):
    """Any difference restarts the search. With the release that wrote the file, the search continues."""
    shared = SharedGpus("n0", 1, (Pack(("1", "2"), 1, guaranteed="1"),))
    control = ShareControl()
    for made in (Steps.of([0.1, 0.11] * 10), Steps.of([0.1, 0.3] * 10)):  # a base, and a share beside it
        control = advance(control, made, ControlSettings())
    group = Group(shared, since_s=5.0, running=shared.packs, control=control)
    before = SavedState(
        boot="a", history="h", groups=[group], account=Account(served_s={"1": 60.0}), jobs={"1": LocalJob(7)}
    )
    StateFile(tmp_path / "state.json").save(before)
    told = json.loads((tmp_path / "state.json").read_text())
    told["groups"][0]["control"] |= changed
    (tmp_path / "state.json").write_text(json.dumps(told))
    if changed:
        group.control = ShareControl()
    assert load(tmp_path / "state.json", "a") == before
