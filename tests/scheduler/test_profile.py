"""`penstock profile run`, with real programs; GPUs are those of a stand-in for NVIDIA's driver (tests/profiles/fake_nvml.c)."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_profiles.families import load_families
from penstock_profiles.fit import fit_throughput
from penstock_profiles.nvml import Device, NoNvml, Process, Reading, Sample
from penstock_profiles.observations import Observations
from penstock_profiles.profiles import Profile, load_profile
from penstock_scheduler.cli import make_app
from penstock_scheduler.cli.profile import choose_gpu
from penstock_scheduler.people.errors import PenstockError
from tests.profiles import fake_nvml
from tests.profiles.fake_nvml import TWO_GPUS

module = importlib.import_module("penstock_scheduler.cli.profile")  # its function has its name
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "numpy_mlp" / "train.py"
BEGIN = "import os, signal, subprocess, sys, time\nfrom pathlib import Path\nfrom penstock_executor import profile\n"


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a user outside Slurm, whose temporary folder is empty before and after."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "PENSTOCK", "CUDA")):
            monkeypatch.delenv(name)
    folders = [str(ROOT / name) for name in ("profiles", "scheduler", "slurm_plugin", "executor", "cloud")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def script(folder: Path, lines: str) -> list[str]:
    """The command that runs a program of these lines."""
    path = folder / "job.py"
    path.write_text(BEGIN + lines)
    return [sys.executable, str(path)]


def penstock(*arguments: str | Path) -> str:
    """What the command prints. Raises what it raises."""
    result = CliRunner().invoke(make_app(), ["profile", "run", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def stored(tmp_path: Path, name: str = "job@cpu") -> Profile:
    return load_profile(tmp_path / "state" / "penstock" / "profiles" / f"{name}.json")


def nothing_is_left(tmp_path: Path) -> bool:
    return os.listdir(tmp_path / "tmp") == [] and not (tmp_path / "state").exists()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return path.read_text()


def test_the_numpy_example(tmp_path: Path):
    options = ("--min-batch", "16", "--max-batch", "64", "--out", tmp_path / "out")
    command = (sys.executable, EXAMPLE, "--checkpoint-dir", tmp_path / "ckpt")
    said = penstock("--gpu-type", "cpu", *options, "--", *command)
    (path,) = (tmp_path / "out").iterdir()
    profile = load_profile(path)
    assert (profile.job, profile.gpu_type, profile.too_large_batch) == ("train", "cpu", None)
    assert profile.versions.keys() >= {"penstock", "python", "numpy"}
    batches = [seen.atomic_batch for seen in profile.observations]
    assert (batches[0], batches[-1], len(batches)) == (16, 64, 10)
    assert all(0 < seen.step_time_s < 1 and seen.memory_mb and seen.memory_mb > 10 for seen in profile.observations)
    rows = [line.split() for line in said.splitlines()]
    assert rows[0] == ["BATCH", "STEP", "ms", "SAMPLES/s", "MEMORY", "MiB"]
    assert [row[0] for row in rows[1:11]] == list(map(str, batches))
    assert f"stored in {path}" in said
    assert not (tmp_path / "ckpt").exists()
    assert nothing_is_left(tmp_path)


def test_the_emulated_trainer(tmp_path: Path):
    """bert-squad on a t4: about 0.175 + 0.0587 m seconds, and 12 samples fit. Options need no -- before the program.

    After the five sizes 5 x 2.46 = 12.3 of 15 s are over: too many to try (12 + 16) / 2 = 14.
    """
    step = load_families()["bert-squad"].gpus["t4"].step
    command = ("-m", "penstock_executor.emulated", "--family", "bert-squad", "--work", "1", "--checkpoint-dir", "none")
    said = penstock("--gpu-type", "t4", "--name", "bert", sys.executable, *command)
    profile = stored(tmp_path, "bert@t4")
    assert {seen.atomic_batch: seen.step_time_s for seen in profile.observations} == {
        m: pytest.approx(step.alpha_c + step.beta_c * m) for m in (1, 2, 4, 8, 12)
    }
    assert profile.too_large_batch == 16
    measured = Observations()
    for seen in profile.observations:
        measured.add(seen.nodes, seen.gpus, seen.atomic_batch, seen.step_time_s, seen.sync_time_s or 0.0, seen.steps)
    assert fit_throughput(measured.measured()).median_rel_err < 0.01
    assert "bert on t4: the memory limit was reached" in said


@pytest.mark.parametrize("model", [("--family", "bert-squad"), ("--rates", '{"k80": {"1": 9}}')])
def test_the_emulated_trainer_without_a_model_of_its_step(tmp_path: Path, model: tuple[str, str]):
    command = (sys.executable, "-m", "penstock_executor.emulated", *model, "--work", "1", "--checkpoint-dir", "none")
    with pytest.raises(PenstockError, match=r"(?s)ended with status 1 and.*no model of a step on k80; set --family"):
        penstock("--gpu-type", "k80", *command)


def test_when_the_time_is_over_the_profile_says_so(tmp_path: Path):
    said = penstock("--gpu-type", "cpu", "--seconds", "0.3", *script(tmp_path, "profile(lambda m: time.sleep(m / 50))"))
    assert "the time was over before batch" in said
    assert stored(tmp_path).ended.startswith("the time was over before batch")


def test_a_program_that_goes_on_afterwards_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    command = script(tmp_path, "profile(lambda m: None, max_batch=2)\ntime.sleep(600)")
    assert "the program continued and was stopped" in penstock("--gpu-type", "cpu", *command)
    assert len(stored(tmp_path).observations) == 2


def test_cpu_hides_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    lines = "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\nprofile(lambda m: None, max_batch=1)"
    penstock("--gpu-type", "cpu", *script(tmp_path, lines))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "def step(m): 1 / (m - 4)",
            "the program failed at batch 4: ZeroDivisionError: division by zero; what was.*ZeroDiv",
        ),
        (
            "def step(m):\n  if m == 4: os.kill(os.getpid(), signal.SIGKILL)",
            "the program was killed by SIGKILL at batch 4;",
        ),
        ("def step(m):\n  if m == 4: sys.exit(3)", "the program ended with status 3 at batch 4;"),
        (
            "def step(m):\n  if m == 4: time.sleep(600)",
            r"still at batch 4 0.5 s after its 3 s .* give it more time with --seconds;",
        ),
    ],
)
def test_what_was_measured_before_it_failed_is_kept(tmp_path: Path, monkeypatch, lines: str, says: str):
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    command = script(tmp_path, f"{lines}\nprofile(step, max_batch=512)")
    with pytest.raises(PenstockError, match=f"(?s){says}") as caught:
        penstock("--gpu-type", "cpu", "--seconds", "3", *command)
    assert "what was measured until then is stored" in str(caught.value)
    profile = stored(tmp_path)
    assert [seen.atomic_batch for seen in profile.observations] == [1, 2]
    assert profile.ended == str(caught.value).splitlines()[0].removesuffix("; what was measured until then is stored")
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("print('hello')", r"ended with status 0 and did not call penstock_executor.profile; see docs.*\| hello"),
        ("1 / 0", r"ended with status 1 and did not call.*\| ZeroDivisionError"),
        ("time.sleep(600)", r"did not call penstock_executor.profile within 0.3 s and was stopped; .*--start-seconds"),
        ("profile(lambda m: 1 / 0)", r"the program failed at batch 1: ZeroDivisionError: division by zero.*\| ZeroDiv"),
        ("profile(lambda m: None, max_batch=0)", "the program failed: ValueError: min_batch=1, max_batch=0"),
        ("def step(m): raise MemoryError\nprofile(step)", "not even the smallest batch fits into memory"),
    ],
)
def test_without_any_measurement_there_is_no_profile(tmp_path: Path, lines: str, says: str):
    limit = ("--start-seconds", "0.3") if "600" in lines else ()
    with pytest.raises(PenstockError, match=f"(?s){says}"):
        penstock("--gpu-type", "cpu", *limit, *script(tmp_path, lines))
    assert nothing_is_left(tmp_path)


def test_a_program_that_cannot_be_run(tmp_path: Path):
    with pytest.raises(PenstockError, match="no-such-program cannot be run: No such file"):
        penstock("--gpu-type", "cpu", "no-such-program")


@pytest.mark.parametrize("options", [("--name", "a/b"), ("--gpu-type", "../t4")])
def test_an_invalid_name_is_reported_before_anything_runs(tmp_path: Path, options: tuple[str, str]):
    ran = tmp_path / "ran"
    with pytest.raises(PenstockError, match="cannot name a file"):
        penstock("--gpu-type", "cpu", *options, "touch", ran)
    assert not ran.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    command = script(tmp_path, "profile(lambda m: None, max_batch=1)")
    with pytest.raises(PenstockError, match="choose a folder that you may write"):
        penstock("--gpu-type", "cpu", "--out", tmp_path / "file", *command)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_when_it_is_stopped_so_is_all_that_it_started(tmp_path: Path, number: signal.Signals, status: int):
    lines = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "beside = Path(sys.argv[1] + '.tmp')\n"
        "beside.write_text(f'{os.getpid()} {child.pid}\\n')\n"
        "beside.rename(sys.argv[1])\n"
        "profile(lambda m: time.sleep(600))\n"
    )
    main = (
        "import importlib, signal, sys; importlib.import_module('penstock_scheduler.cli.profile').GRACE_S = 0.5\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # who is started with & by a shell's script ignores it
        "from penstock_scheduler.cli import main; sys.exit(main())"
    )
    command = [
        sys.executable,
        "-c",
        main,
        "profile",
        "run",
        "--gpu-type",
        "cpu",
        *script(tmp_path, lines),
        tmp_path / "pids",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        pids = [int(word) for word in wait_for(tmp_path / "pids").split()]
        assert all(map(alive, pids))
        child.send_signal(number)
        assert child.wait(timeout=300) == status
        assert child.stderr is not None
        assert b"Traceback" not in child.stderr.read()
    deadline = time.monotonic() + 120
    while any(map(alive, pids)):  # its child is killed with it, and waited for by nobody
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
    assert nothing_is_left(tmp_path)


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_nvml():
        raise NoNvml("library", "no driver here; run it elsewhere")

    monkeypatch.setattr(module, "Nvml", no_nvml)
    with pytest.raises(PenstockError, match=r"no GPU to measure on: no driver here; run it elsewhere.*--gpu-type cpu"):
        penstock("true")
    penstock("--gpu-type", "mi300x", *script(tmp_path, "profile(lambda m: None, max_batch=1)"))
    assert stored(tmp_path, "job@mi300x").device is None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install -e '.[nvml]'")
    return fake_nvml.build(tmp_path_factory.mktemp("driver"))


def with_gpus(library: Path, tmp_path: Path, scenario: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "scenario").write_text(scenario)
    main = "import sys; from penstock_scheduler.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", main, "profile", "run", *arguments],
        env=fake_nvml.environment(library, tmp_path / "scenario"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


SAY = "scenario = Path(os.environ['FAKE_NVML'])\ndef say(line): scenario.write_text(line + chr(10) + scenario.read_text())\n"


def test_on_a_gpu_nvml_tells_type_and_memory(library: Path, tmp_path: Path):
    """Somebody else is on GPU 0, so that GPU 1 is measured; there the program has 300 MiB, and another's process 9000."""
    lines = SAY + (
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-tttt'\n"
        "say(f'1.pids {os.getpid()}:300 1:9000')\n"
        "profile(lambda m: time.sleep(0.1), max_batch=2)\n"
    )
    done = with_gpus(library, tmp_path, TWO_GPUS + "0.pids 1:900\n", "--seconds", "30", *script(tmp_path, lines))
    assert done.returncode == 0, done.stderr
    assert "GPU 1: Tesla T4, type t4" in done.stdout
    profile = stored(tmp_path, "job@t4")
    assert (profile.device, profile.device_memory_mb, profile.versions["driver"]) == ("Tesla T4", 15360.0, "550.54")
    assert [seen.memory_mb for seen in profile.observations] == [300.0, 300.0]


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        (
            "0.error 15",
            "GPU 0 (NVIDIA A100-SXM4-40GB) is lost: GPU is lost; have its node checked; what was measured",
        ),
        ("0.xid 79", "is lost: XID 79: the GPU has fallen off the bus; have its node checked; what was measured"),
        (
            "0.xid 31",
            "at batch 2: RuntimeError: CUDA error: illegal access; the driver logged XID 31; what was measured",
        ),
    ],
)
def test_a_gpu_that_fails_in_mid_run(library: Path, tmp_path: Path, scenario: str, says: str):
    lines = SAY + (
        "def step(m):\n"
        f"    if m == 2: say('{scenario}'); time.sleep({0 if '31' in scenario else 600});"
        " raise RuntimeError('CUDA error: illegal access')\n"
        "profile(step)\n"
    )
    done = with_gpus(library, tmp_path, TWO_GPUS, *script(tmp_path, lines))
    assert done.returncode == 1
    assert says in done.stderr
    assert [seen.atomic_batch for seen in stored(tmp_path, "job@a100").observations] == [1]


