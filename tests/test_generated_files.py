"""The files that are generated from the job spec's fields and the policies are as `script/generate` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from script.generate import BEGIN, END, generated, outdated, replace_part


def test_generated_files_are_up_to_date() -> None:
    assert [str(path) for path in outdated(generated())] == [], "run script/generate"


def test_a_changed_file_is_out_of_date(tmp_path: Path) -> None:
    path = tmp_path / "flags.def"
    assert outdated({path: "new"}) == [path]
    path.write_text("old")
    assert outdated({path: "new"}) == [path]
    path.write_text("new")
    assert outdated({path: "new"}) == []


def test_only_the_marked_part_is_replaced() -> None:
    text = f"before\n-- {BEGIN}\nold\n-- {END}\nafter\n"
    assert replace_part(text, "new\n", "a page") == f"before\n-- {BEGIN}\nnew\n-- {END}\nafter\n"
    for bad in ("before\n", f"-- {END}\n-- {BEGIN}\n", text + text):
        with pytest.raises(ValueError, match="a page needs one line with"):
            replace_part(bad, "new\n", "a page")
