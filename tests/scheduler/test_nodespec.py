"""The line that describes the nodes of a loopback or simulated cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model.nodespec import DEFAULT_SPEC, NodeSpec, SpecError, parse_nodes


def test_numbers_the_nodes_of_each_type() -> None:
    assert parse_nodes("t4:2x4, rtx:1x8") == (
        NodeSpec("t4-00", "t4", 4),
        NodeSpec("t4-01", "t4", 4),
        NodeSpec("rtx-00", "rtx", 8),
    )


def test_a_type_named_twice_is_numbered_on() -> None:
    assert [node.name for node in parse_nodes("t4:1x4,rtx:1x8,t4:2x2")] == ["t4-00", "rtx-00", "t4-01", "t4-02"]


def test_the_default_is_the_cluster_of_the_demo() -> None:
    nodes = parse_nodes(DEFAULT_SPEC)
    assert len(nodes) == 6 + 3 + 2
    assert sum(node.gpus for node in nodes) == 6 * 4 + 3 * 8 + 2 * 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("t4:6y4", "'t4:6y4'"),
        ("t4:2x4,rtx=3x8", "part 2 of"),
        ("t4:2x4,", "''"),
        ("", "such as t4:6x4"),
        ("t4:-1x4", "such as t4:6x4"),
        ("t4:٣x4", "such as t4:6x4"),
        ("t4:0x4", "at least 1 node"),
        ("t4:4x0", "at least 1 node"),
        ("t4:600x4,rtx:401x1", "more than 1000 nodes"),
        ("t4:99999999999999999999x4", "more than 1000 nodes"),
        ("t4:1x65", "more than 64"),
        ("all:1x4", "choose another GPU type"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_nodes(text, most=1000)
    assert says in str(caught.value)


parts = st.tuples(st.sampled_from(["t4", "rtx", "a100", "H100_sxm"]), st.integers(1, 9), st.integers(1, 16))


@given(st.lists(parts, min_size=1, max_size=6))
def test_every_part_gives_its_nodes_with_names_of_their_own(spec: list[tuple[str, int, int]]) -> None:
    nodes = parse_nodes(",".join(f"{gpu_type}:{count}x{gpus}" for gpu_type, count, gpus in spec))
    assert [(node.gpu_type, node.gpus) for node in nodes] == [
        (gpu_type, gpus) for gpu_type, count, gpus in spec for _ in range(count)
    ]
    assert len({node.name for node in nodes}) == len(nodes)
    assert all(node.name.startswith(f"{node.gpu_type}-") for node in nodes)
