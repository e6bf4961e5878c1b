import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_loopback import LoopbackCluster
from penstock_slurm.gateway.hostlist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("t4-[00-02,05],x", ("t4-00", "t4-01", "t4-02", "t4-05", "x")),
        ("rack[1-2]n[8-10]", ("rack1n8", "rack1n9", "rack1n10", "rack2n8", "rack2n9", "rack2n10")),
        ("n[099-101]-ib", ("n099-ib", "n100-ib", "n101-ib")),
        ("a100-00", ("a100-00",)),
        ("", ()),
        ("(null)", ()),
        ("None assigned", ()),
    ],
)
def test_expands_what_slurm_prints(text, names):
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1", "n1]", "n[[1]]", "n[]", "n[3-1]", "n[a]", "a,,b", ",", "n[1-99999999]"])
def test_says_what_is_not_a_host_list(text):
    with pytest.raises(ValueError, match="is not a host list"):
        expand(text)


PREFIX = st.from_regex(r"[a-z]{1,6}-?", fullmatch=True)
RANGE = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)).map(
    lambda given: (
        f"{given[0]:0{given[2]}d}-{given[0] + given[1]:0{given[2]}d}" if given[1] else f"{given[0]:0{given[2]}d}"
    )
)
ITEM = st.one_of(
    PREFIX,
    st.tuples(PREFIX, st.lists(RANGE, min_size=1, max_size=3)).map(lambda given: f"{given[0]}[{','.join(given[1])}]"),
)
HOSTLIST = st.lists(ITEM, min_size=1, max_size=4).map(",".join)


@pytest.mark.slurm
@given(text=HOSTLIST)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_agrees_with_scontrol(loopback: LoopbackCluster, text):
    said = loopback.command("scontrol", "show", "hostnames", text).stdout.split()
    assert list(expand(text)) == said


def test_scontrol_is_not_needed(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert len(expand("n[0001-4000]")) == 4000
