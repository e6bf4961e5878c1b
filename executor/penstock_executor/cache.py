"""A cache of the data set in the host's memory that a job's processes share, after MinIO (Mohan et al., VLDB '21).

The page cache evicts the item that was used longest ago, and training reads every item once per epoch in a new order.
If the data set is a little larger than the memory, nearly every item is evicted before it is needed again, and jobs on
one node evict each other's items. This cache never evicts. The first items that are read stay until the job ends; the
others are read again each time. So every epoch after the first hits as large a part of the data set as fits, and speed
grows in proportion to memory, as the scheduler's tables assume.

The items are in one block of shared memory, so all processes of a node hold them once: ranks and data loader workers,
with any start method. Readers take no lock: an item becomes visible when its entry in the index is written, last. The
block ends with the process that made it (`close`). Containers may need `--shm-size`, and hosts a larger /dev/shm, for a
large cache.

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
"""Number of items, and bytes taken so far."""

_ENTRY = struct.Struct("<QQ")
"""Offset of an item, 0 while the cache does not have it, and its size."""


class CacheError(RuntimeError):
    """The cache cannot be made or attached to; the message says why, and the remedy."""


def cache_bytes(memory_mb: int, own_mb: int) -> int:
    """Bytes that are left for a cache in the memory that the scheduler allocated to a job on this node; at least 0.

    Args:
        memory_mb: the allocated memory, `ControlMessage.memory_mb`; 1 MB is 1024 * 1024 bytes, as Slurm counts.
        own_mb: memory that the job's processes need themselves.
    """
    return max(memory_mb - own_mb, 0) << 20


class SharedCache:
    """The cache. One process of a node makes it with `create`; the others `attach` by its name, or inherit it."""

    def __init__(self, block: shared_memory.SharedMemory, *, owner: bool) -> None:
        assert block.buf is not None, "it is open"
        self._block, self._memory = block, block.buf
        self._owner = owner
        self._pid = os.getpid()
        self._lock = Path(tempfile.gettempdir()) / f"{block.name.strip('/')}.lock"
        self.items: int = _HEADER.unpack_from(self._memory, 0)[0]
        self.hits = 0
        """Number of hits of this process."""
        self.misses = 0

    @classmethod
    def create(cls, items: int, size_bytes: int) -> SharedCache:
        """Make a cache.

        Args:
            items: number of items in the data set.
            size_bytes: space for the items that are kept.

        Raises:
            CacheError: it does not fit into the machine's shared memory.
        """
        if items < 1 or size_bytes < 0:
            raise CacheError(
                f"items={items} size_bytes={size_bytes}: a cache needs at least 1 item, and at least 0 bytes"
            )
        start = _HEADER.size + items * _ENTRY.size
        free = shared_memory_free()
        if free is not None and start + size_bytes > free:
            raise CacheError(
                f"a cache of {start + size_bytes >> 20} MB does not fit into /dev/shm, which has {free >> 20} MB left; "
                "use a smaller cache, or a larger /dev/shm"
            )
        block = shared_memory.SharedMemory(create=True, size=start + size_bytes)
        assert block.buf is not None, "it is open"
        _HEADER.pack_into(block.buf, 0, items, start)
        return cls(block, owner=True)

    @classmethod
    def attach(cls, name: str) -> SharedCache:
        """Attach to the cache that another process of this node made. Raises CacheError if there is none of that
        name."""
        try:
            block = _untracked(name)
        except FileNotFoundError:
            raise CacheError(
                f"there is no cache {name!r} on this node: the process that made it has ended, or is on another node"
            ) from None
        return cls(block, owner=False)

    @property
    def name(self) -> str:
        """The name by which other processes of this node attach."""
        return self._block.name

    def get(self, index: int, read: Callable[[], bytes]) -> bytes:
        """Item `index`, from the cache or by `read`. An item that was read is kept if there is room."""
        if not 0 <= index < self.items:
            raise IndexError(f"item {index} is out of range: the cache is for {self.items} items")
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
        """Detach from the cache. If the process that made it does so, no other process can attach any more."""
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
        """Spawned workers attach to the cache."""
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
            # Write the size before the offset: a reader that sees an offset then reads the whole item.
            where = _HEADER.size + index * _ENTRY.size
            self._memory[where + 8 : where + 16] = struct.pack("<Q", len(data))
            self._memory[where : where + 8] = struct.pack("<Q", used)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock for writers on this node. The kernel releases it if the process dies."""
        with self._lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _untracked(name: str) -> shared_memory.SharedMemory:
    """A block that stays when this process ends. Python before 3.13 would remove it for all processes (bpo-38119)."""
    if sys.version_info >= (3, 13):
        return shared_memory.SharedMemory(name=name, track=False)
    register = resource_tracker.register
    resource_tracker.register = lambda *_: None
    try:
        return shared_memory.SharedMemory(name=name)
    finally:
        resource_tracker.register = register


def shared_memory_free() -> int | None:
    """Bytes that are free in /dev/shm; None if it does not exist."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
