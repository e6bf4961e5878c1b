"""The settings of a cloud, and what a round assumes of a cloud that sets nothing."""

from __future__ import annotations

import dataclasses

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.deciding.estimates import Gravity
from penstock_scheduler.model import CloudState, Offer
from penstock_scheduler.model.waiting import Wait, WaitingPolicy


def _default(name: str) -> object:
    field = CloudSettings.model_fields.get(name)
    return getattr(CloudSettings, name) if field is None else field.default


def test_the_documented_defaults_hold_for_every_cloud_behind_the_port():
    """`Burst` is a port: a cloud of another provider, and the simulator's, get what the reference of settings says."""
    state = CloudState()
    for field in dataclasses.fields(CloudState):
        if field.name in CloudSettings.model_fields or field.name in (
            "margin",
            "unknown_h",
            "cost_per_usd",
            "bytes_per_s",
        ):
            assert getattr(state, field.name) == _default(field.name), field.name
    assert Offer("a@b", "t4", 1, 1, 1.0).boot_s == _default("boot_s")
    assert Gravity() == Gravity(_default("bytes_per_s"), _default("usd_per_gb"))  # type: ignore[arg-type]
    star = WaitingPolicy(Wait.STAR)
    assert (star.t_max_h, star.patience, star.short_h) == tuple(map(_default, ("t_max_h", "patience", "short_h")))


def test_a_cloud_that_says_nothing_offers_nothing_and_no_job_waits_for_it():
    state = CloudState()
    assert (state.offers, state.runs, state.budgets, state.closed, state.longest_s) == ((), (), (), (), None)
    assert (state.returned, state.history_s, state.words) == ({}, {}, {})
    assert state.waiting == WaitingPolicy(Wait.NONE)
    assert Offer("a@b", "t4", 1, 1, 1.0).count == 1
