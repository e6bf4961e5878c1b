"""Start, use, break and stop a Slurm cluster that runs in one folder on this machine."""

import contextlib
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock_loopback import config, machine, processes
from penstock_loopback.daemons import Daemons, listens, outer_environment, reap
from penstock_loopback.errors import CommandFailed, LoopbackError, NotRunning, PortInUse
from penstock_loopback.folder import STATE_FILE, choose_layout, claim, locked, make_folders, write_secret
from penstock_loopback.processes import Process
from penstock_profiles.node_channel import RUN_DIR_VARIABLE
from penstock_profiles.wire import SPOOL_VARIABLE, URL_VARIABLE
from penstock_scheduler.model.nodespec import DEFAULT_SPEC, NodeSpec, parse_nodes
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.settings import load_settings
from penstock_slurm.install import plan
from penstock_slurm.install.units import build_plugin, source

SETTINGS = "penstock.toml"
"""The settings file of penstockd and of the agents on this cluster, beside slurm.conf."""

_GRACE_S = 3.0
"""How long a daemon may take to end by itself. A slurmd that never registered ignores SIGTERM."""

MAX_NODES = 1000
"""Each node is a real slurmd. Up to 256 were tried on one machine (17 s, 0.5 GB)."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as Slurm sees it now. The state is `unknown` while the controller is down."""

    name: str
    gpu_type: str
    gpus: int
    gpus_used: int
    state: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The whole cluster: its folder, its nodes, and the daemons that should run but do not."""

    folder: Path
    nodes: tuple[NodeStatus, ...]
    dead_daemons: tuple[str, ...]


class LoopbackCluster:
    """A real Slurm in a folder: munged, slurmctld, one slurmd for each node, and accounting on request.

    Use it as a context manager, or call `up` and `down`. The daemons outlive this object and this process, and `open`
    finds them again: every process is recorded in a state file as it starts.

    Args:
        folder: holds everything. It is made if missing, and must be empty or an earlier cluster's.
        nodes: specs, or their text such as `t4:6x4,rtx:3x8`.
        accounting: also run slurmdbd with a MariaDB of its own (200 MB more, 5 s more to start).
        cpus_per_node: CPUs that Slurm takes each node to have.
        slurmd_timeout_s: silence after which Slurm takes a node for down.
        settings: lines of slurm.conf to add or replace, by key.
        files: further files beside slurm.conf (plugstack.conf, job_submit.lua), name -> text.
        port: the first of the TCP ports, one for each node and two more. By default free ones are found.
        flags: give sbatch the adaptive flags: the SPANK plugin, which is built for that, and job_submit.lua.
        agents: also run a penstock-agent for each node, so that jobs can share GPUs. It implies `flags`, because the agents
            need the same plugin. The agents' spool is `spool`.
        stand_in: give the nodes the GRES that jobs which share GPUs ask for in their place. `agents` implies it.
        shards: number of parts of each GPU that jobs can ask for with `--gres=shard:N`; 0: none.
        backup: also run a backup controller, which takes over 5 s after the first one is gone. Needs root, because each
            controller gets a host name of its own.
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
        flags: bool = False,
        agents: bool = False,
        stand_in: bool = False,
        shards: int = 0,
        backup: bool = False,
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
        self._flags = flags or agents
        self._stand_in, self._shards = stand_in, shards
        self._backup = backup
        self._layout = config.Layout(self.folder, self.folder)
        self._daemons = Daemons(self.folder, self._save)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The cluster that runs in `folder`, even if another process started it or its `up` crashed.

        Raises:
            NotRunning: no process of a cluster runs there.
        """
        cluster = cls(folder, ())
        try:
            state = json.loads((cluster.folder / STATE_FILE).read_text())
            cluster.nodes = tuple(NodeSpec(**node) for node in state["nodes"])
            cluster.accounting = state["accounting"]
            cluster.agents = state.get("agents", False)
            cluster._layout = config.Layout(cluster.folder, Path(state["short"]))
            cluster._daemons.processes = {name: Process(*process) for name, process in state["daemons"].items()}
        except FileNotFoundError:
            pass  # never there, or deleted while daemons run, which can still be found
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
        """The folder of the daemons' logs and of Slurm's record of ended jobs, jobcomp.txt. It stays after `down`."""
        return self._layout.log

    @property
    def munge_socket(self) -> Path:
        """The socket of the cluster's munged."""
        return self._layout.munge_socket

    @property
    def spool(self) -> Path:
        """The spool of jobs, agents and penstockd on this cluster: its `[slurm] spool_dir`."""
        return self.folder / "penstock-spool"

    def environment(self) -> dict[str, str]:
        """The variables that make Slurm's commands and libraries use this cluster, and jobs its agents."""
        found = {"SLURM_CONF": str(self.slurm_conf)}
        if self.agents:
            found |= {SPOOL_VARIABLE: str(self.spool), RUN_DIR_VARIABLE: self._run_dir}
        return found

    def user_environment(self) -> dict[str, str]:
        """The variables of a user's shell: also Penstock's commands and jobs use the penstockd of `settings_file`."""
        return self.environment() | {
            SPOOL_VARIABLE: str(self.spool),
            URL_VARIABLE: f"unix:{self._api_socket}",
        }

    @property
    def settings_file(self) -> Path:
        """Settings for a penstockd that manages this cluster, and for the agents."""
        return self.slurm_conf.parent / SETTINGS

    @property
    def _api_socket(self) -> Path:
        return self._layout.short / "run" / "api.sock"

    @property
    def _run_dir(self) -> str:
        return f"{self.folder}/run/agent.%n"

    def command(
        self, *argv: str, timeout_s: float = 60, check: bool = True, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on this cluster, such as `command("sbatch", "--wrap=hostname")`.

        It runs in the cluster's folder, so that jobs' output is deleted together with the folder.

        Raises:
            CommandFailed: its exit status is not 0, and `check` is true.
            LoopbackError: it is not installed, or took longer than `timeout_s` seconds.
        """
        path = machine.program(argv[0])
        if path is None:
            raise LoopbackError(f"{argv[0]} is not found on PATH nor in /usr/sbin; is slurm-client installed?")
        try:
            done = subprocess.run(
                [path, *argv[1:]],
                env=outer_environment() | self.environment(),
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
        dead = self._daemons.dead()
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
        """Every live process of the cluster: daemons, slurmstepds and jobs' processes."""
        return self._daemons.alive() | processes.find(self.folder, self.slurm_conf)

    def pid(self, daemon: str) -> int:
        """The process id of a daemon, such as `slurmdbd` or `slurmd.t4-00`."""
        return self._daemons.processes[daemon].pid

    # Start it

    def up(self, *, timeout_s: float = 120, progress: Callable[[str], None] = lambda line: None) -> None:
        """Start the cluster and wait until every node is idle. A start that fails leaves no process behind.

        Args:
            timeout_s: time until the controller answers, and again until every node is idle.
            progress: is called repeatedly with what the start waits for.

        Raises:
            ProgramsMissing: Slurm is not installed.
            PortInUse: `port` is taken, or no free ports are found.
            LoopbackError: too little memory, a folder in use, or a daemon that dies (with the end of its log).
        """
        machine.check_programs(accounting=self.accounting)
        machine.check_memory(len(self.nodes), accounting=self.accounting)
        claim(self.folder)
        with locked(self.folder):
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
            raise LoopbackError(f"--port {self._port}: the {count} ports from there on must lie between 1 and 65535")
        self._write_files(ports)
        self.start_munged()
        if self.accounting:
            self._start_accounting(ports, timeout_s, progress)
        progress("starting slurmctld")
        self.start_slurmctld(timeout_s=timeout_s)
        if self._backup:
            self.start_backup_slurmctld()
        for node in self.nodes:
            self.start_slurmd(node.name)
            if self.agents:
                self.start_agent(node.name)

        def all_idle() -> bool:
            self._daemons.check()
            idle = self._states().count("idle")
            progress(f"{idle} of {len(self.nodes)} nodes are idle")
            return idle == len(self.nodes)

        self._daemons.wait(all_idle, timeout_s + len(self.nodes) / 4, f"{len(self.nodes)} nodes are idle")
        if self._flags:
            site = plan.open_site(load_settings(self.settings_file))
            site.site_file.write_text(plan.site_text(site))

    def _write_files(self, ports: config.Ports) -> None:
        self._layout = layout = choose_layout(self.folder, self.nodes)
        self._save()
        make_folders(layout, self.nodes)
        etc = layout.slurm_conf.parent
        layout.slurm_conf.write_text(
            config.slurm_conf(
                layout,
                self.nodes,
                ports,
                accounting=self.accounting,
                cpus_per_node=self._cpus_per_node,
                slurmd_timeout_s=self._slurmd_timeout_s,
                settings=({"JobSubmitPlugins": "lua"} if self._flags else {}) | self._settings,
                stand_in=self._stand_in or self.agents,
                shards=self._shards,
                backup=self._backup,
            )
        )
        if self._backup:
            lines = (f"{address} {name}\n" for name, address in config.CONTROLLERS.items())
            layout.hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
            # A slurmctld ends the process that the file of its pid names.
            own_pid = layout.slurm_conf.read_text().replace("slurmctld.pid", "slurmctld-backup.pid")
            (etc / "backup.conf").write_text(own_pid)
        (etc / "gres.conf").write_text(config.gres_conf(layout, self.nodes, self._shards))
        (etc / "cgroup.conf").write_text(config.CGROUP_CONF)
        write_secret(etc / "munge.key", secrets.token_hex(512), 0o400)
        if self.accounting:
            write_secret(etc / "slurmdbd.conf", config.slurmdbd_conf(layout, ports), 0o600)
        self.spool.mkdir(exist_ok=True)
        self.settings_file.write_text(
            config.penstock_toml(layout, self.spool, self._api_socket, self._run_dir if self.agents else None)
        )
        if self._flags:
            self._write_flags(etc)
        for name, text in self._files.items():
            (etc / name).write_text(text)

    def _write_flags(self, etc: Path) -> None:
        """Both halves of sbatch's flags: the SPANK plugin, which also binds tasks to the agents' GPUs, and job_submit.lua.

        Raises:
            LoopbackError: the plugin cannot be built.
        """
        try:
            (etc / "penstock.so").write_bytes(build_plugin())
        except PenstockError as error:
            needs = "agents need" if self.agents else "sbatch's flags need"
            raise LoopbackError(f"{needs} the SPANK plugin: {error}; or start without") from None
        argument = f" run_dir={self._run_dir}" if self.agents else ""
        (etc / "plugstack.conf").write_text(f"optional {etc}/penstock.so{argument}\n")
        for name in ("penstock.lua", "job_submit.lua"):
            shutil.copyfile(source("lua") / name, etc / name)

    def _start_accounting(self, ports: config.Ports, timeout_s: float, progress: Callable[[str], None]) -> None:
        progress("setting up MariaDB")
        data, sock = f"--datadir={self.folder / 'data'}", self._layout.mariadb_socket
        # A folder of its own: MariaDB removes #sql files from it when it starts, another server's as well.
        user, temporary = f"--user={config.user_name()}", f"--tmpdir={self.folder / 'db-tmp'}"
        self.command(
            *("mariadb-install-db", "--no-defaults", user, data, temporary, "--skip-test-db"),
            "--auth-root-authentication-method=normal",
            timeout_s=timeout_s,
        )
        self._start(
            *("mariadbd", "mariadbd", "--no-defaults", user, data, temporary, f"--socket={sock}", "--skip-networking"),
            *(f"--pid-file={self._layout.short}/db/pid", "--innodb-buffer-pool-size=64M"),
            *("--innodb-log-file-size=64M", "--innodb-lock-wait-timeout=900"),
        )
        self._daemons.wait(lambda: listens(sock), timeout_s, "MariaDB listens", "mariadbd")
        progress("starting slurmdbd")
        self._start("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(sock))
        self._daemons.wait(lambda: listens(ports.slurmdbd), timeout_s, "slurmdbd listens", "slurmdbd")
        self.command("sacctmgr", "-i", "add", "cluster", "loop")

    # Cause and repair faults

    def start_slurmctld(self, *, timeout_s: float = 120) -> None:
        """Start the controller unless it runs, and wait until it answers."""
        if self._backup:
            self._start_on_host("slurmctld", 0, self.slurm_conf)
        else:
            self._start("slurmctld", "slurmctld", "-D")
        self._daemons.wait(
            lambda: self.command("scontrol", "ping", check=False, timeout_s=timeout_s).returncode == 0,
            timeout_s,
            "slurmctld answers",
            "slurmctld",
        )

    def start_backup_slurmctld(self) -> None:
        """Start the backup controller unless it runs. It takes over when the first one is gone."""
        self._start_on_host("slurmctld-backup", 1, self.slurm_conf.with_name("backup.conf"))

    def _start_on_host(self, name: str, index: int, conf: Path) -> None:
        """Start a controller on a host of its own name."""
        program = machine.program("slurmctld")
        assert program is not None, "slurmctld was there when the cluster started"
        inside = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        host = list(config.CONTROLLERS)[index]
        as_host = ("--uts", "--mount", "sh", "-c", inside, "sh", str(self._layout.hosts), host)
        self._start(name, "unshare", *as_host, program, "-D", "-f", str(conf), "-L", f"{self.log_folder}/{name}.log")

    def kill_slurmctld(self) -> None:
        """End the controller by SIGKILL, as a crash would."""
        self._daemons.end("slurmctld", signal.SIGKILL)

    def kill_slurmdbd(self) -> None:
        """End the accounting daemon by SIGKILL."""
        self._daemons.end("slurmdbd", signal.SIGKILL)

    def stop_slurmctld(self) -> None:
        """End the controller as an admin would. It saves its state first."""
        self._daemons.end(
            "slurmctld", signal.SIGTERM, timeout_s=60
        )  # it finishes its requests first, 15 s on a busy machine

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd unless it runs. Slurm takes the node for idle some time later."""
        self._start(f"slurmd.{self._known(node)}", "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """End a node's slurmd by SIGKILL. Its slurmstepds and jobs run on, as on a node without network."""
        self._daemons.end(f"slurmd.{self._known(node)}", signal.SIGKILL)

    def start_agent(self, node: str) -> None:
        """Start a node's agent unless it runs. The agent reports some time later."""
        name = f"agent.{self._known(node)}"
        self._start(
            name, sys.executable, "-m", "penstock_slurm.agent.main", f"--config={self.settings_file}", f"--node={node}"
        )

    def kill_agent(self, node: str) -> None:
        """End a node's agent by SIGKILL. Jobs stay as they are."""
        self._daemons.end(f"agent.{self._known(node)}", signal.SIGKILL)

    def start_program(self, name: str, *argv: str, ready: Callable[[], bool], timeout_s: float = 120) -> None:
        """Start another program that ends with the cluster, and wait until it is ready. Its output is in the log folder.

        Raises:
            LoopbackError: it has ended, or is not ready in time.
        """
        self._start(name, *argv)
        self._daemons.wait(ready, timeout_s, f"{name} is ready", name)

    def start_munged(self) -> None:
        """Start munged unless it runs, and wait until it listens."""
        etc, run, sock = self.slurm_conf.parent, self._layout.short / "run", self._layout.munge_socket
        self._start(
            *("munged", "munged", "--foreground", "--force", f"--key-file={etc / 'munge.key'}", f"--socket={sock}"),
            *(f"--pid-file={run}/munged.pid", f"--log-file={self.log_folder}/munged.log"),
            *(f"--seed-file={run}/munged.seed", "--num-threads=10"),
        )
        self._daemons.wait(lambda: listens(sock), 60, "munged listens", "munged")

    def stop_munged(self) -> None:
        """Stop munged. Until `start_munged` no client or daemon can authenticate."""
        self._daemons.end("munged", signal.SIGTERM)

    def reset(self, *, timeout_s: float = 120) -> None:
        """Start what has died, cancel every job, resume every node, and wait until all nodes are idle."""
        self.start_munged()
        self.start_slurmctld()
        for node in self.nodes:
            self.start_slurmd(node.name)
            if self.agents:
                self.start_agent(node.name)

        def clean() -> bool:
            # Each time, because a job of an array, or one being requeued, may appear meanwhile.
            if jobs := self.command("squeue", "-ha", "-o", "%A").stdout.split():
                self.command("scancel", *jobs, check=False)
            nodes = self.status().nodes
            for node in nodes:
                if node.state.startswith(("drain", "down")):
                    self.command("scontrol", "update", f"NodeName={node.name}", "State=RESUME", check=False)
            # Slurm calls a node idle a moment before it frees the GPUs of the last job.
            return not jobs and all(node.state == "idle" and node.gpus_used == 0 for node in nodes)

        self._daemons.wait(clean, timeout_s, "no job is left and every node is idle")

    # Stop it

    def down(self) -> None:
        """End every process of the cluster: daemons, slurmstepds and jobs. The logs stay. It may be called again.

        Raises:
            LoopbackError: a process survives SIGKILL.
        """
        with locked(self.folder) if self.folder.is_dir() else contextlib.nullcontext():
            self._stop_all()

    def _stop_all(self) -> None:
        known = self._daemons.processes
        # In this order, because slurmctld writes to slurmdbd until it ends, and slurmdbd to MariaDB.
        for last in (("slurmdbd", "mariadbd", "munged"), ("mariadbd", "munged"), ()):
            spared = {known[name] for name in last if name in known}
            for _ in range(3):  # a job may have started another process meanwhile
                if not (left := self.processes() - spared):
                    break
                # First, because without them their children could not be found. The children are in `left`.
                processes.end(processes.find_steps(self.folder), grace_s=0)
                processes.end(left, _GRACE_S)
        reap()
        if left := self.processes():
            pids = ", ".join(str(process.pid) for process in sorted(left))
            raise LoopbackError(f"processes {pids} of {self.folder} survive SIGKILL; see /proc/PID/stack")
        known.clear()
        if self._layout.short != self.folder:
            shutil.rmtree(self._layout.short, ignore_errors=True)
            self._layout = config.Layout(self.folder, self.folder)
        if (self.folder / STATE_FILE).exists():
            self._save()

    def _start(self, name: str, program: str, *argv: str, **environment: str) -> None:
        self._daemons.start(name, program, *argv, environment=environment | self.environment())

    def _states(self) -> list[str]:
        listing = self.command("sinfo", "-hN", "-p", "all", "-o", "%N %T", check=False).stdout
        state_of = dict(line.split() for line in listing.splitlines())
        return [state_of.get(node.name, "unknown") for node in self.nodes]

    def _known(self, node: str) -> str:
        if all(node != known.name for known in self.nodes):
            raise LoopbackError(f"no node {node!r}; the nodes are {', '.join(known.name for known in self.nodes)}")
        return node

    def _left_by_another(self) -> bool:
        with contextlib.suppress(NotRunning):
            LoopbackCluster.open(self.folder)
            return True
        return False

    def _save(self) -> None:
        state = {
            "short": str(self._layout.short),
            "accounting": self.accounting,
            "agents": self.agents,
            "nodes": [asdict(node) for node in self.nodes],
            "daemons": self._daemons.processes,
        }
        new = self.folder / f"{STATE_FILE}.new"
        new.write_text(json.dumps(state))
        new.replace(self.folder / STATE_FILE)
