"""Elastic training with real processes on CPUs (gloo)."""

import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_executor import Checkpoints
from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import (
    RUN_DIR_VARIABLE,
    JobControl,
    JobStatus,
    control_path,
    statuses_dir,
)

from ..elastic import (
    SAID,
    SCRIPT,
    assert_each_sample_once,
    environment,
    final,
    gang,
    largest_difference,
    last_record,
    steps,
    torch,
    torchrun,
)
from ..spool import JOB, ROOT, bodies, process, tell, wait_for

QUADRATIC = ROOT / "tests" / "executor" / "train_quadratic.py"


def train(folder: Path, *options: str, processes: int = 1, spool: Path | None = None, run_dir: Path | None = None):
    environ = environment(spool) | ({RUN_DIR_VARIABLE: str(run_dir)} if run_dir is not None else {})
    return gang(SCRIPT, folder, *options, processes=processes, environ=environ)


def finish(child) -> str:
    """Wait for a process that was not forked, and therefore takes seconds to import PyTorch."""
    said = child.communicate(timeout=240)[1]
    assert child.returncode == 0, said
    return said


def test_processes_and_micro_steps_do_not_change_what_is_learned(tmp_path: Path):
    """Batch 32 as 32, as 4 x 8 of one process, and as 3 x 2 x 5 or 6 of three: the same mean of gradients."""
    cases = {"one": (1, ()), "four": (1, ("--max-atomic=8",)), "three": (3, ("--max-atomic=6", "--workers=1"))}
    for name, (processes, options) in cases.items():
        with train(tmp_path / name, "--size=203", *options, processes=processes) as job:
            job.finish()
        assert_each_sample_once(tmp_path / name, 3, 203)
        assert final(tmp_path / name)["steps"] == 3 * 7
        assert largest_difference(final(tmp_path / name)["weights"], final(tmp_path / "one")["weights"]) < 1e-12
    assert {len(record["seen"]) for record in steps(tmp_path / "three")} >= {5, 6}


def test_all_processes_train_with_the_batch_that_the_first_one_has_chosen(tmp_path: Path):
    """The last one does not: a note on its node says that 8 samples do not fit, so it would take 6, 5 and 5."""
    with train(tmp_path, "--size=96", "--epochs=1", "--last-is-short=8", processes=2) as job:
        job.finish()
    assert [len(record["seen"]) for record in steps(tmp_path)] == [16] * 6, "three steps of two processes"


def test_the_whole_steps_gradient_is_clipped(tmp_path: Path):
    """Not that of a micro-step or of a process."""
    options = ("--size=203", "--epochs=1", "--clip=0.01")
    cases = {"one": (1, ()), "four": (1, ("--max-atomic=8",)), "two": (2, ("--max-atomic=8",))}
    for name, (processes, more) in cases.items():
        with train(tmp_path / name, *options, *more, processes=processes) as job:
            job.finish()
        assert largest_difference(final(tmp_path / name)["weights"], final(tmp_path / "one")["weights"]) < 1e-12
    with train(tmp_path / "free", "--size=203", "--epochs=1") as job:
        job.finish()
    moved = largest_difference(final(tmp_path / "free")["weights"], final(tmp_path / "one")["weights"])
    assert moved > 0.05, "7 steps of 0.05 x 0.01, with momentum at most 10 x as long, do not get that far"


def test_with_drop_last_an_epoch_is_worth_the_steps_that_it_has(tmp_path: Path):
    """47 samples at batch 32: one step per epoch. Three epochs are worth 96 samples, not 141."""
    with train(tmp_path, "--size=47", "--drop-last", "--max-batch=32") as job:
        job.finish()
    assert (final(tmp_path)["steps"], final(tmp_path)["progress"]) == (3, 96)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_killed_at_random_points_it_goes_on_from_a_whole_checkpoint(tmp_path: Path, kills: int):
    """A checkpoint every 0.3 s, and steps of at least 0.02 s. The loss is at most an interval and the time of one write."""
    chance, lost = random.Random(), 0
    epochs = 4 + kills // 2  # a run makes a quarter of one before it is killed: enough that none completes
    options = (f"--epochs={epochs}", "--size=6001", "--sleep=0.02", "--checkpoint-every=0.3")
    for run in range(1, kills + 1):
        with train(tmp_path, *options) as job:
            wait_for(lambda run=run: last_record(tmp_path).get("run") == run, "step")
            time.sleep(chance.uniform(0, 1))
            job.send(signal.SIGKILL)
            assert job.wait() == -signal.SIGKILL
        reached = max((record["step"] for record in steps(tmp_path) if record["run"] == run), default=-1)
        found = Checkpoints(tmp_path / "checkpoints", run).latest()
        lost = max(lost, reached - (found.step if found else 0))
    (tmp_path / "fast").touch()
    with train(tmp_path, *options) as job:
        job.finish()
    assert_each_sample_once(tmp_path, epochs, 6001)
    assert lost <= 200, f"{lost} steps lost; an interval has about 15, and more if the machine stands still"


