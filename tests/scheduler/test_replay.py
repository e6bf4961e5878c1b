from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.cli.replay import compare, decide_again
from penstock_scheduler.model import Phase, SolveReport, SolveStatus
from penstock_scheduler.model.records import FORMAT, RoundRecord, UnreadableRound, dump_round, load_round
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, on, snapshot, table


def record(**settings: object) -> RoundRecord:
    jobs = [job(f"j{i}", submit_s=i, max_gpus=4) for i in range(6)]
    jobs.append(job("held", phase=Phase.RUNNING, allocation=on("t4", t4_00=2), submit_s=-5, max_gpus=2))
    models = {
        each.id: table(t4={1: 1.0, 2: 1.8, 4: 3.0}, a100={1: 3.0, 2: 5.0, 4: 9.0 + i}) for i, each in enumerate(jobs)
    }
    policy, full = make_policy("sia", settings)
    state = snapshot("t4:2x4,a100:1x4", jobs, models)
    return RoundRecord(state, full, policy.decide(state))


def test_a_saved_round_decides_again_to_the_same_plan():
    saved = load_round(dump_round(record()), "here")
    assert saved == record() or compare(saved.plan, record().plan) == []
    assert compare(saved.plan, decide_again(saved)) == []


def test_a_round_cut_short_is_replayed_from_its_incumbent():
    """What a time limit left behind is not the best plan; replay gives it again, a search finds the better one."""
    best = record()
    worse = dict(best.plan.chosen)
    dropped = worse.popitem()[0]
    incumbent = dataclasses.replace(best.snapshot, incumbent=worse)
    left = make_policy("sia")[0].decide(incumbent)
    assert dropped in left.waiting
    assert left.solve is not None
    cut = dataclasses.replace(
        left, incumbent=worse, solve=SolveReport("cbc", SolveStatus.TIME_LIMIT, left.solve.objective, 0.0, 20.0)
    )
    assert cut.cut_short
    saved = load_round(dump_round(dataclasses.replace(best, plan=cut)), "here")
    assert compare(saved.plan, decide_again(saved)) == []
    assert compare(saved.plan, decide_again(saved, search=True)) != []


def test_the_command(tmp_path):
    runner = CliRunner()
    path = tmp_path / "round.json"
    path.write_bytes(dump_round(record()))
    result = runner.invoke(make_app(), ["rounds", "replay", str(path)])
    assert result.exit_code == 0
    assert "7 jobs, 3 nodes: the same plan" in result.output
    other = runner.invoke(make_app(), ["rounds", "replay", str(path), "--policy", "fifo"])
    assert other.exit_code == 0
    assert "jobs differ" in other.output
    tampered = json.loads(path.read_bytes())
    tampered["plan"]["assignments"].popitem()
    path.write_text(json.dumps(tampered))
    result = runner.invoke(make_app(), ["rounds", "replay", str(path)])
    assert result.exit_code == 1
    assert "not in the plan" in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "JSON"), ("{}", "snapshot"), ("nonsense", "JSON"), ('{"snapshot": {"round": "x"}}', "snapshot.round")],
)
def test_a_file_that_is_no_round_is_said_to_be_none(text, words):
    with pytest.raises(UnreadableRound, match="this-file") as error:
        load_round(text, "this-file")
    assert words in str(error.value)


def test_a_newer_format_is_refused():
    newer = dump_round(dataclasses.replace(record(), format=FORMAT + 1))
    with pytest.raises(UnreadableRound, match="upgrade penstock"):
        load_round(newer, "this-file")


def test_a_file_that_is_not_there(tmp_path):
    result = CliRunner().invoke(make_app(), ["rounds", "replay", str(tmp_path / "none.json")])
    assert isinstance(result.exception, PenstockError)
    assert "No such file" in str(result.exception)
