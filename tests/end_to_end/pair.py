"""Two penstockd on one PostgreSQL beside one Slurm, or one on SQLite, and what goes wrong there: faults, and their witnesses.

Both write to one log, so that the order of its lines is the order of what they did. Slurm's commands are run through a script
that notes each command that changes something, with the fencing number of the penstockd that runs it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.machine import free_ports
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.health_messages import Health, LeaderHealth
from penstock_scheduler.store.leadership.lease import boot_s
from tests.end_to_end.site import Site
from tests.scheduler.databases import Server, new_database

LEASE_S = 6.0


class Proxy:
    """A way to a server on loopback that can be cut: connections neither deliver nor end, and new ones are not answered."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(50)
        self.port = self._listening.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._over = False
        self.delay_s = 0.0
        """By how much each piece of data is late."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Deliver nothing from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Deliver again, also what was held back."""
        self._whole.set()

    def drop(self) -> None:
        """End all connections; new ones are served."""
        for each in (*self._open,):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop."""
        self._over = True
        self._whole.set()
        self._listening.close()

    def _accept(self) -> None:
        while not self._over:
            with suppress(OSError):
                client, _ = self._listening.accept()
                self._whole.wait()
                try:
                    server = socket.create_connection(("127.0.0.1", self._to), timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        self._open.add(source)
        with suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                time.sleep(self.delay_s)
                sink.sendall(data)
        self._open.discard(source)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Member:
    """One of them: a process of its own, which is started again when it ends, as systemd would. `proxy` leads to its database."""

    def __init__(
        self, name: str, site: Site, proxy: Proxy | None, environment: dict[str, str], clock: Path | None
    ) -> None:
        self.name, self.site, self.proxy = name, site, proxy
        self.socket = Path(str(site.api["socket"]))
        self._clock = site.state / "clock"
        site.state.mkdir(exist_ok=True)
        self.environment = dict(os.environ) | environment
        if clock is not None:
            self._clock.touch()
            self.set_clock(0)
            self.environment |= {"LD_PRELOAD": str(clock), "PENSTOCK_TEST_CLOCK": str(self._clock)}
        self.process: subprocess.Popen[bytes] | None = None
        self.wanted = False
        self.starts = 0

    def set_clock(self, ahead_s: float) -> None:
        """Let its wall clock be ahead of the machine's; its monotonic clocks stay."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", ahead_s))

    def start(self) -> None:
        """Start it unless it runs."""
        self.wanted = True
        if self.process is not None and self.process.poll() is None:
            return
        self.site.write_settings()
        self.starts += 1
        with self.site.log.open("ab") as log:
            command = [sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", str(self.site.config)]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> int:
        """End it for good. Returns the exit status."""
        self.wanted = False
        if self.process is None:
            return 0
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def sees(self) -> LeaderHealth | None:
        """Whom it sees leading; None: it does not answer, or nobody can take over from it."""
        found = self._health()
        return None if found is None else found.leader

    def leads(self, newest: int) -> bool:
        """Whether it answers and leads. `newest`: fencing number of the newest term."""
        found = self._health()
        return found is not None and (found.leader is None or (found.leader.here and found.leader.number >= newest))

    def _health(self) -> Health | None:
        try:
            with Client(f"unix:{self.socket}", timeout_s=2) as client:
                return client.ready()
        except Exception:
            return None


class Pair:
    """Two penstockd, `a` and `b`; without a server only `a`, on SQLite. `site` submits jobs and reads the store."""

    def __init__(
        self, slurm: LoopbackCluster, folder: Path, server: Server | None, *, clocks: bool = False, **settings: object
    ) -> None:
        settings = {"lease_s": LEASE_S, "log_writes": True} | settings
        clock = _build_clock(folder) if clocks else None
        self.lease_s = float(str(settings["lease_s"]))
        self.slurm, self.folder, self.server = slurm, folder, server
        database = "" if server is None else new_database(server.url).rpartition("/")[2]
        self.witness = folder / "witness"
        programs = folder / "programs"
        programs.mkdir()
        for name in ("scontrol", "scancel", "sbatch"):
            script = programs / name
            note = (
                f'[ -z "$PENSTOCK_FENCING" ] || echo "$PENSTOCK_FENCING {name} $*" >>{shlex.quote(str(self.witness))}'
            )
            script.write_text(f'#!/bin/sh\n{note}\nexec {shutil.which(name)} "$@"\n')
            script.chmod(0o755)
        self.members: dict[str, Member] = {}
        for name in ("a", "b") if server is not None else ("a",):
            proxy = None if server is None else Proxy(server.port)
            url = proxy and f"postgresql+psycopg://penstock@127.0.0.1:{proxy.port}/{database}"
            site = Site(slurm, folder, **({"store": url} if url else {}), name=name, **settings)
            site.config, site.state = folder / f"{name}.toml", folder / f"state-{name}"
            site.api = {"socket": str(site.state / "api.sock")}
            site.settings["state_dir"] = str(folder / "state-of-both")  # as docs/admin/high-availability.md says
            environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
            self.members[name] = Member(name, site, proxy, environment, clock)
        store = folder / "state-of-both" if server is None else f"{server.url}/{database}"
        self.site = Site(slurm, folder, store=store, **settings)
        self.log = self.site.log
        self._over = threading.Event()
        threading.Thread(target=self._supervise, daemon=True).start()

    def _supervise(self) -> None:
        while not self._over.wait(0.5):
            for member in self.members.values():
                if member.wanted and member.process is not None and member.process.poll() is not None:
                    member.start()

    def start(self) -> None:
        """Start them, and wait until they are ready."""
        for member in self.members.values():
            member.start()
        self.wait_ready(120)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until one leads and the other one, if there is one, stands by."""
        ready = self.leader if self.server is None else self.stands_by
        wait_for(lambda: ready() is not None, timeout_s, "a leader and a standby", details=self.site.tail)

    def stop(self) -> dict[str, int]:
        """End both. Returns their exit statuses."""
        found = {name: member.stop() for name, member in self.members.items()}
        self._over.set()
        for member in self.members.values():
            if member.proxy is not None:
                member.proxy.close()
        return found

    def leader(self) -> Member | None:
        """The one that leads; None: neither, or it does not answer. One that was frozen says for a moment that it still leads."""
        newest = self.ticked()
        for member in self.members.values():
            if member.leads(newest):
                return member
        return None

    def stands_by(self) -> Member | None:
        """The one that stands by while the other one leads, and is known to it."""
        leader = self.leader()
        seen = leader.sees() if leader is not None else None
        if leader is None or seen is None:
            return None
        ready = [each.name for each in seen.standbys if each.seen_age_s < 4 and each.name != leader.name]
        return self.members[ready[0]] if ready else None

    def url(self) -> str:
        """What PENSTOCK_URL would be."""
        return ",".join(f"unix:{member.socket}" for member in self.members.values())

    def ticked(self) -> int:
        """The newest fencing number whose penstockd has begun to lead, by the log."""
        return max(map(int, re.findall(r"event=started .*?fencing=(\d+)", self.log.read_text())), default=0)

    def takeover_s(self, cause: Callable[[], object], timeout_s: float = 180) -> float:
        """Seconds from `cause` until another penstockd leads and decides."""
        before, begun_s = self.ticked(), boot_s()
        cause()
        wait_for(lambda: self.ticked() > before, timeout_s, "a takeover", details=self.site.tail, poll_s=0.05)
        return boot_s() - begun_s

    # --- what must hold

    def assert_one_writer(self) -> None:
        """No penstockd wrote after a later one had: by the log, and by the commands that Slurm was given."""
        logged = [int(each) for each in re.findall(r"event=write .*?fencing=(\d+)", self.log.read_text())]
        assert logged == sorted(logged), f"writes of two leaders: {_turns(logged)}"
        given = (
            [int(line.split()[0]) for line in self.witness.read_text().splitlines()] if self.witness.exists() else []
        )
        assert given == sorted(given), f"commands of two leaders: {_turns(given)}"
        assert logged, "something was written"


def _build_clock(folder: Path) -> Path:
    """The library that gives a process a wall clock of its own."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-o{library}", source, "-ldl"], check=True)
    return library


def _turns(numbers: list[int]) -> list[int]:
    return [each for index, each in enumerate(numbers) if index == 0 or numbers[index - 1] != each]


@contextmanager
def pair(
    slurm: LoopbackCluster, folder: Path, server: Server | None, *, clocks: bool = False, **settings: object
) -> Iterator[Pair]:
    """A pair, or one penstockd on SQLite, that is ended whatever happens.

    `clocks`: whether each has a wall clock that can be set; needs gcc.
    """
    made = Pair(slurm, folder, server, clocks=clocks, **settings)
    try:
        yield made
    finally:
        made.stop()


__all__ = ["LEASE_S", "Member", "Pair", "Proxy", "free_ports", "pair"]
