"""Events that agents report are taken once, and kept over a restart of the daemon."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest

from penstock_profiles.colocation import Colocation
from penstock_scheduler.api.agent_messages import (
    status_file,
)
from penstock_scheduler.jobs.pairs import Pairs
from penstock_slurm.share import agent_files
from tests.scheduler.builders import snapshot

from .site import Site, bound, carried, group, placeholder, runs, taken


def test_a_status_that_cannot_be_read_for_once_stands_until_it_is_old(site: Site) -> None:
    site.commands.indexes = {"20": (2,), "21": (3,)}
    site.told(carried("7", 3))
    found = (runs("7", None),)
    for lost in (False, True):
        if lost:
            status_file(site.spool, "n0").unlink()
        site.observe(*found, others=(placeholder("20"), placeholder("21")), used=2)
        site.agents.share([group("7")])
        assert [each.devices for each in site.order().groups] == [(3,)]
    site.clock.sleep(100.0)
    site.observe(*found, others=(placeholder("20"), placeholder("21")), used=2)
    assert site.agents.keeps_back("7", "n0").startswith("waits for the agent of n0, which does not answer")


def test_what_agents_saw_and_did_while_no_daemon_was_there_is_told_once(site: Site) -> None:
    site.told(news=1)
    assert taken(site) == (0, [], []), "events from before the first daemon may have been reported already"
    site.told(news=2)
    assert taken(site) == (1, [2], [("n0", 2)])
    site.begin()
    assert taken(site) == (0, [], [])
    site.told(news=4)
    site.begin()
    assert taken(site) == (2, [3, 4], [("n0", 3), ("n0", 4)])
    assert taken(site) == (0, [], [])
    site.begin()
    assert taken(site) == (0, [], [])
    site.told(news=2, history="another")
    site.begin()
    assert taken(site) == (2, [1, 2], [("n0", 1), ("n0", 2)]), "an agent that has lost its state counts from 0"


def test_what_a_daemon_has_seen_and_not_told_is_told_by_the_next_one(site: Site) -> None:
    site.told()
    site.observe()
    site.told(news=2)
    site.observe()
    assert [each.number for each in site.agents.take_contained()] == [1, 2]
    site.begin()
    assert taken(site) == (2, [], [("n0", 1), ("n0", 2)])


def test_a_pack_of_jobs_that_have_ended_meanwhile_is_learned(site: Site) -> None:
    """The agent still has its last order, so it reports the jobs' kinds until it gets another order."""
    site.told()
    site.observe()
    site.told(carried("7", 0, kind="a"), carried("8", 0, kind="b"), news=1)
    site.begin()
    site.observe()
    site.told(news=1)
    site.observe()
    pairs = Pairs(Colocation())
    pairs.on(dataclasses.replace(snapshot("t4:1x4", []), sharing=site.agents.sharing()))
    assert (pairs.known.share("t4", "a", "b"), pairs.known.share("t4", "b", "a")) == (0.8, 0.7)
    site.observe()
    assert site.agents.sharing().uses == {}


def test_where_nothing_can_be_kept_news_are_told_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    site.told()
    site.observe()
    monkeypatch.setattr(agent_files, "write_whole", full)
    site.told(news=1)
    assert taken(site) == (1, [1], [("n0", 1)])
    assert taken(site) == (0, [], [])
    assert "cannot record which events of an agent were taken" in caplog.text


def test_what_is_learned_of_a_job_is_its_users_unless_it_declares_a_family(site: Site) -> None:
    """`train.sh` of two users are two programs. A family is one program for all users."""
    site.told()
    found = []
    for number, user, spec in (("7", "ada", {}), ("8", "bob", {}), ("9", "bob", {"model_family": "bert-squad"})):
        each, slurm_job = bound(number, 1, **spec)
        found.append((dataclasses.replace(each, name="train.sh", user=user), slurm_job))
        site.commands.indexes[number] = (int(number) - 7,)
    site.observe(*found)
    site.agents.share([])
    assert [each.kind for each in site.order().jobs] == ["ada/train.sh", "bob/train.sh", "bert-squad"]
