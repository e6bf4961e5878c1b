"""Renders the pages' templates, which escape all that comes from outside. Only HTML that this room has made is marked as safe."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penstock_scheduler.api.estimate_messages import TimeRange
from penstock_scheduler.people.drawing.svg import index, rules, style
from penstock_scheduler.people.safe_text import visible
from penstock_scheduler.people.units import clock, dollars, duration
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
    made.filters.update(moment=moment, between=between, number=number, share=share, colour=index)
    made.filters.update(duration=duration, dollars=dollars)
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


_OLD_PAGE = re.compile(r"^/v1(/jobs/[^/]+)/page$")
_TITLES = {403: "You may not see this", 404: "There is no such page", 429: "Too many requests", 503: "Not now"}


def is_page(request: Request) -> bool:
    """Whether a person asked for a page, rather than a program for data."""
    path = request.url.path
    wants = "text/html" in request.headers.get("accept", "")
    return request.method == "GET" and wants and (not path.startswith("/v1/") or _OLD_PAGE.match(path) is not None)


def page_instead(request: Request, status: int, text: str) -> Response:
    """The answer to a request for a page that is refused."""
    if status == 401:
        path = _OLD_PAGE.sub(r"\1", request.url.path)
        wanted = path + (f"?{request.url.query}" if request.url.query else "")
        there = "/login" if wanted == "/" else f"/login?next={quote(wanted, safe='')}"
        return RedirectResponse(there, 303, {"Cache-Control": "no-store"})
    return HTMLResponse(
        render(
            "problem.html",
            title=_TITLES.get(status, "This did not work"),
            text=text[:1].upper() + text[1:],
            viewer=None,
            live="",
            status="",
        ),
        status,
        HEADERS,
    )


def safe(there: str) -> str:
    """An address on this site, to go to after the log-in; the first page if it is none."""
    ours = re.fullmatch(r"/(?![/\\])[^\s\x00-\x1f\\]*", there) is not None
    return there if ours and not there.startswith("/login") else "/"


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