def test_what_is_measured_just_before_the_gpu_is_lost_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lost_after_batch_1(*_: object) -> None:
        deadline = time.monotonic() + 120
        while not any('"observation"' in path.read_text() for path in (tmp_path / "tmp").rglob("*.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise PenstockError("the GPU is lost")

    monkeypatch.setattr(module._Target, "used_mb", lost_after_batch_1)
    command = script(tmp_path, "profile(lambda m: time.sleep(600 if m > 1 else 0.01))\n")
    with pytest.raises(PenstockError, match="the GPU is lost; what was measured"):
        penstock("--gpu-type", "cpu", *command)
    assert [seen.atomic_batch for seen in stored(tmp_path).observations] == [1]


def test_no_gpu_with_a_driver(library: Path, tmp_path: Path):
    done = with_gpus(library, tmp_path, "count 0\n", "true")
    assert (done.returncode, done.stderr.startswith("penstock: no GPU to measure on: the driver lists none.")) == (
        1,
        True,
    )
    done = with_gpus(library, tmp_path, TWO_GPUS.replace("count 2", "count 1") + "0.handle_error 15\n", "true")
    assert "no GPU to measure on: GPU is lost." in done.stderr


GPUS = tuple(Device(i, uuid, "Tesla T4", "t4", 15360.0) for i, uuid in enumerate(("GPU-a", "GPU-b", "MIG-c")))


def sample(*busy: str) -> Sample:
    someone = (Process(1, None, None),)
    return Sample(tuple(Reading(gpu, 0.0, 0.0, 0.0, someone if gpu.uuid in busy else ()) for gpu in GPUS), ())


@pytest.mark.parametrize(
    ("visible", "busy", "chosen"),
    [
        (None, (), "GPU-a"),
        (None, ("GPU-a",), "GPU-b"),
        ("1", (), "GPU-b"),
        ("1,0", ("GPU-b",), "GPU-b"),
        ("MIG-c", (), "MIG-c"),
        ("GPU-b,GPU-a", (), "GPU-b"),
    ],
)
def test_chooses_what_the_user_shows_else_what_is_free(visible: str | None, busy: tuple[str, ...], chosen: str):
    assert choose_gpu(GPUS, sample(*busy), visible).uuid == chosen


@pytest.mark.parametrize(
    ("visible", "busy", "says"),
    [
        ("", (), "CUDA_VISIBLE_DEVICES= shows no GPU; unset it, or name one of GPU-a"),
        ("7", (), "CUDA_VISIBLE_DEVICES=7 shows no GPU"),
        (None, ("GPU-a", "GPU-b", "MIG-c"), "every GPU of this machine is in use"),
    ],
)
def test_where_there_is_none_to_choose(visible: str | None, busy: tuple[str, ...], says: str):
    with pytest.raises(PenstockError, match=says):
        choose_gpu(GPUS, sample(*busy), visible)
