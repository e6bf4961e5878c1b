"""Loads the authors' simulator from a checkout, with the changes at run time that it needs here.

Nothing of theirs is in this repository: the checkout has no licence. What is changed, and why:

- `gavel` and `sia_fix`, other policies, are empty modules: they import packages that no run here needs.
- `cvxpy`, which only their own policy uses, and `autograd`, which only their fit of the throughput model uses, are empty modules
  where no run needs them.
- Their policy calls the solver CBC, which takes the package cylp. It is solved by `--solver` instead, by default GLPK, which
  their README installs and their paper names.
- `pandas.DataFrame.append` no longer exists; it is `pandas.concat`.
- Their fit and their `get_max_local_bsz` keep their answers: a fit takes a tenth of a second, and jobs of one model measure the
  same. The results are the same to the last digit.
- The log of every round is not kept, and what they print is dropped.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

REPOSITORY, COMMIT = "https://github.com/siasosp23/artifacts", "aaf7a0d"

TYPES: Mapping[str, str] = {"aws": "t4", "dgx-ext": "a100", "rtx": "rtx"}
"""Their name of a GPU type ("cluster") -> ours."""


@dataclass(frozen=True)
class Artifact:
    """Their modules, and the folder of their workloads."""

    modules: Mapping[str, Any]
    workloads: Path

    def __getattr__(self, name: str) -> Any:
        return self.modules[name]


def load(checkout: Path, solver: str | None, *, fits: bool) -> Artifact:
    """Import their simulator.

    Args:
        checkout: a checkout of `REPOSITORY`.
        solver: cvxpy's name of a solver for their own policy; None: it does not run.
        fits: whether jobs fit their own throughput models.

    Raises:
        SystemExit: the folder is not a checkout, or a package is missing.
    """
    folder = checkout / "sia-simulator"
    if not (folder / "sia.py").is_file():
        raise SystemExit(f"{folder} has no sia.py: git clone {REPOSITORY}, then git checkout {COMMIT}")
    _stand_in("gavel", GavelPolicy=type("GavelPolicy", (), {}))
    _stand_in("sia_fix", SiaFixPolicy=type("SiaFixPolicy", (), {}))
    for name, needed in (("cvxpy", solver is not None), ("autograd", fits), ("autograd.numpy", fits)):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if needed:
                raise SystemExit(f"{name} is missing: pip install pandas autograd cvxpy cvxopt") from None
            _stand_in(name)
    sys.path.insert(0, str(folder))
    with quiet():
        import pandas

        pandas.DataFrame.append = _append
        names = ("applications", "cluster", "goodput", "job", "sia", "simulator_config")
        modules: dict[str, Any] = {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(folder))
    application = modules["applications"].Application
    application.get_max_local_bsz = cache(application.get_max_local_bsz)
    modules["job"].fit_perf_params = _kept(modules["goodput"].fit_perf_params)
    modules["cluster"].Cluster.step_log = lambda self: None
    modules["simulator_config"].sia_solver_verbose = False
    if solver is not None:
        modules["sia"].cp = _solved_by(modules["sia"].cp, solver)
    return Artifact(modules, folder / "workloads")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what is printed."""
    with contextlib.redirect_stdout(io.StringIO()) as dropped:
        dropped.write = lambda text: len(text)  # type: ignore[method-assign]
        yield


def _stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def _append(self: Any, other: Any, ignore_index: bool = False) -> Any:
    """pandas 1's `DataFrame.append`."""
    import pandas

    return pandas.concat([self, other], ignore_index=ignore_index)


def _kept(fit: Any) -> Any:
    @cache
    def of(columns: tuple[tuple[float, ...], ...]) -> Any:
        import numpy as np

        return fit(*map(np.array, columns))

    return lambda *columns: of(tuple(tuple(column.tolist()) for column in columns))


def _solved_by(cvxpy: Any, solver: str) -> Any:
    """cvxpy as their policy uses it, with this solver whatever it asks for."""

    class Problem(cvxpy.Problem):  # type: ignore[misc]
        def solve(self, **_: Any) -> Any:
            return super().solve(solver=solver)

    names = ("Variable", "multiply", "sum", "Minimize", "Maximize")
    return SimpleNamespace(Problem=Problem, CBC=None, **{name: getattr(cvxpy, name) for name in names})
