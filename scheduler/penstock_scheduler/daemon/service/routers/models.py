"""Endpoints for what ended jobs have taught: operators see it, admins change it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from penstock_scheduler.api.model_messages import KindImport, KindList, KindOrder, KindsImported, KindView
from penstock_scheduler.daemon.service.api import Admin, Operator
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.forwarding import Route
from penstock_scheduler.people.errors import NoSuchKind
from penstock_scheduler.store.leadership.site_clock import site_time_s

router = APIRouter(prefix="/v1", route_class=Route)


@router.get("/models")
async def get_models(call: Operator) -> KindList:
    """List the kinds of jobs from which new jobs learn."""
    return await asyncio.to_thread(call.api.controls.kin.kinds)


@router.get("/models/kind")
async def get_model(call: Operator, kind: Annotated[str, Query(max_length=3000)]) -> KindView:
    """Show a kind of jobs, with what it has shown."""
    try:
        found = await asyncio.to_thread(call.api.controls.kin.kinds, kind)
    except NoSuchKind as error:
        raise Refusal(404, "no-such-kind", str(error)) from None
    return found.kinds[0]


@router.post("/models/forget")
async def post_forget(order: KindOrder, call: Admin) -> KindView:
    """Let jobs of a kind that have ended teach no more. Jobs that are there keep what they have recalled."""
    try:
        found = await asyncio.to_thread(call.api.controls.kin.forget, order.kind, site_time_s())
    except NoSuchKind as error:
        raise Refusal(404, "no-such-kind", str(error)) from None
    await call.audit(allowed=True, text=order.kind)
    return found


@router.post("/models/import")
async def post_import(order: KindImport, call: Admin) -> KindsImported:
    """Import what another site has learned. It is for jobs of all users, and believed less than the site's own."""
    kinds = await asyncio.to_thread(call.api.controls.kin.bring, order.kinds, site_time_s())
    await call.audit(allowed=True, text=", ".join(kinds))
    return KindsImported(kinds=kinds)
