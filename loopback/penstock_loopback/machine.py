"""Whether this machine can run a loopback cluster: programs, memory and ports."""

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from penstock_loopback.errors import LoopbackError, PortInUse, ProgramsMissing

# Each program that a cluster needs, and its package in Debian 12 and 13.
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
# 120 MB for MariaDB. Rounded up, because jobs need memory too.
_BASE_MB = 50
_NODE_MB = 2
_ACCOUNTING_MB = 200


def program(name: str) -> str | None:
    """The path of a program, also in the folders of daemons that an ordinary user's PATH lacks; None if it is missing."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def check_programs(*, accounting: bool) -> None:
    """Check that the programs of a cluster are installed.

    Raises:
        ProgramsMissing: some are not; the error has their Debian packages.
    """
    needed = PROGRAMS | ACCOUNTING_PROGRAMS if accounting else PROGRAMS
    if missing := {name: package for name, package in needed.items() if program(name) is None}:
        raise ProgramsMissing(missing)


def check_memory(nodes: int, *, accounting: bool, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Check that the machine has memory for this many nodes.

    Raises:
        LoopbackError: less memory is available than the estimate.
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
    """Check that no process listens on the ports.

    Raises:
        PortInUse: a process does; the message names the port.
    """
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))  # slurmctld and slurmd listen on every address
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise LoopbackError(f"TCP port {port} cannot be used: {error.strerror}; choose another") from error
                raise PortInUse(f"TCP port {port} is in use; choose another --port, or leave it out") from None


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now, below the kernel's ephemeral ports.

    The place is random, and not from a seeded generator, to keep apart clusters that start at the same time. If a daemon still
    finds its port in use, the caller asks again.

    Raises:
        PortInUse: 50 tries found none.
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
    raise PortInUse(f"found no {count} consecutive free TCP ports between 10000 and {end}; name the first with --port")
