"""A Penstock that answers over HTTP on loopback, for tests that need no Slurm: it keeps one job for an owner, as the API says.

The tests with a real penstockd show that it does the same.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "penstock_test"


class Fake:
    """The jobs, owners and outputs of a Penstock, and how it behaves."""

    def __init__(self):
        self.jobs, self.owners, self.keys, self.bodies, self.outputs = {}, {}, {}, {}, {}
        self.asked = []
        self.is_silent = False
        self.part_bytes = 1 << 20
        self.token = TOKEN
        self.lock = threading.RLock()

    def job(self, job_id, **changes):
        """Change a job."""
        with self.lock:
            self.jobs[job_id] = {**self.jobs[job_id], **changes, "version": self.jobs[job_id]["version"] + 1}
            return self.jobs[job_id]

    def end(self, job_id, state="COMPLETED", exit_code=0, text=""):
        self.job(job_id, state="ended", ended=state, exit_code=exit_code, ended_text=text, end_s=1.0, allocation=None)

    def open(self):
        return [job["id"] for job in self.jobs.values() if job["state"] != "ended"]

    def new(self, body):
        job_id = str(len(self.jobs) + 1)
        self.jobs[job_id] = {
            "id": job_id, "version": 0, "name": body.get("name", ""), "state": "queued", "ended": "", "exit_code": None,
            "ended_text": "", "end_s": None, "restarts": 0, "key": body.get("key"), "allocation": None, "reason": "",
            "stopped": "", "progress": None, "gpu_seconds": {}, "result": None,
        }  # fmt: skip
        self.bodies[job_id], self.keys[body.get("key")] = body, job_id
        return self.jobs[job_id]

    def submit(self, body):
        owner, key = body.get("owner"), body.get("key")
        if key in self.keys:
            return 200, self.jobs[self.keys[key]]
        known = self.owners.get(owner["name"]) if owner else None
        if known is not None:
            job = self.jobs[known["job"]]
            if owner["attempt"] < known["attempt"]:
                return 409, ("superseded", f"job {job['id']} of a later try")
            if owner["generation"] == known["generation"]:
                if job["state"] != "ended" or job["ended"] == "COMPLETED":
                    self.owners[owner["name"]] = known | owner
                    return 200, job
                if job["ended"] == "CANCELLED" and not known["given_up"]:
                    return 409, ("cancelled", f"job {job['id']}, the job of an earlier try, was cancelled")
            elif job["state"] != "ended":
                self.end(job["id"], "CANCELLED")
        job = self.new(body)
        if owner:
            self.owners[owner["name"]] = {"lease_s": None, **owner, "job": job["id"], "key": key, "given_up": False}
        return 201, job

    def answer(self, method, path, query, body):
        """Status and content."""
        match [method, *path.strip("/").split("/")[1:]]:
            case ["POST", "jobs"]:
                return self.submit(body)
            case ["GET", "jobs"]:
                states, key = query.get("state"), query.get("key", [None])[0]
                found = [job for job in self.jobs.values() if states is None or job["state"] in states]
                found = [job for job in found if key in (None, job["key"])]
                return 200, {"jobs": found[::-1], "next": None}
            case ["GET", "owner"]:
                found = self.owners.get(query["name"][0])
                return (200, found) if found else (404, ("no-such-owner", "no job was submitted for this owner"))
            case ["POST", "jobs", "plan"]:
                return 200, {"would": "start", "text": "", "code": "", "lines": []}
            case ["POST", "jobs", "renew"]:
                return 200, {"jobs": body["jobs"]}
            case ["GET", "ledger"]:
                return 200, {"lines": []}
            case [_, "jobs", job_id, *rest] if job_id in self.jobs:
                return self.about(self.jobs[job_id], rest, query)
            case [_, "jobs", job_id, *_]:
                return 404, ("no-such-job", f"there is no job {job_id}")
        return 404, ("no-such-path", path)

    def about(self, job, rest, query):
        if rest == ["cancel"]:
            if job["state"] != "ended":
                self.end(job["id"], "CANCELLED")
                for owner in self.owners.values():
                    if owner["job"] == job["id"]:
                        owner["given_up"] = query.get("for_owner") == ["true"]
            return 200, self.jobs[job["id"]]
        if rest == ["log"]:
            return 200, self.output(self.outputs.get(job["id"], b""), int(query["offset"][0]))
        return 200, {"observations": []} if rest == ["history"] else job

    def output(self, data, offset):
        """A part of a job's output, as `read_log` of the service makes it."""
        data = data.encode() if isinstance(data, str) else data
        offset = max(len(data) + offset, 0) if offset < 0 else offset
        part = data[offset : offset + self.part_bytes]
        text, end, line = part.decode(errors="replace"), offset + len(part), offset + whole_bytes(part)
        return {"text": text, "offset": offset, "next": end, "whole": line, "size": len(data)}


def whole_bytes(part):
    part = part.rstrip(b"\r")
    return max(part.rfind(b"\n"), part.rfind(b"\r")) + 1


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        fake, url = self.server.fake, urlsplit(self.path)
        fake.asked.append(f"{self.command} {url.path}")
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        if fake.is_silent:
            self.close_connection = True
            return
        if self.headers.get("Authorization") != f"Bearer {fake.token}":
            status, content = 401, ("unauthenticated", "the token is unknown or revoked")
        else:
            with fake.lock:
                status, content = fake.answer(self.command, url.path, parse_qs(url.query), body)
        if isinstance(content, tuple):
            content = {"error": {"code": content[0], "message": content[1]}}
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET


def serve(fake):
    """A server of a fake Penstock, which runs in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.fake = True, fake
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def connection(server, **extra):
    """An Airflow connection to it, as JSON."""
    extra = {"tls": False, "deployment": "tests", "timeout_s": 5} | extra
    host, port = server.server_address[:2]
    return json.dumps({"conn_type": "penstock", "host": host, "port": port, "password": TOKEN, "extra": extra})
