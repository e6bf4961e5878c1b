"""What a user gains by odd requests for licences.

Slurm takes a list of up to 1,023 characters, and a name may come several times, up to its total. Each list took 1.7 ms in
each observation while its job waited, so 5,000 jobs of one user held up every round by 8 s.
"""

from __future__ import annotations

import time

from penstock_slurm.jobs.licences import wanted


def test_a_list_of_licences_is_read_once_and_not_in_every_observation() -> None:
    lists = [f"{'a,' * 500}a:{number}" for number in range(1, 1001)]
    for text in lists:
        wanted(text)
    begun_s = time.perf_counter()
    found = [wanted(text) for text in lists for _ in range(20)]
    assert time.perf_counter() - begun_s < 1.0
    assert found[-1] == {"a": 1500}
