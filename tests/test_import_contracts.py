"""Each import contract of pyproject.toml is broken once, in a copy of the packages: `lint-imports` must report it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]


CIRCLES = (
    ("penstock_scheduler", "model.job", "cli.jobs"),
    ("penstock_scheduler.daemon.service", "errors", "app"),
    ("penstock_slurm", "gateway.parse", "observe.view"),
)
"""In a package, a module and one that imports it already, directly or not."""


def forbidden_imports(contract: dict[str, Any]) -> set[tuple[str, str]]:
    """All pairs (importer, imported) that a contract forbids, between the modules that it names."""
    if contract["type"] == "acyclic_siblings":
        return {(f"{package}.{low}", f"{package}.{high}") for package, low, high in CIRCLES}
    if contract["type"] == "layers":
        layers = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
        upwards = {(low, high) for above, below in combinations(layers, 2) for low in below for high in above}
        return upwards | {pair for layer in layers for pair in permutations(layer, 2)}
    ignored = {tuple(pair.split(" -> ")) for pair in contract.get("ignore_imports", ())}
    pairs = {(source, other) for source in contract["source_modules"] for other in contract["forbidden_modules"]}
    return pairs - ignored


def add_imports(packages: Path, imports: set[tuple[str, str]]) -> None:
    for source, imported in sorted(imports):
        module = packages / source.replace(".", "/")
        file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        with file.open("a", encoding="utf-8") as text:
            text.write(f"\n\ndef breaks_a_contract():\n    import {imported}\n")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a copy of every package's Python files."""
    for package in (*PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "loopback/penstock_loopback"):
        for file in (ROOT / package).rglob("*.py"):
            copy = tmp_path / file.relative_to((ROOT / package).parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return tmp_path


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract["name"])
def test_lint_imports_reports_every_import_that_a_contract_forbids(contract: dict[str, Any], packages: Path) -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    imports = forbidden_imports(contract)
    assert imports, "the contract forbids something"
    add_imports(packages, imports)
    result = subprocess.run(
        [command, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=packages,
        env=os.environ | {"PYTHONPATH": str(packages), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = " ".join(result.stdout.split())
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract['name']} BROKEN" in printed
    if contract["type"] == "acyclic_siblings":
        assert not [package for package, *_ in CIRCLES if f"No cycles are allowed in {package}." not in printed]
        return
    missing = {pair for pair in imports if f"{pair[0]} is not allowed to import {pair[1]}" not in printed}
    assert not missing, result.stdout


def test_the_airflow_provider_has_no_circle_and_imports_nothing_of_penstock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a wheel of its own and is installed beside Airflow, so the contracts of `pyproject.toml` cannot list it."""
    grimp = pytest.importorskip("grimp")
    monkeypatch.syspath_prepend(str(ROOT / "airflow_provider"))
    graph = grimp.build_graph("airflow_provider_penstock", include_external_packages=True)
    inside = {module for module in graph.modules if module.split(".")[0] == "airflow_provider_penstock"}
    assert len(inside) > 30
    assert [name for name in graph.modules if name.startswith("penstock_")] == []
    packages = {module for module in inside if graph.find_children(module)}
    assert {name: circle for name in packages if (circle := graph.nominate_cycle_breakers(name))} == {}
