"""What all commands that ask penstockd do: output for people and as JSON, and what they say while it does not answer."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from penstock_scheduler.api import client as client_module
from penstock_scheduler.cli import main
from penstock_scheduler.cli.ask import print_table
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.waits import WaitLog
from penstock_scheduler.model import ClusterState
from tests.scheduler.builders import snapshot
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import ADAS, BOBS, serving


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """A service that no test changes."""
    with serving(tmp_path_factory.mktemp("api")) as api:
        state = ClusterState(snapshot("t4:2x4", []).nodes, (ADAS, BOBS))
        AllocationLog(api.board.store, None, list).observed(state, time.time())
        WaitLog(api.board.store).observed(state, time.time())
        yield api


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("list", ["1 ", "ada", "running", "2 t4", "bob"]),
        ("list --user bob", ["bob", "queued"]),
        ("show 1", ["ada", "running", "2 t4", "t4-00 (2)"]),
        ("explain 1", ["Job 1 runs", "goodput"]),
        ("usage 1", ["GPU-hours", "relative", "restarts"]),
        ("usage --prices t4=1", ["GPU"]),
        ("list --waiting", ["t4: 6 of 8 GPUs are free", "bob"]),
        ("nodes", ["t4-00", "t4-01", "FREE", "1 ada (2)"]),
        ("rounds list", ["sia", "decide 0.100 s"]),
        ("plan", ["Round 1,", "policy sia", "REASON"]),
        ("plan --dry-run", ["The job would get", " on t4-0"]),
        ("policy list", ["* ", "fifo", "fairness_p"]),
        ("token list", ["boss", "admin"]),
        ("usage --ledger", ["ledger is empty"]),
    ],
)
def test_answers_for_people_and_as_json(unchanged, words, says):
    told = penstock(unchanged, *words.split())
    assert told.exit_code == 0, told.output
    for text in says:
        assert text in told.output
    assert json.loads(penstock(unchanged, *words.split(), "--json").stdout) is not None


def test_a_column_that_is_empty_in_every_row_leaves_its_space_to_the_others(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    rows = [("1", "", "waits for 4 GPUs"), ("2", "", "refused")]
    print_table(("JOB", "ESTIMATED START", "REASON"), rows, "")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["JOB", "REASON"], ["1", "waits", "for", "4", "GPUs"], ["2", "refused"]]
    print_table(("JOB", "ESTIMATED START", "REASON"), [*rows, ("3", "2 h", "")], "")
    assert "ESTIMATED START" in capsys.readouterr().out


@pytest.fixture
def away(tmp_path, monkeypatch):
    """The store of a daemon that has ended."""
    monkeypatch.setattr(client_module, "RETRY_PAUSES_S", ())
    with serving(tmp_path) as api:
        pass
    monkeypatch.setenv("PENSTOCK_URL", api.socket)
    return str(tmp_path / "state")


def status(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    try:
        code = main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_the_daemon_the_answer_comes_from_the_store(away, monkeypatch, capsys):
    for words, says in {"list": "ada", "show 1": "ada", "explain 2": "Job 2", "rounds list": "sia"}.items():
        code, out, err = status(monkeypatch, capsys, *words.split(), "--store", away)
        assert code == 0
        assert says in out
        assert "does not answer" in err
        assert "read from its store" in err


def test_without_daemon_and_store_it_says_what_still_works(away, monkeypatch, capsys):
    for words in (["list", "--store", away + "-not"], ["list", "--waiting"]):
        code, out, err = status(monkeypatch, capsys, *words)
        assert (code, out) == (3, "")
        assert "does not answer" in err
    assert "squeue" in status(monkeypatch, capsys, "list", "--store", away + "-not")[2]


def test_with_several_addresses_the_tried_ones_are_named_within_5_s(monkeypatch, capsys):
    """One machine refuses the connection, and the other one accepts it and says nothing."""
    monkeypatch.setattr(client_module, "RETRY_PAUSES_S", ())
    monkeypatch.setattr(client_module, "FIND_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        first, second = (f"https://127.0.0.1:{each.getsockname()[1]}" for each in (silent, gone))
        gone.close()
        monkeypatch.setenv("PENSTOCK_URL", f"{first},{second}")
        monkeypatch.setenv("PENSTOCK_TOKEN", "t")
        began_s, said = time.monotonic(), list[tuple[float, str]]()
        monkeypatch.setattr("typer.echo", lambda text, **_: said.append((time.monotonic() - began_s, text)))
        code, _, _ = status(monkeypatch, capsys, "list")
    (after_s, text), (_, last) = said
    assert after_s < 5
    tried = rf"{first} \(.*timed out\), {second} \(.*refused\)"
    assert re.fullmatch(rf"penstock: no penstockd leads at {tried}; looks for one for up to 3 s\.", text)
    assert code == 3
    assert re.search(rf"does not answer at {tried}\.", last)


def test_on_80_columns_ids_states_and_users_are_whole_and_long_names_are_cut(monkeypatch, capsys):
    """9 columns of 3, 24, 4, 8, 19, 6, 8, 15 and 4 characters need 107 with what is between them."""
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("JOB", "NAME", "USER", "STATE", "ASKS FOR", "GPUS", "PROGRESS", "ENDS IN", "REASON")
    row = (
        "117",
        "imagenet-not-preemptible",
        "root",
        "starting",
        "strong-scaling 1-64",
        "4 a100",
        "92%",
        "4 to 15 minutes",
        "kept",
    )
    print_table(columns, [row], "")
    head, line = capsys.readouterr().out.splitlines()
    assert len(line) <= 80
    for whole in ("117", "root", "4 a100", "92%", "kept"):
        assert f" {whole} " in f" {line} "
    assert "imagenet…" in line
    assert head.split()[0] == "JOB"
