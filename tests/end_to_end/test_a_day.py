"""An admin's day by the pages, as tests/end_to_end/a_day.py does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_loopback.fixtures import skip_without_slurm, started
from tests.end_to_end.a_day import a_day, cluster, table

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_day(tmp_path: Path) -> None:
    skip_without_slurm(accounting=True)
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    with started(cluster(tmp_path / "slurm")) as slurm:
        (tmp_path / "site").mkdir()
        rows = a_day(slurm, tmp_path / "site")
    assert not any(row.wrong for row in rows), table(rows)
