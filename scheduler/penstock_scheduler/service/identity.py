"""Identifies callers: by the peer credentials of a Unix socket, by a token, or by MUNGE."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import math
import os
import pwd
import re
import secrets
import time
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request

from penstock_scheduler.client import munge_payload
from penstock_scheduler.messages import Identity, NewToken, Role, TokenOrder, TokenView
from penstock_scheduler.service.errors import Refusal
from penstock_scheduler.service.guard import Bucket
from penstock_scheduler.service.settings import ApiSettings
from penstock_scheduler.store import SqlStore

log = logging.getLogger(__name__)

TOKEN_LIFE_S = 30 * 86_400.0
"""Lifetime of a token whose order does not give one."""

CACHED_S = 5.0
"""How long the digests of all tokens stay in memory. Revoking a token takes effect at once all the same."""

UNKNOWN_S = 1.0
"""The digests are read again for an unknown token, at most this often. So wrong tokens cost nearly nothing, and a token that
another process made is known after this time."""

FAILED_PER_S = 1.0
FAILED_BURST = 50
"""Failed logins from one address that are answered as such (401); further ones are told to slow down (429)."""

ACCOUNT_CACHED_S = 60.0
"""How long an account stays cached. A look-up over the network may take long."""

MUNGE_AT_ONCE = 8
"""Most unmunge processes at the same time."""

IDENTITY = "Penstock-Identity"
"""Header on penstockd's private socket: the caller as the API has identified it, as JSON with percent-encoding."""

_PREFIX = "penstock"
_NOT_REACHED = (5, 6, 7)
"""Exit statuses of unmunge for failures of munged: no memory, socket, timeout (libmunge, munge_err_t)."""
_STATUS = re.compile(r"^STATUS:\s*(.*?)\s*\(\d+\)", re.MULTILINE)
_UID = re.compile(r"^UID:.*\((\d+)\)\s*$", re.MULTILINE)


