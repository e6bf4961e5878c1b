#!/usr/bin/env python3
"""An OpenStack cloud behind `[cloud.commands.NAME]`, by Apache Libcloud. openstack.toml beside it has all settings.

The first argument is a settings file, the second one the verb. docs/admin/bursting.md has the contract.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.types import InvalidCredsError
from libcloud.compute.base import Node, NodeImage, NodeSize
from libcloud.compute.providers import get_driver

KEPT_S = 3600.0
"""How long a server that has ended is remembered, s. OpenStack forgets it at once."""


class Refused(Exception):
    """A refusal of the contract: its kind and a message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextlib.contextmanager
def refusals(about: str) -> Iterator[None]:
    """Turns OpenStack's errors into refusals."""
    try:
        yield
    except InvalidCredsError as error:
        raise Refused("configuration", f"OpenStack refuses the credentials: {error}") from error
    except BaseHTTPError as error:
        text = f"{about}: OpenStack answers {error.code}: {error.message}"
        if error.code == 403 and "quota" in str(error.message).lower():
            raise Refused("quota", text) from error
        kinds = {413: "throttled", 429: "throttled", 409: "unknown"}
        raise Refused(kinds.get(error.code, "no answer" if error.code >= 500 else "configuration"), text) from error
    except Exception as error:  # no connection, or an answer that is not OpenStack's own (a proxy's page)
        raise Refused("no answer", f"{about}: {error!r}") from error


class OpenStack:
    """The servers of one project. `settings`: the settings file."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        login = dict(settings["login"])
        user, variable = login.pop("user"), login.pop("password_variable")
        if not os.environ.get(variable):
            raise Refused("configuration", f"penstockd's environment has no {variable}")
        self._driver = get_driver("openstack")(user, os.environ[variable], api_version="2.2", **login)

    def servers(self) -> list[Node]:
        """All servers that Penstock has launched and that exist."""
        with refusals("list"):
            return [each for each in self._driver.list_nodes() if "token" in each.extra["metadata"]]

    def server(self, id_: str) -> Node | None:
        """A server, if it exists."""
        with refusals(id_):
            return self._driver.ex_get_node_details(id_)

    def end(self, ids: list[str]) -> None:
        """End servers that Penstock has launched. One that does not exist has ended."""
        there = [node for id_ in ids if (node := self.server(id_)) is not None and "token" in node.extra["metadata"]]
        with memory(self.settings) as seen:
            seen |= {each.id: shown(each) for each in there}
        for node in there:
            with refusals(node.id), _unless_gone():
                self._driver.destroy_node(node)

    def launch(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Start a server for each node that has none of this token yet. All of them, or none."""
        there = {
            each.extra["metadata"]["node"]: each
            for each in self.servers()
            if each.extra["metadata"]["token"] == asked["token"]
        }
        try:
            for node in asked["nodes"]:
                if node not in there:
                    there[node] = self._create(node, asked)
            self._wait(there)
        except Refused as error:
            if error.kind != "no answer":  # then penstockd looks for what exists, by its tags
                self.end([each.id for each in there.values()])
            raise
        return {"instances": {node: each.id for node, each in there.items()}}

    def _create(self, node: str, asked: dict[str, Any]) -> Node:
        create = self.settings["create"]
        machine = next(each for each in self.settings["machines"] if each["instance_type"] == asked["instance_type"])
        if asked["guest"] is not None:  # the run has no network to the site
            script = base64.b64decode(asked["guest"])
        else:
            text = Path(create["join"]).read_text(encoding="utf-8")
            script = text.replace("@NODE@", node).replace("@LIFETIME_S@", asked["tags"]["lifetime_s"]).encode()
        own = {"node": node, "token": asked["token"], "instance_type": asked["instance_type"]}
        with refusals(f"a server for {node}"):
            return self._driver.create_node(
                node,
                NodeSize(machine["flavor"], "", 0, 0, 0, 0.0, self._driver),
                NodeImage(create["image"], "", self._driver),
                networks=[SimpleNamespace(id=each) for each in create["networks"]],
                ex_security_groups=[SimpleNamespace(name=each) for each in create.get("security_groups", [])],
                ex_metadata={**asked["tags"], **own},
                ex_userdata=script,
            )

    def _wait(self, there: dict[str, Node]) -> None:
        """Wait until OpenStack has found a host for each server: only then does it say that it has none."""
        until = time.monotonic() + self.settings["create"].get("wait_s", 20)
        for node in there:
            while there[node].state == "pending" and time.monotonic() < until:
                time.sleep(0.2)
                there[node] = self.server(there[node].id) or there[node]
            if there[node].state == "error":
                fault = (there[node].extra["fault"] or {}).get("message", "it gives no reason")
                raise Refused("no capacity" if "No valid host" in fault else "unknown", f"{node}: {fault}")


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    try:
        yield
    except BaseHTTPError as error:
        if error.code != 404:
            raise


