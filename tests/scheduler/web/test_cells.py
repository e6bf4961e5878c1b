"""What each GPU is shown as."""

from __future__ import annotations

from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.messages import NodeView
from penstock_scheduler.daemon.service.web.cells import Cell, Held, nodes_of, picture, words
from penstock_scheduler.daemon.service.web.render import Fragments, change
from penstock_scheduler.people.drawing.svg import COLOURS, is_dark, job_colour, rules


def node(name: str = "n1", gpus: int = 4, **more: object) -> NodeView:
    facts = {"gpu_type": "t4", "allocated": 0, "others": 0, "may_start": True, "state": "IDLE"} | more
    return NodeView.model_validate({"name": name, "gpus": gpus} | facts)


def span(job: str, ids: tuple[int, ...] | None, gpus: int = 2, **more: object) -> AllocationSpan:
    facts = {"user": "ada", "gpu_type": "t4", "nodes": {"n1": gpus}, "run_s": 1.0, "from_s": 1.0}
    return AllocationSpan.model_validate({"job": job, "gpu_ids": None if ids is None else {"n1": ids}} | facts | more)


def one(nodes: list[NodeView], spans: list[AllocationSpan], busy: dict[str, float] | None = None) -> list[Cell]:
    (found,) = nodes_of(nodes, {}, spans, busy or {})
    return list(found.cells)


def jobs(cells: list[Cell]) -> list[list[str]]:
    return [[held.job for held in cell.held] for cell in cells]


def test_a_job_is_on_the_gpus_whose_indices_slurm_tells():
    assert jobs(one([node(allocated=2)], [span("1", (1, 3))])) == [[], ["1"], [], ["1"]]


def test_a_job_whose_indices_are_not_known_gets_cells_that_no_other_job_has():
    cells = one([node(allocated=4)], [span("1", None), span("2", (0, 2))])
    assert jobs(cells) == [["2"], ["1"], ["2"], ["1"]]


def test_two_jobs_share_a_cell():
    cells = one([node(allocated=1)], [span("1", (0,), 1, shared=True), span("2", (0,), 1, shared=True)])
    assert jobs(cells)[0] == ["1", "2"]


def test_gpus_of_plain_jobs_and_of_jobs_that_the_viewer_may_not_see_are_neither_free_nor_named():
    cells = one([node(allocated=2, others=1)], [])
    assert [cell.other for cell in cells] == ["hidden", "hidden", "plain", ""]
    assert "data-job" not in picture(nodes_of([node(allocated=2, others=1)], {}, [], {})[0])


def test_an_index_beyond_the_node_is_left_out():
    assert jobs(one([node()], [span("1", (0, 9))])) == [["1"], [], [], []]


def test_held_gpus_that_are_not_used_are_marked():
    cells = one([node(allocated=2)], [span("1", (0, 1))], {"1": 0.001})
    assert [held.idle for cell in cells for held in cell.held] == [True, True]
    (found,) = nodes_of([node(allocated=2)], {}, [span("1", (0, 1))], {"1": 0.001})
    assert 'class="idle"' in picture(found)
    assert words(found) == "n1: 4 t4, 2 in use, 2 of them idle"
    (used,) = nodes_of([node(allocated=2)], {}, [span("1", (0, 1))], {"1": 0.6})
    assert 'class="idle"' not in picture(used)
    assert 'height="6.0"' in picture(used)  # six tenths of a cell


def test_states_are_told_apart_by_shape_and_in_words():
    nodes = [
        node("down", may_start=False, state="DOWN*"),
        node("drained", may_start=False, leave="drain"),
        node("reserved", reservation="course"),
        node("free"),
    ]
    found = {each.name: each for each in nodes_of(nodes, {}, [], {})}
    assert {name: each.states for name, each in found.items()} == {
        "down": ("down",),
        "drained": ("drained",),
        "reserved": ("reserved",),
        "free": (),
    }
    assert len({picture(each) for each in found.values()}) == 4
    assert words(found["down"]).endswith("out of service (down*)")
    assert words(found["reserved"]).endswith("reserved for course")


def test_a_node_of_the_cloud_comes_last_in_its_type():
    spans = [span("1", None, nodes={"cloud-1": 2}, where="cloud")]
    found = nodes_of([node("n10"), node("n2")], {}, spans, {})
    assert [each.name for each in found] == ["n2", "n10", "cloud-1"]
    assert found[-1].states == ("cloud",)


def test_of_another_time_the_states_of_now_are_not_shown():
    (found,) = nodes_of([node(may_start=False, others=2, state="DOWN")], {}, [span("1", (0, 1))], {}, past=True)
    assert (found.states, [cell.other for cell in found.cells]) == ((), ["", "", "", ""])


def test_a_jobs_colour_is_always_the_same_and_has_a_class():
    assert job_colour("12") == job_colour("12")
    assert len({job_colour(str(number)) for number in range(300)}) == len(COLOURS) == len(set(COLOURS))
    assert rules().count("fill:") == len(COLOURS)
    assert is_dark("#000000")
    assert not is_dark("#f0e442")


def test_markup_in_a_job_id_is_text():
    found = nodes_of([node(allocated=1)], {}, [span('"><script>alert(1)</script>', (0,), 1)], {})[0]
    assert "<script" not in picture(found)
    assert Held('"><script>', "x").job not in picture(found)


def test_only_what_has_changed_is_sent():
    before = Fragments({"a": "1", "b": "2"}, "s")
    assert change(before, Fragments({"a": "1", "b": "2"}, "s")) is None
    assert change(before, Fragments({"a": "1", "b": "3"}, "s")) == 'event: parts\ndata: {"b":"3"}\n\n'
    assert change(None, before) == 'event: parts\ndata: {"a":"1","b":"2"}\n\n'
    assert change(before, Fragments({"a": "1"}, "t")) == "event: reload\ndata: {}\n\n"


def test_a_line_break_in_a_fragment_stays_one_event():
    text = change(None, Fragments({"a": "x\n\nevent: parts\ndata: {}"}))
    assert text is not None
    assert text.count("\n\n") == 1


def test_a_node_that_slurm_has_powered_down_is_free_and_says_when_it_is_ready():
    sleeping = node(state="IDLE+POWERED_DOWN", boot_s=90.0, note="is powered down; Slurm wakes it in about 2 min")
    (found,) = nodes_of([sleeping], {}, [], {})
    assert found.states == ()
    assert "Slurm wakes it in about 2 min" in words(found)
