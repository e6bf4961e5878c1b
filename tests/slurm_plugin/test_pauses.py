"""The pause of a move, as the report of the next run ends it."""

from __future__ import annotations

import pytest

from penstock_profiles.wire import ControlMessage, Report, Started
from penstock_slurm.pauses import measured

MOVED = ControlMessage(job_id="7", epoch=3, round=1, moved_s=1000.0, pauses_s=(9.0,))


@pytest.mark.parametrize(("begun_s", "pauses_s"), [(1012.0, (9.0, 12.0)), (1000.0, (9.0, 0.0)), (700.0, (9.0,))])
def test_a_pause_that_ends_before_it_began_is_not_measured(begun_s: float, pauses_s: tuple[float, ...]) -> None:
    """The clock of the node or of penstockd was set, or another penstockd leads."""
    report = Report(job_id="7", epoch=3, sequence=0, time_s=begun_s, body=Started(gpu_type="t4", gpu_ids={"n0": (0,)}))
    found = measured(MOVED, report)
    assert found is not None
    assert (found.moved_s, found.pauses_s) == (None, pauses_s)
