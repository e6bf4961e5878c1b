"""What a browser gets instead of a page: the log-in, or what is wrong. Programs get JSON (`service.app`)."""

from __future__ import annotations

import re
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from penstock_scheduler.daemon.service.web.render import HEADERS, render

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
