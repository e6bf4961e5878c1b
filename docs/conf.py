import tomllib
from pathlib import Path

from penstock_scheduler.settings import reference

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The page on the settings is written from the settings themselves; git ignores it.
(Path(__file__).parent / "admin" / "settings.md").write_text(reference(), encoding="utf-8")

project = "Penstock"
author = "The Penstock developers"
copyright = author
version = release = _project["version"]

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "Penstock"
