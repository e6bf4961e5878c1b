"""Secrets that the store knows by their digests: those of tokens and of browser sessions."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

CACHED_S = 5.0
"""How long the digests stay in memory. A revocation takes effect at once all the same."""

UNKNOWN_S = 1.0
"""The digests are read again for an unknown secret, at most this often. So wrong secrets cost nearly nothing, and one that
another process made is known after this time."""


class Named(Protocol):
    """What has a secret: a token or a browser session."""

    @property
    def id(self) -> str:
        """Its name, which is no secret."""
        ...


T = TypeVar("T", bound=Named)


class Digests(Generic[T]):
    """What the store has of one kind, with the digests of the secrets, as read a moment ago.

    Args:
        read: reads all of them. Raises StoreError.
    """

    def __init__(self, read: Callable[[], list[tuple[T, str]]]) -> None:
        self._read = read
        self._found: dict[str, tuple[T, str]] = {}
        self._read_s = -math.inf
        """When they were read; minus infinity: they have changed since."""
        self._reading = asyncio.Lock()
        self._changes = 0

    def forget(self) -> None:
        """Read them again before the next one is checked: they have changed."""
        self._changes += 1
        self._read_s = -math.inf

    async def get(self, name: str) -> T | None:
        """The one with this id, whatever its secret; None: there is none. Raises StoreError."""
        found = await self._row(name)
        return None if found is None else found[0]

    async def check(self, name: str, secret: str) -> T | None:
        """The one with this id and this secret; None: there is none. Raises StoreError."""
        found = await self._row(name)
        return None if found is None or not hmac.compare_digest(found[1], digest(secret)) else found[0]

    async def _row(self, name: str) -> tuple[T, str] | None:
        if self._old(name):
            async with self._reading:
                if self._old(name):
                    now_s, changes = time.monotonic(), self._changes
                    rows = await asyncio.to_thread(self._read)
                    self._found = {view.id: (view, digest) for view, digest in rows}
                    self._read_s = now_s if self._changes == changes else -math.inf
        return self._found.get(name)

    def _old(self, name: str) -> bool:
        """Whether what is in memory may differ from the store."""
        return time.monotonic() - self._read_s > (CACHED_S if name in self._found else UNKNOWN_S)


def new_secret() -> tuple[str, str]:
    """(id, secret). The secret has 256 random bits."""
    return secrets.token_hex(8), secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """What the store keeps of a secret. 256 random bits need neither salt nor a slow hash."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
