from pathlib import Path

from penstock_scheduler import __version__
from penstock_scheduler.rounds.settings import reference

# The page on the settings is written from the settings themselves; git ignores it.
(Path(__file__).parent / "admin" / "settings.md").write_text(reference(), encoding="utf-8")

project = "Penstock"
author = "The Penstock developers"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "Penstock"
