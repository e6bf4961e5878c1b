import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_executor import Environment, profile
from penstock_executor.profiling import POINTS, batch_sizes, is_out_of_memory
from penstock_profiles import wire


class Emulated:
    """A program whose step takes `step_s(batch)` emulated seconds, and fits up to a batch of `most`."""

    def __init__(self, folder: Path, step_s: Callable[[int], float] = lambda batch: 1e-3, most: int = 10**9) -> None:
        self.folder = folder
        self.now_s = 100.0
        self.calls: list[int] = []
        self._step_s = step_s
        self._most = most

    def step(self, batch: int) -> None:
        self.calls.append(batch)
        if batch > self._most:
            raise MemoryError
        self.now_s += self._step_s(batch)

    def profile(self, *, seconds: float = 15.0, gpu_type: str = "t4", **arguments) -> bool:
        request = wire.ProfileRequest(gpu_type=gpu_type, seconds=seconds, min_batch=arguments.pop("asked_min", None))
        path = self.folder / "request.json"
        path.write_text(request.model_dump_json())
        arguments = {"step": self.step, "clock": lambda: self.now_s} | arguments
        return profile(environment=Environment(job_id="7", profile=path), **arguments)

    def bodies(self, kind: str) -> list:
        lines = wire.reports_file(self.folder, wire.PROFILE_JOB, 1).read_bytes().splitlines()
        reports = [wire.Report.model_validate_json(line) for line in lines]
        return [report.body for report in reports if report.body.kind == kind]

    def measured(self) -> list[int]:
        return [seen.atomic_batch for seen in self.bodies("observation")]

    def too_large(self) -> list[int]:
        return [trial.atomic_batch for trial in self.bodies("trial") if trial.out_of_memory]


def test_without_the_command_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert profile(pytest.fail, environment=Environment()) is False
    assert caplog.text == ""
    assert profile(pytest.fail, environment=Environment(profile=tmp_path / "gone")) is False
    assert "unset PENSTOCK_PROFILE" in caplog.text


def test_warm_up_is_not_timed_and_one_slow_step_does_not_count(tmp_path: Path):
    """The first two steps take 9 s each and one later step 5 s; the median of the others is 0.1 s."""
    slow = itertools.chain([9.0, 9.0, 0.1, 5.0, 0.1], itertools.repeat(0.1))
    program = Emulated(tmp_path, lambda batch: next(slow))
    assert program.profile(max_batch=1, seconds=240) is True  # 240 s / 12: 20 s for a batch size, 2 s after warming up
    (seen,) = program.bodies("observation")
    assert (seen.step_time_s, seen.steps) == (pytest.approx(0.1), 3)
    assert (seen.gpu_type, seen.nodes, seen.gpus, seen.sync_time_s) == ("t4", 1, 1, 0.0)
    assert program.bodies("started")[0].versions["python"]
    (ended,) = program.bodies("ended")
    assert (ended.outcome, ended.text) == ("completed", "the largest batch was reached")


def test_at_the_memory_limit_two_sizes_below_it_are_tried(tmp_path: Path):
    """12 fit: of 1, 2, 4, 8, 16 the last does not; (8 + 16) / 2 = 12 does, (12 + 16) / 2 = 14 does not."""
    program = Emulated(tmp_path, most=12)
    assert program.profile()
    assert program.measured() == [1, 2, 4, 8, 12]
    assert program.too_large() == [16, 14]
    assert program.bodies("ended")[0].text == "the memory limit was reached"


def test_where_the_smallest_does_not_fit_it_goes_down_until_one_does(tmp_path: Path):
    program = Emulated(tmp_path, most=5)
    assert program.profile(min_batch=64)
    assert program.too_large() == [64, 32, 16, 8]
    assert program.measured() == [4]


def test_where_nothing_fits_there_is_no_observation(tmp_path: Path):
    program = Emulated(tmp_path, most=0)
    assert program.profile(min_batch=4)
    assert (program.too_large(), program.measured()) == ([4, 2, 1], [])


