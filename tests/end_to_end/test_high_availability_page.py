"""The steps of docs/admin/high-availability.md, run as they stand, with PostgreSQL, TLS and MUNGE, and a reporting job.

What differs from a site: both hosts are addresses of this machine, so each has a folder in place of /etc/penstock and a socket
of its own; scp copies between folders, and systemctl starts a process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.machine import free_ports
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import UNFORESEEN, Site
from tests.scheduler.databases import REASON, available, new_database, restartable

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.skipif(not available(), reason=REASON)]

PAGE = Path(__file__).parents[2] / "docs/admin/high-availability.md"
HEADS = {"head1": "127.0.0.2", "head2": "127.0.0.3"}

SCP = """#!/bin/sh
for to; do :; done
host=${to#root@}; folder=%(hosts)s/${host%%:*}
shift # -p
while [ $# -gt 1 ]; do cp -p "$1" "$folder/"; shift; done
sed -i -e "s#/etc/penstock#$folder#" -e "s#^\\[api\\]#&\\nsocket = \\"$folder/api.sock\\"#" "$folder/penstock.toml"
"""
SYSTEMCTL = """#!/bin/sh
setsid penstockd --config %(hosts)s/$HOST/penstock.toml >>%(hosts)s/log 2>&1 & echo $! >%(hosts)s/$HOST/pid
"""


def page_blocks() -> dict[str, str]:
    """First line -> the commands of each block of the steps."""
    steps = PAGE.read_text(encoding="utf-8").partition("## Set it up")[2].partition("\n## ")[0]
    blocks = re.findall(r"^ *```\n(.*?)^ *```", steps, re.DOTALL | re.MULTILINE)
    return dict(textwrap.dedent(block).split("\n", 1) for block in blocks)  # type: ignore[arg-type]


class Hosts:
    """The two hosts."""

    def __init__(self, folder: Path, site: Site, store: str) -> None:
        self.folder, self.site = folder / "hosts", site
        programs = folder / "programs"
        programs.mkdir()
        for name, text in (("scp", SCP), ("systemctl", SYSTEMCTL)):
            (programs / name).write_text(text % {"hosts": self.folder})
            (programs / name).chmod(0o755)
        for host in HEADS.values():
            (self.folder / host).mkdir(parents=True)
        self.environment = dict(os.environ) | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PENSTOCK_MUNGE_SOCKET": str(site.slurm.munge_socket),
        }
        ports = {name: free_ports(1) for name in HEADS}
        self.replaced = {
            "head1 head2": " ".join(f"{HEADS[name]}:{port}" for name, port in ports.items()),
            "penstock leader init": f"penstock leader init --config {shlex.quote(str(site.config))}",
            "postgresql+psycopg://penstock@db/penstock": store,
        } | HEADS

    def run(self, block: str, host: str, **replaced: str) -> str:
        """Run a block of the page on a host; its output."""
        for old, new in (self.replaced | replaced).items():
            assert old in block or old not in replaced
            block = block.replace(old, new)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            env=self.environment | {"HOST": host},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}\n{self.tail()}"
        return done.stdout

    def pid(self, host: str) -> int:
        return int((self.folder / host / "pid").read_text())

    def tail(self) -> str:
        log = self.folder / "log"
        return log.read_text()[-5000:] if log.exists() else ""

    def stop(self) -> None:
        for host in HEADS.values():
            if (self.folder / host / "pid").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid(host), signal.SIGKILL)


def test_the_page_makes_a_site_whose_jobs_notice_no_takeover(make_loopback, tmp_path):
    slurm = make_loopback("t4:1x4")
    site = Site(slurm, tmp_path, round_s=1.0, lease_s=6.0)
    site.api = {"munge_socket": str(slurm.munge_socket)}
    site.write_settings()
    with restartable() as server:
        store = new_database(server.url)
        hosts = Hosts(tmp_path, site, store)
        blocks = page_blocks()
        first, each, user = (next(text for line, text in blocks.items() if line.startswith(start)) for start in (
            "# as root, on head1, in", "# as root, on head1 and", "# as a user"))  # fmt: skip
        try:
            hosts.run(first, HEADS["head1"])
            for host in HEADS.values():
                assert "settings: ok" in hosts.run(each, host, **{"/etc/penstock": str(hosts.folder / host)})
            shell = (tmp_path / "heads/penstock.sh").read_text().replace("/etc/penstock", str(tmp_path / "heads/ca"))
            (tmp_path / "users.sh").write_text(shell)
            users = {"/etc/profile.d/penstock.sh": str(tmp_path / "users.sh")}
            wait_for(lambda: "event=started" in hosts.tail(), 120, "a leader", details=hosts.tail)
            shown = hosts.run(user, "", **users)
            leader = re.search(r"^leader +(\S+)", shown, re.MULTILINE)[1]  # type: ignore[index]
            other = next(host for host in HEADS.values() if host != leader)
            variables = dict(re.findall(r"export (\w+)=(\S+)", shell))
            script = tmp_path / "job.sh"
            script.write_text("#!/bin/sh\n" + site.trainer(4000))
            job = _submit(site, script, hosts.environment | variables)
            site.wait_states("RUNNING", job)
            wait_for(lambda: _reports(store, job) > 3, 60, "reports over TLS", details=hosts.tail)
            started = site.job(job).start_s
            wait_for(lambda: "standing by" in (hosts.folder / "log").read_text(), 60, "a standby", details=hosts.tail)
            os.kill(hosts.pid(leader), signal.SIGKILL)
            before = _reports(store, job)
            wait_for(lambda: _reports(store, job) > before + 3, 120, "reports to the new leader", details=hosts.tail)
            shown = hosts.run(user, "", **users)
            assert re.search(rf"^leader +{other}$", shown, re.MULTILINE), shown
            assert re.search(rf"^{job} .*running", shown, re.MULTILINE), shown
            assert (site.job(job).state, site.job(job).start_s, site.job(job).restarts) == ("RUNNING", started, 0)
            assert UNFORESEEN not in (hosts.folder / "log").read_text()
            slurm.command("scancel", job)
        finally:
            hosts.stop()


def _submit(site: Site, script: Path, environment: dict[str, str]) -> str:
    comment = '{"penstock": {"max_gpus": 1, "checkpointable": true}}'
    command = ["sbatch", "--parsable", "--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", str(script)]
    done = subprocess.run(
        command, env=environment | site.slurm.environment(), cwd=site.folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _reports(where: str, job: str) -> int:
    store = open_store(where)
    try:
        return sum(1 for _ in store.reports(job))
    finally:
        store.close()
