"""Presets: named sets of sbatch's options and adaptive flags. A user's preset hides one of the site with the same name.

::

    # ~/.config/penstock/presets.toml, or the site's /etc/penstock/presets.toml
    [big]
    adaptive = true
    max-gpus = 64
    gpu-types = "a100,rtx"
    time = "2-0"
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock_scheduler.people.errors import ConfigError
from penstock_slurm.submit.command_line import Options
from penstock_slurm.submit.flags import BadFlag, flags, read

Preset = Mapping[str, str | int | float | bool]


def user_file(environ: Mapping[str, str]) -> Path:
    """The file of the user's presets, in the XDG configuration folder."""
    folder = environ.get("XDG_CONFIG_HOME", "")
    home = Path(folder) if folder.startswith("/") else Path(environ.get("HOME", "/")) / ".config"
    return home / "penstock" / "presets.toml"


def load(path: Path) -> dict[str, Preset]:
    """The presets of a file; none if there is no file. Raises ConfigError."""
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict) or not all(
            isinstance(value, str | int | float | bool) for value in table.values()
        ):
            raise ConfigError(f'{path}: preset {name}: write [{name}] and below it options such as time = "8:00:00"')
    return tables


def arguments(name: str, preset: Preset, options: Options, where: str) -> list[str]:
    """A preset as options of sbatch. Raises ConfigError with the file, the key and the remedy."""
    known = options.names | set(flags())
    words = []
    for key, value in preset.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else "; sbatch --help lists them"
            raise ConfigError(f"{where}: preset {name}: sbatch has no option --{key}{hint}")
        if value is False:
            continue
        text = None if value is True else str(value)
        flag = flags().get(key)
        if flag is not None:
            try:
                read(flag, text if text is not None else flag.bare_value or "")
            except BadFlag as error:
                raise ConfigError(f"{where}: preset {name}: {error}") from None
        # A switch takes no value.
        words.append(f"--{key}" if text is None or (flag is not None and not flag.has_arg) else f"--{key}={text}")
    return words
