"""Endpoints for the budget ledger, budgets and stored profiles."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from penstock_profiles.profiles import Profile
from penstock_scheduler.api.ledger_messages import BudgetView, LedgerPage, Usage, UsageBy
from penstock_scheduler.api.messages import MAX_PAGE, ProfileList
from penstock_scheduler.daemon.service import views
from penstock_scheduler.daemon.service.api import User, storable
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.forwarding import Route
from penstock_scheduler.model.plausible import check_observation
from penstock_scheduler.store.jobs import MOST_PROFILES

router = APIRouter(prefix="/v1", route_class=Route)


@router.get("/ledger")
def get_ledger(
    call: User,
    job: Annotated[str | None, Query(max_length=100)] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> LedgerPage:
    """Show the budget ledger, newest first. Users see their own entries; with `job`, the entries of that job."""
    if not storable(job):
        return LedgerPage(lines=[])
    user = None if call.sees_all else call.identity.user
    lines = call.api.store.ledger(user=user, job=job, before=before, limit=limit)
    return LedgerPage(lines=lines, next=lines[-1].id if len(lines) == limit else None)


@router.get("/usage")
def get_usage(
    call: User,
    by: UsageBy = "user",
    from_s: Annotated[float, Query(alias="from", ge=0, le=2**53, allow_inf_nan=False)] = 0.0,
    to_s: Annotated[float | None, Query(alias="to", ge=0, le=2**53, allow_inf_nan=False)] = None,
) -> Usage:
    """Show what jobs used between two times, in s since 1970, and what it cost. By default, users see their own jobs."""
    user = None if call.may_see_of("usage", "") else call.identity.user
    return views.usage(call.api.known, call.api.daemon.chosen.prices, by, from_s, to_s, user)


@router.get("/budgets")
def get_budgets(call: User) -> list[BudgetView]:
    """Show budgets as of the newest round. Users see the site's budget and those of accounts that their jobs use."""
    budgets = call.api.daemon.chosen.budgets
    if call.sees_all:
        return list(budgets)
    mine = {"", *(view.account for _, view in call.api.store.jobs(user=call.identity.user, limit=MAX_PAGE))}
    return [budget for budget in budgets if budget.account in mine]


@router.get("/profiles")
def get_profiles(call: User) -> ProfileList:
    """List your stored profiles."""
    return ProfileList(profiles=[each.model_dump(mode="json") for each in call.api.store.profiles(call.identity.user)])


@router.put("/profiles", status_code=204)
async def put_profile(profile: Profile, call: User) -> None:
    """Store a profile for your jobs of that name."""
    try:
        for observation in profile.observations:
            check_observation(observation)
    except ValueError as error:
        raise Refusal(422, "bad-body", f"observations: {error}") from None
    if not await asyncio.to_thread(call.api.store.save_profile, call.identity.user, profile):
        text = f"your stored profiles together may have {MOST_PROFILES:,} characters; store shorter ones in place of long ones"
        raise Refusal(413, "too-large", text)
    await call.audit(allowed=True, text=f"{profile.job}@{profile.gpu_type}")
