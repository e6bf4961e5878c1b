"""Differences of JSON documents: worked by hand, and for any two documents."""

from __future__ import annotations

import copy
import json

import hypothesis.strategies as st
from hypothesis import given

from penstock_scheduler.store.packing import difference, patched


def test_a_counter_is_stored_as_what_it_has_grown_by():
    old = {"gpu_s": {str(job): 1000.0 * job for job in range(1, 5)}}
    new = {"gpu_s": {str(job): 1000.0 * job + 60.0 for job in range(1, 5)}}
    assert difference(old, new) == {"items": [[0, [{"items": [[0, [{"plus": 60.0}] * 4]]}]]]}


def test_a_list_of_jobs_is_not_stored_again_when_its_first_job_ends():
    jobs = [{"id": str(job), "name": "train"} for job in range(100)]
    started = [*jobs[1:50], jobs[50] | {"name": "changed"}, *jobs[51:], {"id": "100", "name": "train"}]
    expected = [[1, 49], [50, [{"items": [[0, 1], [1, [{"value": "changed"}]]]}]], [51, 49], {"new": [started[-1]]}]
    assert difference(jobs, started) == {"items": expected}
    assert patched(jobs, {"items": expected}) == started


def test_order_is_kept_and_the_old_document_stays_as_it_was():
    old = {"a": 1, "b": {"c": [1, 2, 3]}, "d": 2}
    kept = copy.deepcopy(old)
    new = {"d": 2, "new": {"new": []}, "b": {"c": [1, 9]}, "a": 1}
    assert json.dumps(patched(old, difference(old, new))) == json.dumps(new)
    assert old == kept


ITEM = st.fixed_dictionaries({"id": st.sampled_from("abcdef")}, optional={"x": st.floats(allow_nan=False)})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | ITEM,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(ITEM, max_size=6)
        | st.dictionaries(st.sampled_from(["id", "name", "new", "items", "plus", "value"]), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(JSON, JSON)
def test_a_difference_leads_from_any_document_to_any_other(old, new):
    """Also as JSON itself. Only the kind of equal numbers (1, 1.0, True) may be the old one's."""
    delta = json.loads(json.dumps(difference(old, new)))
    assert patched(old, delta) == new
