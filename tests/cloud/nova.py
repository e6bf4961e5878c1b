"""An OpenStack over HTTP, as far as Libcloud asks it: Keystone's tokens, and Nova's servers. Its answers have Nova's form.

Written by Nova's API reference (compute, microversion 2.1); no code of OpenStack runs here.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Nova:
    """The state of the cloud."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.servers: dict[str, dict[str, Any]] = {}
        self.capacity = 100
        self.page = 2
        """Servers in one page of a list."""
        self.faults: dict[str, tuple[int, dict[str, Any]]] = {}
        """Method -> the status and body of its next answer; "after": the request is carried out nevertheless."""
        self.missing: set[str] = set()
        """Servers of a part of the cloud that does not answer."""
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        """POST /servers. As in Nova, whether there is a host shows only afterwards."""
        id_, now = str(uuid.uuid4()), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        fits = sum(each["status"] != "ERROR" for each in self.servers.values()) < self.capacity
        server = {
            "id": id_,
            "name": asked["name"],
            "status": "BUILD",
            "then": "ACTIVE" if fits else "ERROR",
            "metadata": asked["metadata"],
            "addresses": {},
            "hostId": "",
            "tenant_id": "hpc",
            "user_id": "penstock",
            "created": now,
            "updated": now,
            "image": {"id": asked["imageRef"]},
            "flavor": {"id": asked["flavorRef"]},
            "OS-EXT-AZ:availability_zone": "nova",
            "user_data": asked["user_data"],
            "networks": asked["networks"],
            "links": [{"rel": "self", "href": f"{self.url}/compute/servers/{id_}"}],
        }
        self.servers[id_] = server
        return {"server": {"id": id_, "adminPass": "x"}}

    def get(self, id_: str) -> dict[str, Any]:
        """A server; a question later, Nova has scheduled it."""
        server = self.servers[id_]
        seen = {key: value for key, value in server.items() if key not in ("then", "user_data", "networks")}
        if server["status"] == "BUILD":
            server["status"] = server["then"]
            if server["status"] == "ERROR":
                server["fault"] = {"code": 500, "message": "No valid host was found. There are not enough hosts."}
        return seen

    def answer(self, method: str, path: str, asked: Any) -> tuple[int, Any]:
        """The status and the body of the answer to a request of Nova."""
        path, _, query = path.partition("?")
        id_ = path.removeprefix("/compute/servers").strip("/")
        if method == "POST":
            return 202, self.create(asked["server"])
        if id_ == "detail":
            ids = sorted(self.servers.keys() - self.missing)
            if "marker=" in query:
                ids = [each for each in ids if each > query.partition("marker=")[2].partition("&")[0]]
            found = {"servers": [self.get(each) for each in ids[: self.page]]}
            if len(ids) > self.page:
                next_ = f"{self.url}/compute/servers/detail?marker={ids[self.page - 1]}"
                found["servers_links"] = [{"rel": "next", "href": next_}]  # type: ignore[list-item]
            return 200, found
        if id_ in self.missing:
            return 500, {"computeFault": {"code": 500, "message": "Unexpected API Error."}}
        if id_ not in self.servers:
            return 404, {"itemNotFound": {"code": 404, "message": f"Instance {id_} could not be found."}}
        if method == "DELETE":
            del self.servers[id_]
            return 204, None
        return 200, {"server": self.get(id_)}


@contextmanager
def nova() -> Iterator[Nova]:
    """The cloud on a free port of this machine."""
    cloud = Nova()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with cloud.lock:
                status, answer, token = self._answer(json.loads(body) if body else None)
            told = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            if token:
                self.send_header("X-Subject-Token", token)
            self.end_headers()
            self.wfile.write(told)

        def _answer(self, asked: Any) -> tuple[int, Any, str]:
            if self.path.endswith("/auth/tokens"):
                secret = asked["auth"]["identity"]["password"]["user"]["password"]
                if secret != "right":
                    return 401, {"error": {"code": 401, "message": "The request requires authentication."}}, ""
                endpoint = {
                    "interface": "public",
                    "region": "RegionOne",
                    "region_id": "RegionOne",
                    "url": f"{cloud.url}/compute",
                }
                catalog = [{"type": "compute", "name": "nova", "id": "1", "endpoints": [endpoint]}]
                user = {"id": "u", "name": "penstock", "domain": {"id": "default", "name": "Default"}}
                token = {"catalog": catalog, "user": user, "expires_at": "2099-01-01T00:00:00.000000Z", "roles": []}
                return 201, {"token": token}, "a token"
            cloud.asked.append((self.command, self.path))
            fault = cloud.faults.pop(self.command, None)
            if fault is not None and not fault[1].get("after"):
                return *fault, ""
            status, answer = cloud.answer(self.command, self.path, asked)
            return (*fault, "") if fault is not None else (status, answer, "")

        do_GET = do_POST = do_DELETE = _serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    cloud.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
