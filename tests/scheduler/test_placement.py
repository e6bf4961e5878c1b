import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import Configuration, Node, NodeChoice, Placement, Share
from penstock_scheduler.rounds.placement import Placed, place
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import on


def put(nodes, wanted, current=None, pinned=None, partitions=None, **more) -> Placed:
    nodes = nodes_from_spec(nodes) if isinstance(nodes, str) else nodes
    partitions = {job: (partitions or {}).get(job, ("all",)) for job in wanted}
    return place(nodes, wanted, partitions, current or {}, pinned or {}, **more)


def t4(gpus: int, nodes: int = 1) -> Configuration:
    return Configuration(nodes, gpus, "t4")


def test_parts_of_nodes_are_filled_best_fit():
    """A 2-GPU job goes where 2 are free, not where 4 are; a 4-GPU job finds its node whole."""
    found = put("t4:2x4", {"small": t4(2), "large": t4(4)}, pinned={"p": on("t4", t4_01=2)})
    assert found.placements == {"small": on("t4", t4_01=2), "large": on("t4", t4_00=4)}


def test_a_job_that_keeps_its_configuration_keeps_its_nodes():
    found = put("t4:3x4", {"a": t4(2), "b": t4(4)}, current={"a": on("t4", t4_02=2)})
    assert found.placements["a"] == on("t4", t4_02=2)
    assert found.made_room_for == {}


def test_the_job_with_least_work_to_lose_makes_room():
    """Two nodes of 4, a 1-GPU job on each: a job of 4 needs one of them to move; b's restart costs less."""
    current = {"a": on("t4", t4_00=1), "b": on("t4", t4_01=1)}
    found = put("t4:2x4", {"a": t4(1), "b": t4(1), "big": t4(4)}, current, move_cost={"a": 30.0, "b": 20.0})
    assert found.placements == {"a": on("t4", t4_00=1), "b": on("t4", t4_00=1), "big": on("t4", t4_01=4)}
    assert found.made_room_for == {"b": "big"}


def test_the_fewest_gpu_seconds_move_not_the_fewest_jobs():
    """A job of 4 lacks 2 GPUs on a node of 8: one job of 2 GPUs at 100 GPU-seconds, or two of 1 at 30 each, could go."""
    current = {"two": on("t4", t4_00=2), "x": on("t4", t4_00=1), "y": on("t4", t4_00=1)}
    wanted = {"two": t4(2), "x": t4(1), "y": t4(1), "new": t4(4)}
    pinned = {"p": on("t4", t4_00=2, t4_01=6)}
    found = put("t4:2x8", wanted, current, pinned, move_cost={"two": 100.0, "x": 30.0, "y": 30.0})
    assert found.made_room_for == {"x": "new", "y": "new"}
    assert found.placements["new"] == on("t4", t4_00=4)
    assert found.placements["x"] == found.placements["y"] == on("t4", t4_01=1)


def test_several_nodes_are_taken_whole():
    found = put("t4:3x4", {"wide": t4(8, 2), "one": t4(1)}, pinned={"p": on("t4", t4_01=1)})
    assert found.placements["wide"] == on("t4", t4_00=4, t4_02=4)
    assert found.placements["one"] == on("t4", t4_01=1)


def test_nodes_of_one_switch_are_preferred_and_the_fullest_that_will_do():
    nodes = [
        Node(f"n{i}", "t4", 4, ("all",), switch=switch) for i, switch in enumerate(["a", "b", "b", "c", "c", "c", "a"])
    ]
    assert set(put(nodes, {"j": t4(8, 2)}).placements["j"].nodes) in ({"n0", "n6"}, {"n1", "n2"})
    assert put(nodes, {"j": t4(12, 3)}).placements["j"].nodes == ("n3", "n4", "n5")
    assert put(nodes, {"j": t4(16, 4)}).placements["j"].nodes == ("n0", "n3", "n4", "n5")


def test_nodes_on_which_jobs_made_room_are_not_allocated_again():
    """a takes n1, n2 and, from the job there, n3, all in p. b is in q, where n4 and n5 are idle, and n1 and n2 are too."""
    nodes = [
        Node(f"n{i}", "t4", 4, inside) for i, inside in enumerate([("p", "q")] * 2 + [("p",)] * 2 + [("q",)] * 2, 1)
    ]
    held = {"small": Placement("t4", "p", (Share("n3", 1),))}
    wanted = {"a": t4(12, 3), "b": t4(8, 2), "small": t4(1)}
    doors = {"a": ("p",), "b": ("q",), "small": ("p",)}
    found = put(nodes, wanted, held, pinned={"p": Placement("t4", "p", (Share("n4", 1),))}, partitions=doors)
    assert found.placements["a"].nodes == ("n1", "n2", "n3")
    assert found.placements["b"].nodes == ("n5", "n6")


