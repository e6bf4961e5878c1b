"""GPU types and their names, read from `data/gpus.toml` and a site's own file of the same format.

One GPU has many names. NVML reports `NVIDIA A100-SXM4-80GB`, Slurm's AutoDetect writes `nvidia_a100-sxm4-80gb`, a site
uses `a100_80gb` in GRES, and a paper `A100-80GB`. `Gpus.type_of` maps any of them to the name that Penstock uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from penstock_profiles.catalogue import DATA, CatalogueError, read_catalogue, unknown

_BUILT_IN = DATA / "gpus.toml"


class UnknownGpuError(LookupError):
    """The catalogue has no GPU of this name; the message lists the known types and close matches."""


class Gpu(BaseModel):
    """A GPU type; the fields are described in `data/gpus.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vendor: Literal["nvidia", "amd", "intel"]
    architecture: str
    memory_gb: PositiveInt
    products: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str


class Gpus(dict[str, Gpu]):
    """GPUs by type. Looking up an unknown type raises UnknownGpuError, which lists the known ones."""

    def __init__(self, gpus: dict[str, Gpu], types: dict[str, str]) -> None:
        """`types` is plain name -> type: each entry's own name, aliases and products."""
        super().__init__(gpus)
        self._types = types

    def __missing__(self, gpu_type: str) -> Gpu:
        raise UnknownGpuError(unknown("GPU type", gpu_type, self, self._types))

    def type_of(self, name: str) -> str:
        """The type with this name: a type, an alias, or the product as NVML, rocm-smi or Slurm's AutoDetect write it.

        Case does not matter, spaces and underscores are equal, and the leading `NVIDIA`, which older drivers leave out,
        is optional.

        Raises:
            UnknownGpuError: no entry has it.
        """
        try:
            return self._types[_plain(name)]
        except KeyError:
            raise UnknownGpuError(unknown("GPU", name, self, self._types)) from None

    def canonical(self, name: str) -> str:
        """`type_of`, or the name itself if no entry has it: a site may have GPUs that are not in the catalogue."""
        return self._types.get(_plain(name), name)


def load_gpus(extra: Path | None = None) -> Gpus:
    """GPUs that come with Penstock, and those of the file `extra`, which replace Penstock's entries of the same type.

    If both files use a name for different types, the site's entry counts: its `a100` may be the one with 80 GB.

    Raises:
        CatalogueError: a file is missing, is not TOML, has a field that is unknown, missing or out of range, or gives
            one name to two types.
    """
    sites = {} if extra is None else read_catalogue(extra, Gpu, _BUILT_IN.name)
    ours = read_catalogue(_BUILT_IN, Gpu, _BUILT_IN.name)
    kept = {gpu_type: gpu for gpu_type, gpu in ours.items() if gpu_type not in sites}
    return Gpus(kept | sites, _types(_BUILT_IN, kept) | _types(extra, sites))


def _types(path: Path | None, gpus: dict[str, Gpu]) -> dict[str, str]:
    """Plain name -> type, for all names in one file."""
    types: dict[str, str] = {}
    for gpu_type, gpu in gpus.items():
        for name in (gpu_type, *gpu.aliases, *gpu.products):
            other = types.setdefault(_plain(name), gpu_type)
            if other != gpu_type:
                raise CatalogueError(
                    f"catalogue {path}: {name!r} names both {other} and {gpu_type}; take it out of one of them"
                )
    return types


def _plain(name: str) -> str:
    """The form in which names are compared: as Slurm's AutoDetect writes products, without the vendor's name."""
    return "_".join(name.lower().split()).removeprefix("nvidia_")
