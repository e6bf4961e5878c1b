"""Presets: their options, and the files that they are read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_scheduler.people.errors import ConfigError
from penstock_slurm.submit import presets
from tests.slurm_plugin.submit.test_command_line import OPTIONS


def test_a_preset_is_its_options() -> None:
    preset: presets.Preset = {"adaptive": True, "max-gpus": 8, "hold": False, "time": "2-0", "non-preemptible": "yes"}
    words = presets.arguments("big", preset, OPTIONS, "here")
    assert words == ["--adaptive", "--max-gpus=8", "--time=2-0", "--non-preemptible"]


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ({"max-gpu": 8}, "here: preset big: sbatch has no option --max-gpu; did you mean max-gpus"),
        ({"max-gpus": 0}, "here: preset big: --max-gpus=0: give a whole number from 1 to 999999999, such as"),
        ({"max-gpus": True}, "here: preset big: --max-gpus=: give a whole number"),
        ({"x; rm": "y"}, "sbatch has no option --x; rm"),
    ],
)
def test_a_bad_preset_is_told_with_its_place(preset: presets.Preset, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        presets.arguments("big", preset, OPTIONS, "here")


def test_the_users_file_is_in_the_xdg_folder(tmp_path: Path) -> None:
    assert presets.user_file({"HOME": "/home/ann"}) == Path("/home/ann/.config/penstock/presets.toml")
    assert presets.user_file({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/penstock/presets.toml")
    assert presets.user_file({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}) == Path("/h/.config/penstock/presets.toml")
    path = tmp_path / "presets.toml"
    assert presets.load(path) == {}
    path.write_text("[big]\nmax-gpus = 8\n")
    assert presets.load(path) == {"big": {"max-gpus": 8}}
    for bad in ("big = 8", "[big]\nmax-gpus = [8]", "[big"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"presets\.toml"):
            presets.load(path)
