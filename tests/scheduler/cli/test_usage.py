"""What jobs used and cost: `penstock usage`, `cost` and the DataFrame, against a real service."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

from penstock_scheduler.accounts.usage import DTYPES, usage
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.model import Phase
from tests.scheduler.builders import job, on
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import BOBS, serving

ADAS = dataclasses.replace(
    job("1", user="ada", account="vision", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2)),
    partitions=("night", "all"),
)


@pytest.fixture
def api(tmp_path):
    """Ada's job ended at 5,000 s after 2 GPU-hours; bob's runs and has used half of one."""
    with serving(tmp_path) as api:
        bobs = dataclasses.replace(BOBS, phase=Phase.RUNNING, allocation=on("t4", t4_01=2))
        api.look(ADAS, bobs, gpu_seconds={"1": {"t4": 7200.0}, "2": {"t4": 1800.0}})
        api.look(bobs, finished={"1": Fate("COMPLETED", 0, 5000.0)}, gpu_seconds={"2": {"t4": 1800.0}})
        yield api


def lines(api, *words: str, who: str | None = None) -> list[tuple[str, str, str, int, float, float | None]]:
    told = penstock(api, "usage", *words, "--json", who=who)
    return [tuple(line.values()) for line in json.loads(told.stdout)["lines"]]


def test_usage_of_ended_and_running_jobs(api):
    ada, bob = ("ada", "t4", "site", 1, 2.0, None), ("bob", "t4", "site", 1, 0.5, None)
    assert lines(api) == [ada, bob]
    assert lines(api, who="ada") == [ada]
    assert lines(api, "--by", "partition") == [("night", *ada[1:]), (BOBS.partitions[0], *bob[1:])]
    assert lines(api, "--by", "account", who="ada") == [("vision", *ada[1:])]
    assert lines(api, "--by", "gpu-type") == [("t4", "t4", "site", 2, 2.5, None)]


@pytest.mark.parametrize(
    ("times", "users"),
    [
        (("1970-01-01T01:23:20+00:00", "2999-01-01"), ["ada", "bob"]),  # the job's end is the first time that counts
        (("1970-01-01T01:23:21+00:00", "2999-01-01"), ["bob"]),
        (("1970-01-01T00:00:01+00:00", "1970-01-01T01:23:20+00:00"), []),  # and the first that does not
        (("1970-01-01T00:00:01+00:00", "1970-01-01T01:23:21+00:00"), ["ada"]),
    ],
)
def test_a_job_counts_at_its_end(api, times, users):
    assert [line[0] for line in lines(api, "--from", times[0], "--to", times[1])] == users


def test_the_cloud_costs_what_was_paid(api):
    def line(run: str, kind, amount: float, text: str) -> LedgerLine:
        return LedgerLine(
            id=0,
            key=f"cloud:{run}:{kind}",
            time_s=6000.0,
            account="vision",
            user="ada",
            job="1",
            kind=kind,
            amount=amount,
            text=text,
        )

    api.board.store.charge(
        [
            line("1.1", "committed", 9.0, "for 1 a100"),
            line("1.1", "usd", 3.5, "for i-1 3600 s"),
            line("1.1", "cloud-gpu-seconds", 3600.0, "a100"),
            line("1.2", "usd", 0.0, "no charge: no instance was launched"),
        ]
    )
    assert lines(api, "--by", "gpu-type", who="ada") == [
        ("t4", "t4", "site", 1, 2.0, None),
        ("a100", "a100", "cloud", 1, 1.0, 3.5),
        ("", "", "cloud", 1, 0.0, 0.0),
    ]
    assert "a100 in the cloud" in penstock(api, "usage").output


def test_cost_is_gpu_hours_times_the_price(api):
    assert "USD" in penstock(api, "usage", "--prices", "t4=0.5").output
    found = json.loads(penstock(api, "usage", "--prices", "t4=0.5", "--json").stdout)["lines"]
    assert [(line["name"], line["usd"]) for line in found] == [("ada", 1.0), ("bob", 0.25)]
    one = json.loads(penstock(api, "usage", "1", "--prices", "t4=0.5", "--json").stdout)
    assert (one["gpu_hours"], one["usd"]) == ({"t4": 2.0}, {"t4": 1.0})
    assert "cost       1.00 USD for t4" in penstock(api, "usage", "1", "--prices", "t4=0.5").output
    for words in (["usage"], ["usage", "1"]):
        unpriced = penstock(api, *words, "--prices", "a100=1").exception
        assert "no price of a GPU-hour is known for t4" in str(unpriced)


def test_the_sites_prices(tmp_path):
    with serving(tmp_path, prices={"t4": 0.5}) as api:
        api.look(ADAS, BOBS, gpu_seconds={"1": {"t4": 7200.0}})
        assert lines(api) == [("ada", "t4", "site", 1, 2.0, 1.0)]
        (line,) = json.loads(penstock(api, "usage", "--json").stdout)["lines"]
        assert line["usd"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--by", "job"), "choose one of user, account, gpu-type, partition"),
        (("--from", "yesterday"), "--from=yesterday: give a date"),
        (("--ledger", "--from", "2026-11-02"), "leave out the job"),
        (("1", "--from", "2026-11-02"), "are for all jobs"),
        (("--from", "2026-11-02", "--to", "2026-11-02"), "is not before"),
    ],
)
def test_mistakes_are_named(api, words, message):
    assert message in str(penstock(api, "usage", *words).exception)


def test_a_data_frame_and_files_of_it(api, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_URL", api.socket)
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    frame = usage("account", "1970-01-02", "1970-01-03")
    expected = {"account" if name == "name" else name: dtype for name, dtype in DTYPES.items()}
    assert (len(frame), frame.dtypes.astype(str).to_dict()) == (0, expected)
    frame = usage()
    assert frame["user"].tolist() == ["ada", "bob"]
    assert frame["usd"].isna().all()
    assert "name" not in usage("gpu-type").columns
    assert penstock(api, "usage", "--csv", str(tmp_path / "usage.csv")).exit_code == 0
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "usage.csv", dtype=frame.dtypes.to_dict()), frame)
    assert "No such file" in str(penstock(api, "usage", "--csv", str(tmp_path / "none" / "usage.csv")).exception)
    pytest.importorskip("pyarrow")
    assert penstock(api, "usage", "--parquet", str(tmp_path / "usage.parquet")).exit_code == 0
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "usage.parquet"), frame, check_dtype=False)
