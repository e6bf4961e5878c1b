"""Training loops of Hugging Face and Lightning under Penstock: the examples, as real processes."""

import collections
import contextlib
import importlib.util
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_loopback.machine import free_ports

from ..elastic import environment
from ..spool import ROOT, bodies, process, send_to_all, tell, wait_for

LOOPS = [
    ("transformer", "transformers", ("--output={folder}", "--steps=400", "--workers=2")),
    ("lightning", "lightning", ("--checkpoints={folder}", "--epochs=12", "--workers=2")),
]


def needed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(("example", "package", "options"), LOOPS, ids=[name for name, *_ in LOOPS])
def test_a_foreign_loop_reports_saves_on_request_stops_and_goes_on(
    tmp_path: Path, example: str, package: str, options: tuple[str, ...]
):
    needed(package)
    spool, folder = tmp_path / "spool", tmp_path / "out"
    spool.mkdir()
    folder.mkdir()
    tell(spool, 1)
    script = ROOT / "examples" / example / "train.py"
    arguments = (script, *(option.format(folder=folder) for option in options))
    with process(*arguments, environment=environment(spool)) as child:
        (started,) = wait_for(lambda: bodies(spool, 1, "started"), "start", 300)
        assert (started.progress, started.gpu_type) == (0, "cpu")
        tell(spool, 1, "save")
        answers = wait_for(lambda: [b for b in bodies(spool, 1, "checkpointed") if b.request == "save"], "answer", 300)
        assert answers[0].progress > 0
        send_to_all(child.pid, signal.SIGTERM)
        _, said = child.communicate(timeout=120)
        assert child.returncode == 143, said
    if example == "transformer":  # what a kill in the middle of a write leaves
        broken = folder / "checkpoint-399"
        broken.mkdir()
        (broken / "model.safetensors").write_bytes(b"trunc")
    (ended,) = bodies(spool, 1, "ended")
    assert (ended.outcome, ended.progress >= answers[0].progress) == ("stopped", True), said
    with process(*arguments, environment=environment(spool)) as child:
        _, said = child.communicate(timeout=400)
        assert child.returncode == 0, said
    (again,) = bodies(spool, 2, "started")
    assert again.progress == ended.progress, "it continues where it stopped"
    (done,) = bodies(spool, 2, "ended")
    assert (done.outcome, done.progress) == ("completed", again.total)


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
@pytest.mark.parametrize("loop", ["lightning", "huggingface"])
def test_a_loop_stopped_in_mid_epoch_sees_each_sample_once_on_another_number_of_processes(
    loop: str, worlds: tuple[int, int], tmp_path: Path
):
    needed({"huggingface": "transformers"}.get(loop, loop))
    sees_each_sample_once(tmp_path, f"train_{loop}.py", worlds)


def test_lightning_with_a_stateful_loader_stopped_in_mid_epoch_sees_each_sample_once(tmp_path: Path):
    needed("lightning")
    needed("torchdata")
    sees_each_sample_once(tmp_path, "train_lightning.py", (1, 1), "stateful")


def sees_each_sample_once(folder: Path, name: str, worlds: tuple[int, int], *options: str) -> None:
    """12 steps an epoch; SIGTERM comes in the sixth of the second. Then other processes continue."""
    script = Path(__file__).with_name(name)
    for status, world in zip((143, 0), worlds, strict=True):
        run_torchrun((script, folder, "17", *options), world, status)
        assert (folder / "done").exists() == (status == 0), "nothing after the loop runs in a job that was stopped"
    seen = (folder / "seen").read_text().split()
    assert collections.Counter(seen) == {str(sample): 2 for sample in range(96)}


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
@pytest.mark.parametrize("loop", ["huggingface", "lightning"])
def test_the_batch_grows_and_the_schedule_of_the_learning_rate_follows_the_samples(
    loop: str, worlds: tuple[int, int], tmp_path: Path
):
    """3,001 samples, 376 steps of 8 an epoch, 1,128 in all. The job is stopped once the batch has grown, and moves."""
    needed({"huggingface": "transformers"}.get(loop, loop))
    script = Path(__file__).with_name("train_adaptive.py")
    for stop, status, world in zip((["--stop"], []), (143, 0), worlds, strict=True):
        said = run_torchrun((script, loop, tmp_path, *stop), world, status)
        assert "not resumable" not in said, "Lightning's warning would be wrong"
    runs = {number: steps_of(tmp_path, number, world) for number, world in zip((1, 2), worlds, strict=True)}
    assert max(len(seen) for seen, _ in runs[1]) > 8, "it grew"
    assert len([seen for seen, _ in runs[2] if len(seen) > 8]) > 0, "it goes on with what the first run has learned"
    done = 0
    counts: collections.Counter[int] = collections.Counter()
    for seen, rate in runs[1] + runs[2]:
        epoch, position = divmod(done, 3001)
        before = epoch * 376 + math.ceil(position / 8)  # steps of the initial batch
        assert rate == pytest.approx(0.01 * (1 - before / 1128) * math.sqrt(max(len(seen) / 8, 1.0)))
        done += len(seen)
        counts.update(seen)
    assert (len(counts), set(counts.values())) == (3001, {3}), "each sample once an epoch"
    assert (tmp_path / "done").read_text() == "1128"
    validated = (tmp_path / "validated").read_text().split()
    assert len(validated) >= 3
    assert len(set(validated)) == 3, "validation at the end of each epoch"


