"""One word, one home: a public class has one module, and the glossary explains those that several modules use."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = (*sorted(ROOT.glob("*/penstock_*")), ROOT / "airflow_provider/airflow_provider_penstock")
WITH_ROOMS = ("penstock_scheduler", "penstock_slurm")
"""Packages whose folders and modules at the top are rooms. Each other package is one room."""

SEVERAL_HOMES = """
    Account AgentSettings Arrivals Batch BudgetLine Burst Claim Client Cluster Controls Daemon Driver Entry
    Estimator Event Events Facts Group Held History Holder Kind Line Measured Measuring NodeStatus Orders Owned Owner
    Part PenstockCallback Places Pool Problem Process Provider Query Reader Refusal Request Resident Service Settings
    State Stream Suspension Unreadable Watcher World
"""
"""Names that still have several homes. This list may only shrink."""


class Home(NamedTuple):
    """The module of a class, and the first sentence of its docstring."""

    module: str
    meaning: str

    @property
    def room(self) -> str:
        """Where the glossary lists the class, such as `penstock_scheduler/jobs`."""
        package, *inner = self.module.split(".")
        return f"{package}/{inner[0]}" if package in WITH_ROOMS and inner else package


@cache
def classes() -> dict[str, list[Home]]:
    """The homes of each public class."""
    homes: dict[str, list[Home]] = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                homes[node.name].append(Home(module, re.split(r"(?<=[.:;])\s", text)[0].rstrip(":;")))
    return homes


@cache
def modules() -> dict[str, ast.Module]:
    """The modules of the product."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
    }


def shared() -> set[str]:
    """Public classes with one home that two or more modules import. A package that only passes a name on does not count."""
    users: dict[str, set[str]] = defaultdict(set)
    for module, tree in modules().items():
        passed_on = {
            name
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
            for name in ast.literal_eval(node.value)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name not in passed_on:
                        users[alias.name].add(module)
    return {name for name, homes in classes().items() if len(homes) == 1 and len(users[name]) > 1}


def glossary() -> dict[str, str]:
    """The classes in the glossary's first columns, with the heading above: a room, or a subject."""
    found, heading = {}, ""
    for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.strip("#` ")
        elif line.startswith("|"):
            found.update(dict.fromkeys(re.findall(r"`([A-Z]\w+)`", line.split("|")[1]), heading))
    return found


def test_a_public_class_has_one_home() -> None:
    known = set(SEVERAL_HOMES.split())
    several = {name: [home.module for home in homes] for name, homes in classes().items() if len(homes) > 1}
    assert {name: homes for name, homes in several.items() if name not in known} == {}, "rename the more special one"
    assert sorted(known - several.keys()) == [], "they have one home now: delete them from SEVERAL_HOMES"


def test_the_glossary_explains_the_classes_that_several_modules_use() -> None:
    explained = glossary()
    missing = defaultdict(list)
    for name in sorted(shared() - explained.keys()):
        home = classes()[name][0]
        missing[home.room].append(f"| `{name}` | {home.meaning} |")
    text = "\n\n".join(f"### {room}\n\n" + "\n".join(lines) for room, lines in sorted(missing.items()))
    assert not missing, f"lines for docs/glossary.md:\n\n{text}"


def test_the_glossary_lists_each_class_in_its_room() -> None:
    wrong = {
        name: (heading, [home.room for home in classes().get(name, ())])
        for name, heading in glossary().items()
        if "/" in heading or heading.startswith("penstock_")
        if heading not in [home.room for home in classes().get(name, ())]
    }
    assert wrong == {}, "a class has moved or is gone: move or delete its line in docs/glossary.md"
