"""What plain Slurm starts, Penstock starts within two rounds; what Slurm refuses is refused at submission."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.reality.cluster import Case, Configuration
from tests.reality.differential import Differential, Outcome, differences, running
from tests.reality.sites import ALL

pytestmark = pytest.mark.slurm


@dataclass(frozen=True, slots=True)
class Judged:
    """A site with penstockd, and what plain Slurm did with each case before."""

    differential: Differential
    plain: dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    site: Configuration = request.param
    with running(tmp_path_factory.mktemp("reality"), site) as differential:
        selected = [case for item in request.session.items if (case := case_of(item, site))]
        plain = {case.name: differential.plain(case.requests) for case in selected}
        differential.site.start()
        yield Judged(differential, plain)


def case_of(item: pytest.Item, site: Configuration) -> Case | None:
    """The case of a test, if it is one of this site."""
    spec = getattr(item, "callspec", None)
    return spec.params["case"] if spec is not None and spec.params.get("judged") is site else None


def cases() -> Sequence[object]:
    found = []
    for site in ALL:
        for case in site.cases:
            marks = [] if case.quick else [pytest.mark.long]
            if case.differs:
                marks.append(pytest.mark.xfail(strict=True, reason=case.differs, raises=AssertionError))
            found.append(pytest.param(site, case, marks=marks, id=f"{site.name}: {case.name}"))
    return found


@pytest.mark.parametrize(("judged", "case"), cases(), indirect=["judged"], scope="module")
def test_what_plain_slurm_does_penstock_does(judged: Judged, case: Case) -> None:
    plain = judged.plain[case.name]
    adaptive = judged.differential.adaptive(case.requests, plain)
    print(*plain, "--", *adaptive, sep="\n")
    found = differences(plain, adaptive)
    assert not found, "\n".join([*found, judged.differential.site.tail()])