def test_it_answers_the_daemon_stops_when_asked_and_gives_way_to_a_later_run(tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    options = ("--epochs=1000", "--sleep=0.01", "--max-batch=256")
    with train(tmp_path, *options, spool=spool) as job:
        seen = wait_for(lambda: [b for b in bodies(spool, 1, "observation") if b.grad_var is not None], "noise")[0]
        assert (seen.gpu_type, seen.nodes, seen.gpus) == ("cpu", 1, 1)
        assert 0.01 < seen.step_time_s < 10
        tell(spool, 1, "save")
        wait_for(lambda: [b for b in bodies(spool, 1, "checkpointed") if b.request == "save"], "answer")
        wait_for(lambda: steps(tmp_path)[-1]["batch"] > 32, "larger batch")
        reached = wait_for(lambda: bodies(spool, 1, "result"), "result of an epoch")[0]
        assert reached.metric < 0 < reached.progress
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    (ended,) = bodies(spool, 1, "ended")
    assert (ended.outcome, ended.text) == ("stopped", "")
    last, saved = steps(tmp_path)[-1]["step"], Checkpoints(tmp_path / "checkpoints", 1).latest()
    assert saved is not None
    with train(tmp_path, *options, spool=spool) as job:
        (started,) = wait_for(lambda: bodies(spool, 2, "started"), "second start")
        assert started.progress == ended.progress > 0
        again = wait_for(lambda: [record for record in steps(tmp_path) if record["run"] == 2], "step")[0]
        assert (again["step"], again["batch"]) == (last + 1, saved.meta["batch"]["total"])
        tell(spool, 3)
        assert job.wait() == 75
    assert bodies(spool, 2, "ended")[0].outcome == "superseded"


def test_stopped_with_workers_and_a_loader_for_validation_it_saves_and_goes_on(tmp_path: Path):
    """Slurm signals a data loader's workers too, also those of a loader that is not Penstock's."""
    options = ("--workers=2", "--validation-workers=1", "--epochs=2", "--size=203")
    with train(tmp_path, "--hold=9", *options) as job:
        wait_for(lambda: "held in step 9" in job.said.read_text(), "a step of the second epoch")
        job.send(signal.SIGTSTP)
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.said.read_text()
    with train(tmp_path, *options) as job:
        said = job.finish()
    assert "continues" in said
    assert_each_sample_once(tmp_path, 2, 203)


def train_with_and_without_a_stop(folder: Path, *options: str) -> None:
    """Train in `folder`/whole without a stop, and in `folder` with one in mid-epoch."""
    with train(folder / "whole", *options) as job:
        job.finish()
    with train(folder, "--hold=9", *options) as job:
        wait_for(lambda: "held in step 9" in job.said.read_text(), "a step of the second epoch")
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.said.read_text()
    with train(folder, *options) as job:
        job.finish()


def test_stopped_in_mid_epoch_dropout_and_a_state_of_numpy_go_on_as_if_nothing_had_stopped_them(tmp_path: Path):
    options = ("--epochs=2", "--size=203", "--dropout=0.5", "--numpy")
    train_with_and_without_a_stop(tmp_path, *options)
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) == 0


def test_what_the_script_does_after_a_step_belongs_to_the_step(tmp_path: Path):
    """A moving average that is updated after `run.step` loses no update when the run is stopped."""
    options = ("--epochs=2", "--size=203", "--average")
    train_with_and_without_a_stop(tmp_path, *options)
    assert int(final(tmp_path)["weights"]["average.n_averaged"]) == final(tmp_path)["steps"] == 14
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) == 0


