"""How rounds are stored: the newest one whole, and most of the others as the difference from a *key round*.

A key round is stored whole. The rounds after it are stored as their difference from it, so each needs one other row, and a
damaged row costs one round unless it is a key round. The newest round is whole until the next one is saved, because penstockd
starts from it. See decision 22.

A difference between two JSON documents is JSON: `patched(old, difference(old, new))` is `new`. It is one of:

- `{"value": new}`: the new value itself;
- `{"plus": number}`: the old number plus this one. Counters that grow alike, such as GPU-seconds, become the same text, which
  compresses well;
- `{"items": [part, ...]}`: an object or a list, put together from parts, in the order of the new one:
    - `[first, count]`: `count` items of the old one from the position `first`, as they are;
    - `[first, [difference, ...]]`: as many items of the old one, each with its difference;
    - `{...}` in an object, or `{"new": [...]}` in a list: new items.

Items of an object are known by their key. Items of a list that are objects with a key `id` or `name` each are known by it, so
that a list of jobs is not written again when its first job ends. Other items of a list are known by their position.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

NAMES = ("id", "name")
"""Keys that tell the items of a list apart."""


def difference(old: Any, new: Any) -> dict[str, Any]:
    """What makes `new` of `old`. Both are JSON as Python's objects."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {"items": _parts(list(old), list(old.values()), list(new), list(new.values()), _new_in_object)}
    if isinstance(old, list) and isinstance(new, list):
        name = next((name for name in NAMES if _named(old, name) and _named(new, name)), None)
        old_keys, new_keys = ([each[name] for each in items] if name else range(len(items)) for items in (old, new))
        return {"items": _parts(old_keys, old, new_keys, new, _new_in_list)}
    if isinstance(old, float) and isinstance(new, float) and old + (new - old) == new:
        return {"plus": new - old}
    return {"value": new}


def patched(old: Any, delta: dict[str, Any]) -> Any:
    """`old` with a difference applied. `old` stays as it is, and the result shares what has not changed.

    Raises:
        LookupError, TypeError, ValueError: the difference is not one to this document.
    """
    if "items" not in delta:
        return old + delta["plus"] if "plus" in delta else delta["value"]
    if isinstance(old, dict):
        keys, values = list(old), list(old.values())
        made: dict[str, Any] = {}
        for part in delta["items"]:
            if isinstance(part, dict):
                made |= part
                continue
            some = _old_items(values, part)
            made |= zip(keys[part[0] : part[0] + len(some)], some, strict=True)
        return made
    items: list[Any] = []
    for part in delta["items"]:
        items += part["new"] if isinstance(part, dict) else _old_items(old, part)
    return items


def _old_items(values: Sequence[Any], part: list[Any]) -> list[Any]:
    first, what = part
    if isinstance(what, int):
        return list(values[first : first + what])
    return [patched(values[first + at], delta) for at, delta in enumerate(what)]


def _named(items: list[Any], name: str) -> bool:
    """Whether each item is an object with a text of its own under this name."""
    found = {item[name] for item in items if isinstance(item, dict) and isinstance(item.get(name), str)}
    return bool(items) and len(found) == len(items)


def _new_in_object(keys: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(keys, values, strict=True))


def _new_in_list(keys: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    del keys
    return {"new": list(values)}


def _parts(
    old_keys: Sequence[Any],
    old: Sequence[Any],
    new_keys: Sequence[Any],
    new: Sequence[Any],
    new_items: Callable[[Sequence[Any], Sequence[Any]], dict[str, Any]],
) -> list[Any]:
    """The parts that make the new items of the old ones. Keys are unique."""
    where = {key: index for index, key in enumerate(old_keys)}
    at = [where.get(key) for key in new_keys]
    same = [index is not None and old[index] == item for index, item in zip(at, new, strict=True)]
    parts: list[Any] = []
    first = 0
    while first < len(new):
        index, kind = at[first], same[first]
        end = first + 1
        while end < len(new) and same[end] is kind and at[end] == (None if index is None else index + end - first):
            end += 1
        if index is None:
            parts.append(new_items(new_keys[first:end], new[first:end]))
        elif kind:
            parts.append([index, end - first])
        else:
            pairs = zip(old[index : index + end - first], new[first:end], strict=True)
            parts.append([index, [difference(before, now) for before, now in pairs]])
        first = end
    return parts


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
