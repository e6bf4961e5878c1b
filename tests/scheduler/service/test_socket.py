"""The Unix socket: one default for penstockd and its clients, and nobody's socket is taken away."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from penstock_scheduler.api.client import Client
from penstock_scheduler.daemon.service.server import Service
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import ConfigError
from tests.scheduler.service.api import ME, serving

ROOT = Path(__file__).parents[3]


def test_penstockd_its_clients_and_its_unit_agree_on_the_socket():
    with Client.open({}) as client:
        assert client.url == f"unix:{ApiSettings().socket}"
    unit = (ROOT / "slurm_plugin/systemd/penstockd.service").read_text()
    assert f"\nRuntimeDirectory={ApiSettings().socket.parent.relative_to('/run')}\n" in unit
    assert "\nRuntimeDirectoryPreserve=yes\n" in unit, "the agent's files are in the same folder and jobs use them"
    assert re.search("^After=.* run-penstock.mount", unit, re.MULTILINE), "a later mount would hide the socket"


def test_all_users_reach_the_socket_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        with (
            serving(tmp_path / "api", socket=tmp_path / "run" / "api.sock"),
            Client(f"unix:{tmp_path}/run/api.sock") as me,
        ):
            assert me.me().user == ME
            assert oct((tmp_path / "run").stat().st_mode & 0o777) == "0o755"
            assert oct((tmp_path / "run" / "api.sock").stat().st_mode & 0o777) == "0o666"
    finally:
        os.umask(before)


def test_a_second_penstockd_does_not_take_the_socket_of_the_first(tmp_path):
    path = tmp_path / "api.sock"
    with serving(tmp_path / "one", socket=path), Client(f"unix:{path}") as me:
        with (
            pytest.raises(ConfigError, match=r"api\.sock'.*another penstockd or penstock-api serves"),
            serving(tmp_path / "two", socket=path),
        ):
            pass
        assert me.me().user == ME, "the first one still answers"


def test_the_socket_of_a_killed_penstockd_is_replaced(tmp_path):
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with serving(tmp_path / "api", socket=path), Client(f"unix:{path}") as me:
        assert me.me().user == ME


def test_a_file_that_is_no_socket_is_never_deleted(tmp_path):
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    with pytest.raises(ConfigError, match="is not a socket"), serving(tmp_path / "api", socket=path):
        pass
    assert path.read_text() == "years of work"


async def nothing() -> None:
    pass


def test_a_service_that_has_hardly_started_stops_at_once(tmp_path):
    """As that of a penstockd that takes over in the moment in which it starts."""
    known = SimpleNamespace(serve_on=lambda loop: None, counters={})
    app = FastAPI()
    app.state.api = SimpleNamespace(leases=None, close=lambda: None, daemon=SimpleNamespace(close=nothing))
    service = Service(ApiSettings(socket=tmp_path / "api.sock"), app, known)
    service.start()
    service.stop()
    assert not service.serves