def test_a_compiled_model_goes_on_with_two_processes(tmp_path: Path):
    """Compiled by dynamo, with PyTorch's own kernels, it learns what the model learns that was not compiled."""
    options = ("--epochs=2", "--size=203", "--optimizer=adam")
    with train(tmp_path / "whole", *options) as job:
        job.finish()
    with train(tmp_path, "--hold=9", "--compile", *options) as job:
        wait_for(lambda: "held in step 9" in job.said.read_text(), "a step of the second epoch")
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.said.read_text()
    with train(tmp_path, "--compile", *options, processes=2) as job:
        job.finish()
    assert_each_sample_once(tmp_path, 2, 203)
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) < 1e-9


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_on_a_full_disk_it_trains_on_and_saves_when_there_is_space(tmp_path: Path):
    """A file that the run is about to write is on a full disk: for every step of the first epochs."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    options = ("--epochs=1000", "--size=203", "--sleep=0.02", "--checkpoint-every=0.2")
    with train(tmp_path, *options, spool=spool) as job:
        folder = wait_for(lambda: list((tmp_path / "checkpoints").glob("epoch-0001")), "its folder")[0]
        full = [folder / f"step-{step:012d}.{job.processes[0].pid}.tmp" for step in range(3000)]
        for path in full:
            path.symlink_to("/dev/full")
        wait_for(lambda: "No space left" in job.said.read_text(), "a save that failed")
        for path in full:
            path.unlink(missing_ok=True)
        failed = job.said.read_text().count("checkpoint written pause_s")
        wait_for(lambda: job.said.read_text().count("checkpoint written pause_s") > failed, "a checkpoint")
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    assert Checkpoints(tmp_path / "checkpoints", 1).latest() is not None
    assert bodies(spool, 1, "ended")[0].text == ""


def test_two_processes_train_a_model_that_does_not_use_all_its_parameters_in_each_step(tmp_path: Path):
    """The option goes to DDP. Without it, PyTorch's error names it."""
    options = ("--epochs=1", "--size=203", "--unused")
    with train(tmp_path / "one", *options) as job:
        job.finish()
    with train(tmp_path / "two", *options, '--ddp={"find_unused_parameters": true}', processes=2) as job:
        job.finish()
    assert largest_difference(final(tmp_path / "one")["weights"], final(tmp_path / "two")["weights"]) < 1e-12
    with train(tmp_path / "wrong", *options, '--ddp={"find_unused": true}') as job:
        assert job.wait() == 1
    assert "ddp={'find_unused': ...}: a script can set only" in job.said.read_text()


def test_one_process_reads_a_checkpoint_for_all(tmp_path: Path):
    options = ("--epochs=2", "--size=203", "--optimizer=adam", "--note-reading")
    with train(tmp_path / "whole", *options) as job:
        job.finish()
    with train(tmp_path, "--hold=4", *options) as job:
        wait_for(lambda: "held in step 4" in job.said.read_text(), "step")
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    with train(tmp_path, *options, processes=3) as job:
        assert "continues" in job.finish()
    assert set((tmp_path / "read").read_text().split()) == {"0"}
    assert_each_sample_once(tmp_path, 2, 203)
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) < 1e-12


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded by FSDP2"])
def test_suspended_it_releases_its_memory_and_resumed_it_has_the_same_state(tmp_path: Path, sharded: bool):
    """The CPU's memory stands for the GPU's."""
    options = ("--epochs=2", "--size=203", "--optimizer=adam", *(("--sharded",) if sharded else ()))
    with train(tmp_path / "whole", *options, processes=2) as job:
        job.finish()
    with train(tmp_path, "--sleep=2", "--release", *options, processes=2) as job:
        wait_for(lambda: last_record(tmp_path).get("step", 0) >= 2, "steps")
        job.send(signal.SIGTSTP)
        wait_for(lambda: job.said.read_text().count("suspended moved_bytes") == 2, "both have moved out")
        (tmp_path / "fast").touch()
        job.send(signal.SIGCONT)
        said = job.finish()
    # 129 parameters in double precision, their two moments, and the number of each step in float32.
    assert sum(map(int, re.findall(r"suspended moved_bytes=(\d+)", said))) >= 129 * 8 * 3
    assert said.count("resumed moved_bytes") == 2
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) == 0


