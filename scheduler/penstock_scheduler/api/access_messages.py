"""The bodies of requests and answers about who calls the API: identities, tokens, browser sessions, and the audit log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, StringConstraints, model_validator

from penstock_scheduler.api.messages import Body, Role

Caller = Literal["nobody", "user", "operator", "admin", "job"]
"""The role of a request: `nobody` if the caller is not known yet, as in a log-in."""

By = Literal["socket", "munge", "token", "session", "password", "oidc", "nothing"]
"""How a caller was identified."""

_User = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@+-]{1,100}$")]
_Secret = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class Identity(Body):
    """The caller, as the daemon sees it."""

    user: str
    uid: int | None
    role: Caller
    job: str | None = None
    by: By
    token: str | None = None
    """Id of the token that the caller sent, or logged in with."""
    session: str | None = None
    """Id of the browser session."""
    address: str = ""
    """Where the request came from: an IP address; empty on the Unix socket."""


class TokenOrder(Body):
    """A token to create."""

    user: _User
    role: Role = "user"
    job: str | None = None
    """For role `job`: the job whose reports the token may send."""
    expires_s: PositiveFloat | None = None
    """None: in 30 days."""
    note: str = Field(default="", max_length=200)

    @model_validator(mode="after")
    def _job_token(self) -> TokenOrder:
        if (self.role == "job") != (self.job is not None):
            raise ValueError("give the field job with role 'job', and only with it")
        return self


class TokenView(Body):
    """A token, without its secret."""

    id: str
    user: str
    role: Role
    job: str | None
    created_s: float
    expires_s: float
    revoked: bool
    note: str


class NewToken(Body):
    """A new token with its secret. The secret is shown only once."""

    token: str
    view: TokenView


class LogIn(Body):
    """A log-in: a token, or a user and a password. Without both, the header Authorization must identify the caller."""

    token: _Secret | None = None
    user: _User | None = None
    password: _Secret | None = None
    """Where the site has set `[api] pam_service`."""

    @model_validator(mode="after")
    def _one_way(self) -> LogIn:
        if (self.user is None) != (self.password is None) or (self.token is not None and self.user is not None):
            raise ValueError("give either the token, or the user and the password")
        return self


class Ways(Body):
    """How a browser may log in here, besides with a token."""

    password: bool
    oidc: bool


class SessionRow(Body):
    """A browser session, as the store keeps it, without its secret."""

    id: str
    user: str
    token: str | None
    """Id of the token of the log-in: the session ends with it, and has its role. None: another kind of log-in."""
    created_s: float
    expires_s: float
    address: str


class SessionView(Body):
    """A browser session. The cookie has its secret."""

    user: str
    role: Role
    created_s: float
    expires_s: float
    csrf: str
    """Requests that change something must have it in the header X-CSRF-Token."""


class AuditLine(Body):
    """A request that changed something, or was refused."""

    id: int
    time_s: float
    user: str
    role: str
    action: str
    target: str
    allowed: bool
    text: str
    address: str = ""
    """Where the request came from: an IP address; empty on the Unix socket, and for penstockd itself."""
    token: str = ""
    """Id of the token that the caller sent, or logged in with; empty: none."""


class AuditPage(Body):
    """A page of the audit log, newest first."""

    lines: list[AuditLine]
    next: int | None = None