def shown(node: Node) -> dict[str, Any]:
    """A server in the words of the contract."""
    tags = node.extra["metadata"]
    return {
        "id": node.id,
        "state": str(node.state),
        "instance_type": tags["instance_type"],
        "zone": node.extra["availability_zone"] or "",
        "launched_s": node.created_at.timestamp(),
        "ended_s": None,
        "gone": False,
        "tags": tags,
    }


@contextlib.contextmanager
def memory(settings: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """The servers that were seen, by id, for one process at a time: an older list must not come after a newer one."""
    with Path(settings["memory"]).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        seen: dict[str, dict[str, Any]] = json.loads(file.read() or "{}")
        yield seen
        file.truncate(0)
        json.dump(seen, file)


def listed(cloud: OpenStack, asked: dict[str, Any]) -> dict[str, Any]:
    """The servers that exist, and those that have ended of late. One that has stopped itself is ended."""
    with memory(cloud.settings) as seen:
        live = {each.id: shown(each) for each in cloud.servers()}
        seen |= live
        now = time.time()
        for id_, each in [*seen.items()]:
            # A part of OpenStack that is down is missing in its lists. It refuses a question about one server.
            if id_ not in live and not each["gone"] and cloud.server(id_) is None:
                each.update(gone=True, state="terminated", ended_s=now)
            elif each["gone"] and now - each["ended_s"] > KEPT_S:
                del seen[id_]
    cloud.end([id_ for id_ in live if live[id_]["state"] == "stopped"])
    if asked["ids"] is not None:
        found = [each for id_, each in seen.items() if id_ in asked["ids"]]
        return {"instances": found, "unknown": [id_ for id_ in asked["ids"] if id_ not in seen]}
    mine = [each for each in seen.values() if each["tags"].get("site") == asked["site"]]
    return {"instances": [each for each in mine if asked["run"] in (None, each["tags"]["run"])]}


def offers(settings: dict[str, Any]) -> dict[str, Any]:
    """The machines of the settings file, at its prices."""
    machines = [{key: each[key] for key in each if key != "flavor"} for each in settings["machines"]]
    return {"as_of": settings["as_of"].isoformat(), "machines": machines}


def answer(path: str, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question. Raises Refused."""
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if verb == "offers":
            return offers(settings)
        cloud = OpenStack(settings)
        if verb == "launch":
            return cloud.launch(asked)
        if verb == "list":
            return listed(cloud, asked)
        if verb == "terminate":
            cloud.end(asked["ids"])
        return {}
    except KeyError as error:
        raise Refused("configuration", f"{path} lacks {error}") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Refused("configuration", f"{path}: {error}") from error


if __name__ == "__main__":
    try:
        print(json.dumps(answer(sys.argv[1], sys.argv[2], json.load(sys.stdin))))
    except Refused as error:
        print(json.dumps({"kind": error.kind, "message": str(error)}))
        sys.exit(1)
