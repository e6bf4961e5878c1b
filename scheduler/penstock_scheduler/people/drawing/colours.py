"""The colour of a job follows from its id, so it is the same on every page, in reports and in the terminal, at any time."""

from __future__ import annotations

import hashlib

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Okabe and Ito's colours, which people tell apart whatever colours they see."""

LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b8a800")
"""The same for lines, on a light and on a dark ground: the yellow is darker, and black is grey."""

_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


def _mixed(colour: str, other: tuple[int, int, int], share: float) -> str:
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (to - part) * share):02x}" for part, to in zip(parts, other, strict=True))


COLOURS = (
    *HUES,
    *(_mixed(hue, _WHITE, 0.45) for hue in HUES),
    *(_mixed(hue, _BLACK, 0.35) for hue in HUES),
)
"""The hues as they are, lighter, and darker."""


def number(job: str) -> int:
    """A number that follows from a job's id, evenly spread."""
    return int.from_bytes(hashlib.blake2s(job.encode(errors="replace"), digest_size=4).digest())


def index(job: str) -> int:
    """Index in `COLOURS` of a job's colour."""
    return number(job) % len(COLOURS)


def job_colour(job: str) -> str:
    """The colour of a job, such as "#0072b2"."""
    return COLOURS[index(job)]


def rules() -> str:
    """The colours as CSS: for jobs, the class `c` and an index, in SVG and for keys; for lines, `--line-` and an index."""
    jobs = (f".c{at}{{fill:{colour};background:{colour}}}" for at, colour in enumerate(COLOURS))
    lines = ";".join(f"--line-{at}:{colour}" for at, colour in enumerate(LINES))
    return "\n".join((*jobs, f":root{{{lines}}}")) + "\n"


def is_dark(colour: str) -> bool:
    """Whether white text on this colour is easier to read than black text (WCAG's contrast)."""

    def linear(part: int) -> float:
        share = part / 255
        return float(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)

    red, green, blue = (linear(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05
