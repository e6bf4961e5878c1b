"""Endpoints for operators and admins: policy, pause, drains, settings, audit log, tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from penstock_scheduler.api.access_messages import AuditPage, NewToken, TokenOrder, TokenView
from penstock_scheduler.api.health_messages import ImagesAccepted, LeaderMove, StoreAdopted
from penstock_scheduler.api.messages import (
    MAX_PAGE,
    ApprovalView,
    CloudResumed,
    Drain,
    Drained,
    DrainOrder,
    Pause,
    PolicyView,
    RunForgotten,
)
from penstock_scheduler.api.ports import Burst
from penstock_scheduler.daemon.service.api import Admin, Call, Operator, User, storable
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.forwarding import Route
from penstock_scheduler.daemon.service.routers.history import From, To
from penstock_scheduler.daemon.service.views import drainable
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import CloudRefuses, NoStandby, NoSuchRun
from penstock_scheduler.rounds.plan_gate import NothingToApprove
from penstock_scheduler.rounds.policies import make_policy, policy_names
from penstock_scheduler.store.leadership.site_clock import site_time_s

Filter = Annotated[str | None, Query(max_length=255)]

router = APIRouter(prefix="/v1", route_class=Route)


@router.get("/policies")
def get_policies(call: User) -> list[PolicyView]:
    """List the policies, and show which one decides."""
    active = call.api.daemon.chosen.policy
    others = [make_policy(name)[1] for name in policy_names() if name != str(active)]
    return [PolicyView(**choice.model_dump(), active=choice is active) for choice in sorted([*others, active], key=str)]


@router.put("/policy")
async def put_policy(choice: PolicyChoice, call: Admin) -> PolicyChoice:
    """Choose the policy that decides from the next round on. The choice outlives a restart of the daemon."""
    full = await asyncio.to_thread(call.api.controls.set_policy, choice)
    await call.audit(allowed=True, text=choice.model_dump_json())
    return full


@router.post("/rounds/{number}/approval")
async def post_approval(number: Annotated[int, Path(ge=0, le=2**62)], call: Admin) -> ApprovalView:
    """Let plans stop the jobs that the refused plan of this round would have stopped, for 15 minutes."""
    try:
        approval = await asyncio.to_thread(call.api.controls.approve, number, call.identity.user)
    except NothingToApprove as error:
        raise Refusal(409, "nothing-to-approve", str(error)) from None
    await call.audit(allowed=True, text=f"jobs {', '.join(sorted(approval.jobs))}")
    return ApprovalView(round=approval.round, jobs=sorted(approval.jobs), by=approval.by, until_s=approval.until_s)


@router.put("/pause")
async def put_pause(pause: Pause, call: Admin) -> Pause:
    """Stop deciding rounds, or start again. Running jobs keep running."""
    await asyncio.to_thread(call.api.controls.set_paused, pause.paused)
    await call.audit(allowed=True, text=pause.model_dump_json())
    return pause


@router.post("/cloud/resume")
async def post_cloud_resume(call: Admin) -> CloudResumed:
    """End protected mode, so that the cloud may launch again. The answer says why it did not."""
    reasons = await asyncio.to_thread(_cloud(call).end_protection)
    await call.audit(allowed=True, text="; ".join(reasons))
    return CloudResumed(reasons=list(reasons))


@router.post("/cloud/adopt")
async def post_cloud_adopt(call: Admin) -> StoreAdopted:
    """Make the store this cluster's own, so that instances are launched and ended. Never while the other cluster is alive."""
    was = await asyncio.to_thread(_cloud(call).adopt)
    await call.audit(allowed=True, text=was)
    return StoreAdopted(was=was)


@router.post("/cloud/images")
async def post_cloud_images(call: Admin) -> ImagesAccepted:
    """Launch from the images that the settings' parameters name now. Those that were pinned before are not used any more."""
    try:
        images = await asyncio.to_thread(_cloud(call).accept_images)
    except CloudRefuses as error:
        raise Refusal(409, "cloud-refuses", str(error)) from None
    await call.audit(allowed=True, text=", ".join(images))
    return ImagesAccepted(images=list(images))