def test_a_run_that_fails_ends_at_once_although_its_workers_ignore_signals(tmp_path: Path):
    with train(tmp_path, "--workers=2", "--fail=3") as job:
        assert job.wait() == 1
    assert "RuntimeError: as asked" in job.said.read_text()


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (("--fail-rank=1",), "rank 1 on {}: RuntimeError: as asked"),
        (
            ("--fail-rank=1", "--kill"),
            "rank 1 on {0} .*killed by signal 9; often out of memory. Then rank 0 on {0}: ",
        ),
    ],
)
def test_the_process_that_fails_first_is_reported_first(tmp_path: Path, options: tuple[str, ...], first: str):
    """Also if it is not the one that reports to the daemon: that one fails as well, but only because the other is gone."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    with train(tmp_path, "--fail=3", *options, processes=2, spool=spool) as job:
        for process in job.processes:
            process.join(240)
    ended = bodies(spool, 1, "ended")
    assert [each.outcome for each in ended] == ["failed"] * len(ended)
    assert re.match(first.format(re.escape(socket.gethostname())), ended[0].text)


def test_stopped_in_an_epochs_last_step_it_makes_the_end_of_that_epoch(tmp_path: Path):
    """Two steps per epoch. The second run has nothing of the first epoch left."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    with train(tmp_path, "--size=64", "--epochs=2", "--hold=1", spool=spool) as job:
        wait_for(lambda: "held in step 1" in job.said.read_text(), "last step of the epoch")
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    assert [result.progress for result in bodies(spool, 1, "result")] == [64]
    with train(tmp_path, "--size=64", "--epochs=2", spool=spool) as job:
        job.finish()
    assert [(record["run"], record["epoch"], record["step"]) for record in steps(tmp_path)] == [
        (1, 0, 0),
        (1, 0, 1),
        (2, 1, 2),
        (2, 1, 3),
    ]
    assert [result.progress for result in bodies(spool, 2, "result")] == [128]


@pytest.mark.parametrize(
    ("launcher", "processes", "options"),
    [
        ("torchrun", 2, ("--mixed",)),
        pytest.param("", 2, (), marks=pytest.mark.long),
        pytest.param("", 1, ("--mixed", "--max-atomic=4"), marks=pytest.mark.long),
        ("", 2, ("--optimizer=adam", "--max-atomic=4")),
        pytest.param("", 1, ("--max-atomic=4",), marks=pytest.mark.long),
        pytest.param("", 1, ("--optimizer=adam",), marks=pytest.mark.long),
    ],
    ids=[
        "two replicas of torchrun's, mixed",
        "two replicas",
        "one that accumulates, mixed",
        "two of Adam that accumulate",
        "one that accumulates",
        "one of Adam by pairs",
    ],
)
def test_gradient_noise_of_a_known_problem_is_found_in_1900_steps_of_which_500_are_measured(
    tmp_path: Path, launcher: str, processes: int, options: tuple[str, ...]
):
    if launcher:
        with process(*torchrun(processes), QUADRATIC, tmp_path, "1900", *options, environment=environment()) as child:
            finish(child)
    else:
        with gang(QUADRATIC, tmp_path, "1900", *options, processes=processes) as job:
            job.finish()
    noise = json.loads((tmp_path / "noise.json").read_text())
    assert noise["found"] == pytest.approx(noise["true"], rel=0.1)
    assert (noise["left_out"] > 0) == ("--mixed" in options), "steps with overflowing gradients are not progress"


def test_without_slurm_and_a_folder_nothing_is_saved(tmp_path: Path):
    with gang(QUADRATIC, tmp_path, "3") as job:
        job.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"noise.json", SAID}


def test_where_memory_runs_out_it_begins_again_with_a_smaller_batch(tmp_path: Path):
    """40 samples fit and 32 is the initial batch. Some of the next batches do not fit."""
    options = ("--epochs=30", "--max-batch=256", "--memory=40", "--report-every=0.05")
    with process(SCRIPT, tmp_path, *options, environment=environment()) as child:
        said = finish(child)
    assert "does not fit into memory: the run restarts with a smaller batch" in said
    assert max(record["step"] for record in steps(tmp_path)) == final(tmp_path)["steps"] - 1
    assert max(len(record["seen"]) for record in steps(tmp_path) if record["run"] > 1) >= 32
    assert_each_sample_once(tmp_path, max(record["epoch"] for record in steps(tmp_path)) + 1, 1003)


def test_a_full_disk_and_a_read_only_folder_are_reported_and_the_old_checkpoint_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from penstock_executor.training.saving import Saver, load

    told: list[float] = []
    saver = Saver(Checkpoints(tmp_path, 1))
    saver.save({"w": torch.ones(3)}, 1, {}, told.append)
    saver.wait()
    assert len(told) == 1
    (tmp_path / "epoch-0001" / f"step-000000000002.{os.getpid()}.tmp").symlink_to("/dev/full")
    saver.save({"w": torch.ones(30_000)}, 2, {}, told.append)
    saver.wait()
    assert "No space left" in caplog.text
    assert "earlier checkpoints are whole; free some space" in caplog.text
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            saver.save({"w": torch.ones(3)}, 3, {}, told.append)
            saver.wait()
        finally:
            os.seteuid(0)
        assert "Permission denied" in caplog.text
    assert len(told) == 1
    assert saver.failure is not None
    found = saver.checkpoints.latest()
    assert (found.step, load(found.open())["w"].tolist()) == (1, [1, 1, 1])
    saver.save({"w": torch.zeros(3)}, 4, {}, told.append)
    saver.wait()
    assert (saver.failure, len(told), saver.checkpoints.latest().step) == (None, 2, 4)


