"""Fixtures for a real penstockd. tests/airflow_provider/test_suite.py puts its address into the environment."""

import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

PENSTOCK = "PenstockExecutor:airflow_provider_penstock.executors.penstock.PenstockExecutor"
if not version("apache-airflow").startswith("2."):  # read when Airflow is imported, which checks tasks' executors
    os.environ["AIRFLOW__CORE__EXECUTOR"] = f"LocalExecutor,{PENSTOCK}"

from fake import Fake, connection, serve  # noqa: E402

from airflow_provider_penstock.hooks.penstock import PenstockHook  # noqa: E402


@pytest.fixture(scope="session")
def folder() -> Path:
    return Path(os.environ["PENSTOCK_TEST_FOLDER"])


@pytest.fixture
def hook() -> PenstockHook:
    return PenstockHook()


@pytest.fixture(autouse=True)
def _unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is on its way out here."""
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.SETTLE_S", 0.0)


class Instance(SimpleNamespace):
    """The parts of a task instance that operators use. `pushed` has their XComs."""

    def __init__(self, task_id: str, *, max_tries: int = 0, try_number: int = 1) -> None:
        names = {"dag_id": "tests", "run_id": "manual__2026-11-21T00:00:00+00:00", "map_index": -1, "pushed": {}}
        super().__init__(task_id=task_id, max_tries=max_tries, try_number=try_number, **names)

    def xcom_push(self, key: str, value: object) -> None:
        self.pushed[key] = value


@pytest.fixture
def instance() -> type[Instance]:
    return Instance


def wait_until(condition: Callable[[], object], timeout_s: float = 180) -> None:
    """Wait for what takes up to a minute on an idle machine: Slurm looks at dependencies every half minute."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not true within {timeout_s:g} s"
        time.sleep(0.2)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A Penstock on loopback, which the connection `penstock_fake` names. Nothing waits for long."""
    made = Fake()
    server = serve(made)
    monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_FAKE", connection(server))
    monkeypatch.setattr("airflow_provider_penstock.silence.TELL_AFTER_S", 0.0)
    yield made
    server.shutdown()
    server.server_close()
