"""`run.evaluating` serves requests in the midst of an evaluation, with real processes on CPUs."""

import json
import shutil
from pathlib import Path

import pytest

from ..elastic import gang
from ..spool import ROOT, bodies, job_environment, tell, wait_for

SCRIPT = ROOT / "tests" / "executor" / "train_evaluating.py"
LOOPS = [(), ("--own",)]


def weights(folder: Path) -> list[float]:
    return json.loads((folder / "weights.json").read_text())


def noted(folder: Path, what: str, rank: int = 0) -> list:
    lines = [json.loads(line) for line in (folder / f"noted-{rank}.jsonl").read_text().splitlines()]
    return [(line["epoch"], line[what]) for line in lines if what in line]


def run_twice(folder: Path, *options: str, processes: int, epoch: int = 1) -> None:
    """Undisturbed, and with a stop in the evaluation of that epoch."""
    with gang(SCRIPT, folder / "whole", *options, processes=processes) as job:
        job.finish()
    with gang(SCRIPT, folder / "stopped", *options, f"--stop-in={epoch}", processes=processes) as job:
        assert job.wait() == 143, job.said.read_text()
    with gang(SCRIPT, folder / "stopped", *options, f"--stop-in={epoch}", processes=processes) as job:
        job.finish()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_after_the_loop_leaves_at_once_and_evaluates_again(
    tmp_path: Path, loop: tuple[str, ...], processes: int
):
    """The last process has more batches than the others, which are done and wait for it when it is stopped."""
    run_twice(tmp_path, *loop, processes=processes, epoch=0)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    first = [batch for epoch, batch in noted(stopped, "evaluates", processes - 1) if epoch == 0]
    more = 4 * (processes - 1)
    assert first[: first.index(0, 1)][-1] < 3 + more - 1 or processes == 1, "it left before the end of the evaluation"
    assert first[first.index(0, 1) :] == list(range(3 + more)), "and evaluated again from the beginning"
    assert noted(stopped, "evaluated") == [(0, True), (1, True), (2, True)]
    assert [step for epoch, step in noted(stopped, "step") if epoch == 0] == [*range(1, 11), 10]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_in_mid_epoch_saves_at_once(tmp_path: Path, loop: tuple[str, ...], processes: int):
    run_twice(tmp_path, *loop, "--in-epoch", processes=processes)
    stopped = tmp_path / "stopped"
    assert weights(stopped) == weights(tmp_path / "whole")
    assert noted(stopped, "step") == noted(tmp_path / "whole", "step"), "no step is done twice"
    if processes == 2:
        evaluated = [batch for epoch, batch in noted(stopped, "evaluates", 1) if epoch == 1]
        assert 2 in evaluated
        assert 6 not in evaluated, "it left before the end of the evaluation"


def test_processes_that_exchange_values_in_each_batch_leave_together(tmp_path: Path):
    run_twice(tmp_path, "--together", processes=2)
    stopped = tmp_path / "stopped"
    assert weights(stopped) == weights(tmp_path / "whole")
    assert noted(stopped, "evaluates", 0) == noted(stopped, "evaluates", 1)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_for_a_checkpoint_is_answered_with_the_newest_one(tmp_path: Path, loop: tuple[str, ...]):
    """In the code after the inner loop, that is the state before the last step. The run says how far it will go."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    environ = job_environment(spool) | {"OMP_NUM_THREADS": "1"}
    with gang(SCRIPT, tmp_path / "job", *loop, "--hold", environ=environ) as job:
        wait_for(lambda: bodies(spool, 1, "checkpointed"), "the checkpoint before the last step")
        tell(spool, 1, "save")
        wait_for(lambda: [b for b in bodies(spool, 1, "checkpointed") if b.request == "save"], "answer")
        (job.said.parent / "released").touch()
        job.finish()
    (answer,) = [body for body in bodies(spool, 1, "checkpointed") if body.request == "save"]
    assert answer.progress == 36
    assert [body.total for body in bodies(spool, 1, "started")] == [120]


@pytest.mark.parametrize("there", ["removed", "a file"])
def test_a_checkpoint_folder_that_is_gone_is_made_again_and_a_failed_save_is_reported(tmp_path: Path, there: str):
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    environ = job_environment(spool) | {"OMP_NUM_THREADS": "1"}
    with gang(SCRIPT, tmp_path / "job", "--in-epoch", "--hold", environ=environ) as job:
        wait_for(lambda: bodies(spool, 1, "checkpointed"), "the proof that it can save")
        checkpoints = job.said.parent / "checkpoints"
        shutil.rmtree(checkpoints)
        if there == "a file":
            checkpoints.touch()
        tell(spool, 1, "save")
        kind = "save_failed" if there == "a file" else "checkpointed"
        (answer,) = wait_for(lambda: [b for b in bodies(spool, 1, kind) if b.request == "save"], "answer")
        if there == "a file":
            assert str(checkpoints) in answer.text
            checkpoints.unlink()
        (job.said.parent / "released").touch()
        job.finish()
