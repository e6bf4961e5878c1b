"""Section `[api]` of the settings file."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class ApiSettings(BaseModel):
    """Where the API listens, and who may do what."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(default=True, description="Whether there is an API at all.")
    socket: Path | None = Field(default=None, description="Unix socket; absent: api.sock in the daemon's state_dir.")
    listen: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):[0-9]{1,5}$",
        description="HOST:PORT to listen on as well; absent: the socket alone.",
    )
    tls: bool = Field(default=True, description="Whether TLS is a must for listening on anything but loopback.")
    tls_certificate: Path | None = Field(default=None, description="The certificate and its chain, PEM.")
    tls_key: Path | None = Field(default=None, description="Its key, PEM.")
    munge: bool = Field(default=False, description="Whether MUNGE credentials prove who asks over TCP.")
    munge_socket: Path | None = Field(default=None, description="munged's socket; absent: MUNGE's own default.")
    operators: tuple[str, ...] = Field(default=(), description="Users who see and change all jobs.")
    admins: tuple[str, ...] = Field(default=(), description="Users who change settings and make tokens, too.")
    requests_per_s: PositiveFloat = Field(default=100.0, description="Requests that one user may make, per second.")
    burst: PositiveInt = Field(default=500, description="Requests that one user may make at once after a pause.")
    submissions_per_hour: PositiveInt = Field(default=1000, description="Jobs that one user may submit in an hour.")
    max_waiting: PositiveInt = Field(default=2000, description="Requests that wait for a change at a time.")

    @model_validator(mode="after")
    def _safe(self) -> ApiSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if self.listen and self.tls and self.tls_certificate is None:
            host = self.listen.rsplit(":", 1)[0]
            if host not in LOOPBACK:
                raise ValueError(
                    f"listen={self.listen!r} without TLS shows tokens to the network; give tls_certificate and tls_key, or "
                    "say tls = false"
                )
        return self
