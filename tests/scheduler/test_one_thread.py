"""Numerical libraries use one thread while Penstock decides, and what Penstock starts is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_scheduler.daemon import penstockd as daemon
from penstock_scheduler.rounds import one_thread
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.run import prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec

threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed: pip install threadpoolctl")


def threads() -> set[int]:
    """Threads of each BLAS of this process."""
    return {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}


def test_a_simulation_decides_with_one_thread_and_gives_the_others_back():
    one = WorkloadJob("0", 0.0, 1, rigid_spec(1), duration_s=120.0)
    where, during, environment = prepare(nodes_from_spec("t4:1x4"), Workload("one", (one,))), [], dict(os.environ)
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        simulate_policy(where, "sia", on_tick=lambda simulation: during.append(threads()))
        assert threads() == {2}
    assert during
    assert all(each == {1} for each in during)
    assert dict(os.environ) == environment  # jobs and programs inherit it


def test_the_daemon_decides_with_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "penstock.toml").write_text("[daemon]\nround_s = 60\n")
    during: list[set[int]] = []
    monkeypatch.setattr(daemon, "_run", lambda *_: during.append(threads()) or 0)
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        assert daemon.main(["--config", str(tmp_path / "penstock.toml")]) == 0
    assert during == [{1}]


def test_without_threadpoolctl_the_same_is_decided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "threadpoolctl", None)
    before = threads()
    with one_thread.one_blas_thread():
        assert threads() == before
