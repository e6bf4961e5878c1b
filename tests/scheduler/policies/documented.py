"""The policy that CONTRIBUTING.md shows, registered as the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from penstock_scheduler.rounds.policies import REGISTRY, registered

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
NAME = "one-each"


@contextmanager
def documented() -> Iterator[None]:
    """While this is open, the file and the line of the page are part of the package."""
    section = PAGE.read_text(encoding="utf-8").split("## Add a policy in one file")[1].split("\n## ")[0]
    source, line = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module = ModuleType("penstock_scheduler.rounds.policies.one_each")
    with patch.dict(sys.modules, {module.__name__: module}):
        exec(compile(source, str(PAGE), "exec"), module.__dict__)  # our own page
        with patch.dict(REGISTRY, eval(f"{{{line}}}", {"registered": registered})):
            yield
