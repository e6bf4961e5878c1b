"""A memory limit on a process's GPU, with a stand-in for `torch.cuda` and the driver."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor.training.gpu_memory import MIB, held_mb, limit_memory

DEVICE = torch.device("cuda", 1)


class Cuda:
    """torch's memory on a GPU of 16,000 MB: in use, and cached for the next tensor.

    Like torch's own allocator, it takes new memory from the driver only within the fraction, and cached memory counts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, in_use_mb: int, cached_mb: int) -> None:
        self.in_use_mb, self.cached_mb, self.most_mb = in_use_mb, cached_mb, 16_000.0
        self.held_at_limits: list[tuple[float, int]] = []
        """(limit, MB held when it was set) of each."""
        for name in (
            "get_device_properties",
            "empty_cache",
            "set_per_process_memory_fraction",
            "memory_reserved",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        assert device == DEVICE
        return SimpleNamespace(total_memory=16_000 * MIB)

    def empty_cache(self) -> None:
        self.cached_mb = 0

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        assert device == DEVICE
        assert 0 <= fraction <= 1, "torch raises ValueError"
        self.most_mb = fraction * 16_000
        self.held_at_limits.append((self.most_mb, self.in_use_mb + self.cached_mb))

    def memory_reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return (self.in_use_mb + self.cached_mb) * MIB

    def tensor(self, mb: int) -> None:
        """Allocate memory, as the script does."""
        if mb > self.cached_mb and self.in_use_mb + self.cached_mb + mb > self.most_mb:
            raise torch.OutOfMemoryError
        self.cached_mb -= mb if mb <= self.cached_mb else 0
        self.in_use_mb += mb

    def drop(self, mb: int) -> None:
        self.in_use_mb, self.cached_mb = self.in_use_mb - mb, self.cached_mb + mb


def test_what_is_only_kept_is_given_back_before_the_limit_is_lowered(monkeypatch: pytest.MonkeyPatch):
    """3,000 MB in use and 6,000 cached. With a limit of 4,000, a tensor of 1,000 fits, and a byte more does not."""
    cuda = Cuda(monkeypatch, in_use_mb=3_000, cached_mb=6_000)
    limit_memory(DEVICE, 4_000)
    assert cuda.held_at_limits == [(4_000, 3_000)]
    assert held_mb(DEVICE) == 3_000
    cuda.tensor(1_000)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.tensor(1)


def test_what_is_in_use_stays_though_it_be_more_than_the_limit(monkeypatch: pytest.MonkeyPatch):
    """5,000 MB in use with a limit of 4,000: no new memory, but freed memory is used again. 0 removes the limit."""
    cuda = Cuda(monkeypatch, in_use_mb=5_000, cached_mb=100)
    limit_memory(DEVICE, 4_000)
    assert held_mb(DEVICE) == cuda.in_use_mb == 5_000
    with pytest.raises(torch.OutOfMemoryError):
        cuda.tensor(100)
    cuda.drop(2_000)
    cuda.tensor(1_500)
    assert held_mb(DEVICE) == 5_000
    limit_memory(DEVICE, 0)
    cuda.tensor(10_000)
    assert [limit_mb for limit_mb, _ in cuda.held_at_limits] == [4_000, 16_000]


def test_a_limit_beyond_the_gpu_is_all_of_it(monkeypatch: pytest.MonkeyPatch):
    cuda = Cuda(monkeypatch, in_use_mb=0, cached_mb=0)
    limit_memory(DEVICE, 20_000)
    assert cuda.held_at_limits == [(16_000, 0)]
