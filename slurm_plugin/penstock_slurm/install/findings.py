"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `remedy` is empty if nothing is wrong."""

    what: str
    remedy: str = ""