def test_the_time_is_kept_by_not_beginning_what_would_not_end_in_it(tmp_path: Path):
    """A step takes a second a sample and a size five steps: 5 s, then 5 x 2 = 10 s; then 20 s of the 13 left."""
    program = Emulated(tmp_path, float)
    assert program.profile(seconds=28)
    assert program.calls == [1] * 5 + [2] * 5
    assert program.bodies("ended")[0].text == "the time was over before batch 4; allow more with --seconds"


def test_the_commands_options_go_before_the_scripts(tmp_path: Path):
    program = Emulated(tmp_path)
    program.profile(min_batch=1, max_batch=12, asked_min=11)
    assert program.measured() == [11, 12]


@pytest.mark.parametrize("arguments", [{"min_batch": 0}, {"min_batch": 9, "max_batch": 8}])
def test_sizes_that_cannot_be(tmp_path: Path, arguments: dict[str, int]):
    program = Emulated(tmp_path)
    with pytest.raises(ValueError, match=r"min_batch=\d, max_batch=.*at least 1, and at most the second"):
        program.profile(**arguments)
    assert program.bodies("ended")[0].outcome == "failed"


def test_another_error_is_reported_and_raised(tmp_path: Path):
    def broken(batch: int) -> float:
        return 0.1 if batch < 4 else 1 / 0

    program = Emulated(tmp_path, broken)
    with pytest.raises(ZeroDivisionError):
        program.profile()
    assert program.measured() == [1, 2]
    assert program.bodies("trial")[-1].atomic_batch == 4
    (ended,) = program.bodies("ended")
    assert ended.outcome == "failed"
    assert ended.text.startswith("ZeroDivisionError: ")


@pytest.mark.parametrize("content", ["", "[]", '{"gpu_type": "t4", "seconds": 0}', '{"version": 2, "gpu_type": "t4"}'])
def test_a_request_that_cannot_be_read(tmp_path: Path, content: str):
    (tmp_path / "request.json").write_text(content)
    with pytest.raises(ValueError, match="need the same version of Penstock"):
        profile(pytest.fail, environment=Environment(profile=tmp_path / "request.json"))


def test_torch_is_waited_for_and_asked_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: asked.append("wait"),
        reset_peak_memory_stats=lambda: asked.append("reset"),
        max_memory_allocated=lambda: 3 * 2**20,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.9"))
    program = Emulated(tmp_path)
    program.profile(max_batch=1)
    (seen,) = program.bodies("observation")
    assert seen.memory_mb == 3.0
    assert asked == ["reset", *["wait"] * (seen.steps + 1)]  # after warming up, and after each step
    assert program.bodies("started")[0].versions["torch"] == "2.9"


def test_a_synchronize_of_the_scripts_own(tmp_path: Path):
    waits = []
    program = Emulated(tmp_path)
    program.profile(max_batch=1, synchronize=lambda: waits.append(1))
    assert len(waits) == program.bodies("observation")[0].steps + 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_on_a_cpu_the_memory_is_the_hosts(tmp_path: Path):
    program = Emulated(tmp_path, lambda batch: bool(b"x" * (batch << 20)) * 1.0)
    program.profile(seconds=60, gpu_type="cpu", min_batch=8, max_batch=128)
    first, *_, last = [seen.memory_mb for seen in program.bodies("observation")]
    assert 80 < last - first < 160  # 128 - 8 = 120 MiB more


@given(st.integers(1, 10**6), st.integers(0, 10**7))
def test_sizes_grow_from_the_smallest_to_the_largest(smallest: int, more: int):
    sizes = list(batch_sizes(smallest, smallest + more))
    assert (sizes[0], sizes[-1]) == (smallest, smallest + more)
    for small, large in itertools.pairwise(sizes):
        assert small < large <= 2 * small + 1
    if smallest + more <= smallest * 2 ** (POINTS - 1):
        assert len(sizes) <= POINTS


def test_without_a_largest_they_double():
    assert list(itertools.islice(batch_sizes(3, None), 5)) == [3, 6, 12, 24, 48]


OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})  # torch's, by its name


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_knows_when_memory_is_short(error: Exception, is_so: bool):
    assert is_out_of_memory(error) is is_so
