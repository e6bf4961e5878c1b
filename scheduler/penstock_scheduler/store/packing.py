"""How rounds are stored: the newest one whole, and most of the others as the difference from a *key round*.

A key round is stored whole. The rounds after it are stored as their difference from it, so each needs one other row, and a
damaged row costs one round unless it is a key round. The newest round is whole until the next one is saved, because penstockd
starts from it. See decision 22.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from penstock_scheduler.store.deltas import difference, patched


class Damaged(ValueError):
    """A packed round cannot be unpacked."""


@dataclass(frozen=True)
class KeyRound:
    """A whole round from which others differ."""

    number: int
    tree: Any
    """The round as Python's objects."""
    packed_bytes: int
    difference_bytes: int = 0
    """What the differences from it take so far."""


@dataclass(frozen=True)
class Packed:
    """A round's difference from a key round."""

    number: int
    key_round: int
    record: bytes


def pack(text: bytes) -> bytes:
    """A whole round."""
    return zlib.compress(text, 1)


def unpack(packed: bytes) -> bytes:
    """The text of a whole round. Raises Damaged."""
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise Damaged(str(error)) from None


def pack_difference(key: KeyRound, number: int, text: bytes) -> Packed | None:
    """A round as its difference from a key round; None: the round should be the next key round.

    A round becomes a key round when the differences would take more than the key round itself, or if the difference does not
    lead to the very same text.
    """
    delta = difference(key.tree, from_json(text))
    if to_json(patched(key.tree, delta)) != text:
        return None
    record = zlib.compress(to_json({"crc": zlib.crc32(text), "delta": delta}), 6)
    if key.difference_bytes + len(record) > key.packed_bytes:
        return None
    return Packed(number, key.number, record)


def unpack_difference(tree: Any, packed: bytes) -> bytes:
    """The text of a round, from the tree of its key round and its difference from it. Raises Damaged."""
    try:
        found = from_json(unpack(packed))
        text: bytes = to_json(patched(tree, found["delta"]))
        whole: bool = zlib.crc32(text) == found["crc"]
    except (LookupError, TypeError, ValueError) as error:
        raise Damaged(str(error)) from None
    if not whole:
        raise Damaged("its key round is another one than when it was saved")
    return text
