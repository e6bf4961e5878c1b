"""Browser sessions: the cookie, and the protection against requests that another site makes a browser send (CSRF).

A session is a row in the store and a secret in the browser's cookie. It is never a token in the browser: no script can read the
cookie (HttpOnly), other sites' requests come without it (SameSite), and a request that changes something must also carry a value
that only pages of this site can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from penstock_scheduler.api.access_messages import Identity, SessionRow, SessionView
from penstock_scheduler.daemon.service.digests import digest, new_secret
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.sql import SqlStore

if TYPE_CHECKING:
    from penstock_scheduler.daemon.service.api import Call

PATH = "/v1/session"
CSRF_HEADER = "X-CSRF-Token"
MAX_SESSIONS = 20
"""Sessions of a user at the same time. A further log-in ends the oldest."""

_COOKIE = "penstock-session"
_ATTEMPT = "penstock-log-in"
_HARMLESS = ("GET", "HEAD", "OPTIONS")


_OF_NOBODY = (("POST", PATH), ("GET", f"{PATH}/ways"), ("GET", f"{PATH}/oidc"), ("GET", f"{PATH}/oidc/callback"))


def is_log_in(request: Request) -> bool:
    """Whether the request is a log-in, to which nobody has to be known."""
    return (request.method, request.url.path) in _OF_NOBODY


class Cookies:
    """Reads and writes the cookie of a session.

    Under TLS its name has the prefix `__Host-`: browsers take such a cookie only from this host, over TLS, and for all paths.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self.secure = settings.tls_certificate is not None or settings.behind_tls
        prefix = "__Host-" if self.secure else ""
        self.name, self._attempt = prefix + _COOKIE, prefix + _ATTEMPT

    def read(self, request: Request) -> tuple[str, str] | None:
        """The id and the secret of the session; None: there is no cookie."""
        value = request.cookies.get(self.name)
        if value is None:
            return None
        name, _, secret = value.partition(".")
        return name, secret

    def set(self, response: Response, row: SessionRow, secret: str) -> None:
        """Give the browser the cookie."""
        life_s = int(row.expires_s - site_time_s())
        response.set_cookie(
            self.name, f"{row.id}.{secret}", life_s, path="/", secure=self.secure, httponly=True, samesite="lax"
        )

    def keep_attempt(self, response: Response, value: str, life_s: float) -> None:
        """Let the browser keep a log-in under way."""
        response.set_cookie(
            self._attempt, value, int(life_s), path="/", secure=self.secure, httponly=True, samesite="lax"
        )

    def attempt(self, request: Request) -> str | None:
        """The log-in under way; None: there is none."""
        return request.cookies.get(self._attempt)

    def clear_attempt(self, response: Response) -> None:
        """Let the browser forget the log-in."""
        response.delete_cookie(self._attempt, path="/", secure=self.secure, httponly=True, samesite="lax")

    def clear(self, response: Response) -> None:
        """Let the browser delete the cookie."""
        response.delete_cookie(self.name, path="/", secure=self.secure, httponly=True, samesite="lax")


def begin(store: SqlStore, identity: Identity, expires_s: float) -> tuple[SessionRow, str]:
    """Begin a session of a caller. Returns it and its secret. Raises StoreError."""
    now_s = site_time_s()
    name, secret = new_secret()
    row = SessionRow(
        id=name,
        user=identity.user,
        token=identity.token,
        created_s=now_s,
        expires_s=expires_s,
        address=identity.address,
    )
    store.add_session(row, digest(secret), now_s=now_s, most=MAX_SESSIONS)
    return row, secret


async def open_for(call: Call, found: Identity, response: Response) -> SessionView:
    """Begin a session of somebody who has logged in, and give the browser its cookie. Raises StoreError."""
    gatekeeper = call.api.gatekeeper
    row, secret = await gatekeeper.begin_session(found)
    await dataclasses.replace(call, identity=found).audit(allowed=True)
    gatekeeper.cookies.set(response, row, secret)
    return view(row, found.role, secret)


def view(row: SessionRow, role: str, secret: str) -> SessionView:
    """A session, for its own page."""
    fields = {"user": row.user, "role": role, "created_s": row.created_s, "expires_s": row.expires_s}
    return SessionView.model_validate(fields | {"csrf": csrf(secret)})


def csrf(secret: str) -> str:
    """The value that requests of the session with this secret must have in the header X-CSRF-Token."""
    return hmac.new(secret.encode(errors="replace"), b"csrf", hashlib.sha256).hexdigest()


def check_csrf(request: Request, secret: str) -> None:
    """Refuse a request that changes something unless a page of this site has sent it.

    Raises:
        Refusal: 403.
    """
    if request.method in _HARMLESS:
        return
    check_origin(request)
    given = request.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), csrf(secret).encode()):
        text = f"send the header {CSRF_HEADER} with the field csrf of GET {PATH}; nothing was done"
        raise Refusal(403, "csrf", text)


def check_origin(request: Request) -> None:
    """Refuse a request that a browser sends for another site. Programs that are no browsers send neither header.

    Raises:
        Refusal: 403.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site in ("same-origin", "none"):
        return
    if site is not None or (origin is not None and urlsplit(origin).netloc != request.headers.get("host")):
        text = "another site made your browser send this request; nothing was done"
        raise Refusal(403, "csrf", text)