class Gatekeeper:
    """Identifies callers, and creates and revokes tokens."""

    def __init__(self, settings: ApiSettings, store: SqlStore) -> None:
        self._settings = settings
        self._store = store
        self._tokens: dict[str, tuple[TokenView, str]] = {}
        """Id -> token and digest."""
        self._read_s = -math.inf
        """When they were read; minus infinity: they have changed since."""
        self.changes = 0
        """How often tokens were made or revoked, as far as this process knows."""
        self.daemon_uid = os.geteuid()
        """penstockd's user, who is an admin on the socket as root is."""
        self._reading = asyncio.Lock()
        self._munge = asyncio.Semaphore(MUNGE_AT_ONCE)
        self._failed = Bucket(FAILED_PER_S, FAILED_BURST)
        self._accounts: dict[int | str, tuple[float, pwd.struct_passwd | None]] = {}

    async def identify(self, request: Request) -> Identity:
        """The caller of a request. An Authorization header takes precedence over the socket's credentials.

        Raises:
            Refusal: 401, the caller cannot be identified; 429, too many failed logins; 503, munged does not answer.
        """
        if is_private(request):
            return _said(request.headers.get(IDENTITY))
        given = request.headers.get("authorization")
        if given is None:
            uid = request.scope.get("state", {}).get("peer_uid")
            if uid is None:
                raise Refusal(401, "unauthenticated", "send a token in the header Authorization: Bearer TOKEN")
            return await self._of_uid(uid, "socket")
        peer_uid = request.scope.get("state", {}).get("peer_uid")
        where = request.client.host if request.client else f"uid {peer_uid}"
        kind, _, proof = given.partition(" ")
        if kind.lower() == "basic" and is_page(request):
            kind, proof = "bearer", _password(proof)
        # A token costs nothing to check, so failed logins of others at the same address, such as a login node, never keep a
        # valid one out. A MUNGE credential costs a process.
        if kind.lower() != "bearer" and (pause_s := self._failed.pause_s(where)) > 0:
            raise _too_many_failed(where, pause_s)
        try:
            return await self._by_header(request, kind, proof)
        except Refusal as refusal:
            if refusal.status != 401:
                raise
            if (pause_s := self._failed.take(where)) > 0:
                raise _too_many_failed(where, pause_s) from None
            log.info("login failed", extra={"address": where, "text": str(refusal)[:200]})
            raise

    async def _by_header(self, request: Request, kind: str, proof: str) -> Identity:
        if kind.lower() == "bearer":
            return await self._by_token(proof.strip())
        if kind.upper() == "MUNGE" and self._settings.munge:
            return await self._by_munge(proof.strip(), munge_payload(request.method, request.url.path))
        munge = " or MUNGE CREDENTIAL" if self._settings.munge else ""
        raise Refusal(401, "unauthenticated", f"the header Authorization must be Bearer TOKEN{munge}")

    def new_token(self, order: TokenOrder) -> NewToken:
        """Create a token. The store keeps a digest of its secret; 256 random bits need neither salt nor a slow hash."""
        now_s = time.time()
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        view = TokenView(
            id=name,
            user=order.user,
            role=order.role,
            job=order.job,
            created_s=now_s,
            expires_s=now_s + TOKEN_LIFE_S if order.expires_s is None else order.expires_s,
            revoked=False,
            note=order.note,
        )
        self._store.add_token(view, _digest(secret))
        self.forget_tokens()
        return NewToken(token=f"{_PREFIX}_{name}_{secret}", view=view)

    def revoke(self, token: str) -> TokenView:
        """Revoke a token at once. Raises Refusal 404 if there is no such token."""
        if not self._store.tokens(token):
            raise Refusal(404, "no-such-token", f"there is no token {token}; see GET /v1/tokens")
        self._store.revoke_token(token)
        self.forget_tokens()
        return self._store.tokens(token)[0][0]

    def forget_tokens(self) -> None:
        """Read the tokens again before the next one is checked: they have changed."""
        self.changes += 1
        self._read_s = -math.inf

    async def _account(self, user: int | str) -> pwd.struct_passwd | None:
        """The account with this uid or name; None: there is none."""
        now_s = time.monotonic()
        since_s, account = self._accounts.get(user, (-math.inf, None))
        if now_s - since_s > ACCOUNT_CACHED_S:
            account = await asyncio.to_thread(_look_up_account, user)
            if len(self._accounts) > 10_000:
                self._accounts.clear()
            self._accounts[user] = now_s, account
        return account

    async def _of_uid(self, uid: int, by: Any) -> Identity:
        account = await self._account(uid)
        if account is None:
            raise Refusal(401, "unauthenticated", f"the daemon's host has no user with uid {uid}")
        user = account.pw_name
        if by == "socket" and uid in (0, self.daemon_uid):
            return Identity(user=user, uid=uid, role="admin", by=by)
        return Identity(user=user, uid=uid, role=self._role(user), by=by)

    def _role(self, user: str) -> Role:
        if user in self._settings.admins:
            return "admin"
        return "operator" if user in self._settings.operators else "user"

    async def _by_token(self, proof: str) -> Identity:
        prefix, _, rest = proof.partition("_")
        name, _, secret = rest.partition("_")
        found = await self._token(name) if prefix == _PREFIX else None
        if found is None or not hmac.compare_digest(found[1], _digest(secret)) or found[0].revoked:
            raise Refusal(
                401, "unauthenticated", "the token is unknown or revoked; ask an admin for one (penstock token create)"
            )
        view, _ = found
        if time.time() >= view.expires_s:
            raise Refusal(
                401, "unauthenticated", "the token has expired; ask an admin for a new one (penstock token create)"
            )
        account = await self._account(view.user)
        uid = account.pw_uid if account else None
        return Identity(user=view.user, uid=uid, role=view.role, job=view.job, by="token")

    async def _token(self, name: str) -> tuple[TokenView, str] | None:
        """The token with this id, and its digest; None: there is none. Raises StoreError."""
        if self._old(name):
            async with self._reading:
                if self._old(name):
                    now_s, changes = time.monotonic(), self.changes
                    tokens = await asyncio.to_thread(self._store.tokens)
                    self._tokens = {view.id: (view, digest) for view, digest in tokens}
                    self._read_s = now_s if self.changes == changes else -math.inf
        return self._tokens.get(name)

    def _old(self, name: str) -> bool:
        """Whether the tokens in memory may be others than those in the store."""
        return time.monotonic() - self._read_s > (CACHED_S if name in self._tokens else UNKNOWN_S)

    async def _by_munge(self, proof: str, payload: str) -> Identity:
        """munged refuses a credential that is forged, expired or replayed. The payload ties it to this request."""
        at = [f"--socket={self._settings.munge_socket}"] if self._settings.munge_socket else []
        async with self._munge:
            try:
                process = await asyncio.create_subprocess_exec(
                    "unmunge",
                    *at,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                output, why = await asyncio.wait_for(process.communicate(proof.encode()), 10)
            except (OSError, TimeoutError) as error:
                raise Refusal(503, "busy", f"MUNGE does not answer: {error}; try again, or use a token") from None
        status = _STATUS.search(output.decode(errors="replace"))
        text = status[1] if status else why.decode(errors="replace").strip()
        if process.returncode in _NOT_REACHED:
            raise Refusal(503, "busy", f"MUNGE does not answer: {text}; try again, or use a token")
        if process.returncode != 0:
            raise Refusal(401, "unauthenticated", f"MUNGE refuses the credential: {text}; create a new one")
        head, _, body = output.decode(errors="replace").partition("\n\n")
        found = _UID.search(head)
        if found is None or body != payload:
            raise Refusal(401, "unauthenticated", f"the payload of the MUNGE credential must be {payload!r}")
        return await self._of_uid(int(found[1]), "munge")


def is_private(request: Request) -> bool:
    """Whether the request comes from the API over penstockd's private socket, where only the API's user may connect."""
    return bool(request.scope.get("state", {}).get("private"))


def _said(identity: str | None) -> Identity:
    """The caller as the API has identified it."""
    try:
        return Identity.model_validate_json(unquote(identity or ""))
    except ValueError:
        raise Refusal(401, "unauthenticated", f"the header {IDENTITY} must say who the caller of the API is") from None


def _too_many_failed(where: str, pause_s: float) -> Refusal:
    text = f"too many failed logins from {where}; wait and try again"
    return Refusal(429, "too-many", text, retry_after_s=pause_s)


def _look_up_account(user: int | str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
    except KeyError:
        return None


def is_page(request: Request) -> bool:
    """Whether a browser may log in with a token as its password.

    Only for pages: a browser also sends the password with requests that another site makes it send.
    """
    return request.method == "GET" and request.url.path.endswith("/page")


def _password(proof: str) -> str:
    try:
        return base64.b64decode(proof.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
