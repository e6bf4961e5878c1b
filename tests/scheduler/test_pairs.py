"""What is learned of pairs of jobs while they share GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import JobUse, KnownPair, PackSeen, SharingState
from penstock_scheduler.pairs import open_pairs
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
    assert open_pairs(tmp_path / "other.json").on(state) is state, "nobody shares"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text("{")
    with pytest.raises(ConfigError, match="what is known of pairs"):
        open_pairs(tmp_path / "pairs.json")
