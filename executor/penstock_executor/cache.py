"""A fixed cache of the data set in the host's memory, after MinIO (Mohan et al., VLDB '21), shared by a job's processes.

The page cache evicts what was used longest ago, and training reads every item once an epoch in a new order: where the data set is
a little too large, nearly everything is evicted before it is needed again, and jobs on one node evict each other's. This
cache never evicts. The first items that are asked for stay until the job ends; the others are read anew each time. So
every epoch after the first hits as large a part of the data set as fits, and with memory comes speed in proportion,
which is what the scheduler's tables reckon with.

The items are in one block of shared memory, so that a node's processes (ranks, and workers of data loaders, of whatever start
method) hold them once. Readers take no lock: an item becomes visible when its entry in the
index is written, last. The block ends with the process that made it (`close`); the kernel may also need
`--shm-size`, or a larger /dev/shm, to hold as much as the grant.

    cache = SharedCache.create(items=len(dataset), size_bytes=cache_bytes(memory_mb, own_mb=4000))
    data = cache.get(index, lambda: path.read_bytes())
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

_HEADER = struct.Struct("<QQ")
"""Number of items, bytes taken so far."""

_ENTRY = struct.Struct("<QQ")
"""Where an item begins, 0 while it is not there, and its size."""


class CacheError(RuntimeError):
    """The cache cannot be had; the message says why, and the remedy."""


def cache_bytes(memory_mb: int, own_mb: int) -> int:
    """What is left for a cache of the memory that the scheduler gave a job on this node, in bytes; 0 if nothing.

    Args:
        memory_mb: the grant, `Control.memory_mb`, of 1024 * 1024 bytes each as Slurm counts.
        own_mb: what the job's processes need themselves.
    """
    return max(memory_mb - own_mb, 0) << 20


class SharedCache:
    """The cache. Made once on a node with `create`; other processes `attach` by its name, or inherit it."""

    def __init__(self, block: shared_memory.SharedMemory, *, owner: bool) -> None:
        assert block.buf is not None, "it is open"
        self._block, self._memory = block, block.buf
        self._owner = owner
        self._pid = os.getpid()
        self._lock = Path(tempfile.gettempdir()) / f"{block.name.strip('/')}.lock"
        self.items: int = _HEADER.unpack_from(self._memory, 0)[0]
        self.hits = 0
        """Of this process."""
        self.misses = 0

    @classmethod
    def create(cls, items: int, size_bytes: int) -> SharedCache:
        """A new cache for so many items; `size_bytes` is what the items themselves may take.

        Raises:
            CacheError: it does not fit into the machine's shared memory.
        """
        if items < 1 or size_bytes < 0:
            raise CacheError(
                f"items={items} size_bytes={size_bytes}: a cache is for at least one item, of no bytes or more"
            )
        start = _HEADER.size + items * _ENTRY.size
        free = shared_memory_free()
        if free is not None and start + size_bytes > free:
            raise CacheError(
                f"a cache of {start + size_bytes >> 20} MB does not fit into /dev/shm, which has {free >> 20} MB left; "
                "make it smaller, or /dev/shm larger"
            )
        block = shared_memory.SharedMemory(create=True, size=start + size_bytes)
        assert block.buf is not None, "it is open"
        _HEADER.pack_into(block.buf, 0, items, start)
        return cls(block, owner=True)

    @classmethod
    def attach(cls, name: str) -> SharedCache:
        """The cache of that name, which another process of this node made. Raises CacheError if there is none."""
        try:
            block = _untracked(name)
        except FileNotFoundError:
            raise CacheError(
                f"there is no cache {name!r} on this node: its maker has ended, or is on another node"
            ) from None
        return cls(block, owner=False)

    @property
    def name(self) -> str:
        """By which other processes of this node attach."""
        return self._block.name

    def get(self, index: int, read: Callable[[], bytes]) -> bytes:
        """Item `index`: from the cache, or by `read`, and then it is kept as long as there is room."""
        if not 0 <= index < self.items:
            raise IndexError(f"item {index} of a cache for {self.items}")
        begin, size = self._entry(index)
        if begin:
            self.hits += 1
            return bytes(self._memory[begin : begin + size])
        self.misses += 1
        data = read()
        self._keep(index, data)
        return data

    def holds(self, index: int) -> bool:
        """Whether the item is in the cache."""
        return self._entry(index)[0] != 0

    @property
    def held(self) -> int:
        """Number of items in the cache."""
        return sum(self.holds(index) for index in range(self.items))

    def close(self) -> None:
        """Leave the cache; with its maker it ends for all who have not got it open."""
        self._memory.release()
        self._block.close()
        if self._owner and self._pid == os.getpid():
            self._block.unlink()
            self._lock.unlink(missing_ok=True)

    def __enter__(self) -> SharedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[str], SharedCache], tuple[str]]:
        """Workers that are spawned attach."""
        return SharedCache.attach, (self.name,)

    def _entry(self, index: int) -> tuple[int, int]:
        begin, size = _ENTRY.unpack_from(self._memory, _HEADER.size + index * _ENTRY.size)
        return begin, size

    def _keep(self, index: int, data: bytes) -> None:
        with self._locked():
            items, used = _HEADER.unpack_from(self._memory, 0)
            if self.holds(index) or used + len(data) > self._block.size:
                return
            self._memory[used : used + len(data)] = data
            _HEADER.pack_into(self._memory, 0, items, used + len(data))
            # The size before the beginning: whoever sees a beginning reads whole data.
            where = _HEADER.size + index * _ENTRY.size
            self._memory[where + 8 : where + 16] = struct.pack("<Q", len(data))
            self._memory[where : where + 8] = struct.pack("<Q", used)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time on this node. The lock goes with a process that dies."""
        with self._lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _untracked(name: str) -> shared_memory.SharedMemory:
    """A block that this process does not take away from all others when it ends, as Python before 3.13 has it (bpo-38119)."""
    if sys.version_info >= (3, 13):
        return shared_memory.SharedMemory(name=name, track=False)
    register = resource_tracker.register
    resource_tracker.register = lambda *_: None
    try:
        return shared_memory.SharedMemory(name=name)
    finally:
        resource_tracker.register = register


def shared_memory_free() -> int | None:
    """Bytes that /dev/shm has left; None where there is none to ask."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - it is asked for its size, nothing is written there
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
