"""When jobs will start and end, as ranges with a probability.

`past` knows how long earlier jobs ran and when they came. `futures` plays the next hours several times with the site's own
policy, and `ranges` turns what happened in these futures into ranges. `worker` does this in a process of its own beside
penstockd.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Order(BaseModel):
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
