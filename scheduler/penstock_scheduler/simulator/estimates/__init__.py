"""When jobs will start and end, as ranges with a probability.

`past` knows how long earlier jobs ran and when they came. `futures` plays the next hours several times with the site's own
policy, and `ranges` turns what happened in these futures into ranges. `held` learns how wide these must be. `worker` does this
in a process of its own beside penstockd.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock_scheduler.api.estimate_messages import Estimates

NOTES = "estimates"
"""Name under which penstockd keeps the notes of `held`, among what admins set: they must outlive a restart."""


class EstimatesOrder(BaseModel):
    """What penstockd tells the process that estimates."""

    model_config = ConfigDict(frozen=True)

    store: str
    """Folder or URL."""
    cores: float
    """Share of one core that it may take."""
    every_s: float
    """Least time between two estimates."""
    restart_cost_s: float
    families: Path | None


class Found(BaseModel):
    """What it tells penstockd."""

    model_config = ConfigDict(frozen=True)

    estimates: Estimates
    notes: dict[str, Any] | None = None
    """`held.Notes` to keep; None: they have not changed."""
