"""Endpoints for browsers: log in, the session, log out."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse

from penstock_scheduler.api.access_messages import LogIn, SessionRow, SessionView, Ways
from penstock_scheduler.daemon.service import oidc, sessions
from penstock_scheduler.daemon.service.api import Anybody, Call, User
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.forwarding import Route

router = APIRouter(prefix=sessions.PATH, route_class=Route)


@router.post("", status_code=201)
async def log_in(order: LogIn, call: Anybody, response: Response) -> SessionView:
    """Log in: begin a browser session, whose cookie comes with the answer."""
    found = await call.api.gatekeeper.log_in(order, call.identity)
    if found.role in ("job", "nobody"):
        raise Refusal(403, "not-allowed", "a token of a job only sends reports; log in with a token of your own")
    response.headers["Cache-Control"] = "no-store"
    return await sessions.open_for(call, found, response)


@router.get("/ways")
async def get_ways(call: Anybody) -> Ways:
    """Tell how a browser may log in here, besides with a token."""
    return Ways(password=call.api.settings.pam_service is not None, oidc=call.api.provider is not None)


@router.get("/oidc", status_code=303, response_class=RedirectResponse)
async def begin_oidc(
    call: Anybody, next_: Annotated[str, Query(alias="next", max_length=1000)] = "/"
) -> RedirectResponse:
    """Log in with the site's identity provider: go there, and afterwards to the path `next`."""
    url, attempt = await _provider(call).begin(oidc.local_path(next_))
    answer = RedirectResponse(url, 303, {"Cache-Control": "no-store"})
    call.api.gatekeeper.cookies.keep_attempt(answer, attempt.dump(), oidc.ATTEMPT_S)
    return answer


@router.get("/oidc/callback", status_code=303, response_class=RedirectResponse)
async def end_oidc(
    call: Anybody,
    state: Annotated[str, Query(max_length=1000)] = "",
    code: Annotated[str, Query(max_length=4000)] = "",
    error: Annotated[str, Query(max_length=1000)] = "",
) -> RedirectResponse:
    """Come back from the identity provider: begin a browser session."""
    provider, cookies = _provider(call), call.api.gatekeeper.cookies
    attempt = oidc.Attempt.load(cookies.attempt(call.request))
    if error or not code:
        raise Refusal(401, "unauthenticated", f"the identity provider did not log you in: {error or 'no code'}")
    found = await call.api.gatekeeper.of_provider(provider.finish(attempt, state, code), call.identity.address)
    answer = RedirectResponse(oidc.local_path(attempt.next), 303, {"Cache-Control": "no-store"})
    await call.api.daemon.begin_session(call, found, answer)
    cookies.clear_attempt(answer)
    return answer


def _provider(call: Call) -> oidc.Provider:
    if call.api.provider is None:
        raise Refusal(404, "no-such-path", "this site has no identity provider; log in with a token")
    return call.api.provider


@router.get("")
async def get_session(call: User, response: Response) -> SessionView:
    """Show the browser session of this request, with the value of the header X-CSRF-Token."""
    row, cookie = await _session(call), call.api.gatekeeper.cookies.read(call.request)
    assert cookie is not None
    response.headers["Cache-Control"] = "no-store"
    return sessions.view(row, call.identity.role, cookie[1])


@router.delete("", status_code=204)
async def log_out(call: User, response: Response) -> None:
    """Log out: end the browser session of this request."""
    row = await _session(call)
    await asyncio.to_thread(call.api.gatekeeper.end_session, row.id)
    await call.audit(allowed=True)
    call.api.gatekeeper.cookies.clear(response)


async def _session(call: Call) -> SessionRow:
    name = call.identity.session
    row = None if name is None else await call.api.gatekeeper.session(name)
    if row is None:
        raise Refusal(404, "no-such-session", "this request has no session; log in with POST /v1/session")
    return row
