"""pytest fixtures: a real Slurm for tests. Name this module in `pytest_plugins`.

Where Slurm's daemons are not installed, tests that use the fixtures are skipped with the names of the Debian packages.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from penstock_loopback import LoopbackCluster, LoopbackError, ProgramsMissing, machine, wait_for

__all__ = ["MakeLoopback", "loopback", "make_loopback", "running_slurm", "skip_without_slurm", "started", "wait_for"]

Cluster = TypeVar("Cluster", bound=LoopbackCluster)

SMALL = "t4:2x4,rtx:2x8,a100:2x8"

NO_DATABASE = "_check_mysql_concat_is_sane: null result"
"""What slurmdbd logs before it ends if libmariadb gives it no rows, as in Debian 13 and sid in November 2026."""


class MakeLoopback(Protocol):
    """The type of the fixture `make_loopback`."""

    def __call__(self, nodes: str = "t4:1x4", **options: Any) -> LoopbackCluster:
        """A running cluster; `options` are `LoopbackCluster`'s."""


def pytest_configure() -> None:
    """Make SIGTERM, as from `timeout`, end the session like Ctrl-C, so that its clusters are stopped."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackCluster]:
    """A running cluster for the whole session, `t4:2x4,rtx:2x8,a100:2x8`. It is reset after each test."""
    skip_without_slurm(accounting=False)
    with LoopbackCluster(tmp_path_factory.mktemp("loopback"), SMALL) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _loopback_left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    # autouse, so that it ends after the test's other fixtures, which may still submit or cancel jobs.
    if "loopback" not in request.fixturenames:
        yield
        return
    cluster: LoopbackCluster = request.getfixturevalue("loopback")
    yield
    try:
        cluster.reset()
    except LoopbackError:
        cluster.down()
        cluster.up()


@pytest.fixture
def make_loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLoopback]:
    """Start clusters for one test, to break or to configure. They end with the test."""
    with contextlib.ExitStack() as clusters:

        def make(nodes: str = "t4:1x4", **options: Any) -> LoopbackCluster:
            return clusters.enter_context(running_slurm(tmp_path_factory.mktemp("loopback"), nodes, **options))

        yield make


@contextlib.contextmanager
def running_slurm(folder: Path, nodes: str, **options: Any) -> Iterator[LoopbackCluster]:
    """A running cluster; the calling test is skipped where it cannot be. `options` are `LoopbackCluster`'s."""
    skip_without_slurm(accounting=bool(options.get("accounting")))
    with started(LoopbackCluster(folder, nodes, **options)) as cluster:
        yield cluster


@contextlib.contextmanager
def started(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster while it runs; the calling test is skipped where slurmdbd cannot work."""
    with contextlib.ExitStack() as clusters:
        try:
            clusters.enter_context(cluster)
        except LoopbackError as error:
            if NO_DATABASE not in str(error):
                raise
            pytest.skip("this slurmdbd cannot use this libmariadb (docs/developer/slurm-versions.md)")
        yield cluster


def skip_without_slurm(*, accounting: bool) -> None:
    """Skip the calling test if Slurm's daemons are missing; with `accounting` also slurmdbd and MariaDB."""
    try:
        machine.check_programs(accounting=accounting)
    except ProgramsMissing as missing:
        pytest.skip(str(missing))
