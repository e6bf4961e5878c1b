"""Fit the catalogue's model families again: `python benchmarks/families.py PROFILES_DIR [--write]`.

Fits each family to all its measured steps, on every GPU type in PROFILES_DIR (see `fit.py` for its format), and prints
the tables for `profiles/penstock_profiles/data/families.toml`. With --write, it replaces them there.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import numpy as np
from fit import as_measured, read_steps

from penstock_profiles.families import load_families
from penstock_profiles.fit import fit_throughput

FOLDERS = {"resnet18-cifar10": "cifar10", "resnet50-imagenet": "imagenet", "bert-squad": "bert"}
"""Family -> its folder, if the folder has another name."""

CATALOGUE = Path(__file__).parents[1] / "profiles" / "penstock_profiles" / "data" / "families.toml"
TYPES = ("t4", "rtx", "rtx6000", "v100", "a100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, metavar="PROFILES_DIR")
    parser.add_argument("--write", action="store_true", help="replace the tables in the catalogue")
    options = parser.parse_args()
    text = CATALOGUE.read_text()
    for family in load_families():
        tables = [t for gpu_type in TYPES if (t := table(family, gpu_type, options.profiles)) is not None]
        if not options.write:
            print("\n".join(tables))
        found = re.search(rf"(\[{family}\]\n(?:[^\[\n][^\n]*\n)*\n)((?:\[{family}\.gpus\.[^\[]*)*)", text)
        assert found, f"the catalogue has a table [{family}]"
        text = text[: found.start(2)] + "\n".join(tables) + "\n" + text[found.end(2) :]
    if options.write:
        CATALOGUE.write_text(text.rstrip("\n") + "\n")


def table(family: str, gpu_type: str, profiles: Path) -> str | None:
    """The family's TOML table on one type; None if no step was measured there."""
    steps = read_steps(profiles / FOLDERS.get(family, family) / f"placements-{gpu_type}.csv")
    if steps is None:
        return None
    fit = fit_throughput(as_measured(steps))
    assert fit.params is not None, fit.failure
    rounded = [f"{field.name} = {getattr(fit.params, field.name):.3g}" for field in dataclasses.fields(fit.params)]
    return (
        f"[{family}.gpus.{gpu_type}]\n"
        f"max_atomic_batch = {int(np.max(steps.local_bsz))}\n"
        f"median_rel_err = {fit.median_rel_err:.3f}\n"
        f"step = {{ {', '.join(rounded)} }}\n"
    )


if __name__ == "__main__":
    main()
