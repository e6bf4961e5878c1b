"""Suspend and resume in place: a job's state waits in the host's memory while other jobs have its GPUs.

SIGTSTP asks for it, and SIGCONT ends it. Slurm's `scontrol suspend` sends SIGTSTP, and Slurm 22.05 freezes the job 2.0
s later in any case. On CPUs there is nothing to move: the job only stands still.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from penstock_executor.client import present_request
from penstock_executor.environment import read_environment
from penstock_executor.node_channel import Channel
from penstock_executor.training.host_copies import HostCopies
from penstock_executor.training.preconditioning import local
from penstock_executor.training.processes import Group
from penstock_executor.training.reporter import Reporter
from penstock_profiles.wire import Resumed, Suspended

log = logging.getLogger(__name__)

MIB = 2**20

POLL_S = 0.05

GRACE_S = 2.5
"""How long a process waits for its own signal after another process of the job got one: Slurm freezes the job 2.0 s
later."""

PATIENCE_S = 60.0
"""How long a job that moved out on request waits to be frozen before it assumes that the daemon is gone."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one process moved out."""

    size: int
    """In bytes."""
    left: int
    """Bytes that PyTorch still holds on the GPU."""
    seconds: float


class Suspension:
    """Suspends this process. Must be made in the main thread, since it handles signals.

    Args:
        host_cap_bytes: the most host memory that the process's state may take; larger states stay on the GPU. None: no
            limit.
        device: type of the devices whose memory is released.
    """

    def __init__(self, host_cap_bytes: int | None = None, device: str = "cuda") -> None:
        self.requested = False
        """SIGTSTP has asked this process to stand still."""
        self._continued = False
        """SIGCONT has come since SIGTSTP, or since the process last stood still."""
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Storages that hold nothing at present, and what they held."""
        self._cap, self._device = host_cap_bytes, device
        signal.signal(signal.SIGTSTP, self.on_stop)
        signal.signal(signal.SIGCONT, self.on_continue)

    def move_out(self, tensors: Iterable[torch.Tensor]) -> Moved:
        """Move the state to the host's memory, at the end of a step.

        The tensors stay, and only the memory below them is released: other tensors may share it, such as DDP's buckets,
        which the gradients are views of, or what FSDP2 gathers parameters from.
        """
        began_s = time.monotonic()
        storages = {each.data_ptr(): each for each in map(_storage, tensors) if each.device.type == self._device}
        storages.pop(0, None)  # without memory
        size = sum(each.nbytes() for each in storages.values())
        if self._cap is not None and size > self._cap:
            log.warning(
                "bytes=%d stay on the GPU: the host may take at most %d bytes (host_cap_bytes)", size, self._cap
            )
            storages, size = {}, 0
        copies = HostCopies()
        for storage in storages.values():
            self._moved.append((storage, copies.copy_from_gpu(_bytes_of(storage))))
        copies.finish()
        for storage, _ in self._moved:
            storage.resize_(0)
        left = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved()
        moved = Moved(size, left, time.monotonic() - began_s)
        log.info("suspended moved_bytes=%d left_bytes=%d out_s=%.3f", moved.size, moved.left, moved.seconds)
        return moved

    def wait(self, wanted: Callable[[], bool] | None) -> None:
        """Stand still until SIGCONT.

        Args:
            wanted: whether the request to move out still stands. None: a signal asked, and there is no request.
        """
        if wanted is not None and not self.requested:
            self._continued = False  # left from an earlier suspension
        # Time in which the process is frozen does not count. If SIGTSTP and SIGCONT both come during one call into C,
        # Python calls the handler of SIGCONT first; `requested` is then left set although the suspension is over.
        waited_s = 0.0
        while (self.requested and waited_s < PATIENCE_S) or not self._over(wanted, waited_s):
            time.sleep(POLL_S)
            waited_s += POLL_S
        self.requested = self._continued = False

    def move_back(self) -> float:
        """Undo `move_out`; the seconds that it took."""
        began_s = time.monotonic()
        size = sum(held.nbytes for _, held in self._moved)
        for storage, held in self._moved:
            storage.resize_(held.nbytes)
            _bytes_of(storage).copy_(held)
        self._moved = []
        seconds = time.monotonic() - began_s
        log.info("resumed moved_bytes=%d back_s=%.3f", size, seconds)
        return seconds

    def on_stop(self, _number: int, _frame: object) -> None:
        """Handler of SIGTSTP."""
        self.requested, self._continued = True, False

    def on_continue(self, _number: int, _frame: object) -> None:
        """Handler of SIGCONT."""
        self.requested, self._continued = False, True

    def _over(self, wanted: Callable[[], bool] | None, waited_s: float) -> bool:
        if self._continued:
            return True
        return waited_s > GRACE_S if wanted is None else waited_s > PATIENCE_S or not wanted()


def stand_still(
    suspension: Suspension,
    group: Group,
    channel: Channel | None,
    reporter: Reporter | None,
    tensors: Iterable[torch.Tensor],
    *,
    requested: bool,
) -> None:
    """Move off the GPUs, wait until the job may go on, and move back. All processes call it after the same step.

    While they stand still, processes exchange nothing, since Slurm may freeze any of them.

    Args:
        suspension: of this process.
        group: all processes of the run.
        channel: to the node's agent, if there is one.
        reporter: to the daemon, on rank 0.
        tensors: of the models and optimisers.
        requested: whether the daemon or the node's agent asked for it. Else a signal did.
    """
    request, by_agent = _request(group, channel, reporter) if requested else (None, False)
    if requested and request is None:
        return  # the daemon has withdrawn its request
    own = suspension.move_out(tensors)
    moved = group.gather(own) if requested else [own]
    if reporter is not None:
        reporter.put(
            Suspended(
                request=None if by_agent else request,
                moved_bytes=sum(each.size for each in moved),
                left_bytes=sum(each.left for each in moved),
                seconds=max(each.seconds for each in moved),
            )
        )
    environment = read_environment()
    wanted: Callable[[], bool] | None = None
    if by_agent and channel is not None and request is not None:
        channel.suspended(request, own.size / MIB, own.left / MIB)
        wanted = partial(channel.wants, request)
    elif request is not None:
        wanted = lambda: present_request(environment) == request  # noqa: E731 - one line, one use
    suspension.wait(wanted)
    seconds = suspension.move_back()
    if reporter is not None:
        reporter.put(Resumed(seconds=seconds))
    if channel is not None:
        channel.resumed()


def _request(group: Group, channel: Channel | None, reporter: Reporter | None) -> tuple[str | None, bool]:
    """Id of the request to move out, the same on all processes, and whether the node's agent made it. None:
    withdrawn."""
    request, by_agent = None, False
    asked = reporter.request if reporter is not None else None
    if reporter is not None and asked is not None and asked.kind == "suspend":
        request, reporter.request = asked.id, None
    elif channel is not None and channel.request is not None:
        request, by_agent = channel.request, True
    request, by_agent = group.from_first((request, by_agent))
    return request, by_agent


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch.no_grad():
        return local(tensor).untyped_storage()
