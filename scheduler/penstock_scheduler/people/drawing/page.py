"""The style of pages and reports, and a report: one HTML page with inline style and SVG, without scripts or network access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from penstock_scheduler.people.safe_text import visible

_REPORT = """
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 + .card { font-size: 1.1rem; }
td.n { white-space: nowrap; }
code { background: var(--card); padding: .1em .3em; border-radius: 3px; }
"""


@cache
def style() -> str:
    """What pages and reports share, as CSS."""
    return files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def page(heading: str, parts: Sequence[str]) -> str:
    """A report with this heading. `parts`: HTML."""
    return visible(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(heading)}</title><style>{style()}{_REPORT}</style>"
        f"<body><h1>{escape(heading)}</h1>{''.join(parts)}</body></html>\n"
    )


def key(colour: str) -> str:
    """A spot of a colour, before what it stands for."""
    return f'<span class="key" style="background:{colour}"></span>'


def legend(colours: Mapping[str, str]) -> str:
    """Which line stands for what: name -> colour."""
    return f"<p>{' &emsp; '.join(key(colour) + escape(name) for name, colour in colours.items())}</p>"


def wide(inside: str) -> str:
    """A table or a picture that scrolls sideways where the page is narrower."""
    return f'<div class="wide">{inside}</div>'
