"""`penstock simulate run --cloud`: the cloud that stands behind a simulated site, from the command line and a settings file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.cli.options import split
from penstock_scheduler.model import Node
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.settings import DaemonSettings, load_settings
from penstock_scheduler.simulator.cloud import TICK_S, CloudSpec, cloud_settings
from penstock_scheduler.simulator.workloads import Workload

OWN = ("usd_per_gpu_h", "gpu_type", "nodes", "suspend_s")
"""Keys of --cloud that are not of section [cloud]."""

CONSTANTS = ("boot_s", "t_max_h", "patience")
"""Constants of the burst manager that --cloud may set."""

NOT_SIMULATED = ("site", "name", "share", "share_users")
"""Keys of section [cloud] without a meaning in a simulation."""


def cloud_of(text: str, config: Path | None, workload: Workload, nodes: Sequence[Node]) -> CloudSpec:
    """The cloud of a simulation.

    Args:
        text: the value of --cloud: `usd_per_gpu_h=2.5`, and keys of section [cloud].
        config: a settings file, whose section [cloud] applies where `text` says nothing, and whose `[daemon] tick_s` is the
            time between two ticks; None: the daemon's defaults.
        workload: the jobs.
        nodes: the site's nodes.

    Raises:
        ConfigError: a key is unknown, a value wrong, or there is no price.
    """
    given = _given(text)
    price = given.pop("usd_per_gpu_h", None)
    if price is None:
        raise ConfigError("--cloud needs the price of a GPU-hour there, such as usd_per_gpu_h=2.5")
    types = list(dict.fromkeys(node.gpu_type for node in nodes))
    gpu_type = given.pop("gpu_type", types[0] if len(types) == 1 else None)
    if gpu_type is None:
        raise ConfigError(f"--cloud: which GPUs are there? Add gpu_type=TYPE, such as gpu_type={types[0]}")
    usd_per_gpu_h = _positive("usd_per_gpu_h", price)
    most = int(_positive("nodes", given.pop("nodes"), least=1.0)) if "nodes" in given else None
    suspend_s = _positive("suspend_s", given.pop("suspend_s")) if "suspend_s" in given else 0.0
    constants = {name: _positive(name, given.pop(name)) for name in CONSTANTS if name in given}
    try:
        settings = cloud_settings(_of_file(config) | given, workload, **constants)
    except ValidationError as error:
        raise ConfigError(f"--cloud: {'; '.join(describe_errors(error, BurstSettings))}") from None
    largest = max(node.gpus for node in nodes)
    asked = {gpus for job in workload.jobs for gpus in (job.gpus, job.spec.min_gpus) if gpus <= largest}
    tick_s = TICK_S if config is None else load_settings(config).section(DaemonSettings).tick_s
    return CloudSpec(settings, gpu_type, usd_per_gpu_h, tuple(sorted(asked | {largest})), tick_s, most, suspend_s)


def _positive(name: str, text: str, least: float = 0.0) -> float:
    try:
        value = float(text)
        if not (0 < value < float("inf") and value >= least):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--cloud: {name}={text} is not a number {'above 0' if not least else f'of at least {least:g}'}"
        ) from None
    return value


def _given(text: str) -> dict[str, Any]:
    known = [*OWN, *CONSTANTS, *(name for name in BurstSettings.model_fields if name not in (*NOT_SIMULATED, "budget"))]
    found: dict[str, Any] = {}
    for part in split(text):
        name, given, value = part.partition("=")
        if not given or not value:
            raise ConfigError(f"--cloud: {part!r} is not NAME=VALUE")
        if name not in known:
            raise ConfigError(f"--cloud: unknown {name!r}; use {', '.join(known)}")
        found[name] = value
    return found


def _of_file(config: Path | None) -> dict[str, Any]:
    """What section [cloud] of a settings file says."""
    if config is None:
        return {}
    try:
        section = load_settings(config).section(BurstSettings)
    except ConfigError as error:
        if "section [BurstSettings] is missing" in str(error):
            return {}
        raise
    said = section.model_fields_set & BurstSettings.model_fields.keys()
    return {name: getattr(section, name) for name in sorted(said) if name not in NOT_SIMULATED}
