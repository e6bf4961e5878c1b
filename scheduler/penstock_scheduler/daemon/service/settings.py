"""Section `[api]` of the settings file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, IPvAnyNetwork, PositiveFloat, PositiveInt, model_validator

from penstock_scheduler.api.messages import DEFAULT_SOCKET

DEFAULT_PRIVATE_SOCKET = Path("/run/penstock/penstockd.sock")
"""Where penstockd listens to penstock-api."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class OidcSettings(BaseModel):
    """Section `[api.oidc]`: log-in in a browser with the site's identity provider (OpenID Connect)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: str = Field(pattern=r"^https?://", description="The provider's issuer URL.")
    client_id: str = Field(description="Penstock's id at the provider.")
    client_secret_file: Path = Field(description="File with Penstock's secret at the provider.")
    public_url: str = Field(
        pattern=r"^https?://",
        description="URL under which browsers reach the API. The provider must allow public_url + /v1/session/oidc/callback.",
    )
    claim: str = Field(default="preferred_username", description="Claim that has the user's name at the site.")
    scope: str = Field(default="openid profile", description="Scopes to ask for.")


class ApiSettings(BaseModel):
    """Where the API listens, who may use it, and how much."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(default=True, description="Whether penstockd serves the API.")
    embedded: bool = Field(
        default=True,
        description="Whether penstockd serves the API itself. If not, penstock-api does, in a process of its own, and penstockd "
        "listens to it on `private_socket`.",
    )
    private_socket: Path = Field(
        default=DEFAULT_PRIVATE_SOCKET,
        description="With embedded = false: path of the Unix socket on which penstockd listens to penstock-api.",
    )
    user: str | None = Field(
        default=None,
        description="With embedded = false: the user that penstock-api runs as; not set: penstockd's own user.",
    )
    store: str | None = Field(
        default=None,
        description="URL of the store for penstock-api, such as with a database's role that may only read; not set: that of "
        "`[daemon]`.",
    )
    socket: Path = Field(
        default=DEFAULT_SOCKET,
        description="Path of the Unix socket. Clients use the default unless PENSTOCK_URL is set: unix:PATH.",
    )
    listen: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):[0-9]{1,5}$",
        description="HOST:PORT of a TCP address to listen on, besides the socket; absent: only the socket.",
    )
    tls: bool = Field(default=True, description="Whether TLS is required to listen on any address but loopback.")
    tls_certificate: Path | None = Field(default=None, description="PEM file with the certificate and its chain.")
    tls_key: Path | None = Field(default=None, description="PEM file with the certificate's key.")
    trusted_proxies: tuple[IPvAnyNetwork, ...] = Field(
        default=(),
        description="Addresses and networks of the site's own reverse proxies: of their requests, the address in the header "
        "X-Forwarded-For counts. The header of any other client is ignored.",
    )
    behind_tls: bool = Field(
        default=False,
        description="Whether browsers reach the API only through a proxy with TLS: then cookies are sent over TLS alone.",
    )
    session_hours: PositiveFloat = Field(default=12.0, description="Hours after which a browser must log in again.")
    pam_service: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Service of PAM, a file in /etc/pam.d, that checks passwords of browser log-ins; not set: no passwords.",
    )
    oidc: OidcSettings | None = Field(default=None, description="Log-in with an identity provider; not set: none.")
    munge: bool = Field(default=False, description="Whether clients on TCP may identify themselves with MUNGE.")
    munge_socket: Path | None = Field(default=None, description="Path of munged's socket; absent: MUNGE's default.")
    operators: tuple[str, ...] = Field(default=(), description="Users that see and change the jobs of all users.")
    admins: tuple[str, ...] = Field(
        default=(), description="Users that, in addition, change settings and create tokens."
    )
    private_data: tuple[PrivateData, ...] = Field(
        default=("usage",),
        description="The data that users do not see of other users: `jobs` (who holds which GPUs, and who waits) and `usage`. "
        "Operators see everything.",
    )
    requests_per_s: PositiveFloat = Field(default=100.0, description="Requests per second that one user may send.")
    submissions_per_hour: PositiveInt = Field(default=1000, description="Jobs that one user may submit per hour.")

    burst: ClassVar[int] = 500
    """Requests that one user may send at once after a pause: five seconds of the default rate, as a script that lists
    hundreds of jobs sends them."""

    max_connections: ClassVar[int] = 8192
    """Connections at the same time; fewer if the limit on open files is low, which is the bound that a site sets. A client
    holds at most as many as are free."""

    max_waiting: ClassVar[int] = 4000
    """Requests that may wait for a change at the same time: about half of the connections, so that other requests always find
    one. A user holds at most as many as are free."""

    @model_validator(mode="after")
    def _safe(self) -> ApiSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give both tls_certificate and tls_key, or neither")
        if self.listen and self.tls and self.tls_certificate is None:
            host = self.listen.rsplit(":", 1)[0]
            if host not in LOOPBACK:
                raise ValueError(
                    f"listen={self.listen!r} without TLS shows tokens to the network; give tls_certificate and tls_key, or "
                    "set tls = false"
                )
        return self


PrivateData = Literal["jobs", "usage"]
"""`jobs`: who holds which GPUs, and who waits. `usage`: what others have used, and what it cost."""


def may_see(what: PrivateData, owner: str, caller: str, *, sees_all: bool, private: Collection[PrivateData]) -> bool:
    """Whether a caller may see this about the jobs of a user.

    Args:
        what: what it is about.
        owner: the user of the jobs.
        caller: the user that asks.
        sees_all: whether the caller's role sees everything: an operator or an admin.
        private: what the site keeps from others.
    """
    return sees_all or owner == caller or what not in private
