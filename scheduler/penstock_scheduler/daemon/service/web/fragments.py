"""A page as fragments: pieces of HTML, each of which belongs into the element with its id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_scheduler.people.safe_text import visible

Parts = Mapping[str, str]
"""Id of an element -> the HTML inside it."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """A page at a time.

    Args:
        parts: what is on it.
        shape: the browser reads the whole page again when this changes: elements have come or gone.
        more: what else the page's template needs. It does not change while the page is open.
    """

    parts: Parts
    shape: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, parts: Parts) -> Fragments:
        """The same page with more parts."""
        return Fragments({**self.parts, **parts}, self.shape, self.more)


def change(before: Fragments | None, after: Fragments) -> str | None:
    """The event that brings a page from one state to another; None: nothing has changed."""
    if before is after:
        return None
    if before is None:
        return _event("parts", after.parts)
    if before.shape != after.shape:
        return _event("reload", {})
    news = {name: html for name, html in after.parts.items() if before.parts.get(name) != html}
    return _event("parts", news) if news else None


def _event(kind: str, data: Parts) -> str:
    shown = {name: visible(html) for name, html in data.items()}
    return f"event: {kind}\ndata: {json.dumps(shown, separators=(',', ':'))}\n\n"
