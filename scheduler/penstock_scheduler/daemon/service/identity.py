"""Identifies callers: by the peer credentials of a Unix socket, by a token, by the cookie of a browser session, or by MUNGE."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import pwd
import re
import time
from collections.abc import Collection, Coroutine, Iterable
from functools import partial
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request

from penstock_profiles.wire import read
from penstock_scheduler.api.access_messages import By, Identity, LogIn, NewToken, SessionRow, TokenOrder, TokenView
from penstock_scheduler.api.messages import Role
from penstock_scheduler.daemon.service import sessions
from penstock_scheduler.daemon.service.digests import Digests, digest, new_secret
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.guard import Bucket
from penstock_scheduler.daemon.service.passwords import Passwords
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.safety import children, munge
from penstock_scheduler.safety.children import ChildError, Pool
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

TOKEN_LIFE_S = 30 * 86_400.0
"""Lifetime of a token whose order does not give one."""

FAILED_PER_S = 1.0
FAILED_BURST = 50
"""Failed logins from one address that are answered as such (401); further ones are told to slow down (429)."""

GUESSES_PER_S = 0.1
GUESSES_BURST = 10
"""Wrong passwords of one user, from wherever they come. The user can log in in another way meanwhile."""

ACCOUNT_CACHED_S = 60.0
"""How long an account stays cached. A look-up over the network may take long."""

MUNGE_AT_ONCE, MUNGE_WAITING = 16, 1000
"""Most unmunge processes at the same time, of which one host has at most half, and requests that wait for one."""

MUNGE_S = 10.0

NOBODY = Identity(user="", uid=None, role="nobody", by="nothing")
"""Who a caller is before the log-in."""

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
        self._tokens = Digests(store.tokens)
        self._sessions = Digests(store.sessions)
        self.cookies = sessions.Cookies(settings)
        self.changes = 0
        """How often tokens or sessions began or ended, as far as this process knows."""
        self.daemon_uid = os.geteuid()
        """penstockd's user, who is an admin on the socket as root is."""
        self._munge = Pool("requests by MUNGE", MUNGE_AT_ONCE, MUNGE_WAITING)
        self._unmunge = children.found("unmunge")
        self._passwords = Passwords(settings.pam_service) if settings.pam_service is not None else None
        self._guesses = Bucket(GUESSES_PER_S, GUESSES_BURST)
        """Of a user's password."""
        self._failed = Bucket(FAILED_PER_S, FAILED_BURST)
        self._accounts: dict[int | str, tuple[float, pwd.struct_passwd | None]] = {}

    async def identify(self, request: Request) -> Identity:
        """The caller of a request: by the header Authorization, else by a session's cookie, else by the socket's credentials.

        Raises:
            Refusal: 401, the caller cannot be identified; 403, another site made a browser send the request; 429, too many failed
                logins; 503, munged does not answer.
        """
        if is_private(request):
            return _said(request.headers.get(IDENTITY))
        peer = request.client.host if request.client else ""
        address = client_address(peer, request.headers.getlist("x-forwarded-for"), self._settings.trusted_proxies)
        return (await self._identify(request, address)).model_copy(update={"address": address})

    async def _identify(self, request: Request, address: str) -> Identity:
        peer_uid = request.scope.get("state", {}).get("peer_uid")
        given = request.headers.get("authorization")
        if sessions.is_log_in(request):
            sessions.check_origin(request)
        if given is not None:
            where = address or f"uid {peer_uid}"
            kind, _, proof = given.partition(" ")
            return await self._guarded(
                self._by_header(request, kind, proof, host_of(where)), where, cheap=kind.lower() == "bearer"
            )
        if sessions.is_log_in(request):
            return NOBODY
        if (cookie := self.cookies.read(request)) is not None:
            return await self._by_session(request, *cookie)
        if peer_uid is None:
            raise Refusal(401, "unauthenticated", "send a token in the header Authorization: Bearer TOKEN")
        return await self._of_uid(peer_uid, "socket")

    async def still(self, identity: Identity) -> bool:
        """Whether a caller who has been identified would be the same caller with the same rights now. Raises StoreError."""
        try:
            if identity.session is not None:
                found = await self._of_session(await self._sessions.get(identity.session))
            elif identity.token is not None:
                found = await self._of_token(await self._tokens.get(identity.token))
            elif identity.uid is not None:
                found = await self._of_uid(identity.uid, identity.by)
            else:
                return True  # nobody, to whom only the log-in is open
        except Refusal:
            return False
        return found.model_copy(update={"address": identity.address}) == identity

    async def log_in(self, order: LogIn, caller: Identity) -> Identity:
        """Who logs in. `caller` is what the request itself said.

        Raises:
            Refusal: 401, the log-in failed; 429, too many failed logins.
        """
        if order.user is not None and order.password is not None:
            found = await self._guarded(
                self._by_password(order.user, order.password), caller.address or "this host", cheap=False
            )
            return found.model_copy(update={"address": caller.address})
        if order.token is None:
            if caller.role == "nobody":
                raise Refusal(
                    401, "unauthenticated", "send a token in the field token, or the fields user and password"
                )
            return caller
        found = await self._guarded(self._by_token(order.token.strip()), caller.address, cheap=True)
        return found.model_copy(update={"address": caller.address})

    async def _by_password(self, user: str, password: str) -> Identity:
        if self._passwords is None:
            raise Refusal(401, "unauthenticated", "this site takes no passwords; log in with a token")
        if (pause_s := self._guesses.take(user)) > 0:  # before PAM is asked: guesses at the same time count, too
            raise _too_many_failed(f"the user {user}", pause_s)
        try:
            await self._passwords.check(user, password)
        except Refusal as refusal:
            if refusal.status != 401:
                self._guesses.give_back(user)
            raise
        self._guesses.give_back(user)
        return await self.known_user(user, "password")

    async def of_provider(self, name: Coroutine[Any, Any, str], address: str) -> Identity:
        """The user whom the site's identity provider names. Raises Refusal as `log_in`."""

        async def found() -> Identity:
            return await self.known_user(await name, "oidc")

        return (await self._guarded(found(), address, cheap=True)).model_copy(update={"address": address})

    async def known_user(self, user: str, by: By) -> Identity:
        """A user who has logged in, with the role by the settings. Raises Refusal 403 if the site has no such account."""
        account = await self._account(user)
        if account is None:
            raise Refusal(403, "not-allowed", f"this site has no account {user[:100]}; ask an admin")
        return Identity(user=user, uid=account.pw_uid, role=self._role(user), by=by)

    async def _guarded(self, found: Coroutine[Any, Any, Identity], where: str, *, cheap: bool) -> Identity:
        """A caller, unless too many logins from there have failed.

        Args:
            cheap: whether to look in any case. A token costs nothing to check, so failed logins of others at the same address,
                such as a login node, never keep a valid one out. A MUNGE credential costs a process.
        """
        host = host_of(where)
        if not cheap and (pause_s := self._failed.pause_s(host)) > 0:
            found.close()
            raise _too_many_failed(where, pause_s)
        try:
            return await found
        except Refusal as refusal:
            if refusal.status != 401:
                raise
            if (pause_s := self._failed.take(host)) > 0:
                raise _too_many_failed(where, pause_s) from None
            log.info("login failed", extra={"address": where, "text": str(refusal)[:200]})
            raise

    async def _by_header(self, request: Request, kind: str, proof: str, host: str) -> Identity:
        if kind.lower() == "bearer":
            return await self._by_token(proof.strip())
        if kind.upper() == "MUNGE" and self._settings.munge:
            payload = munge.payload(request.method, request.url.path)
            return await self._by_munge(proof.strip(), payload, host)
        also = " or MUNGE CREDENTIAL" if self._settings.munge else ""
        raise Refusal(401, "unauthenticated", f"the header Authorization must be Bearer TOKEN{also}")

    def new_token(self, order: TokenOrder) -> NewToken:
        """Create a token. The store keeps a digest of its secret."""
        now_s = site_time_s()
        name, secret = new_secret()
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
        self._store.add_token(view, digest(secret))
        self.forget_tokens()
        return NewToken(token=f"{_PREFIX}_{name}_{secret}", view=view)

    def revoke(self, token: str) -> TokenView:
        """Revoke a token at once. Raises Refusal 404 if there is no such token."""
        if not self._store.tokens(token):
            raise Refusal(404, "no-such-token", f"there is no token {token}; see GET /v1/tokens")
        self._store.revoke_token(token)
        self.forget_tokens()
        return self._store.tokens(token)[0][0]

    async def begin_session(self, identity: Identity) -> tuple[SessionRow, str]:
        """Begin a browser session. Returns it and its secret. It ends with the token of the log-in, if there is one."""
        expires_s = site_time_s() + self._settings.session_hours * 3600
        if identity.token is not None and (token := await self._tokens.get(identity.token)) is not None:
            expires_s = min(expires_s, token.expires_s)
        made = await asyncio.to_thread(sessions.begin, self._store, identity, expires_s)
        self.forget_tokens()
        return made

    async def session(self, name: str) -> SessionRow | None:
        """The session with this id; None: it has ended."""
        return await self._sessions.get(name)

    def end_session(self, name: str) -> None:
        """End a browser session at once."""
        self._store.end_session(name)
        self.forget_tokens()

    def forget_tokens(self) -> None:
        """Read tokens and sessions again before the next one is checked: they have changed."""
        self.changes += 1
        self._tokens.forget()
        self._sessions.forget()

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
        return await self._of_token(await self._tokens.check(name, secret) if prefix == _PREFIX else None)

    async def _of_token(self, view: TokenView | None) -> Identity:
        if view is None or view.revoked:
            raise Refusal(
                401, "unauthenticated", "the token is unknown or revoked; ask an admin for one (penstock token create)"
            )
        if site_time_s() >= view.expires_s:
            raise Refusal(
                401, "unauthenticated", "the token has expired; ask an admin for a new one (penstock token create)"
            )
        account = await self._account(view.user)
        uid = account.pw_uid if account else None
        return Identity(user=view.user, uid=uid, role=view.role, job=view.job, by="token", token=view.id)

    async def _by_session(self, request: Request, name: str, secret: str) -> Identity:
        """The caller by the cookie of a session. Raises Refusal 401 and 403."""
        found = await self._of_session(await self._sessions.check(name, secret))
        sessions.check_csrf(request, secret)
        return found

    async def _of_session(self, row: SessionRow | None) -> Identity:
        token = None if row is None or row.token is None else await self._tokens.get(row.token)
        now_s = site_time_s()
        if (
            row is None
            or now_s >= row.expires_s
            or (row.token is not None and (token is None or token.revoked or now_s >= token.expires_s))
        ):
            raise Refusal(401, "unauthenticated", "your session has ended; log in again")
        account = await self._account(row.user)
        return Identity(
            user=row.user,
            uid=account.pw_uid if account else None,
            role=self._role(row.user) if token is None else token.role,
            by="session",
            token=row.token,
            session=row.id,
        )

    async def _by_munge(self, proof: str, payload: str, host: str) -> Identity:
        """munged refuses a credential that is forged, expired or replayed. The payload ties it to this request."""
        at = [f"--socket={self._settings.munge_socket}"] if self._settings.munge_socket else []
        if self._unmunge is None:
            raise Refusal(503, "busy", "MUNGE does not answer: unmunge is not installed; use a token")
        ask = partial(children.run, [self._unmunge, *at], env=os.environ, input=proof.encode(), timeout_s=MUNGE_S)
        try:
            done = await self._munge.call(host, ask)
        except ChildError as error:
            raise Refusal(503, "busy", f"MUNGE does not answer: {error}; try again, or use a token") from None
        status = _STATUS.search(done.out)
        text = status[1] if status else done.err.strip()
        if done.returncode in _NOT_REACHED:
            raise Refusal(503, "busy", f"MUNGE does not answer: {text}; try again, or use a token")
        if done.returncode != 0:
            raise Refusal(401, "unauthenticated", f"MUNGE refuses the credential: {text}; create a new one")
        head, _, body = done.out.partition("\n\n")
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
        return read(Identity, unquote(identity or ""))
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


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def client_address(peer: str, forwarded: Iterable[str], trusted: Collection[Network]) -> str:
    """The address of the client that sent a request.

    Each proxy adds the address that it saw to the header X-Forwarded-For, and whoever is no proxy may write anything there. So
    the header is read from its end, for as long as a trusted proxy has written it.

    Args:
        peer: the address of the connection; empty on a Unix socket.
        forwarded: the values of the headers X-Forwarded-For, in their order.
        trusted: networks of the site's own proxies.
    """
    at = peer
    for given in reversed([each for line in forwarded for each in line.split(",")]):
        if not _is_in(at, trusted) or (found := _address(given)) is None:
            break
        at = str(found)
    return at


def host_of(address: str) -> str:
    """The host that an address counts for, by which clients are limited: an IPv6 host has a whole /64."""
    found = _address(address)
    if found is None or found.version == 4:
        return address
    return str(ipaddress.ip_network((int(found), 64), strict=False))


def _is_in(address: str, networks: Collection[Network]) -> bool:
    found = _address(address)
    return found is not None and any(found.version == each.version and found in each for each in networks)


def _address(text: str) -> Address | None:
    """The address in a text, which may have a port or a zone; None: there is none. IPv4 within IPv6 is IPv4."""
    host = text.strip().partition("%")[0]
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return found.ipv4_mapped or found if found.version == 6 else found
