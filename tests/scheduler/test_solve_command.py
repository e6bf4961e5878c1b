from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import dump_round
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import staged
from tests.scheduler.test_replay import record


@pytest.fixture
def arrays(tmp_path):
    """Two jobs, 3 GPUs: 2 + 1 cost 0.6 + 0.8 = 1.4, and a fourth would take off 0.2; see test_solve."""
    path = tmp_path / "round.npz"
    np.savez(
        path,
        cost=np.array([[0.8, 0.6, 0.5]] * 2),
        config_gpus=np.array([1, 2, 4]),
        config_type=np.zeros(3, dtype=np.int64),
        capacity=np.array([3]),
        lambda_noalloc=1.1,
        type_names=np.array(["t4"]),
    )
    return path


def run(*arguments):
    return CliRunner().invoke(make_app(), ["rounds", "solve", *map(str, arguments)])


def test_arrays(arrays):
    result = run(arrays)
    assert result.exit_code == 0
    assert "2 jobs, 1 GPU types with 3 GPUs" in result.output
    assert "dual: optimal" in result.output
    assert "objective 1.4, bound 1.4, gap 0.0000%" in result.output
    assert "CPU seconds" in result.output
    assert "one more GPU of type t4 would lower the objective by about 0.2" in result.output


@pytest.mark.parametrize("solver", ["auto", "dual", "milp"])
def test_arrays_as_json(arrays, solver):
    result = json.loads(run(arrays, "--json", "--solver", solver).output)
    assert result["objective"] == pytest.approx(1.4)
    assert result["bound"] == pytest.approx(1.4)
    assert result["gap"] <= 1e-4
    assert result["status"] == "optimal"
    assert result["cpu_s"] >= 0
    assert result["prices"] == ({} if solver == "milp" else {"t4": pytest.approx(0.2)})


def test_forced_entries_are_read(arrays):
    """The first must have 4 of 3 GPUs."""
    given = dict(np.load(arrays))
    np.savez(arrays, **given, forced_config=np.array([2, -1]))
    assert "forced entries alone" in str(run(arrays).exception)


@pytest.mark.parametrize("solver", ["auto", "dual", "milp"])
def test_a_saved_round_is_decided_again_with_that_solver(tmp_path, solver):
    path = tmp_path / "7.json"
    saved = record()
    path.write_bytes(dump_round(saved))
    result = json.loads(run(path, "--json", "--solver", solver).output)
    assert result["objective"] == pytest.approx(saved.plan.solve.objective)
    assert result["solver"] == ("milp-highs" if solver == "milp" else "dual")
    assert set(result["prices"]) == (set() if solver == "milp" else {"a100", "t4"})


@pytest.mark.parametrize("choice", [staged("sia", "proportional"), staged("sia", partitions={"other": "fifo"})])
def test_a_round_of_a_policy_of_parts_is_solved_by_its_first(tmp_path, choice):
    """A part of its own holds one of the two types, so that the program has prices for the other alone."""
    path, saved = tmp_path / "7.json", record()
    nodes = tuple(
        dataclasses.replace(node, partitions=("other",) if node.gpu_type == "a100" else node.partitions)
        for node in saved.snapshot.nodes
    )
    policy, full = make_policy(choice)
    state = dataclasses.replace(saved.snapshot, nodes=nodes)
    path.write_bytes(dump_round(type(saved)(state, full, policy.decide(state))))
    result = json.loads(run(path, "--json", "--solver", "dual").output)
    assert result["solver"] == "dual"
    assert "t4" in result["prices"]
    assert json.loads(run(path, "--json", "--solver", "milp").output)["solver"] == "milp-highs"


def test_files_that_hold_no_problem_are_said_to_hold_none(tmp_path, arrays):
    rubbish = tmp_path / "rubbish.npz"
    rubbish.write_text("no arrays")
    part = tmp_path / "part.npz"
    np.savez(part, cost=np.zeros((1, 1)))
    jobs = tmp_path / "nan.npz"
    np.savez(jobs, **(dict(np.load(arrays)) | {"cost": np.full((2, 3), np.nan)}))
    fifo = tmp_path / "fifo.json"
    saved = record()
    fifo.write_bytes(dump_round(type(saved)(saved.snapshot, PolicyChoice(name="fifo"), saved.plan)))
    for path, words in (
        (rubbish, "has no arrays"),
        (part, "lacks config_gpus, config_type, capacity, lambda_noalloc"),
        (tmp_path / "none.npz", "No such file"),
        (tmp_path / "none.json", "No such file"),
        (jobs, "use inf for an impossible entry"),
        (fifo, "policy fifo decided without a solver"),
    ):
        error = run(path).exception
        assert isinstance(error, PenstockError), path
        assert words in str(error)
