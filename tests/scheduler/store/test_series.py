"""Samples and the queue in both kinds of database."""

from __future__ import annotations

from penstock_scheduler.api.history_messages import JobSample, QueueEntry

HOUR = 3600


def sample(progress: float, **fields: object) -> JobSample:
    return JobSample.model_validate({"time_s": 0, "span_s": 0, "gpus": 2, "progress": progress} | fields)


def test_samples_are_averaged_by_steps_and_thinned_out(store):
    for minute in range(120):
        at = 10 * HOUR + 60 * minute
        store.add_samples(at, [("1", sample(minute, goodput=minute, utilisation=0.5))], {"busy": minute})
        store.add_samples(at, [("1", sample(-1.0))], {"busy": -1.0})  # what is there already stays
    steps = store.samples("1", 10 * HOUR, 11 * HOUR, 1800)
    assert [(each.time_s, each.progress, each.goodput) for each in steps] == [(36_000, 29, 14.5), (37_800, 59, 44.5)]
    assert (steps[0].utilisation, steps[0].memory_mb, steps[0].expected) == (0.5, None, None)
    assert store.series(["busy"], 10 * HOUR, 12 * HOUR, HOUR) == {"busy": [(36_000, 29.5), (39_600, 89.5)]}
    after = store.thin(11 * HOUR, 0, "", 10)
    assert store.thin(11 * HOUR, 0, after, 10) == ""
    assert [each.span_s for each in store.samples("1", 0, 11 * HOUR, 1)] == [HOUR]
    assert store.series([], 0, 11 * HOUR, 1) == {"busy": [(36_000, 29.5)]}
    assert len(store.samples("1", 11 * HOUR, 12 * HOUR, 1)) == 60
    for name in ("", "name "):
        store.thin(12 * HOUR, 11 * HOUR, name, 10)
    assert store.samples("1", 0, 11 * HOUR, 1) == []
    assert len(store.samples("1", 0, 12 * HOUR, 1)) == len(store.series([], 0, 12 * HOUR, 1)["busy"]) == 1


def test_the_queue_is_what_has_not_ended(store):
    entry = QueueEntry(position=None, job="1", user="ada", submit_s=5.0, since_s=6.0, code="held", text="is held")
    other = entry.model_copy(update={"job": "2", "submit_s": 4.0, "estimated_start_s": 9.0})
    store.save_waits([entry, other], {})
    assert store.waits() == [other, entry]
    store.save_waits([entry.model_copy(update={"text": "still"})], {("2", 6.0): 7.0})
    assert [(each.job, each.text) for each in store.waits()] == [("1", "still")]
