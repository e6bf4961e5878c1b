"""GPUs as cells: each GPU is drawn once, and its job is told without colour too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.api.messages import NodeView
from penstock_scheduler.cli.terminal.cells import (
    FREE,
    HIDDEN,
    LETTERS,
    OUT,
    PLAIN,
    Letters,
    cluster_cells,
    node_cells,
    style,
)
from penstock_scheduler.cli.terminal.picture import Line, Picture
from penstock_scheduler.people.drawing.svg import COLOURS


def node(name: str = "t4-00", gpus: int = 8, allocated: int = 0, others: int = 0, **fields: object) -> NodeView:
    known = {"may_start": True, "state": "IDLE", "gpu_type": "t4"} | fields
    return NodeView.model_validate(
        {"name": name, "gpus": gpus, "allocated": allocated, "others": others, **known}, strict=True
    )


def line(job: str, **nodes: int) -> Line:
    held = {name.replace("_", "-"): gpus for name, gpus in nodes.items()}
    return Line(job, "", "ada", "1", "running", sum(held.values()), "t4", held, "", 0.0, placed=True)


def lettered(*jobs: str) -> Letters:
    letters = Letters()
    letters.give(jobs)
    return letters


def test_each_gpu_is_told_apart():
    drawn = node_cells(node(allocated=5, others=1), [line("12", t4_00=3)], lettered("12")).plain
    assert drawn == "AAA" + HIDDEN * 2 + PLAIN + FREE * 2
    assert node_cells(node(gpus=2, may_start=False), [], lettered()).plain == OUT * 2


@given(
    st.integers(1, 16),
    st.lists(st.integers(1, 16), max_size=4),
    st.integers(0, 16),
    st.integers(0, 16),
)
def test_a_node_has_as_many_cells_as_gpus_whatever_penstockd_says(gpus, held, allocated, others):
    jobs = [line(str(number), t4_00=count) for number, count in enumerate(held)]
    letters = lettered(*(each.id for each in jobs))
    assert len(node_cells(node(gpus=gpus, allocated=allocated, others=others), jobs, letters).plain) == gpus


def test_nodes_fill_the_width_and_no_more():
    nodes = (*(node(f"t4-{number:03d}") for number in range(100)), node("a-0", gpu_type="a100"))
    picture = Picture(1, 0.0, "sia", nodes, (line("1", t4_000=8),))
    letters = lettered("1")
    for width in (30, 80, 150):
        rows = [row.plain for row in cluster_cells(picture, width, letters)]
        assert all(len(row) <= width for row in rows)
        assert rows[0].startswith("a100")
        assert sum(row.count(FREE) for row in rows) == 100 * 8
    assert len(cluster_cells(picture, 150, letters)) < len(cluster_cells(picture, 30, letters)) / 4


def test_jobs_have_letters_of_their_own_and_keep_them():
    jobs = [str(4100 + 7 * number) for number in range(len(LETTERS))]
    letters = lettered(*jobs)
    assert {letters[job] for job in jobs} == set(LETTERS)
    before = letters[jobs[5]]
    letters.give([jobs[5], "9"])
    assert letters[jobs[5]] == before
    assert letters["9"] != before
    letters.give(str(number) for number in range(1000))
    assert all(letters[str(number)] in LETTERS for number in range(1000)), "more jobs than letters"


def test_a_job_has_the_same_colour_on_every_screen():
    assert style("4711") == style("4711")
    assert len({style(str(number)) for number in range(300)}) == len(COLOURS)
