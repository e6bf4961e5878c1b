"""What the machine offers a loopback cluster: programs, memory, ports."""

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from penstock_slurm.loopback.errors import LoopbackError, PortInUse, ProgramsMissing

# Each program of ours and its package in Debian 12 and 13.
PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "sinfo": "slurm-client",
}
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}

# Measured on Debian 12, Slurm 22.05: 1.3 MB of proportional memory for each of 64 slurmds, 7.7 MB for slurmctld,
# 120 MB for MariaDB; rounded up, because jobs need some as well.
_BASE_MB = 50
_NODE_MB = 2
_ACCOUNTING_MB = 200


def program(name: str) -> str | None:
    """Where the program is; daemons lie in folders that an ordinary user's PATH lacks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def check_programs(*, accounting: bool) -> None:
    """Refuse to start without the programs that a cluster runs.

    Raises:
        ProgramsMissing: with the Debian package of each.
    """
    needed = PROGRAMS | ACCOUNTING_PROGRAMS if accounting else PROGRAMS
    if missing := {name: package for name, package in needed.items() if program(name) is None}:
        raise ProgramsMissing(missing)


def check_memory(nodes: int, *, accounting: bool, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Refuse to start what would not fit.

    Raises:
        LoopbackError: less memory is available than the estimate for this many nodes.
    """
    needed_mb = _BASE_MB + _NODE_MB * nodes + _ACCOUNTING_MB * accounting
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available_mb = int(fields["MemAvailable"].split()[0]) // 1024
    if available_mb < needed_mb:
        also = " with accounting" if accounting else ""
        raise LoopbackError(
            f"{nodes} nodes{also} need about {needed_mb} MB of memory and {available_mb} MB are available; "
            "give fewer nodes (--nodes) or free some memory"
        )


def check_ports(ports: Iterable[int]) -> None:
    """Refuse ports on which somebody listens.

    Raises:
        PortInUse: names the port.
    """
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))  # slurmctld and slurmd listen on every address
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise LoopbackError(f"TCP port {port} cannot be used: {error.strerror}; choose another") from error
                raise PortInUse(f"TCP port {port} is in use; choose other ports with --port, or give none") from None


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now, below those that the kernel hands out itself.

    A random place keeps clusters that start at the same time apart, be their processes' generators seeded alike; a daemon
    that loses its port all the same says so, and the caller asks again.

    Raises:
        PortInUse: no such place was found in 50 tries.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = ephemeral if ephemeral > 10_000 + count else 60_000
    for _ in range(50):
        first = 10_000 + secrets.randbelow(end - count - 10_000)
        try:
            check_ports(range(first, first + count))
        except PortInUse:
            continue
        return first
    raise PortInUse(f"found no {count} free TCP ports in a row between 10000 and {end}; give their first with --port")
