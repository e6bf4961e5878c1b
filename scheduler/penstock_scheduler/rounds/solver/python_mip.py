"""What python-mip can run here. It is optional, and so is CBC, its larger library.

`pip install mip highsbox` installs python-mip with CBC (the package cbcbox, 600 MB) and HiGHS (the package highsbox,
24 MB). python-mip looks for HiGHS in highspy first. Since 1.16 highspy no longer exports the C functions that it calls;
python-mip then says so once and takes highsbox. The Debian packages and the container have python-mip with HiGHS alone.
"""

from __future__ import annotations

from importlib.util import find_spec

from penstock_scheduler.people.errors import ConfigError

LIBRARIES = {"cbc": "cbcbox", "highs": "highsbox"}
"""Back end of the solver `milp` -> the package that has its library. The first that is installed is the default."""


def backends() -> list[str]:
    """The back ends that can run here, the default first. None without python-mip."""
    return [name for name, package in LIBRARIES.items() if find_spec("mip") and find_spec(package)]


def backend(wanted: str | None = None) -> str:
    """The back end `wanted`; None: the default.

    Raises:
        ConfigError: it is not installed, with the remedy.
    """
    here = backends()
    if not here:
        raise ConfigError("python-mip is not installed; pip install mip highsbox installs it (600 MB)")
    if wanted is not None and wanted not in here:
        missing = LIBRARIES[wanted]
        raise ConfigError(
            f"python-mip cannot run {wanted!r}, because {missing} is not installed; "
            f"pip install {missing}, or choose the back end {here[0]!r}"
        )
    return wanted or here[0]