@pytest.mark.parametrize("loop", ["huggingface", "lightning"])
def test_where_memory_runs_out_the_loop_begins_again_with_a_smaller_batch(loop: str, tmp_path: Path):
    """20 samples fit, so that the first larger batch does, and a later one does not."""
    needed({"huggingface": "transformers"}.get(loop, loop))
    script = Path(__file__).with_name("train_adaptive.py")
    with process(script, loop, tmp_path, "--memory=20", environment=environment()) as child:
        _, said = child.communicate(timeout=400)
        assert child.returncode == 0, said
    assert "the run restarts with a smaller one" in said
    sizes = {len(json.loads(line)["seen"]) for line in (tmp_path / "steps").read_text().splitlines()}
    assert 16 in sizes
    assert max(sizes) <= 20
    assert (tmp_path / "done").read_text() == "1128"


def steps_of(folder: Path, run: int, world: int) -> list[tuple[list[int], float]]:
    """Samples and learning rate of each step of a run."""
    records = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    steps: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for record in records:
        if record["run"] == run:
            steps[record["step"]].append(record)
    assert all(len(each) == world and len({one["rate"] for one in each}) == 1 for each in steps.values())
    return [([i for one in steps[n] for i in one["seen"]], steps[n][0]["rate"]) for n in sorted(steps)]


def run_torchrun(arguments: tuple[Any, ...], world: int, status: int) -> str:
    """Run a script with so many processes, which all end with this status; what they wrote to standard error."""
    port, words = free_ports(1), ""
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(process(*arguments, environment=environment() | torchrun(rank, world, port)))
            for rank in range(world)
        ]
        for child in children:
            _, said = child.communicate(timeout=400)
            assert child.returncode == status, said
            words += said
    return words


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables of a process, as torchrun sets them on one node."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}


def monitor_at(clock: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch, channel: object = None):
    """A training monitor of job 1 that reads the time from `clock`, with its spool in `folder`; and its signal handlers."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from penstock_executor.integrations import training_monitor as monitor

    handlers = []
    tell(folder, 1)
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(monitor, "open_channel", lambda *_, **__: channel)
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(monitor.signal, "signal", lambda _, handler: handlers.append(handler))
    run = monitor.TrainingMonitor(
        folder / "out",
        samples_per_step=8,
        atomic_batch=8,
        steps=0,
        total_steps=None,
        report_every_s=30.0,
        device=torch.device("cpu"),
    )
    return run, handlers


def test_a_run_that_is_measured_reports_every_2_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setenv("PENSTOCK_MEASURING", str(tmp_path))
    run, _ = monitor_at(clock, tmp_path, monkeypatch)
    for step in range(1, 5):
        clock.now = step * 1.05
        run.step_done(step)
    run.report(0.5, minimize=True)
    run.report(float("nan"), minimize=False)
    run.end()
    assert [(body.metric, body.progress) for body in bodies(tmp_path, 1, "result")] == [(-0.5, 32)]
    assert [body.progress for body in bodies(tmp_path, 1, "observation")] == [16, 32]


def test_a_pause_for_others_is_no_training_and_ends_when_the_run_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(now=0.0)

    class Channel:
        urgent = None

        def step_done(self, samples: int) -> None:
            clock.now += 9.0

    channel = Channel()
    run, handlers = monitor_at(clock, tmp_path, monkeypatch, channel)
    for step in range(1, 5):
        clock.now += 1.0
        run.step_done(step)
    assert not channel.urgent()
    handlers[0](15, None)
    assert channel.urgent()
    run.end()
    said = bodies(tmp_path, 1, "observation")
    assert said
    assert [body.step_time_s for body in said] == pytest.approx([1.0] * len(said))


def test_the_packages_are_imported_only_if_they_are_used():
    code = "import penstock_executor, sys; print({'transformers', 'lightning'} & set(sys.modules))"
    with process("-c", code, environment=environment()) as child:
        told, _ = child.communicate(timeout=120)
    assert told.strip() == "set()"


def test_several_processes_act_on_what_they_said_in_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To act on this step's word, each process would have to wait for its GPU. A stand-in adds up the words: here another
    process has received SIGTERM during the second step."""
    run, _ = monitor_at(SimpleNamespace(now=0.0), tmp_path, monkeypatch)
    from penstock_executor.integrations import training_monitor as monitor

    others = iter([0.0, 1.0, 0.0, 0.0, 0.0])

    def add_up(vote: Any, op: object) -> None:
        vote[2] = max(vote[2], next(others))

    monkeypatch.setattr(monitor.dist, "all_reduce", add_up)
    run._world = 2
    assert run.step_done(1) == (False, False)
    assert run.step_done(2) == (False, False)
    assert run.step_done(3) == (True, True), "all processes stop after the same step"
    run._world = 1
    run.end()


def test_several_processes_save_once_for_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, _ = monitor_at(SimpleNamespace(now=0.0), tmp_path, monkeypatch)
    from penstock_executor.integrations import training_monitor as monitor

    monkeypatch.setattr(monitor.dist, "all_reduce", lambda vote, op: None)
    run._world = 2
    run._reporter.request = SimpleNamespace(kind="checkpoint", id="now")
    assert [run.step_done(step) for step in (1, 2, 3, 4)] == [(False, False), (True, False)] + [(False, False)] * 2
    run._world = 1
    run.end()
