"""Start, use, break and stop a Slurm cluster that lives in one folder on this machine."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock_profiles.node_channel import RUN_DIR_VARIABLE
from penstock_profiles.wire import SPOOL_VARIABLE
from penstock_scheduler.errors import PenstockError
from penstock_scheduler.nodespec import DEFAULT_SPEC, NodeSpec, parse_nodes
from penstock_slurm.install.sources import build_plugin
from penstock_slurm.loopback import config, machine, processes
from penstock_slurm.loopback.errors import CommandFailed, LoopbackError, NotRunning, PortInUse
from penstock_slurm.loopback.processes import Process
from penstock_slurm.loopback.waiting import wait_for

STATE_FILE = "penstock-loopback.json"
AGENT_SETTINGS = "agent.toml"
_SOCKET_PATH_MAX = 107
# The longest socket is a slurmstepd's: spool/NODE/NODE_JOB.STEP, both numbers of up to 10 digits.
_SOCKET_ROOM = len("/spool/") + len("/_4294967295.4294967295")
_SUBFOLDERS = ("etc", "state", "log", "run", "dev", "spool", "db", "data")
_GRACE_S = 3.0
"""How long a daemon may take to end by itself; a slurmd that never registered ignores SIGTERM."""

MAX_NODES = 1000
"""Each node is a real slurmd; 256 on one machine is the most that was tried (17 s, 0.5 GB)."""

_children: list[subprocess.Popen[bytes]] = []
"""Daemons that this process started, of whichever cluster: they outlive cluster objects, and want to be reaped."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as Slurm sees it now; the state is `unknown` while the controller is away."""

    name: str
    gpu_type: str
    gpus: int
    gpus_used: int
    state: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The whole cluster: its folder, its nodes and the daemons that should run and do not."""

    folder: Path
    nodes: tuple[NodeStatus, ...]
    dead_daemons: tuple[str, ...]


def default_folder() -> Path:
    """The folder when none is named: one for each user. `/run/user/UID` cannot be assumed."""
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / f"penstock-loopback-{os.getuid()}"


class LoopbackCluster:
    """A real Slurm in a folder: munged, slurmctld, one slurmd for each node, and accounting on request.

    Use it as a context manager, or call `up` and `down`. The daemons outlive this object and this process:
    `open` finds them again. Every process is recorded in a state file as it starts.

    Args:
        folder: holds everything; made when missing, and must be empty or an earlier cluster's.
        nodes: specs, or their text such as `t4:6x4,rtx:3x8`.
        accounting: also run slurmdbd with a MariaDB of its own (200 MB more, 5 s more to start).
        cpus_per_node: what Slurm believes each node to have.
        slurmd_timeout_s: silence after which Slurm takes a node for down.
        settings: lines of slurm.conf to add or replace, by key.
        files: further files beside slurm.conf (plugstack.conf, job_submit.lua), name -> text.
        port: the first of the TCP ports, one for each node and two more; by default free ones are found.
        agents: also run a penstock-agent for each node, so that jobs can share GPUs, and give Slurm the SPANK plugin, which is
            built for that. Their spool is `spool`.
        stand_in: give the nodes the GRES that jobs which share ask for in place of GPUs; with `agents` they have it anyway.
    """

    def __init__(
        self,
        folder: Path | str,
        nodes: Sequence[NodeSpec] | str = DEFAULT_SPEC,
        *,
        accounting: bool = False,
        cpus_per_node: int = 64,
        slurmd_timeout_s: int = 30,
        settings: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        port: int | None = None,
        agents: bool = False,
        stand_in: bool = False,
    ) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.nodes = parse_nodes(nodes, most=MAX_NODES) if isinstance(nodes, str) else tuple(nodes)
        self.accounting = accounting
        self._cpus_per_node = cpus_per_node
        self._slurmd_timeout_s = slurmd_timeout_s
        self._settings = dict(settings or {})
        self._files = dict(files or {})
        self._port = port
        self.agents = agents
        self._stand_in = stand_in
        self._layout = config.Layout(self.folder, self.folder)
        self._daemons: dict[str, Process] = {}

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The cluster that lives in `folder`, whoever started it; also what a crashed `up` left of one.

        Raises:
            NotRunning: nothing of a cluster lives there.
        """
        cluster = cls(folder, ())
        try:
            state = json.loads((cluster.folder / STATE_FILE).read_text())
            cluster.nodes = tuple(NodeSpec(**node) for node in state["nodes"])
            cluster.accounting = state["accounting"]
            cluster.agents = state.get("agents", False)
            cluster._layout = config.Layout(cluster.folder, Path(state["short"]))
            cluster._daemons = {name: Process(*process) for name, process in state["daemons"].items()}
        except FileNotFoundError:
            pass  # never there, or deleted under running daemons: those are still to be found
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LoopbackError(f"{cluster.folder / STATE_FILE} cannot be read: {error!r}") from error
        if not cluster.processes():
            raise NotRunning(f"no loopback cluster runs in {cluster.folder}; start one with `up`")
        return cluster

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Use it

    @property
    def slurm_conf(self) -> Path:
        """The cluster's slurm.conf."""
        return self._layout.slurm_conf

    @property
    def log_folder(self) -> Path:
        """Where the daemons' logs and Slurm's record of ended jobs, jobcomp.txt, lie; they stay after `down`."""
        return self._layout.log

    @property
    def spool(self) -> Path:
        """The folder through which jobs, agents and a penstockd talk on this cluster: its `[slurm] spool_dir`."""
        return self.folder / "penstock-spool"

    def environment(self) -> dict[str, str]:
        """The variables that make Slurm's commands and libraries speak to this cluster, and jobs to its agents."""
        found = {"SLURM_CONF": str(self.slurm_conf)}
        if self.agents:
            found |= {SPOOL_VARIABLE: str(self.spool), RUN_DIR_VARIABLE: self._run_dir}
        return found

    @property
    def _run_dir(self) -> str:
        return f"{self.folder}/run/agent.%n"

    def command(
        self, *argv: str, timeout_s: float = 60, check: bool = True, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on this cluster, such as `command("sbatch", "--wrap=hostname")`.

        It runs in the cluster's folder, so that what jobs write beside them by default is swept away with it.

        Raises:
            CommandFailed: it ended with another exit status than 0, and `check` is true.
            LoopbackError: it is not installed, or gave no answer within `timeout_s` seconds.
        """
        path = machine.program(argv[0])
        if path is None:
            raise LoopbackError(f"{argv[0]} is not found on PATH nor in /usr/sbin; is slurm-client installed?")
        try:
            done = subprocess.run(
                [path, *argv[1:]],
                env=_outer_environment() | self.environment(),
                cwd=self.folder,
                input="" if input is None else input,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LoopbackError(f"`{' '.join(argv)}` gave no answer within {timeout_s:g} s") from None
        if check and done.returncode != 0:
            raise CommandFailed(argv, done.returncode, done.stdout, done.stderr)
        return done

    def status(self) -> ClusterStatus:
        """Nodes and daemons as they are now."""
        dead = self._dead()
        seen: dict[str, tuple[str, int]] = {}
        if "slurmctld" not in dead and "munged" not in dead:
            listing = self.command("sinfo", "-hN", "-p", "all", "-O", "NodeList:100,StateLong:60,GresUsed:200")
            for line in listing.stdout.splitlines():
                name, state, used = line.split()
                seen[name] = (state, sum(map(int, re.findall(r"gpu:\w+:(\d+)", used))))
        return ClusterStatus(
            self.folder,
            tuple(
                NodeStatus(node.name, node.gpu_type, node.gpus, used, state)
                for node in self.nodes
                for state, used in [seen.get(node.name, ("unknown", 0))]
            ),
            tuple(dead),
        )

    def processes(self) -> set[Process]:
        """Every live process of the cluster: daemons, slurmstepds, the jobs' own."""
        recorded = {process for process in self._daemons.values() if processes.alive(process)}
        return recorded | processes.find(self.folder, self.slurm_conf)

    # Start it

    def up(self, *, timeout_s: float = 120, progress: Callable[[str], None] = lambda line: None) -> None:
        """Start the cluster and wait until every node is idle; a start that fails leaves nothing behind.

        Args:
            timeout_s: for each of: the controller answers; every node is idle.
            progress: told what is being waited for, again and again.

        Raises:
            ProgramsMissing: Slurm is not installed.
            PortInUse: the port asked for is taken, or no free ones are found.
            LoopbackError: no memory, a folder in use, a daemon that dies (with the end of its log).
        """
        machine.check_programs(accounting=self.accounting)
        machine.check_memory(len(self.nodes), accounting=self.accounting)
        self._claim_folder()
        with self._lock():
            if self.processes() or self._left_by_another():
                raise LoopbackError(f"a loopback cluster already runs in {self.folder}; stop it with `down`")
            for attempts_left in reversed(range(5)):
                try:
                    self._start_all(timeout_s, progress)
                    return
                except PortInUse:
                    self._stop_all()
                    if self._port is not None or attempts_left == 0:
                        raise
                except BaseException:
                    self._stop_all()
                    raise

    def _start_all(self, timeout_s: float, progress: Callable[[str], None]) -> None:
        count = len(self.nodes) + 2
        if self._port is None:
            ports = config.Ports(machine.free_ports(count))
        elif 1 <= self._port <= 65_536 - count:
            ports = config.Ports(self._port)
            machine.check_ports(range(self._port, self._port + count))
        else:
            raise LoopbackError(f"--port {self._port}: {count} ports from there on must lie between 1 and 65535")
        self._write_files(ports)
        self.start_munged()
        if self.accounting:
            self._start_accounting(ports, timeout_s, progress)
        progress("starting slurmctld")
        self.start_slurmctld(timeout_s=timeout_s)
        for node in self.nodes:
            self.start_slurmd(node.name)
            if self.agents:
                self.start_agent(node.name)

        def all_idle() -> bool:
            self._refuse_death()
            idle = self._states().count("idle")
            progress(f"{idle} of {len(self.nodes)} nodes are idle")
            return idle == len(self.nodes)

        self._wait(all_idle, timeout_s + len(self.nodes) / 4, f"{len(self.nodes)} nodes are idle")

    def _write_files(self, ports: config.Ports) -> None:
        for name in _SUBFOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        room = _SOCKET_ROOM + 2 * max((len(node.name) for node in self.nodes), default=0)
        short = self.folder
        if len(os.fsencode(self.folder)) + room > _SOCKET_PATH_MAX:
            # Not tempfile.gettempdir(): TMPDIR may be the long path itself.
            short = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
            short.chmod(0o755)
        self._layout = layout = config.Layout(self.folder, short)
        self._save()
        for name in ("etc", "log", "dev"):
            (self.folder / name).mkdir()
        for folder in (self.folder / "state", self.folder / "data", layout.mariadb_socket.parent):
            folder.mkdir(mode=0o700)
        layout.munge_socket.parent.mkdir()
        for node in self.nodes:
            (short / "spool" / node.name).mkdir(parents=True)
        for index in range(max((node.gpus for node in self.nodes), default=0)):
            layout.gpu(index).symlink_to("/dev/null")
        etc = layout.slurm_conf.parent
        layout.slurm_conf.write_text(
            config.slurm_conf(
                layout,
                self.nodes,
                ports,
                accounting=self.accounting,
                cpus_per_node=self._cpus_per_node,
                slurmd_timeout_s=self._slurmd_timeout_s,
                settings=self._settings,
                stand_in=self._stand_in or self.agents,
            )
        )
        (etc / "gres.conf").write_text(config.gres_conf(layout, self.nodes))
        (etc / "cgroup.conf").write_text(config.CGROUP_CONF)
        _write_secret(etc / "munge.key", secrets.token_hex(512), 0o400)
        if self.accounting:
            _write_secret(etc / "slurmdbd.conf", config.slurmdbd_conf(layout, ports), 0o600)
        if self.agents:
            self.spool.mkdir(exist_ok=True)
            (etc / AGENT_SETTINGS).write_text(
                f"[slurm]\npartitions = ['all']\nconf = '{layout.slurm_conf}'\nspool_dir = '{self.spool}'\n\n"
                f"[agent]\nrun_dir = '{self._run_dir}'\nstate_dir = '{self._run_dir}-state'\n"
            )
            self._write_plugin(etc)
        for name, text in self._files.items():
            (etc / name).write_text(text)

    def _write_plugin(self, etc: Path) -> None:
        """The SPANK plugin, which binds tasks to GPUs as an agent says. Raises LoopbackError if it cannot be built."""
        try:
            (etc / "penstock.so").write_bytes(build_plugin())
        except PenstockError as error:
            raise LoopbackError(f"agents need the SPANK plugin: {error}; or start without agents") from None
        (etc / "plugstack.conf").write_text(f"optional {etc}/penstock.so run_dir={self._run_dir}\n")

    def _start_accounting(self, ports: config.Ports, timeout_s: float, progress: Callable[[str], None]) -> None:
        progress("setting up MariaDB")
        data, sock = f"--datadir={self.folder / 'data'}", self._layout.mariadb_socket
        user = f"--user={config.user_name()}"
        self.command(
            *("mariadb-install-db", "--no-defaults", user, data, "--skip-test-db"),
            "--auth-root-authentication-method=normal",
            timeout_s=timeout_s,
        )
        self._start(
            *("mariadbd", "mariadbd", "--no-defaults", user, data, f"--socket={sock}", "--skip-networking"),
            *(f"--pid-file={self._layout.short}/db/pid", "--innodb-buffer-pool-size=64M"),
            *("--innodb-log-file-size=64M", "--innodb-lock-wait-timeout=900"),
        )
        self._wait(lambda: _listens(sock), timeout_s, "MariaDB listens", "mariadbd")
        progress("starting slurmdbd")
        self._start("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(sock))
        self._wait(lambda: _listens(ports.slurmdbd), timeout_s, "slurmdbd listens", "slurmdbd")
        self.command("sacctmgr", "-i", "add", "cluster", "loop")

    # Break it and fix it

    def start_slurmctld(self, *, timeout_s: float = 120) -> None:
        """Start the controller, unless it runs, and wait until it answers."""
        self._start("slurmctld", "slurmctld", "-D")
        self._wait(
            lambda: self.command("scontrol", "ping", check=False, timeout_s=timeout_s).returncode == 0,
            timeout_s,
            "slurmctld answers",
            "slurmctld",
        )

    def kill_slurmctld(self) -> None:
        """End the controller by SIGKILL, as a crash would."""
        self._end("slurmctld", signal.SIGKILL)

    def stop_slurmctld(self) -> None:
        """End the controller as an admin would: it saves its state first. Start it again with `start_slurmctld`."""
        self._end("slurmctld", signal.SIGTERM, timeout_s=60)  # it finishes what it was asked; on a busy machine, 15 s

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd, unless it runs; it is some time later that Slurm takes the node for idle."""
        self._start(f"slurmd.{self._known(node)}", "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """End a node's slurmd by SIGKILL; its slurmstepds and their jobs run on, as on a node cut off."""
        self._end(f"slurmd.{self._known(node)}", signal.SIGKILL)

    def start_agent(self, node: str) -> None:
        """Start a node's agent, unless it runs; it tells some time later that it is there."""
        name = f"agent.{self._known(node)}"
        settings = self.slurm_conf.parent / AGENT_SETTINGS
        self._launch(name, sys.executable, "-m", "penstock_slurm.agent.main", f"--config={settings}", f"--node={node}")

    def kill_agent(self, node: str) -> None:
        """End a node's agent by SIGKILL; jobs stay as they are."""
        self._end(f"agent.{self._known(node)}", signal.SIGKILL)

    def start_munged(self) -> None:
        """Start munged, unless it runs, and wait until it listens."""
        etc, run, sock = self.slurm_conf.parent, self._layout.short / "run", self._layout.munge_socket
        self._start(
            *("munged", "munged", "--foreground", "--force", f"--key-file={etc / 'munge.key'}", f"--socket={sock}"),
            *(f"--pid-file={run}/munged.pid", f"--log-file={self.log_folder}/munged.log"),
            *(f"--seed-file={run}/munged.seed", "--num-threads=10"),
        )
        self._wait(lambda: _listens(sock), 60, "munged listens", "munged")

    def stop_munged(self) -> None:
        """Stop munged: every client and daemon fails to prove who it is until `start_munged`."""
        self._end("munged", signal.SIGTERM)

    def reset(self, *, timeout_s: float = 120) -> None:
        """Make the cluster as new: start what has died, cancel every job, resume every node, wait until all are idle."""
        self.start_munged()
        self.start_slurmctld()
        for node in self.nodes:
            self.start_slurmd(node.name)
            if self.agents:
                self.start_agent(node.name)

        def clean() -> bool:
            # Asked anew each time: a job of an array, or one being requeued, may appear meanwhile.
            if jobs := self.command("squeue", "-ha", "-o", "%A").stdout.split():
                self.command("scancel", *jobs, check=False)
            nodes = self.status().nodes
            for node in nodes:
                if node.state.startswith(("drain", "down")):
                    self.command("scontrol", "update", f"NodeName={node.name}", "State=RESUME", check=False)
            # Slurm calls a node idle a moment before it has taken the GPUs of its last job off its books.
            return not jobs and all(node.state == "idle" and node.gpus_used == 0 for node in nodes)

        self._wait(clean, timeout_s, "no job is left and every node is idle")

    # Stop it

    def down(self) -> None:
        """End every process of the cluster: daemons, slurmstepds, jobs. Logs stay; nothing to end is no error.

        Raises:
            LoopbackError: a process survives SIGKILL.
        """
        with self._lock() if self.folder.is_dir() else contextlib.nullcontext():
            self._stop_all()

    def _stop_all(self) -> None:
        # slurmctld still tells slurmdbd, and slurmdbd MariaDB, what happened: so in this order.
        for last in (("slurmdbd", "mariadbd", "munged"), ("mariadbd", "munged"), ()):
            spared = {self._daemons[name] for name in last if name in self._daemons}
            for _ in range(3):  # a job may have started another process meanwhile
                if not (left := self.processes() - spared):
                    break
                # Those below them are in `left` already, and would not be found any more without them.
                processes.end(processes.find_steps(self.folder), grace_s=0)
                processes.end(left, _GRACE_S)
        _reap()
        if left := self.processes():
            pids = ", ".join(str(process.pid) for process in sorted(left))
            raise LoopbackError(f"processes {pids} of {self.folder} survive SIGKILL; look at /proc/PID/stack")
        self._daemons.clear()
        if self._layout.short != self.folder:
            shutil.rmtree(self._layout.short, ignore_errors=True)
            self._layout = config.Layout(self.folder, self.folder)
        if (self.folder / STATE_FILE).exists():
            self._save()

    # Daemons

    def _start(self, name: str, program: str, *argv: str, **environment: str) -> None:
        path = machine.program(program)
        assert path is not None, f"{program} was there when the cluster came up"
        self._launch(name, path, *argv, **environment)

    def _launch(self, name: str, path: str, *argv: str, **environment: str) -> None:
        if name in self._daemons and processes.alive(self._daemons[name]):
            return
        environment |= self.environment() | {processes.MARK: str(self.folder)}
        with (self.log_folder / f"{name}.err").open("ab") as log:
            child = subprocess.Popen(
                [path, *argv],
                env=_outer_environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C in the terminal is not for the daemons
            )
        _children.append(child)
        self._daemons[name] = processes.identify(child.pid)
        self._save()

    def _end(self, name: str, number: signal.Signals, timeout_s: float = 60) -> None:
        process = self._daemons[name]
        processes.send(process, number)
        self._wait(lambda: not processes.alive(process), timeout_s, f"{name} has ended")
        _reap()

    def _dead(self) -> list[str]:
        return [name for name, process in self._daemons.items() if not processes.alive(process)]

    def _refuse_death(self, *only: str) -> None:
        for name in self._dead():
            if not only or name in only:
                lines = self._last_lines(name)
                if "Address already in use" in lines:
                    raise PortInUse(f"{name} found its port in use; the end of its log:\n{lines}")
                raise LoopbackError(f"{name} died; the end of its log, in {self.log_folder}:\n{lines}")

    def _last_lines(self, name: str, count: int = 15) -> str:
        for ending in (".err", ".log"):
            path = self.log_folder / f"{name}{ending}"
            if path.exists() and (lines := path.read_text(errors="replace").splitlines()):
                return "\n".join(f"  {line}" for line in lines[-count:])
        return "  (empty)"

    def _wait(self, predicate: Callable[[], bool], timeout_s: float, what: str, daemon: str | None = None) -> None:
        def check() -> bool:
            if daemon is not None:
                self._refuse_death(daemon)
            return predicate()

        try:
            wait_for(check, timeout_s, what, poll_s=0.03, details=lambda: self._last_lines(daemon or "slurmctld"))
        except TimeoutError as error:
            raise LoopbackError(f"{error}\nthe logs are in {self.log_folder}") from None

    def _states(self) -> list[str]:
        listing = self.command("sinfo", "-hN", "-p", "all", "-o", "%N %T", check=False).stdout
        state_of = dict(line.split() for line in listing.splitlines())
        return [state_of.get(node.name, "unknown") for node in self.nodes]

    def _known(self, node: str) -> str:
        if all(node != known.name for known in self.nodes):
            raise LoopbackError(f"no node {node!r}; there are {', '.join(known.name for known in self.nodes)}")
        return node

    # The folder

    def _claim_folder(self) -> None:
        # Slurm's files know no quotes: a blank, comma, # or % in a path would be read as something else.
        if not re.fullmatch(r"[A-Za-z0-9_./+@-]+", str(self.folder)):
            raise LoopbackError(f"the folder {str(self.folder)!r} has signs that slurm.conf cannot hold; choose --dir")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            foreign = not (self.folder / STATE_FILE).exists() and any(self.folder.iterdir())
            owner = self.folder.stat().st_uid
        except OSError as error:
            raise LoopbackError(f"the folder {self.folder} cannot be used: {error.strerror}; choose --dir") from error
        if owner != os.getuid():
            raise LoopbackError(f"the folder {self.folder} belongs to user {owner}, not to you; choose --dir")
        if foreign:
            raise LoopbackError(f"the folder {self.folder} holds other files; give --dir an empty or a new folder")

    def _left_by_another(self) -> bool:
        with contextlib.suppress(NotRunning):
            LoopbackCluster.open(self.folder)
            return True
        return False

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise LoopbackError(f"another `up` or `down` works on {self.folder}; wait until it has ended") from None
        finally:
            os.close(descriptor)

    def _save(self) -> None:
        state = {
            "short": str(self._layout.short),
            "accounting": self.accounting,
            "agents": self.agents,
            "nodes": [asdict(node) for node in self.nodes],
            "daemons": self._daemons,
        }
        new = self.folder / f"{STATE_FILE}.new"
        new.write_text(json.dumps(state))
        new.replace(self.folder / STATE_FILE)


def _outer_environment() -> dict[str, str]:
    """Ours without Slurm's variables: inside a job, or with options in SBATCH_*, they would mislead the cluster."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "SCONTROL_", processes.MARK))
    }


def _reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def _listens(where: Path | int) -> bool:
    """Whether somebody listens on the Unix socket or the local TCP port."""
    family, address = (socket.AF_INET, ("127.0.0.1", where)) if isinstance(where, int) else (socket.AF_UNIX, str(where))
    with socket.socket(family) as probe:
        probe.settimeout(1)
        return probe.connect_ex(address) == 0


def _write_secret(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
