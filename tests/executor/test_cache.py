"""The shared cache, with real processes."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_executor.cache import CacheError, SharedCache, cache_bytes

SIZE = 1000
"""Bytes of an item in these tests."""

EPOCHS = """
import json, random, sys
from penstock_executor.cache import SharedCache
name, seed = sys.argv[1], int(sys.argv[2])
cache = SharedCache.attach(name)
rng, rates = random.Random(seed), []
for _ in range(3):
    hits = cache.hits
    for index in rng.sample(range(cache.items), cache.items):
        data = cache.get(index, lambda: bytes([index % 251]) * 1000)
        assert data == bytes([index % 251]) * 1000, index
    rates.append((cache.hits - hits) / cache.items)
print(json.dumps(rates))
cache.close()
"""


def item(index: int) -> bytes:
    return bytes([index % 251]) * SIZE


def test_every_epoch_after_the_first_hits_the_part_that_fits():
    """Room for 40 of 100 items, read in another order each time. A cache that evicts the oldest would hit fewer."""
    rng = random.Random(1)
    with SharedCache.create(100, 40 * SIZE) as cache:
        for epoch in range(5):
            before = cache.hits
            for index in rng.sample(range(100), 100):
                assert cache.get(index, lambda index=index: item(index)) == item(index)  # type: ignore[misc]
            assert cache.hits - before == (0 if epoch == 0 else 40)
            assert cache.held == 40


def test_memory_buys_hits_in_proportion():
    for part in (0, 10, 50, 100):
        with SharedCache.create(100, part * SIZE) as cache:
            for _ in range(2):
                for index in range(100):
                    cache.get(index, lambda index=index: item(index))  # type: ignore[misc]
            assert cache.hits == part


def test_processes_of_a_node_share_one_cache():
    """Three processes at once, in different orders. Each reads the right items, and together they hold no item twice."""
    with SharedCache.create(200, 80 * SIZE) as cache:
        running = [
            subprocess.Popen([sys.executable, "-c", EPOCHS, cache.name, str(seed)], stdout=subprocess.PIPE)
            for seed in range(3)
        ]
        for process in running:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            assert json.loads(out)[1:] == [0.4, 0.4], "the same part in every epoch"
        assert cache.held == 80
        assert all(cache.get(index, lambda: b"") in (item(index), b"") for index in range(200))


def test_a_process_that_ends_takes_nothing_away():
    with SharedCache.create(4, 4 * SIZE) as cache:
        code = "import sys; from penstock_executor.cache import SharedCache; SharedCache.attach(sys.argv[1]).get(1, lambda: b'x')"
        subprocess.run([sys.executable, "-c", code, cache.name], check=True, timeout=30)
        assert cache.get(1, lambda: b"not read") == b"x"


def _worker(cache: SharedCache, index: int) -> None:
    cache.get(index, lambda: item(index))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process")
def test_workers_of_a_data_loader_inherit_it(method: str):
    with SharedCache.create(3, 3 * SIZE) as cache:
        context = multiprocessing.get_context(method)
        workers = [context.Process(target=_worker, args=(cache, index)) for index in range(3)]  # type: ignore[attr-defined]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=60)
            assert worker.exitcode == 0
        assert cache.held == 3


def test_it_ends_with_its_maker():
    cache = SharedCache.create(1, SIZE)
    name = cache.name
    cache.close()
    assert not Path("/dev/shm", name).exists()
    with pytest.raises(CacheError, match="another node"):
        SharedCache.attach(name)


def test_its_size_is_the_grant_less_what_the_job_needs():
    assert cache_bytes(62_500, 2_500) == 60_000 * 1024 * 1024
    assert cache_bytes(1_000, 2_500) == 0
    with pytest.raises(CacheError, match="use a smaller cache"):
        SharedCache.create(1, 1 << 60)
    with pytest.raises(CacheError, match="items=0"):
        SharedCache.create(0, 1)
    with SharedCache.create(1, 10) as cache, pytest.raises(IndexError):
        cache.get(1, lambda: b"")
