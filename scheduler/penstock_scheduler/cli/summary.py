"""What a command says of itself in its module's source, read without running it: importing them all takes seconds."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def summary(where: str) -> str | None:
    """The help of the command at `package.module:name`: the docstring of a function, or the `help` of a `typer.Typer(…)`.

    Returns:
        None where the source does not say so plainly; then the command itself must be asked.
    """
    module, _, name = where.partition(":")
    try:
        tree = _tree(module)
        return None if tree is None else _help(tree, name)
    except (OSError, SyntaxError, ValueError, ImportError):
        return None


@cache  # several commands share a module
def _tree(module: str) -> ast.Module | None:
    package, *below = module.split(".")
    spec = find_spec(package)  # of a package inside another one this would import the outer one
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, *below)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _help(tree: ast.Module, name: str) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
        if (
            isinstance(node, ast.Assign)
            and [target.id for target in node.targets if isinstance(target, ast.Name)] == [name]
            and isinstance(node.value, ast.Call)
        ):
            words = [each.value for each in node.value.keywords if each.arg == "help"]
            return inspect.cleandoc(ast.literal_eval(words[0])) if words else None
    return None