@router.post("/cloud/runs/{run}/forget")
async def post_cloud_forget(run: str, call: Admin) -> RunForgotten:
    """Close a run whose record cannot be read, once its instances have ended. Its commitment stays in the ledger."""
    try:
        job = await asyncio.to_thread(_cloud(call).forget, run)
    except NoSuchRun as error:
        raise Refusal(404, "no-such-run", str(error)) from None
    await call.audit(allowed=True, text=f"job {job}")
    return RunForgotten(run=run, job=job)


def _cloud(call: Call) -> Burst:
    if call.api.controls.cloud is None:
        raise Refusal(409, "no-cloud", "the site has no cloud; see [daemon] cloud in the settings")
    return call.api.controls.cloud


@router.post("/leader/move", status_code=202)
async def post_leader_move(order: LeaderMove, call: Admin) -> LeaderMove:
    """Let another penstockd lead: the one of this name, or any that stands by. Running jobs notice nothing."""
    try:
        to = await asyncio.to_thread(call.api.controls.may_lead, order.to)
    except NoStandby as error:
        raise Refusal(409, "no-standby", str(error)) from None
    await call.audit(allowed=True, text=order.model_dump_json())  # before, because nothing can be written afterwards
    await asyncio.to_thread(call.api.controls.hand_over, order.to)
    return LeaderMove(to=to)


@router.get("/drains")
def get_drains(call: User) -> list[Drain]:
    """List what is drained for adaptive jobs."""
    return list(call.api.daemon.chosen.drains)


@router.post("/drains")
async def post_drain(order: DrainOrder, call: Operator) -> Drain:
    """Drain a node, a GPU type or a partition: from the next round on adaptive jobs are allocated none of its GPUs.

    The policy decides whether the jobs that run there leave.
    """
    names = drainable(call.api.board)[order.kind]
    if order.name not in names:
        raise Refusal(422, "refused", f"there is no {order.kind} {order.name}; choose one of {', '.join(names)}")
    drain = Drain(**order.model_dump(), by=call.identity.user, since_s=site_time_s())
    await asyncio.to_thread(call.api.controls.rules.drain, drain)
    await call.audit(allowed=True, text=order.model_dump_json())
    return drain


@router.delete("/drains/{kind}/{name}", status_code=204)
async def delete_drain(kind: Drained, name: str, call: Operator) -> None:
    """End a drain: from the next round on adaptive jobs are allocated these GPUs again."""
    if not await asyncio.to_thread(call.api.controls.rules.end_drain, (kind, name)):
        raise Refusal(404, "no-such-drain", f"no {kind} of that name is drained; see GET /v1/drains")
    await call.audit(allowed=True)


@router.get("/settings")
def get_settings(call: Admin) -> dict[str, Any]:
    """Show the settings by section."""
    return call.api.controls.settings.as_dict()


@router.get("/audit")
def get_audit(
    call: Operator,
    from_: From = None,
    to: To = None,
    user: Filter = None,
    action: Filter = None,
    job: Filter = None,
    refused: bool = False,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> AuditPage:
    """Show the audit log, newest first. `action` may be a part of the action; `refused`: only what was refused."""
    if not all(map(storable, (user, action, job))):
        return AuditPage(lines=[])
    lines = call.api.store.audit(
        before=before, limit=limit, from_s=from_, to_s=to, user=user, action=action, job=job, refused=refused
    )
    return AuditPage(lines=lines, next=lines[-1].id if len(lines) == limit else None)


@router.get("/tokens")
def get_tokens(call: Admin) -> list[TokenView]:
    """List all tokens, without their secrets."""
    return [view for view, _ in call.api.store.tokens()]


@router.post("/tokens", status_code=201)
async def post_token(order: TokenOrder, call: Admin) -> NewToken:
    """Create a token. Its secret is shown only in this answer."""
    made = await asyncio.to_thread(call.api.gatekeeper.new_token, order)
    await call.audit(allowed=True, text=f"{made.view.id} for {order.user}, {order.role}")
    return made


@router.delete("/tokens/{token}")
async def delete_token(token: str, call: Admin) -> TokenView:
    """Revoke a token."""
    if not token.isalnum() or not token.isascii():
        raise Refusal(404, "no-such-token", "a token's id has only letters and digits; see GET /v1/tokens")
    revoked = await asyncio.to_thread(call.api.gatekeeper.revoke, token)
    await call.audit(allowed=True)
    return revoked
