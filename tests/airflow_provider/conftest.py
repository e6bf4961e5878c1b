from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock_scheduler.client import Client
from penstock_scheduler.messages import TokenOrder
from penstock_slurm.loopback import LoopbackCluster
from penstock_slurm.loopback.fixtures import skip_without_slurm
from tests.airflow_provider.deployment import REPOSITORY, free_port
from tests.cloud.conftest import cloud_settings, ec2, moto
from tests.cloud.test_slurm import cloud_site
from tests.end_to_end.site import Site

__all__ = ["cloud_settings", "cloud_site", "ec2", "moto"]  # fixtures

CLUSTER = "t4:2x4,a100:2x8"


def airflow_python() -> str:
    """An interpreter with Airflow, or the test is skipped."""
    named = os.environ.get("PENSTOCK_AIRFLOW_PYTHON")
    made = REPOSITORY / ".venv-airflow/bin/python"
    if named or made.exists():
        return named or str(made)
    pytest.skip(
        "no Airflow: `script/test airflow` makes .venv-airflow, or PENSTOCK_AIRFLOW_PYTHON names an interpreter"
    )


def listening(site: Site, certificate: tuple[Path, Path] | None = None) -> dict[str, object]:
    """Start a site's daemon with a TCP port, over TLS if given a certificate and its key. Returns an Airflow connection to
    it."""
    port = free_port()
    site.api["listen"] = f"127.0.0.1:{port}"
    extra: dict[str, object] = {"tls": False}
    if certificate is not None:
        site.api |= {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
        extra = {"ca_file": str(certificate[0])}
    site.start()
    with Client(f"unix:{site.state / 'api.sock'}") as admin:
        token = admin.create_token(TokenOrder(user=admin.me().user)).token
    return {"conn_type": "penstock", "host": "127.0.0.1", "port": port, "password": token, "extra": extra}


@contextmanager
def accounted_site(folder: Path, nodes: str = CLUSTER) -> Iterator[Site]:
    """A site on its own Slurm, with accounting that records every job."""
    skip_without_slurm(accounting=True)
    settings = {"AccountingStoreFlags": "job_comment"}
    with LoopbackCluster(folder / "slurm", nodes, settings=settings, accounting=True) as slurm:
        (folder / "site").mkdir()
        site = Site(slurm, folder / "site")
        try:
            yield site
        finally:
            site.stop()
