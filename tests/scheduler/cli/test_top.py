"""`penstock top --once`: what a user sees at common widths."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.cli.terminal.picture import recorded
from penstock_scheduler.cli.terminal.printed import render
from penstock_scheduler.model import Node, Phase, Refusal
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import serving

RUNNING = on("t4", t4_00=4, t4_01=4)


def record(nodes: str | tuple[Node, ...] = "t4:2x4,a100:1x8", **fields: object) -> RoundRecord:
    """Job 10 runs on 8 T4, 9 is new, 7 can never run, 8 is refused; all submitted in the same second."""
    jobs = [
        job("10", phase=Phase.RUNNING, allocation=RUNNING, min_gpus=8, max_gpus=8, adaptivity="rigid"),
        job("9", max_gpus=4, gpu_types=["a100"]),
        job("7", gpu_types=["h100"], max_gpus=2),
    ]
    jobs[1] = dataclasses.replace(jobs[1], name="[/red] a name that is longer than it has room for")
    shown = dataclasses.replace(snapshot(nodes, jobs), refused=(Refusal("8", "[b]", "ada", "unknown key"),), **fields)
    policy, choice = make_policy("sia")
    return RoundRecord(shown, choice, policy.decide(shown))


def screen(width: int, shown: RoundRecord | None = None) -> list[str]:
    console = Console(width=width, height=60, color_system=None)
    with console.capture() as capture:
        console.print(render(recorded(shown or record()), now_s=1200.0))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_round_tells_its_age_and_jobs_come_in_the_order_of_their_numbers():
    title, *lines = screen(120)
    assert "(3 min ago)" in title
    assert "jobs: 2 with GPUs, 1 waiting" in title
    jobs = [line.split()[0] for line in lines[3:] if line.split()[0].isdigit()]
    assert jobs == ["9", "10", "7"], "those with GPUs first"


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_gpus_and_reason_are_readable_at_every_width(width):
    lines = screen(width)
    assert all(len(line) <= width for line in lines)
    row = next(line for line in lines if line.startswith("10 "))
    assert "rigid 8" in row
    assert "8 t4" in row
    assert "keeps 8 t4" in row
    assert ("t4-00,t4-01" in row, "t4-00 +1" in row) == {80: (False, False), 200: (True, False)}.get(
        width, (False, True)
    )
    told = " ".join(" ".join(lines).split())
    assert "no node here has h100; the types are a100, t4" in told


def test_names_are_text_and_no_markup():
    text = "\n".join(screen(120))
    assert "[/red] a name" in text
    assert "Job 8 ([b]) is not managed: unknown key" in text


def test_bars_of_a_large_cluster_fit():
    nodes = tuple(Node(f"t4-{i:03d}", "t4", 8, ("all",), may_start=i > 0, gpus_others=2) for i in range(200))
    shown = RoundRecord(
        dataclasses.replace(snapshot(nodes, [])),
        PolicyChoice(name="sia"),
        make_policy("sia")[0].decide(snapshot(nodes, [])),
    )
    line = next(line for line in screen(80, shown) if line.startswith("t4"))
    bar = line.split()[1]
    assert len(bar) == 40
    assert "Penstock manages no jobs that you may see." in screen(80, shown)
    assert bar.count("▒") == 10, "400 of 1600"
    assert "8 out of service" in " ".join(screen(80, shown))


def test_without_penstockd_the_newest_round_of_the_store_is_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_URL", f"unix:{tmp_path}/nobody.sock")
    state = tmp_path / "state"
    open_store(state, writer=True).save_round(record())
    done = CliRunner().invoke(make_app(), ["top", "--store", str(state)])
    assert done.exit_code == 0
    assert done.stdout.startswith("Round 1 at ")
    assert "is read from its store" in done.stderr
    assert "\x1b" not in done.output


def test_without_a_terminal_the_cluster_is_printed_once(tmp_path, monkeypatch):
    with serving(tmp_path) as api:
        monkeypatch.setenv("PENSTOCK_URL", api.url)
        monkeypatch.setenv("PENSTOCK_TOKEN", api.tokens["bob"])
        done = CliRunner().invoke(make_app(), ["top"])
    assert done.exit_code == 0, done.output
    jobs = [line.split()[0] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert jobs == ["2"], "bob sees his own jobs"
    assert "2 of 8 allocated" in done.stdout


def test_one_json_document_has_the_cluster_and_the_jobs_from_the_daemon_and_from_its_store(tmp_path, monkeypatch):
    """`--json`, as `explain` and `list` have it. What the caller may not see is not in it."""
    with serving(tmp_path) as api:
        monkeypatch.setenv("PENSTOCK_URL", api.url)
        monkeypatch.setenv("PENSTOCK_TOKEN", api.tokens["bob"])
        done = CliRunner().invoke(make_app(), ["top", "--json"])
    assert done.exit_code == 0, done.output
    seen = json.loads(done.stdout)
    assert [line["id"] for line in seen["lines"]] == ["2"], "bob sees his own jobs"
    assert sum(node["gpus"] for node in seen["nodes"]) == 8

    monkeypatch.setenv("PENSTOCK_URL", f"unix:{tmp_path}/nobody.sock")
    state = tmp_path / "state"
    open_store(state, writer=True).save_round(record())
    done = CliRunner().invoke(make_app(), ["top", "--json", "--store", str(state)])
    assert done.exit_code == 0, done.output
    seen = json.loads(done.stdout)
    assert (seen["round"], [line["id"] for line in seen["lines"]]) == (1, ["9", "10", "7"])
    assert [each["id"] for each in seen["refused"]] == ["8"]
