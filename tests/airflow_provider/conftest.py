from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock_loopback.fixtures import running_slurm
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import Client
from tests.airflow_provider.deployment import REPOSITORY, Deployment, free_port
from tests.airflow_provider.proxy import Proxy
from tests.cloud.conftest import cloud_settings, ec2, moto
from tests.cloud.test_slurm import cloud_site
from tests.end_to_end.site import UNFORESEEN, Site
from tests.scheduler.databases import postgresql

__all__ = ["cloud_settings", "cloud_site", "ec2", "moto"]  # fixtures

CLUSTER = "t4:2x4,a100:2x8"
OWN = Path(__file__).parent / "dags"
PROVIDER = REPOSITORY / "airflow_provider/airflow_provider_penstock"
EXECUTORS = "LocalExecutor,PenstockExecutor:airflow_provider_penstock.executors.penstock.PenstockExecutor"


def airflow_python(folder: str = ".venv-airflow") -> str:
    """An interpreter with Airflow and this checkout's provider, installed from its wheel; or the test is skipped."""
    python = Path(os.environ.get("PENSTOCK_AIRFLOW_PYTHON") or REPOSITORY / folder / "bin/python")
    if not python.exists():
        pytest.skip(
            f"no Airflow: `script/test airflow` makes {folder}, or PENSTOCK_AIRFLOW_PYTHON names an interpreter"
        )
    code = "import airflow_provider_penstock as provider; print(provider.__path__[0])"
    told = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    installed = Path(told.stdout.strip())
    assert installed != PROVIDER, (
        "the provider is installed as editable, and the tests run what ships: script/test airflow"
    )
    old = [file for file in PROVIDER.rglob("*.py") if not _same(file, installed / file.relative_to(PROVIDER))]
    assert old == [], "the provider that is installed is an older one; `script/test airflow` installs this one"
    return str(python)


def _same(file: Path, other: Path) -> bool:
    return other.exists() and other.read_bytes() == file.read_bytes()


# --- a running Airflow beside a real penstockd and a real Slurm, shared by the tests of a module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("running")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    airflow_python()
    with accounted_site(folder) as site:
        yield site
        assert UNFORESEEN not in site.log.read_text(), site.tail()


@pytest.fixture(scope="module")
def connection(site: Site) -> dict[str, object]:
    return listening(site)


@pytest.fixture(scope="module")
def line(connection: dict[str, object]) -> Iterator[Proxy]:
    """The proxy between Airflow's connection `penstock_line` and penstockd."""
    with Proxy(int(str(connection["port"]))) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def dag_files() -> list[Path]:
    """The DAG files of the module's tests, beside the provider's examples."""
    return sorted(OWN.glob("*.py"))


@pytest.fixture(scope="module")
def airflow(folder: Path, connection: dict[str, object], line: Proxy, dag_files: list[Path]) -> Iterator[Deployment]:
    connections = {
        "penstock_default": connection,
        "penstock_wrong": connection | {"password": "wrong"},
        "penstock_line": connection
        | {"port": line.port, "extra": {"tls": False, "timeout_s": 5, "deployment": "tests"}},
    }
    python = airflow_python()
    settings = {
        "CORE__EXECUTOR": EXECUTORS,
        "PENSTOCK_EXECUTOR__PYTHON": python,
        "PENSTOCK_EXECUTOR__OUTPUT_FILE": f"{folder}/executor-%j.out",
        "PENSTOCK_EXECUTOR__ENVIRONMENT": json.dumps(on_nodes(folder / "airflow")),
    }
    with contextlib.ExitStack() as stack:
        if os.environ.get("PENSTOCK_AIRFLOW_DATABASE") == "postgresql":
            url = stack.enter_context(postgresql()).replace("+psycopg:", "+psycopg2:")
            settings["DATABASE__SQL_ALCHEMY_CONN"] = f"{url}/postgres"
        made = Deployment(python, folder / "airflow", connections, dag_files, **settings)
        yield stack.enter_context(made)


@pytest.fixture
def nothing_left(site: Site) -> Iterator[None]:
    """Jobs that a test leaves are ended."""
    yield
    site.slurm.reset()


def on_nodes(home: Path) -> dict[str, str]:
    """The settings that a site writes into the airflow.cfg of its nodes."""
    return {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home / "logs-of-nodes"),
    }


# --- sites


def listening(site: Site, certificate: tuple[Path, Path] | None = None) -> dict[str, object]:
    """Start a site's daemon with a TCP port, over TLS if given a certificate and its key. Returns an Airflow connection to
    it."""
    port = free_port()
    site.api["listen"] = f"127.0.0.1:{port}"
    extra: dict[str, object] = {"tls": False, "deployment": "tests"}
    if certificate is not None:
        site.api |= {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
        extra = {"ca_file": str(certificate[0]), "deployment": "tests"}
    site.start()
    with Client(f"unix:{site.state / 'api.sock'}") as admin:
        token = admin.create_token(TokenOrder(user=admin.me().user)).token
    return {"conn_type": "penstock", "host": "127.0.0.1", "port": port, "password": token, "extra": extra}


@contextmanager
def accounted_site(folder: Path, nodes: str = CLUSTER) -> Iterator[Site]:
    """A site on its own Slurm, with accounting that records every job."""
    settings = {"AccountingStoreFlags": "job_comment"}
    with running_slurm(folder / "slurm", nodes, settings=settings, accounting=True) as slurm:
        (folder / "site").mkdir()
        site = Site(slurm, folder / "site")
        try:
            yield site
        finally:
            site.stop()
