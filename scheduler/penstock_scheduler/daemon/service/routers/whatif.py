"""Endpoints that replay recorded history, for operators. penstockd runs the tasks; see `service.whatif`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path

from penstock_scheduler.api.whatif_messages import WhatIfOrder, WhatIfTask
from penstock_scheduler.daemon.service.api import Operator
from penstock_scheduler.daemon.service.forwarding import Route
from penstock_scheduler.model.nodespec import parse_nodes
from penstock_scheduler.rounds.policies import make_policy

TaskId = Annotated[str, Path(max_length=100)]

router = APIRouter(prefix="/v1", route_class=Route)


@router.post("/whatif", status_code=202)
async def post_whatif(order: WhatIfOrder, call: Operator) -> WhatIfTask:
    """Begin to replay recorded history on another cluster or under other policies. One replay runs at a time."""
    for nodes in filter(None, (order.add_nodes, order.remove_nodes)):
        parse_nodes(nodes)
    for name in order.policies:
        make_policy(name)
    chosen = call.api.daemon.chosen
    task = await asyncio.to_thread(call.api.whatif.begin, order, call.identity.user, chosen.policy, chosen.prices)
    await call.audit(allowed=True, text=order.model_dump_json(exclude_defaults=True))
    return task


@router.get("/whatif")
async def get_whatifs(call: Operator) -> list[WhatIfTask]:
    """List the replays, newest first, without their results."""
    return call.api.whatif.all()


@router.get("/whatif/{task}")
async def get_whatif(task: TaskId, call: Operator) -> WhatIfTask:
    """Show a replay: how far it is, and its result."""
    return call.api.whatif.task(task)


@router.delete("/whatif/{task}")
async def delete_whatif(task: TaskId, call: Operator) -> WhatIfTask:
    """Cancel a replay, or forget one that has ended."""
    found = call.api.whatif.remove(task)
    await call.audit(allowed=True)
    return found
