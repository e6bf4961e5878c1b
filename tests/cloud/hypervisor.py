"""Boots the instances that run by moto: runs their user data in processes of this machine, each with its own metadata service.

The inside of an instance is real: its user data runs under bash, and slurmd is Slurm's. `shutdown` ends the instance, as on EC2
with InstanceInitiatedShutdownBehavior=terminate. The processes of an instance end with it.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import os
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from tests.cloud.faults import Ec2


class Metadata(ThreadingHTTPServer):
    """IMDSv2 of one instance. It answers only with a token from a PUT."""

    daemon_threads = True

    def __init__(self, tags: dict[str, str]) -> None:
        self.tags, self.notice = tags, ""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._say(200, "secret")

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") != "secret":
                    return self._say(401, "")
                path = self.path.removeprefix("/latest/meta-data/")
                tag = service.tags.get(path.removeprefix("tags/instance/"))
                if path == "spot/instance-action" and service.notice:
                    return self._say(200, service.notice)
                if path == "local-ipv4":
                    return self._say(200, "127.0.0.1")
                return self._say(404, "") if tag is None else self._say(200, tag)

            def _say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Hypervisor:
    """Use as a context manager. It polls moto several times a second."""

    def __init__(self, ec2: Ec2, folder: Path) -> None:
        self._ec2, self._folder = ec2, folder
        self._machines: dict[str, tuple[subprocess.Popen[bytes], Metadata]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.boots = True
        self._before: dict[str, dict[str, str]] = {}
        """Instance -> its tags as they were at the last look."""
        self.booted: list[str] = []
        binaries = folder / "bin"
        binaries.mkdir(parents=True)
        (binaries / "shutdown").write_text('#!/bin/bash\ntouch "$HYPERVISOR/$INSTANCE.off"\nsleep 60\n')
        (binaries / "shutdown").chmod(0o755)

    def __enter__(self) -> Hypervisor:
        self._client = self._ec2.direct()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for instance in tuple(self._machines):
            self._off(instance)

    def notice(self, node: str) -> None:
        """EC2 announces that it will reclaim the node's instance."""
        for _, metadata in tuple(self._machines.values()):
            if metadata.tags.get("penstock:node") == node:
                metadata.notice = '{"action": "terminate", "time": "2026-11-21T16:00:00Z"}'

    def root(self, instance: str) -> Path:
        """The folder of a detached instance's files, in place of /."""
        return self._folder / instance

    def console(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.console")))

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            # moto may stumble over an instance that is just being made, and gives a page of HTML then
            with contextlib.suppress(ClientError, BotoCoreError, ResponseParserError):
                self._look()

    def _look(self) -> None:
        for file in self._folder.glob("*.off"):
            self._client.terminate_instances(InstanceIds=[file.stem])
            file.unlink()
        running = {
            each["InstanceId"]: {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])}
            for group in self._client.describe_instances()["Reservations"]
            for each in group["Instances"]
            if each["State"]["Name"] == "running"
        }
        for instance in set(self._machines) - set(running):
            self._off(instance)
        for instance, tags in running.items():
            if instance in self._machines:
                self._machines[instance][1].tags = tags
            whole = "penstock:run" in tags and tags == self._before.get(instance)  # moto gives them one by one
            if instance not in self._machines and self.boots and whole:
                self._on(instance, tags)
        self._before = running

    def _on(self, instance: str, tags: dict[str, str]) -> None:
        answer: dict[str, Any] = self._client.describe_instance_attribute(InstanceId=instance, Attribute="userData")
        script = self._folder / f"{instance}.sh"
        told = base64.b64decode(answer["UserData"]["Value"])
        script.write_bytes(gzip.decompress(told) if told.startswith(b"\x1f\x8b") else told)  # as cloud-init does
        metadata = Metadata(tags)
        with (self._folder / f"{instance}.console").open("wb") as console:
            machine = subprocess.Popen(
                ["bash", str(script)],
                stdout=console,
                stderr=console,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ
                | {
                    "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin",
                    "PENSTOCK_IMDS": f"http://127.0.0.1:{metadata.server_address[1]}",
                    "PENSTOCK_WATCH_S": "0.3",
                    "PENSTOCK_ROOT": str(self._folder / instance),
                    "HYPERVISOR": str(self._folder),
                    "INSTANCE": instance,
                },
            )
        self._machines[instance] = machine, metadata
        self.booted.append(instance)

    def _off(self, instance: str) -> None:
        machine, metadata = self._machines.pop(instance)
        for process in _session(machine.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        machine.wait()
        metadata.shutdown()
        metadata.server_close()


def _session(leader: int) -> list[int]:
    """Processes of a session: a job in it has a process group of its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3]) == leader:
                found.append(int(folder.name))
    return found
