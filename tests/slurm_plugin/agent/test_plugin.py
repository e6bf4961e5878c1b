"""How an agent checks the SPANK plugin on its node, by Slurm's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler import __version__
from penstock_scheduler.people.errors import PenstockError
from penstock_slurm.agent.plugin import ASK_EVERY, MARK, Plugin, check
from penstock_slurm.gateway.local_slurm import SlurmCommands, constrains_devices
from penstock_slurm.install.units import source

PLUGIN = b"\x7fELF..." + MARK + b"..."


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Slurm's folder, with the plugin and its line."""
    (tmp_path / "penstock.so").write_bytes(PLUGIN)
    (tmp_path / "plugstack.conf").write_text(f"# ours\noptional {tmp_path}/penstock.so checkpoint-every=30\n")
    return tmp_path


def found(etc: Path, run_dir: str = "") -> str | None:
    trouble = check(etc / "plugstack.conf", run_dir, str(etc))
    return trouble and trouble[0]


def test_the_source_names_this_release() -> None:
    text, version = MARK.rstrip(bytes(1)).decode().rsplit(" ", 1)
    assert f'"{text} " PENSTOCK_VERSION' in (source("spank") / "penstock.c").read_text()
    assert f'PENSTOCK_VERSION "{version}"' in (source("spank") / "version.h").read_text()


def test_where_it_is_all_is_well(etc: Path) -> None:
    assert found(etc) is None
    (etc / "plugstack.conf").write_text("optional penstock.so run_dir=/run/%n\n")
    assert found(etc, "/run/%n") is None, "without a folder it is in PluginDir"
    (etc / "stack.d").mkdir()
    (etc / "plugstack.conf").rename(etc / "stack.d" / "ours.conf")
    for include in (f"{etc}/stack.d/*", "stack.d/*.conf"):
        (etc / "plugstack.conf").write_text(f"include {include}\n")
        assert found(etc, "/run/%n") is None


def test_where_slurm_has_several_folders_the_first_that_has_it_counts(etc: Path) -> None:
    (etc / "plugstack.conf").write_text("optional penstock.so\n")
    first, second = etc / "first", etc / "second"
    for folder in (first, second):
        folder.mkdir()
    (etc / "penstock.so").rename(second / "penstock.so")

    def trouble() -> tuple[str, str] | None:
        return check(etc / "plugstack.conf", "", f"{first}:{second}")

    assert trouble() is None
    (first / "penstock.so").write_bytes(b"old")
    assert trouble() == ("old-plugin", f"{first}/penstock.so is not from Penstock {__version__}")
    for folder in (first, second):
        (folder / "penstock.so").unlink()
    assert trouble() == ("no-plugin", f"{first}/penstock.so: No such file or directory")


def test_a_missing_plugin_or_one_with_another_run_dir_counts_as_none(etc: Path) -> None:
    assert found(etc, "/run/%n") == "no-plugin"
    assert (
        "no line for penstock.so with run_dir=/run/%n"
        in (check(etc / "plugstack.conf", "/run/%n", str(etc)) or ("", ""))[1]
    )
    (etc / "penstock.so").unlink()
    assert check(etc / "plugstack.conf", "", str(etc)) == ("no-plugin", f"{etc}/penstock.so: No such file or directory")
    (etc / "plugstack.conf").write_text("# optional penstock.so\n")
    assert found(etc) == "no-plugin"
    (etc / "plugstack.conf").unlink()
    assert found(etc) == "no-plugin"


@pytest.mark.parametrize(
    "mark", [b"", MARK.replace(__version__.encode(), b"0.0.9"), f"penstock.so of Penstock {__version__}1\0".encode()]
)
def test_one_of_another_release_is_told_apart(etc: Path, mark: bytes) -> None:
    (etc / "penstock.so").write_bytes(PLUGIN.replace(MARK, mark))
    assert found(etc) == "old-plugin"


def test_slurm_is_asked_until_it_answers_and_again_now_and_then(etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def config(_: SlurmCommands) -> dict[str, str]:
        asked.append("")
        if len(asked) in (1, 3):
            raise PenstockError("scontrol show config: no answer")
        folders = {"SLURM_CONF": f"{etc}/slurm.conf", "PlugStackConfig": "", "PluginDir": f"{etc}/none:{etc}"}
        return folders | {"ConstrainDevices": "yes" if len(asked) == 2 else "no"}

    monkeypatch.setattr(SlurmCommands, "config", config)
    (etc / "plugstack.conf").write_text("optional penstock.so\n")
    plugin = Plugin(SlurmCommands(None), RUN_DIR)
    assert not plugin.constrains(), "Slurm has not answered yet"
    assert [plugin.trouble() for _ in range(3)] == [None, None, None]
    (etc / "penstock.so").unlink()
    trouble = plugin.trouble()
    assert trouble is not None
    assert trouble[0] == "no-plugin"
    assert plugin.constrains()
    assert len(asked) == 2
    for _ in range(ASK_EVERY):
        plugin.trouble()
    assert len(asked) == 3
    assert plugin.constrains(), "the last answer counts until there is another"
    for _ in range(ASK_EVERY):
        plugin.trouble()
    assert len(asked) == 4
    assert not plugin.constrains()


@pytest.mark.parametrize(
    ("config", "constrains"),
    [({"TaskPlugin": "task/affinity,task/cgroup"}, True), ({"TaskPlugin": "task/affinity"}, False), ({}, True)],
)
def test_slurm_constrains_devices_by_its_plugin_for_tasks(config: dict[str, str], constrains: bool) -> None:
    assert constrains_devices(config | {"ConstrainDevices": "yes"}) is constrains
    assert not constrains_devices(config | {"ConstrainDevices": "no"})
