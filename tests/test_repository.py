"""The repository is consistent: pyproject.toml's entries exist, imports point one way, and no stray file is tracked."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from penstock_scheduler import __version__, cli

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OF_SITES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
TOOLS = tomllib.loads((ROOT / "loopback/pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [*OF_SITES, "loopback/penstock_loopback"]
ENTRY_POINTS = [
    EntryPoint(name, value, group)
    for group, entries in (
        ("console_scripts", PYPROJECT["project"]["scripts"]),
        *PYPROJECT["project"]["entry-points"].items(),
        *TOOLS["project"]["entry-points"].items(),
    )
    for name, value in entries.items()
]


def _tracked_files() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_imports_from_this_checkout(package: str):
    folder = ROOT / package
    assert (folder / "py.typed").is_file()
    module = importlib.import_module(folder.name)
    assert Path(module.__file__ or "").parent == folder


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda entry: f"{entry.group}:{entry.name}")
def test_entry_point_resolves(entry_point: EntryPoint):
    assert callable(entry_point.load())


def test_every_source_folder_is_known_to_all_tools():
    folders = [package.split("/")[0] for package in PACKAGES]
    names = [package.split("/")[1] for package in PACKAGES]
    tool = PYPROJECT["tool"]
    assert tool["hatch"]["build"]["dev-mode-dirs"] == [package.split("/")[0] for package in OF_SITES]
    assert tool["mypy"]["packages"] == names
    assert tool["importlinter"]["root_packages"] == names
    assert set(folders) <= set(tool["ruff"]["src"])
    assert set(folders) <= set(tool["mypy"]["mypy_path"].split(":"))


def test_the_tools_for_developers_are_a_distribution_of_their_own_of_the_same_version():
    assert "loopback" not in "".join((*OF_SITES, *PYPROJECT["project"]["entry-points"]["penstock.commands"].values()))
    assert TOOLS["project"]["entry-points"]["penstock.commands"].keys() == {*cli.TOOLS}
    assert TOOLS["project"]["dependencies"] == [f"penstock-scheduler[slurm]=={__version__}"]
    assert (ROOT / "loopback/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_imports_point_one_way():
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_licence_is_apache_2():
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    heading = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")[0]
    assert "Apache License" in heading
    assert "Version 2.0" in heading


def test_no_lock_file_is_tracked():
    """It would record the addresses of its author's package index."""
    assert [path for path in _tracked_files() if path.name == "uv.lock"] == []


def test_no_page_and_no_message_installs_the_strangers_package():
    """`penstock` on the public package index is another project (decision 12). The remedy names a file, or another package."""
    assert PYPROJECT["project"]["name"] == "penstock-scheduler"
    strange = re.compile(r"(?<![-\w/.*~])penstock\[[a-z]|pip install(?: +-\S+)* +['\"]?penstock(?![-\w]*\.)")
    warnings = re.compile(r"do not\s+`pip install penstock`", re.IGNORECASE)
    found = {}
    for path in _tracked_files():
        if path.name in (Path(__file__).name, "0012-the-name-on-the-index.md") or not path.is_file():
            continue
        text = warnings.sub("", path.read_bytes().decode("utf-8", "replace"))
        if strange.search(text):
            found[path.relative_to(ROOT).as_posix()] = strange.findall(text)
    assert found == {}


@pytest.mark.parametrize("package", ["scheduler/penstock_scheduler", "slurm_plugin/penstock_slurm"])
def test_a_package_has_few_rooms_and_says_what_each_is_for(package: str):
    top = {
        path.relative_to(ROOT / package).parts[0] for path in _tracked_files() if path.is_relative_to(ROOT / package)
    }
    rooms = sorted(top - {"__init__.py", "py.typed"})
    assert len(rooms) <= MOST_ROOMS
    page = (ROOT / "docs/developer/architecture.md").read_text(encoding="utf-8")
    assert [room for room in rooms if f"| `{room}`" not in page] == []


def test_no_tracked_file_is_over_1_mib():
    sizes = {path: path.stat().st_size for path in _tracked_files() if path.is_file()}
    assert {path.relative_to(ROOT): size for path, size in sizes.items() if size > 2**20} == {}


CORE = (
    "model",
    "burst/deciding",
    *(f"rounds/{name}" for name in ("policies", "solver", "free_gpus", "placement", "diff")),
)
"""The parts of scheduler/penstock_scheduler that decide."""

MOST_ROOMS = 12
"""Folders and modules at the top of a package, so that a stranger opens the right one."""

LARGE: dict[str, str] = {}
"""Files that are allowed to be longer, and why."""


def test_rooms_are_small():
    """At most 600 lines per file, 400 in the parts that decide, and 500 in a file of tests."""
    core = tuple(f"scheduler/penstock_scheduler/{each}" for each in CORE)
    found = {}
    for path in _tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix != ".py" or not path.is_file() or name in LARGE:
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        most = 400 if name.startswith(core) else 500 if path.name.startswith("test_") else 600
        if lines > most:
            found[name] = f"{lines} lines, at most {most}"
    assert found == {}
