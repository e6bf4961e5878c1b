"""Renders the pages' templates, which escape all that comes from outside. Only HTML that this room has made is marked as safe."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penstock_scheduler.api.estimate_messages import TimeRange
from penstock_scheduler.people.drawing.colours import index, rules
from penstock_scheduler.people.drawing.page import style
from penstock_scheduler.people.safe_text import visible
from penstock_scheduler.people.units import clock, duration
from penstock_scheduler.store.leadership.site_clock import site_time_s

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: a page runs the scripts of this package and no others, whatever a job's output contains."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}

_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FILES = ("app.css", "app.js", "icon.svg", "vendor/htmx.min.js", "vendor/idiomorph-ext.min.js")
_CHARTS = ("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")


@cache
def static(name: str) -> tuple[bytes, str]:
    """A file of the pages, and its media type. Raises KeyError if there is none."""
    if name == "drawing.css":
        return (style() + rules()).encode(), _TYPES[".css"]
    if name not in _FILES + _CHARTS:
        raise KeyError(name)
    content = files(__package__).joinpath("static", name).read_bytes()
    return content, _TYPES[name[name.rindex(".") :]]


@cache
def address(name: str) -> str:
    """The address of a file, which changes with its content, so that browsers may keep it for ever."""
    return f"/static/{name}?v={hashlib.sha256(static(name)[0]).hexdigest()[:12]}"


def moment(time_s: float | None) -> Markup:
    """A time of the day, and the date where it is not today's."""
    if time_s is None:
        return Markup("–")
    iso = datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    near = abs(site_time_s() - time_s) < 12 * 3600
    text = clock(time_s) if near else time.strftime("%d %b %H:%M", time.localtime(time_s))
    return Markup('<time datetime="{}">{}</time>').format(iso, text)


def between(times: TimeRange) -> Markup:
    """A range of times."""
    if times.to_s is None:
        return Markup("{} or later").format(moment(times.from_s))
    return Markup("{} to {}").format(moment(times.from_s), moment(times.to_s))


def number(value: float | None, digits: int = 3) -> str:
    """A number with sensible digits, and thousands apart."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value:.0%}".replace("%", " %")


@cache
def environment() -> Environment:
    """Jinja's environment, which escapes everything."""
    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=PackageLoader(__package__ or "", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(moment=moment, between=between, number=number, share=share, duration=duration, colour=index)
    made.globals.update(static=address)
    return made


def render(template: str, **values: Any) -> str:
    """A template with these values."""
    return visible(environment().get_template(template).render(**values))


def block(template: str, name: str, **values: Any) -> str:
    """A macro of a page's parts with these arguments."""
    return str(getattr(_module(f"parts/{template}"), name)(**values)).strip()


@cache
def _module(template: str) -> Any:
    return environment().get_template(template).module
