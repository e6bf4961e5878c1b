"""Site configurations in shapes that centres publish, each with few nodes."""

from __future__ import annotations

from tests.reality.sites import gpus, limits, partitions

ALL = (*gpus.SITES, *partitions.SITES, *limits.SITES)
