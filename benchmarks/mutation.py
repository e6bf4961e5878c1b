"""Mutation testing: `python benchmarks/mutation.py --survey`, or of one module `... MODULE.py TESTS... [--sample N] [--seed N]`.

For example::

    python benchmarks/mutation.py scheduler/penstock_scheduler/rounds/diff.py tests/scheduler/test_diff.py --sample 40
    python benchmarks/mutation.py --survey --least 27           # CI: 30 mutants of modules with fast, strong tests
    python benchmarks/mutation.py --survey --long --least 288   # by hand: 24 mutants of each module, 92 % of 312

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import islice
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

SCHEDULER, SLURM = "scheduler/penstock_scheduler/", "slurm_plugin/penstock_slurm/"

SURVEY: dict[str, tuple[str, ...]] = {
    SCHEDULER + "rounds/plan_gate.py": ("scheduler/test_plan_gate_boundaries.py", "scheduler/test_plan_gate.py"),
    SCHEDULER + "rounds/diff.py": ("scheduler/test_diff.py", "scheduler/test_diff_cloud.py"),
    SCHEDULER + "rounds/loop.py": (
        "scheduler/test_loop_steps.py",
        "scheduler/test_loop_cloud.py",
        "scheduler/test_health.py",
        "scheduler/test_loop.py",
    ),
    SCHEDULER + "rounds/free_gpus/book.py": (
        "scheduler/test_free_gpus.py",
        "scheduler/test_placement.py",
    ),
    SCHEDULER + "rounds/free_gpus/allowance.py": ("scheduler/test_free_gpus.py",),
    SCHEDULER + "rounds/solver/dual.py": ("scheduler/solver/test_solve.py", "scheduler/solver/test_properties.py"),
    SCHEDULER + "rounds/solver/reduced.py": ("scheduler/solver/test_solve.py", "scheduler/solver/test_properties.py"),
    SCHEDULER + "rounds/policies/sia/costs.py": ("scheduler/policies/sia",),
    SCHEDULER + "store/rounds.py": ("scheduler/store/test_round_store.py", "scheduler/store/test_store.py"),
    SLURM + "act/steps.py": ("slurm_plugin/test_steps.py", "slurm_plugin/test_node_parts.py"),
    SLURM + "observe/view.py": ("slurm_plugin/test_view.py", "slurm_plugin/test_view_nodes.py"),
    SLURM + "observe/records.py": ("slurm_plugin/test_records.py",),
    SLURM + "gateway/parse.py": (
        "slurm_plugin/gateway/test_parse_edges.py",
        "slurm_plugin/gateway/test_parse.py",
        "slurm_plugin/test_licences.py",
    ),
}
"""The modules that decide about running jobs -> the tests that judge them, under tests/."""

FIXTURES = {"scheduler/store/": "tests.scheduler.store.conftest"}
"""Folders of tests -> the module with their fixtures. The store is tested in SQLite, where each test takes milliseconds."""

SLOW = ("rounds/loop.py", "rounds/solver/dual.py", "rounds/solver/reduced.py", "store/rounds.py")
"""Ends of the modules whose tests take too long for CI's gate."""

CI_MUTANTS, LONG_MUTANTS = 30, 24 * len(SURVEY)
"""Mutants of a survey, and of a long one."""

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


def mutants(source: str, shuffle: random.Random) -> Iterator[str]:
    """All texts with one change, without those that mean the same to Python, in an order that `shuffle` chooses.

    Each is made when it is asked for: to make all of a large module's takes a minute or more.
    """
    makers = [*_by_cosmic_ray(source), *_by_swaps(source)]
    shuffle.shuffle(makers)
    known = {_meaning(source)}
    for make in makers:
        text = make()
        try:
            changed = _meaning(text) if text is not None else None
        except SyntaxError:
            continue
        if text is not None and changed not in known:
            known.add(changed)
            yield text


def _by_cosmic_ray(source: str) -> Iterator[Callable[[], str | None]]:
    tree = get_ast(source)
    for name in sorted(cosmic_ray.plugins.operator_names()):
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        places = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(tree))
        yield from (partial(MutationVisitor.mutate_code, source, operator, place) for place in range(places))


def _by_swaps(source: str) -> Iterator[Callable[[], str]]:
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SWAPS:
            name, line = node.func, lines[node.func.lineno - 1].encode()
            changed = line[: name.col_offset] + SWAPS[name.id].encode() + line[name.end_col_offset :]
            yield partial("".join, (*lines[: name.lineno - 1], changed.decode(), *lines[name.lineno :]))


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
        options += ["-W", "ignore:Module already imported", "-k", "not postgresql"]
        options += [f"-p{each}" for folder, each in FIXTURES.items() if any(folder in test for test in tests)]
        os._exit(int(pytest.main([*options, *tests])))
    end = time.monotonic() + timeout_s
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.02)
    return ended[1] == 0


def judged(path: Path, tests: Sequence[str], number: int, seed: int, timeout_s: float) -> tuple[int, int]:
    """Test a sample of a module's mutants and print those that survive. Returns how many were killed, and of how many."""
    source, begun = path.read_text(), time.monotonic()
    if not survives(path, source, tests, 10 * timeout_s):
        sys.exit(f"{path}: the tests fail with the unchanged module; make them pass first")
    alive = tried = 0
    for tried, text in enumerate(islice(mutants(source, random.Random(seed)), number), 1):
        if survives(path, text, tests, timeout_s):
            alive += 1
            change = difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")
            print(f"mutant {tried} survives:", *list(change)[2:], sep="\n  ", flush=True)
    killed, seconds = tried - alive, time.monotonic() - begun
    name = path.relative_to(ROOT)
    print(f"{name}: {killed} of {tried} mutants killed, {seconds:.0f} s", flush=True)
    return killed, tried


def main() -> None:
    """Test mutants of one module or of all modules of `SURVEY`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("module", type=Path, nargs="?")
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--survey", action="store_true", help="the modules of SURVEY, by their tests")
    parser.add_argument("--long", action="store_true", help="with --survey: all modules of SURVEY, and more mutants")
    parser.add_argument(
        "--sample", type=int, help="number of mutants together; default: 50 of one module; 0: all of it"
    )
    parser.add_argument("--least", type=int, default=0, help="fail if fewer mutants are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    args = parser.parse_args()
    if args.survey == (args.module is not None):
        parser.error("name a module and its tests, or give --survey")
    os.chdir(ROOT)
    hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("mutation")
    if args.survey:
        asked = {
            ROOT / module: [f"tests/{test}" for test in tests]
            for module, tests in SURVEY.items()
            if args.long or not module.endswith(SLOW)
        }
        total = args.sample or (LONG_MUTANTS if args.long else CI_MUTANTS)
    else:
        asked = {args.module.resolve(): args.tests}
        total = 50 if args.sample is None else args.sample or sys.maxsize
    # The same number for each module; a shuffle says which ones have one more.
    share, left = divmod(total, len(asked))
    more = random.Random(args.seed).sample(list(asked), left)
    numbers = {path: share + (path in more) for path in asked}
    results = [
        judged(path, tests, numbers[path], args.seed, args.timeout_s) for path, tests in asked.items() if numbers[path]
    ]
    killed, tried = (sum(column) for column in zip(*results, strict=True))
    print(f"together: {killed} of {tried} mutants killed ({killed / tried:.0%})")
    if killed < args.least:
        sys.exit(
            f"fewer than {args.least} mutants were killed: write tests for the survivors above, or say why they are equivalent"
        )


if __name__ == "__main__":
    main()
