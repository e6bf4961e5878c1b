"""Mutation testing of one module: `python benchmarks/mutation.py MODULE.py TESTS... [--sample N] [--seed N]`.

For example::

    python benchmarks/mutation.py scheduler/penstock_scheduler/rounds/diff.py tests/scheduler/test_diff.py --sample 40

A *mutant* is the module with one operator, number, condition or order changed. The tests should fail with each of them; a
mutant with which all tests pass *survives*, and is either equivalent (it changes nothing that anybody can see) or shows
that a test is missing. cosmic-ray makes the mutants (`pip install cosmic-ray`), and four more come from here: `list` for
`sorted`, and `min`, `max`, `any` and `all` for each other. Mutants in annotations that Python never evaluates are left out.

No file changes: each mutant is tested in a forked process that imports the changed text instead of the module. So tests that
start processes of their own test the unchanged module there, and kill fewer mutants. Tests that need the fixtures of
tests/conftest.py (a real Slurm) do not run here. A mutant whose tests take longer than
`--timeout-s` counts as killed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import cosmic_ray.plugins
import highspy  # noqa: F401 (imported here once, not in every process; so are the next ones)
import hypothesis
import pandas  # noqa: F401
import pytest
import scipy.optimize  # noqa: F401
import sqlalchemy  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator  # noqa: F401

SWAPS = {"sorted": "(lambda items, **_: list(items))", "min": "max", "max": "min", "any": "all", "all": "any"}
"""Functions -> what is called instead, beside the operators of cosmic-ray."""

ROOT = Path(__file__).resolve().parents[1]


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a changed text instead of the module in `path`."""

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.rpartition(".")[2] != self._path.stem:
            return None
        for folder in path or ():
            if Path(folder).resolve() == self._path.parent:
                return importlib.util.spec_from_file_location(name, self._path, loader=self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def mutants(source: str) -> list[str]:
    """All texts with one change, without those that mean the same to Python, in a fixed order."""
    meaning, found = _meaning(source), {}
    for text in (*_by_cosmic_ray(source), *_by_swaps(source)):
        try:
            changed = _meaning(text)
        except SyntaxError:
            continue
        if changed != meaning:
            found.setdefault(changed, text)
    return list(found.values())


def _by_cosmic_ray(source: str) -> Iterator[str]:
    tree = get_ast(source)
    for name in sorted(cosmic_ray.plugins.operator_names()):
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        places = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(tree))
        for place in range(places):
            if (text := MutationVisitor.mutate_code(source, operator, place)) is not None:
                yield text


def _by_swaps(source: str) -> Iterator[str]:
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SWAPS:
            name, line = node.func, lines[node.func.lineno - 1].encode()
            changed = line[: name.col_offset] + SWAPS[name.id].encode() + line[name.end_col_offset :]
            yield "".join((*lines[: name.lineno - 1], changed.decode(), *lines[name.lineno :]))


def _meaning(source: str) -> str:
    """The program without annotations, unless pydantic evaluates them."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg) or (isinstance(node, ast.AnnAssign) and "pydantic" not in source):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def survives(path: Path, source: str, tests: Sequence[str], timeout_s: float) -> bool:
    """Whether all tests pass with this text for the module."""
    gc.freeze()  # or each process copies what it collects
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, Mutated(path, source))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to import than most tests to run
        options = ["-x", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
        options += ["-W", "ignore:Module already imported"]
        os._exit(int(pytest.main([*options, *tests])))
    end = time.monotonic() + timeout_s
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.02)
    return ended[1] == 0


def main() -> None:
    """Test a sample of a module's mutants and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--sample", type=int, default=50, help="number of mutants; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    args = parser.parse_args()
    os.chdir(ROOT)
    hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("mutation")
    path: Path = args.module.resolve()
    source = path.read_text()
    if not survives(path, source, args.tests, 10 * args.timeout_s):
        sys.exit("the tests fail with the unchanged module; make them pass first")
    every = mutants(source)
    sample = every if not args.sample else random.Random(args.seed).sample(every, min(args.sample, len(every)))
    alive = 0
    for number, text in enumerate(sample, 1):
        if survives(path, text, args.tests, args.timeout_s):
            alive += 1
            change = difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")
            print(f"mutant {number} survives:", *list(change)[2:], sep="\n  ", flush=True)
    print(f"{args.module}: {len(sample) - alive} of {len(sample)} mutants killed ({len(every)} in all)", flush=True)


if __name__ == "__main__":
    main()
