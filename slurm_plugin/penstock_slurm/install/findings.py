"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One check; `remedy` is "" where all is well."""

    what: str
    remedy: str = ""
