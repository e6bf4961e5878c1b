"""Log-in with OpenID Connect: the site's own identity provider says who the user is.

The authorization code flow with PKCE, by Authlib (OAuth) and joserfc (signatures), which the extra `login` installs.
"""

from __future__ import annotations

import base64
import secrets
import time
import warnings
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.settings import OidcSettings
from penstock_scheduler.people.errors import ConfigError

if TYPE_CHECKING:
    from authlib.integrations.httpx_client import AsyncOAuth2Client

CALLBACK = "/v1/session/oidc/callback"
ATTEMPT_S = 600.0
"""How long a user may take at the provider."""
METADATA_S = 3600.0
"""How long the provider's addresses and keys are remembered."""
_TIMEOUT_S = 10.0
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]
"""Signatures with the provider's public key. `none` and those with a shared secret are not among them."""


class Attempt(BaseModel):
    """A log-in under way. The browser keeps it in a cookie, so that only the browser that began can end it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: str
    nonce: str
    verifier: str
    """PKCE: shows the provider that who began the log-in also ends it."""
    next: str
    """Path to which the browser goes afterwards."""

    def dump(self) -> str:
        """As the value of a cookie."""
        return base64.urlsafe_b64encode(self.model_dump_json().encode()).decode()

    @classmethod
    def load(cls, value: str | None) -> Attempt:
        """From the value of a cookie. Raises Refusal 401."""
        try:
            return cls.model_validate_json(base64.urlsafe_b64decode((value or "").encode()))
        except (ValueError, ValidationError):
            raise Refusal(
                401, "unauthenticated", "this log-in was not begun here, or took too long; begin again"
            ) from None


class Provider:
    """The site's identity provider. Raises ConfigError if the extra `login` is not installed, or the secret cannot be read."""

    def __init__(self, settings: OidcSettings) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Authlib says that it prefers another HTTP client
                from authlib.integrations.httpx_client import AsyncOAuth2Client
        except ImportError:
            text = "[api.oidc] needs Authlib: install penstock-scheduler with the extra login"
            raise ConfigError(text) from None
        self._settings = settings
        self._client = AsyncOAuth2Client
        self._redirect = settings.public_url.rstrip("/") + CALLBACK
        try:
            self._secret = settings.client_secret_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"[api.oidc] client_secret_file={str(settings.client_secret_file)!r}: {error}") from None
        self._metadata: tuple[float, dict[str, Any], Any] | None = None

    async def begin(self, next_: str) -> tuple[str, Attempt]:
        """(the provider's address for this log-in, the attempt). Raises Refusal 503."""
        metadata, _ = await self._known()
        attempt = Attempt(
            state=secrets.token_urlsafe(24),
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            next=next_,
        )
        async with self._oauth() as oauth:
            url, _ = oauth.create_authorization_url(
                metadata["authorization_endpoint"],
                state=attempt.state,
                code_verifier=attempt.verifier,
                nonce=attempt.nonce,
            )
        return str(url), attempt

    async def finish(self, attempt: Attempt, state: str, code: str) -> str:
        """The user whom the provider names. Raises Refusal: 401, the log-in failed; 503, the provider does not answer."""
        if not secrets.compare_digest(state.encode(), attempt.state.encode()):
            raise Refusal(401, "unauthenticated", "this log-in was not begun in this browser; begin again")
        metadata, keys = await self._known()
        from authlib.common.errors import AuthlibBaseError

        try:
            async with self._oauth() as oauth:
                token = await oauth.fetch_token(
                    metadata["token_endpoint"],
                    grant_type="authorization_code",
                    code=code,
                    code_verifier=attempt.verifier,
                )
        except AuthlibBaseError as error:
            raise Refusal(401, "unauthenticated", f"the identity provider refused the log-in: {error}") from None
        except (httpx.HTTPError, ValueError) as error:
            raise _away(error) from None
        return self._user(token.get("id_token"), attempt.nonce, keys)

    def _user(self, id_token: object, nonce: str, keys: Any) -> str:
        from joserfc import jwt
        from joserfc.errors import JoseError

        claim, settings = self._settings.claim, self._settings
        rules = jwt.JWTClaimsRegistry(
            leeway=60,
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "value": settings.client_id},
            exp={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            claims = jwt.decode(str(id_token), keys, algorithms=_ALGORITHMS).claims
            rules.validate(claims)
        except (JoseError, ValueError) as error:
            raise Refusal(401, "unauthenticated", f"the identity provider's answer is not valid: {error}") from None
        user = claims.get(claim)
        if not isinstance(user, str) or not user:
            text = f"the identity provider names no {claim}; set [api.oidc] claim to a claim that has the user's name"
            raise Refusal(401, "unauthenticated", text)
        return user

    async def _known(self) -> tuple[dict[str, Any], Any]:
        """The provider's addresses, and its public keys. Raises Refusal 503."""
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        if self._metadata is None or time.monotonic() - self._metadata[0] > METADATA_S:
            issuer = self._settings.issuer
            try:
                async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
                    address = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
                    metadata = (await http.get(address)).raise_for_status().json()
                    keys = (await http.get(metadata["jwks_uri"])).raise_for_status().json()
                if metadata["issuer"] != issuer:
                    raise ValueError(f"it calls itself {metadata['issuer']!r}, and [api.oidc] issuer is {issuer!r}")
                self._metadata = time.monotonic(), metadata, KeySet.import_key_set(keys)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, JoseError) as error:
                raise _away(error) from None
        return self._metadata[1], self._metadata[2]

    def _oauth(self) -> AsyncOAuth2Client:
        return self._client(
            self._settings.client_id,
            self._secret,
            scope=self._settings.scope,
            redirect_uri=self._redirect,
            code_challenge_method="S256",
            timeout=_TIMEOUT_S,
            trust_env=False,
        )


def local_path(given: str) -> str:
    """A path of this site to go to after the log-in; `/` in place of anything else, such as another site's address."""
    fine = given.startswith("/") and not given.startswith("//") and "\\" not in given and given.isprintable()
    return given if fine else "/"


def _away(error: Exception) -> Refusal:
    text = f"the identity provider does not answer as it should: {error or type(error).__name__}; try again later"
    return Refusal(503, "not-ready", text[:500], retry_after_s=10)
