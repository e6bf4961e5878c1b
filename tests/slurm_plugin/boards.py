"""Connections between the GPUs of two kinds of machine, as `Nvml.links` returns them."""

from __future__ import annotations

NVLINKS = ("-1122...", "1-21.2..", "12-2..1.", "212-...1", "2...-112", ".2..1-21", "..1.12-2", "...1212-")
"""Between the GPUs of a DGX-1 with V100, a row for each: two squares with their diagonals, and four edges that connect the two.
Each GPU has two NVLinks to two others, and one to two more."""

DGX_1 = tuple(tuple(0 if n == "-" else 1 if n == "." else 6 + int(n) for n in row) for row in NVLINKS)
"""7: one NVLink; 8: two. GPUs without an NVLink are on different processors: 1."""

TWO_PAIRS = ((0, 1, 5, 1), (1, 0, 1, 5), (5, 1, 0, 1), (1, 5, 1, 0))
"""Four GPUs without NVLink: 0 and 2 are on one PCIe switch (5), 1 and 3 on another one, at the other processor (1)."""
