"""What plain Slurm starts, Penstock starts within two rounds; what Slurm refuses is refused at submission."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock_slurm.loopback.fixtures import skip_without_slurm
from tests.reality.cluster import Case, Configuration
from tests.reality.configurations import ALL
from tests.reality.differential import Differential, Outcome, differences, running

pytestmark = pytest.mark.slurm


@dataclass(frozen=True, slots=True)
class Judged:
    """A site with penstockd, and what plain Slurm did with each case before."""

    differential: Differential
    plain: dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    site: Configuration = request.param
    skip_without_slurm(accounting=bool(site.accounting))
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    with running(tmp_path_factory.mktemp("reality"), site) as differential:
        selected = [item.callspec.params["case"] for item in request.session.items if mine(item, site)]
        plain = {case.name: differential.plain(case.requests) for case in selected}
        differential.site.start()
        yield Judged(differential, plain)


def mine(item: pytest.Item, site: Configuration) -> bool:
    """Whether this is one of the tests of a site."""
    spec = getattr(item, "callspec", None)
    return spec is not None and spec.params.get("judged") is site


def cases() -> list[object]:
    found = []
    for site in ALL:
        for case in site.cases:
            marks = [] if case.quick else [pytest.mark.long]
            if case.differs:
                marks.append(pytest.mark.xfail(strict=True, reason=case.differs, raises=AssertionError))
            found.append(pytest.param(site, case, marks=marks, id=f"{site.name}: {case.name}"))
    return found


@pytest.mark.parametrize(("judged", "case"), cases(), indirect=["judged"])
def test_what_plain_slurm_does_penstock_does(judged: Judged, case: Case) -> None:
    plain = judged.plain[case.name]
    adaptive = judged.differential.adaptive(case.requests, plain)
    print(*plain, "--", *adaptive, sep="\n")
    assert differences(plain, adaptive) == [], judged.differential.site.tail()
