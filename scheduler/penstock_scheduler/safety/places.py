"""Places that clients share, without a limit for each client."""

from __future__ import annotations

from collections import Counter


class Places:
    """Places that clients share: a client may hold as many as are free.

    One client gets half of all places at most, and always leaves as many for others; a second client gets half of the rest.
    So no client needs a limit of its own, and a site with one client, such as a service that submits for all, is not slowed.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str) -> bool:
        """Take a place. Returns whether there was one for this client."""
        if self._held[client] >= self.total - self.taken:
            if not self._held[client]:
                del self._held[client]
            return False
        self._held[client] += 1
        self.taken += 1
        return True

    def give_back(self, client: str) -> None:
        """Give a place back."""
        self._held[client] -= 1
        self.taken -= 1
        if not self._held[client]:
            del self._held[client]  # clients of the past take no memory

    def held(self, client: str) -> int:
        """How many places a client holds."""
        return self._held.get(client, 0)
