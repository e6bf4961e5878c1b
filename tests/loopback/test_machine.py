"""Requirements on the machine, which are checked before anything is started."""

import socket
from pathlib import Path

import pytest

from penstock_loopback import LoopbackError, PortInUse, ProgramsMissing, machine


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "program", lambda name: None if name in ("slurmd", "munged") else f"/bin/{name}")
    with pytest.raises(ProgramsMissing, match=r"munged, slurmd; .*apt-get install munge slurmd") as caught:
        machine.check_programs(accounting=False)
    assert caught.value.packages == {"munged": "munge", "slurmd": "slurmd"}


def test_only_accounting_needs_mariadb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "program", lambda name: None if name == "mariadbd" else f"/bin/{name}")
    machine.check_programs(accounting=False)
    with pytest.raises(ProgramsMissing, match="mariadb-server"):
        machine.check_programs(accounting=True)


def test_daemons_are_found_outside_an_ordinary_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbin is where every Debian keeps its daemons, and some program is there."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.program("ldconfig") is not None


def test_too_little_memory_is_refused_with_the_figures(tmp_path: Path) -> None:
    """64 nodes: 50 + 64 x 2 = 178 MB, with accounting 378 MB."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1024000 kB\nMemAvailable:    204800 kB\n")
    machine.check_memory(64, accounting=False, meminfo=meminfo)
    with pytest.raises(LoopbackError, match=r"64 nodes with accounting need about 378 MB .* 200 MB are available"):
        machine.check_memory(64, accounting=True, meminfo=meminfo)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=f"TCP port {port} is in use.*--port"):
            machine.check_ports([port])


def test_free_ports_avoid_those_in_use_and_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", machine.free_ports(1))) as server:
        taken = server.getsockname()[1]
        places = iter([taken - 2, taken, taken + 1])
        monkeypatch.setattr("secrets.randbelow", lambda end: next(places) - 10_000)
        assert machine.free_ports(3) == taken + 1