def test_suspended_it_stands_still_and_resumed_it_goes_on(tmp_path: Path):
    """First as Slurm does it, by SIGTSTP and then SIGSTOP. Then on the daemon's request, which is withdrawn."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)

    def stands_still(said: int) -> None:
        wait_for(lambda: len(bodies(spool, 1, "suspended")) == said, "report that it has moved out")
        count = len(steps(tmp_path))
        time.sleep(1)
        assert len(steps(tmp_path)) == count

    # 70 s of steps. It makes most of them once `fast` exists.
    with train(tmp_path, "--size=203", "--epochs=100", "--sleep=0.1", spool=spool) as job:
        wait_for(lambda: steps(tmp_path), "steps")
        job.send(signal.SIGTSTP)
        stands_still(1)
        job.send(signal.SIGSTOP)
        job.send(signal.SIGCONT)
        wait_for(lambda: len(bodies(spool, 1, "resumed")) == 1, "report that it continues")
        tell(spool, 1, "away", "suspend")
        stands_still(2)
        tell(spool, 1)
        (tmp_path / "fast").touch()
        assert "resumed moved_bytes=0" in job.finish()
    assert [body.request for body in bodies(spool, 1, "suspended")] == [None, "away"]
    assert len(bodies(spool, 1, "resumed")) == 2
    assert_each_sample_once(tmp_path, 100, 203)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_nodes_agent_holds_it_to_a_share_stops_it_and_lets_it_go_on(tmp_path: Path, processes: int):
    """It answers while it stands still. All processes move out on request, and the job can still be ended."""
    spool, run_dir = tmp_path / "spool", tmp_path / "run"
    spool.mkdir()
    tell(spool, 1)
    statuses_dir(run_dir, int(JOB)).mkdir(parents=True)
    numbers = iter(range(1, 100))

    def told(**fields: object) -> int:
        control = JobControl.model_validate({"number": next(numbers), **fields})
        write_whole(control_path(run_dir, int(JOB)), control.model_dump_json())
        return control.number

    def said() -> list[JobStatus]:
        found = sorted(statuses_dir(run_dir, int(JOB)).glob("?.json"))
        return [JobStatus.model_validate_json(path.read_bytes()) for path in found]

    def all_say(what: Callable[[JobStatus], object], text: str) -> None:
        wait_for(lambda: len(now := said()) == processes and all(map(what, now)), text)

    number = told()
    options = ("--size=203", "--epochs=400", "--sleep=0.05")
    with train(tmp_path, *options, processes=processes, spool=spool, run_dir=run_dir) as job:
        all_say(lambda each: each.number == number and each.samples > 0, "steps")
        request = told(suspend="away")
        all_say(lambda each: each.suspended == "away" and each.number == request, "report that it has moved out")
        count = len(steps(tmp_path))
        time.sleep(0.5)
        assert len(steps(tmp_path)) == count
        number = told(compute=0.5)
        wait_for(lambda: len(steps(tmp_path)) > count + 5 * processes, "further steps")
        all_say(lambda each: each.suspended is None and each.compute == 0.5, "share")
        number = told(compute=0.0)
        all_say(lambda each: each.number == number, "answer")
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    assert {each.anywhere for each in said()} == {True}, "on a CPU, it is not bound to a GPU"
    assert [body.request for body in bodies(spool, 1, "suspended")] == [None]
    assert bodies(spool, 1, "ended")[0].outcome == "stopped"


def test_a_sharded_model_goes_on_with_another_number_of_processes(tmp_path: Path):
    """FSDP2 on CPUs: each of two processes writes its shards. It continues on three processes, as if it had never been
    sharded."""
    options = ("--size=203", "--optimizer=adam", "--epochs=2")
    with train(tmp_path / "whole", *options) as job:
        job.finish()
    options = ("--sharded", *options)
    with train(tmp_path, "--hold=4", *options, processes=2) as job:
        wait_for(lambda: any(record["step"] > 3 for record in steps(tmp_path)), "steps")
        job.send(signal.SIGTERM)
        assert job.wait() == 143
    (shards,) = (tmp_path / "checkpoints" / "epoch-0001").glob("*.shards")
    assert {path.name for path in shards.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    with train(tmp_path, *options, processes=3) as job:
        job.finish()
    assert {record["world"] for record in steps(tmp_path)} == {2, 3}
    assert_each_sample_once(tmp_path, 2, 203)
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) < 1e-9
