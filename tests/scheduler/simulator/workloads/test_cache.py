"""Tables that are kept as Parquet."""

from __future__ import annotations

import pytest

from penstock_scheduler.simulator.workloads import BadInput, cache, read_workload
from tests.scheduler.simulator.workloads.test_reading import OWN, SACCT

pytest.importorskip("pyarrow")

TABLES = {
    "penstock": 'id,submit_s,gpus,duration_s,cpus,model,spec\na,0,4,,,bert-squad,"{""max_gpus"": 16}"\nb,1,2,5,3,,\n',
    "philly": "timestamp,duration,num_gpus,cluster\n2017-10-02 00:00:30,66.0,2,vc1\n2017-10-01 23:59:00,5,1,vc2\n",
    "sia": "name,time,application,num_replicas,batch_size\ncifar10-0,107,cifar10,6,2048\nnew-1,108.5,new,1,8\n",
    "sacct": SACCT
    + "12|ada|lab|COMPLETED|2026-11-02T10:00:00|3600|1440|gres/gpu=4|cpu=16,gres/gpu:a100=4,mem=64G|train\n"
    + "13|bob||TIMEOUT|2026-11-02T10:01:30|60|UNLIMITED|gres/gpu:t4=1|gres/gpu:t4=1|x\n"
    + "13.batch||lab|COMPLETED|2026-11-02T10:01:30|60|||cpu=1,gres/gpu:t4=1|batch\n",
}


@pytest.fixture(autouse=True)
def every_table_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LEAST_ROWS", 1)
    monkeypatch.setattr(cache, "LEAST_BYTES", 1)


@pytest.mark.parametrize("name", TABLES)
def test_a_workload_from_the_cache_is_the_same(tmp_path, name):
    (tmp_path / "trace.csv").write_text(TABLES[name])
    first = read_workload(tmp_path / "trace.csv")
    assert len(list(cache.folder().glob("*.parquet"))) == 1
    assert cache.folder().stat().st_mode & 0o077 == 0, "nobody else reads it"
    again = read_workload(tmp_path / "trace.csv")
    assert again == first
    assert [type(job.cpus) for job in again.jobs] == [type(job.cpus) for job in first.jobs]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "trace.csv"], "nothing beside the trace"


def test_the_cache_is_what_is_read(tmp_path, monkeypatch):
    (tmp_path / "trace.csv").write_text(TABLES["philly"])
    first = read_workload(tmp_path / "trace.csv")
    monkeypatch.setattr(
        "penstock_scheduler.simulator.workloads.reading.read_chunks", lambda *_: pytest.fail("read anew")
    )
    assert read_workload(tmp_path / "trace.csv") == first


def test_a_changed_file_is_read_anew(tmp_path):
    (tmp_path / "trace.csv").write_text(OWN + "a,0,1,5\n")
    assert read_workload(tmp_path / "trace.csv").jobs[0].duration_s == 5
    (tmp_path / "trace.csv").write_text(OWN + "a,0,1,6\n")
    assert read_workload(tmp_path / "trace.csv").jobs[0].duration_s == 6


def test_limits_and_types_are_checked_for_a_cached_table_too(tmp_path):
    (tmp_path / "trace.csv").write_text("id,submit_s,gpus,duration_s,gpu_type\na,0,1,5,mi50\nb,0,1,5,mi50\n")
    assert len(read_workload(tmp_path / "trace.csv", gpu_types=["mi50"]).jobs) == 2
    with pytest.raises(BadInput, match="line 2: found the GPU type 'mi50'"):
        read_workload(tmp_path / "trace.csv")
    with pytest.raises(BadInput, match="line 3: found yet another job"):
        read_workload(tmp_path / "trace.csv", gpu_types=["mi50"], most_jobs=1)


def test_a_broken_or_missing_cache_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "trace.csv").write_text(TABLES["philly"])
    first = read_workload(tmp_path / "trace.csv")
    for file in cache.folder().iterdir():
        file.write_bytes(b"no Parquet")
    assert read_workload(tmp_path / "trace.csv") == first
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read_workload(tmp_path / "trace.csv") == first
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert read_workload(tmp_path / "trace.csv") == first


def test_old_tables_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MOST_TABLES", 2)
    for number in range(4):
        (tmp_path / "trace.csv").write_text(OWN + f"a,{number},1,5\n")
        read_workload(tmp_path / "trace.csv")
    assert len(list(cache.folder().iterdir())) == 2
