"""The parts of the simulated cluster, one by one: events, nodes, arrivals and the queue."""

from __future__ import annotations

import math

from penstock_scheduler.model import JobSpec
from penstock_scheduler.simulator import nodes_from_spec
from penstock_scheduler.simulator.jobs import Event, Events, SimulatedJob
from penstock_scheduler.simulator.node_book import Arrivals, NodeBook, SimulatedQueue
from penstock_scheduler.simulator.truth import TimedJob
from tests.scheduler.builders import on


def job(name: str, submit_s: float) -> SimulatedJob:
    return SimulatedJob(name, name, JobSpec(max_gpus=8), TimedJob(None, 100.0, 10.0, {}), submit_s)


def test_events_happen_in_order_and_stale_ones_never():
    stale: set[int] = set()
    dropped: list[Event] = []
    events = Events(lambda event: event.number in stale, dropped.append)
    late, early, same = events.push(5, "end", "a"), events.push(3, "fail", "n"), events.push(5, "leave", "b")
    assert events.next_s() == 3
    stale.add(early)
    assert events.next_s() == 5
    assert [event.number for event in dropped] == [early]
    assert events.first_s(lambda event: event.subject == "b") == 5
    assert events.first_s(lambda event: event.subject == "c") == math.inf
    assert events.pop(4.9) is None
    assert [event.number for event in (events.pop(5), events.pop(5)) if event is not None] == [late, same]
    assert (events.pop(math.inf), events.next_s()) == (None, math.inf)


def test_a_node_book_counts_what_jobs_hold():
    """4 GPUs for 10 s and 2 for 5 s more are 50 GPU-seconds; a failed node is shown as it is now."""
    book = NodeBook(nodes_from_spec("t4:2x4"), 0.0)
    book.take_all(on("t4", t4_00=4), 1, 0.0)
    assert (book.free["t4-00"], book.free["t4-01"], book.gpus_held) == (0, 4, 4)
    assert [node.gpus_others for node in book.shown()] == [4, 0]
    book.take("t4-00", -2, 10.0)
    book.count(15.0)
    assert book.gpu_seconds == 50
    book.set_may_start("t4-01", may_start=False)
    assert (book.may_start("t4-01"), book.may_start("away"), book.whole) == (False, False, False)
    assert [(node.gpus_others, node.may_start) for node in book.shown()] == [(2, True), (0, False)]


def test_arrivals_come_once_and_in_order():
    arrivals = Arrivals([job("b", 5), job("a", 1)])
    assert arrivals.next_s == 1
    assert [each.id for each in arrivals.until(1)] == ["a"]
    assert (arrivals.until(4), arrivals.next_s, arrivals.over) == ([], 5, False)
    assert [each.id for each in arrivals.until(9)] == ["b"]
    assert (arrivals.next_s, arrivals.over) == (math.inf, True)


def test_the_front_of_the_queue_shows_as_many_more_as_fit_nowhere():
    first, second, third = jobs = [job("a", 1), job("b", 2), job("c", 3)]
    queue = SimulatedQueue(1)
    for each in reversed(jobs):
        queue.add(each)
    assert (queue.first, queue.show(), queue.full) == ("a", ["a"], True)
    queue.pass_over(1)
    assert queue.observe_again
    queue.observe_again = False
    assert queue.show() == ["a", "b"]
    queue.remove(second)
    queue.acted()
    assert queue.observe_again, "all of the front that fit have started: the next ones must be seen"
    assert queue.show() == ["a", "c"]
    queue.remove(first)
    queue.remove(third)
    assert (len(queue), queue.full) == (0, False)
