"""The simulator for Python users: `simulate` compares policies and returns DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from penstock_scheduler.model import Node
    from penstock_scheduler.simulator.disturbances import Disturbances
    from penstock_scheduler.simulator.frames import SimulationResult
    from penstock_scheduler.simulator.workloads import Workload


def simulate(
    cluster: str | Sequence[Node],
    workload: str | Path | pd.DataFrame | Workload,
    policies: str | PolicyChoice | Sequence[str | PolicyChoice] | Mapping[str, Mapping[str, object]] = "sia",
    *,
    seeds: int = 1,
    profiles: str | Path | None = None,
    gpu_speeds: Mapping[str, float] | None = None,
    prices: Mapping[str, float] | None = None,
    disturbances: Disturbances | None = None,
) -> SimulationResult:
    """Simulate a workload on a cluster under each policy and each seed. Ctrl-C returns what was computed so far.

    `penstock simulate run` computes the same figures. Jobs do not share GPUs here.

    Args:
        cluster: nodes, or a spec of them such as `t4:6x4,a100:2x8` (6 nodes of 4 T4, 2 nodes of 8 A100).
        workload: a file that `penstock simulate workload` reads, a DataFrame with columns of `workloads.frames.WORKLOAD`, or a
            Workload.
        policies: one policy or several, by name or as a PolicyChoice with stages; or names with their settings.
        seeds: number of simulations of each policy. Seed 0 is the workload as it is; in others jobs come up to 60 s
            later.
        profiles: folder of measured tables of the workload's models; None: the catalogue of model families.
        gpu_speeds: GPU type -> relative speed, for jobs with recorded durations; None: all types are equally fast.
        prices: GPU type -> price of a GPU-hour; None: no costs.
        disturbances: failures, stragglers and other faults; None: none.

    Raises:
        ConfigError: an argument is wrong, or a job cannot run on this cluster; BadInput names file and line.
    """
    # SciPy, pandas and the policies take seconds to load, and reading settings loads this module.
    import pandas as pd

    from penstock_scheduler.simulator.cluster import nodes_from_spec
    from penstock_scheduler.simulator.profiles import Profiles
    from penstock_scheduler.simulator.results import simulate_each, to_result
    from penstock_scheduler.simulator.run import prepare
    from penstock_scheduler.simulator.workloads import from_frame, read_workload

    if seeds < 1:
        raise ConfigError(f"seeds={seeds}; use at least 1")
    nodes = nodes_from_spec(cluster) if isinstance(cluster, str) else tuple(cluster)
    if isinstance(workload, pd.DataFrame):
        workload = from_frame(workload)
    elif isinstance(workload, str | Path):
        workload = read_workload(Path(workload), gpu_types=[node.gpu_type for node in nodes])
    if isinstance(policies, Mapping):
        choices = [PolicyChoice(name=name, settings={name: dict(its)}) for name, its in policies.items()]
    else:
        names = [policies] if isinstance(policies, str | PolicyChoice) else policies
        choices = [PolicyChoice(name=each) if isinstance(each, str) else each for each in names]
    tables = None if profiles is None else Profiles(Path(profiles))
    scenarios = [
        prepare(nodes, workload, tables, gpu_speeds=gpu_speeds, disturbances=disturbances, seed=seed)
        for seed in range(seeds)
    ]
    scenarios[0].check()
    each = ((scenario, choice, seed) for seed, scenario in enumerate(scenarios) for choice in choices)
    return to_result(simulate_each(each, prices=prices))
