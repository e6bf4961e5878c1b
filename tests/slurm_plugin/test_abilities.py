"""Requests that a Slurm has refused are recorded by its version."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_slurm.gateway import Refused, SlurmError, TimedOut, Transient, Unregistered
from penstock_slurm.gateway.abilities import FILE, Abilities


def test_what_a_version_refused_once_is_not_tried_again(tmp_path: Path) -> None:
    old, new = Abilities(tmp_path, lambda: (22, 5), lambda: False), Abilities(tmp_path, lambda: (24, 11), lambda: False)
    assert old.may("shrink-again")
    old.refused("shrink-again", Refused("no longer pending", command="scontrol update"))
    assert not Abilities(tmp_path, lambda: (22, 5), lambda: False).may("shrink-again")
    assert old.may("shrink")
    assert new.may("shrink-again")
    (tmp_path / FILE).write_text("[")
    assert old.may("shrink-again"), "an unreadable file counts as empty"


@pytest.mark.parametrize(
    ("kind", "accounting", "first", "again"),
    [
        (Refused, True, False, False),
        (Unregistered, False, True, False),
        (Unregistered, True, True, True),
        (TimedOut, False, True, True),
        (Transient, False, True, True),
    ],
)
def test_not_just_now_is_no_refusal(
    tmp_path: Path, kind: type[SlurmError], accounting: bool, first: bool, again: bool
) -> None:
    """For a run that has given up nodes, 22.05 always answers that it waits for slurmdbd, if the site does not have it."""
    abilities = Abilities(tmp_path, lambda: (22, 5), lambda: accounting)
    error = kind("try again", command="scontrol update")
    abilities.refused("shrink", error)
    abilities.refused("shrink-again", error)
    assert (abilities.may("shrink"), abilities.may("shrink-again")) == (first, again)