def test_the_preferred_partition_comes_first():
    nodes = (Node("x", "t4", 4, ("slow",)), Node("y", "t4", 4, ("fast",)))
    found = put(nodes, {"j": t4(4)}, partitions={"j": ("fast", "slow")})
    assert found.placements["j"] == Placement("t4", "fast", (Share("y", 4),))


def test_reserved_nodes_are_for_their_own_jobs():
    nodes = (Node("x", "t4", 4, ("all",), reservation="exam"), Node("y", "t4", 4, ("all",)))
    found = put(nodes, {"in": t4(4), "out": t4(4), "late": t4(4)}, reservations={"in": "exam"})
    assert found.placements["in"].nodes == ("x",)
    assert sorted(found.placements) in (["in", "late"], ["in", "out"])
    assert len(found.left_over) == 1


def test_a_reservation_that_begins_moves_the_jobs_on_its_nodes():
    nodes = (Node("x", "t4", 4, ("all",), reservation="exam"), Node("y", "t4", 4, ("all",)))
    held = {"j": Placement("t4", "all", (Share("x", 2),))}
    assert put(nodes, {"j": t4(2)}, held).placements["j"].nodes == ("y",)


def test_nobody_is_placed_on_a_node_out_of_service():
    down = dataclasses.replace(nodes_from_spec("t4:1x4")[0], may_start=False)
    found = put((down,), {"j": t4(1)}, current={"j": on("t4", t4_00=1)})
    assert found.left_over == ("j",)


def test_what_does_not_fit_is_named_and_the_rest_is_placed():
    found = put("t4:2x4", {"wide": t4(8, 2), "one": t4(1)}, pinned={"p": on("t4", t4_01=1)})
    assert found.left_over == ("wide",)
    assert "one" in found.placements


