"""Training loops of Hugging Face and Lightning under Penstock: the examples, as real processes."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from .elastic import environment
from .spool import ROOT, bodies, process, tell, wait_for

LOOPS = [
    ("transformer", "transformers", ("--output={folder}", "--steps=400")),
    ("lightning", "lightning", ("--checkpoints={folder}", "--epochs=12")),
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
        child.terminate()
        _, said = child.communicate(timeout=120)
    (ended,) = bodies(spool, 1, "ended")
    assert (ended.outcome, ended.progress >= answers[0].progress) == ("stopped", True), said
    with process(*arguments, environment=environment(spool)) as child:
        _, said = child.communicate(timeout=400)
        assert child.returncode == 0, said
    (again,) = bodies(spool, 2, "started")
    assert again.progress == ended.progress, "it goes on where it stopped"
    (done,) = bodies(spool, 2, "ended")
    assert (done.outcome, done.progress) == ("completed", again.total)


def test_a_run_that_is_measured_reports_every_2_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'penstock[executor]'")
    from penstock_executor.integrations import pulse

    spool, clock = tmp_path / "spool", SimpleNamespace(now=0.0)
    tell(spool, 1)
    for name, value in environment(spool).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_MEASURING", str(tmp_path))
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(pulse.signal, "signal", lambda *_: None)
    run = pulse.Pulse(
        tmp_path / "out",
        samples_per_step=8,
        atomic_batch=8,
        steps=0,
        total_steps=None,
        report_every_s=30.0,
        device=torch.device("cpu"),
    )
    for step in range(1, 5):
        clock.now = step * 1.05
        run.step_done(step)
    run.end()
    assert [body.progress for body in bodies(spool, 1, "observation")] == [16, 32]


def test_the_packages_are_asked_for_only_by_those_who_use_them():
    code = "import penstock_executor, sys; print({'transformers', 'lightning'} & set(sys.modules))"
    with process("-c", code, environment=environment()) as child:
        told, _ = child.communicate(timeout=120)
    assert told.strip() == "set()"
