"""No function or class has more branches than a reader can hold: radon's cyclomatic complexity is at most 20."""

from __future__ import annotations

from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).parent.parent
ROOMS = ("scheduler", "slurm_plugin", "cloud", "executor", "profiles", "airflow_provider", "loopback")

MOST = 20


def complex_blocks() -> dict[str, int]:
    """The blocks of the product above `MOST`: `package/module.py: Class.method` -> complexity."""
    return {
        f"{path.relative_to(ROOT / room)}: {block.fullname}": block.complexity
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for block in cc_visit(path.read_text(encoding="utf-8"))
        if block.complexity > MOST
    }


def test_no_block_is_too_complex() -> None:
    assert complex_blocks() == {}, (
        "name the ideas of this block, as functions or as data, or delete a branch that no case needs"
    )