@st.composite
def full_clusters(draw):
    """Equal nodes of a power of two, jobs that fit by number of GPUs, and some that already run anywhere."""
    size = 2 ** draw(st.integers(0, 3))
    count = draw(st.integers(1, 8))
    shapes = [Configuration(1, 2**k, "t4") for k in range(size.bit_length())]
    shapes += [Configuration(n, n * size, "t4") for n in range(2, count + 1)]
    wanted, used = {}, 0
    for number in range(draw(st.integers(1, 24))):
        shape = draw(st.sampled_from(shapes))
        if used + shape.gpus <= size * count:
            wanted[f"j{number:02d}"] = shape
            used += shape.gpus
    nodes = tuple(Node(f"n{i}", "t4", size, ("all",), switch=draw(st.sampled_from("ab"))) for i in range(count))
    free = {node.name: size for node in nodes}
    current = {}
    for job, shape in wanted.items():
        if draw(st.booleans()):
            room = [name for name in draw(st.permutations(sorted(free))) if free[name] >= shape.gpus // shape.nodes]
            if shape.nodes > 1:
                room = [name for name in room if free[name] == size]
            if len(room) >= shape.nodes:
                each = shape.gpus // shape.nodes
                for name in room[: shape.nodes]:
                    free[name] -= each
                shares = tuple(Share(name, each) for name in sorted(room[: shape.nodes]))
                current[job] = Placement("t4", "all", shares)
    return nodes, wanted, current


@given(full_clusters(), st.randoms(use_true_random=False))
def test_whatever_fits_by_number_is_placed(cluster, random):
    """The proof in the module's docstring, on nodes of one size that is a power of two."""
    nodes, wanted, current = cluster
    costs = {job: random.random() for job in wanted}
    found = put(nodes, wanted, current, move_cost=costs)
    assert found.left_over == ()
    used = {node.name: 0 for node in nodes}
    for job, placement in found.placements.items():
        assert placement.configuration == wanted[job]
        for share in placement.shares:
            used[share.node] += share.gpus
    assert all(used[node.name] <= node.gpus for node in nodes)
    for job, placement in current.items():
        moved = found.placements[job].shares != placement.shares
        assert not moved or job in found.made_room_for
    again = put(nodes, dict(reversed(wanted.items())), current, move_cost=costs)
    assert again.placements == found.placements


@pytest.mark.parametrize("size", [3, 6, 12])
def test_other_sizes_are_placed_where_they_can_be(size):
    """12 = 8 + 4: on two nodes of 12, three jobs of 8 are 24 GPUs and do not fit; two, and two of 4, do."""
    nodes = tuple(Node(f"n{i}", "t4", size, ("all",)) for i in range(2))
    half = 2 ** (size.bit_length() - 1)
    assert len(put(nodes, {f"j{i}": t4(half) for i in range(3)}).placements) == 2
    rest = {f"r{i}": t4(size - half) for i in range(2)}
    assert put(nodes, {"a": t4(half), "b": t4(half), **rest}).left_over == ()


@st.composite
def odd_clusters(draw):
    """Nodes of any size, partitions and reservations; jobs of any shape; some run already, some are pinned."""
    nodes = [
        Node(
            f"n{i}",
            "t4",
            draw(st.sampled_from([2, 3, 4, 8])),
            draw(st.sampled_from([("a",), ("a", "b"), ("b",)])),
            may_start=draw(st.sampled_from([True, True, True, False])),
            gpus_others=draw(st.sampled_from([0, 0, 1])),
            reservation=draw(st.sampled_from(["", "", "exam"])),
            switch=draw(st.sampled_from("xy")),
        )
        for i in range(draw(st.integers(1, 8)))
    ]
    free = {node.name: node.gpus_for_us for node in nodes}
    wanted, current, pinned = {}, {}, {}
    for number in range(draw(st.integers(1, 16))):
        shape = draw(
            st.sampled_from([t4(1), t4(2), t4(3), t4(4), t4(8), t4(4, 2), t4(8, 2), t4(12, 3), t4(16, 4), t4(10, 2)])
        )
        job, each = f"j{number:02d}", shape.gpus // shape.nodes
        at = [
            node.name
            for node in nodes
            if free[node.name] >= each and (shape.nodes == 1 or free[node.name] == node.gpus)
        ]
        state = draw(st.sampled_from(["new", "new", "runs", "pinned"]))
        if state != "new" and len(at) >= shape.nodes:
            names = sorted(draw(st.permutations(at))[: shape.nodes])
            for name in names:
                free[name] -= each
            where = Placement("t4", draw(st.sampled_from("ab")), tuple(Share(name, each) for name in names))
            (current if state == "runs" else pinned)[job] = where
        if job not in pinned:
            wanted[job] = shape
    partitions = {job: draw(st.sampled_from([("a",), ("b", "a")])) for job in wanted}
    reservations = {job: "exam" for job in wanted if draw(st.integers(0, 3)) == 0}
    some = st.frozensets(st.sampled_from([node.name for node in nodes]), max_size=3)
    choices = {job: NodeChoice(draw(some), draw(some)) for job in wanted if draw(st.integers(0, 3)) == 0}
    return tuple(nodes), wanted, current, pinned, partitions, reservations, choices


@given(odd_clusters())
def test_the_rules_hold_on_any_cluster(cluster):
    nodes, wanted, current, pinned, partitions, reservations, choices = cluster
    found = place(nodes, wanted, partitions, current, pinned, reservations=reservations, choices=choices)
    by_name = {node.name: node for node in nodes}
    assert set(found.placements) | set(found.left_over) == set(wanted)
    assert not set(found.placements) & set(found.left_over)
    users: dict[str, list[str]] = {}
    used = {name: node.gpus - node.gpus_for_us for name, node in by_name.items()}
    for job, placement in {**pinned, **found.placements}.items():
        for share in placement.shares:
            used[share.node] += share.gpus
            users.setdefault(share.node, []).append(job)
    for job, placement in found.placements.items():
        assert placement.configuration == wanted[job]
        assert placement.partition in partitions[job]
        for share in placement.shares:
            node = by_name[share.node]
            assert used[share.node] <= node.gpus
            assert node.may_start
            assert node.reservation == reservations.get(job, "")
            assert job not in choices or choices[job].admits(node)
            if placement != current.get(job):  # Slurm itself may have put it elsewhere, or on parts of nodes
                assert placement.partition in node.partitions
                if len(placement.shares) > 1 and any(each.gpus == share.gpus for each in nodes):
                    assert users[share.node] == [job]
                    assert share.gpus == node.gpus
    for job, by in found.made_room_for.items():
        assert job in current
        assert by in found.placements
