"""Reads a command's help from its module's source, because importing the modules of all commands takes seconds."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def reflow(text: str) -> str:
    """A help text with each paragraph on one line, so that the terminal's width decides where it wraps."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def summary(where: str) -> str | None:
    """The help of the command at `package.module:name`: the docstring of a function, or the `help` of a `typer.Typer(…)`.

    Returns:
        None: the source does not have it as a literal, so that the module must be imported.
    """
    module, _, name = where.partition(":")
    try:
        tree = _tree(module)
        text = None if tree is None else _help(tree, name)
        return None if text is None else reflow(text)
    except (OSError, SyntaxError, ValueError, ImportError):
        return None


@cache  # several commands share a module
def _tree(module: str) -> ast.Module | None:
    package, *below = module.split(".")
    spec = find_spec(package)  # find_spec of a subpackage would import its parent
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
            texts = [each.value for each in node.value.keywords if each.arg == "help"]
            return inspect.cleandoc(ast.literal_eval(texts[0])) if texts else None
    return None
