"""Options and notes of `penstock simulate run` and `penstock simulate whatif` about co-located jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from penstock_profiles.colocation import Colocation, ColocationError, read_pairs
from penstock_scheduler.cli.options import numbers, split
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import sharing_parts
from penstock_scheduler.simulator.agents import AgentSettings, SimulatedAgents
from penstock_scheduler.simulator.cluster_sharing import Sharers, names_of, sharers
from penstock_scheduler.simulator.workloads import Workload

SHOWN = 5
"""Most job names in a sentence."""


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """The options as given on the command line; see `simulate`."""

    pairs: Path | None
    pair_types: str
    draw_kinds: bool
    agents: str
    assume_utilisation: float | None


@dataclass(frozen=True, slots=True)
class Learned:
    """What a site has learned about pairs, instead of a table."""

    pairs: Colocation
    source: str
    """Its source, as part of a sentence."""
    like: Mapping[str, str] = field(default_factory=dict)
    """GPU type that the site lacks -> the GPU type whose pairs are used for it."""
    gpu_memory_mb: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shared:
    """What simulations assume about co-located jobs.

    Args:
        policies: policies under which jobs share GPUs.
        pairs: shares of pairs, by the cluster's names of GPU types.
        table: the file of the pairs; None: the site has learned them.
        source: where the pairs are from, as part of a sentence; empty: there are none.
        gpu_types: GPU types of the cluster.
        settings: costs of sharing.
        drawn: whether kinds are drawn.
        utilisation: utilisation of a job that runs alone, for jobs of unknown utilisation; None: not given.
        gpu_memory_mb: memory of one GPU by GPU type, MB, as the site knows it.
    """

    policies: tuple[str, ...]
    pairs: Colocation
    table: Path | None
    source: str
    gpu_types: tuple[str, ...]
    settings: AgentSettings
    drawn: bool
    utilisation: float | None
    gpu_memory_mb: Mapping[str, int]

    def sharers(self, workload: Workload, seed: int = 0) -> Sharers:
        """The truth about the jobs."""
        return sharers(
            workload,
            self.gpu_types,
            self.pairs,
            self.settings.model_copy(update={"seed": seed}),
            drawn=self.drawn,
            assumed=1.0 if self.utilisation is None else self.utilisation,
            gpu_memory_mb=self.gpu_memory_mb,
        )

    def agents(self, policy: PolicyChoice, workload: Workload, seed: int) -> SimulatedAgents | None:
        """New agents for one simulation; None: under this policy, no jobs share GPUs."""
        return self.sharers(workload, seed).agents() if str(policy) in self.policies else None

    def check(self, workload: Workload, naming: str = "") -> None:
        """Raise ConfigError if a given table has none of the jobs' kinds. `naming` is a remedy besides drawing
        kinds."""
        told = self.sharers(workload)
        if self.table is not None and not self.drawn and told.unknown == len(workload.jobs):
            named, has = next(iter(told.kinds.values())).name, told.pairs.kinds(told.pairs.gpu_types[0])
            raise ConfigError(
                f"--pairs={self.table}: the table has none of the jobs' kinds, such as {named!r}; it has "
                f"{', '.join(has[:3])}, …: {naming}draw them with --draw-kinds"
            )

    def expect_something(self, workload: Workload) -> None:
        """Raise ConfigError if nothing is known or given about the effect of the jobs on each other."""
        told = self.sharers(workload)
        if self.utilisation is None and len(told.assumed) == told.unknown == len(workload.jobs):
            raise ConfigError(
                f"under policy {self.policies[0]} jobs share GPUs, but the record shows neither the utilisation of "
                "any job nor its effect on other jobs. Give a table of pairs (--pairs FILE, with --draw-kinds if it "
                "lacks your jobs), or say what to assume: with --assume-utilisation 1 jobs gain by time slices alone"
            )

    def assumed(self, workload: Workload) -> dict[str, object]:
        """The assumptions and the jobs that they concern, for programs."""
        told = self.sharers(workload)
        memory = [job for job, kind in told.kinds.items() if not kind.memory_mb]
        utilisation = told.kinds[told.assumed[0]].utilisation if told.assumed else None
        return {"utilisation": utilisation, "utilisation_of": list(told.assumed), "memory_fits_of": memory}

    def notes(self, workload: Workload) -> list[str]:
        """Sentences on where the truth about co-located jobs is from, and on what was assumed."""
        told, jobs = self.sharers(workload), len(workload.jobs)
        names = {job.id: next(names_of(job)) for job in workload.jobs}
        found = []
        if not self.source:
            found.append(
                "No pairs of jobs are known (--pairs): on one GPU, only the jobs' utilisation slows them down."
            )
        elif not told.unknown:
            found.append(f"Pairs of jobs: {self.source}.")
        elif self.drawn:
            drawn = (
                f"{told.unknown} of {jobs} jobs have a kind that the table lacks: each got a random kind of its size"
            )
            found.append(f"Pairs of jobs: {self.source}. {drawn}.")
        else:
            prior = f"{told.unknown} of {jobs} jobs have a kind that it lacks: only utilisation slows them down"
            found.append(f"Pairs of jobs: {self.source}. {prior}.")
        if told.assumed:
            which = _some([names[job] for job in told.assumed])
            found.append(
                f"The utilisation of {len(told.assumed)} of {jobs} jobs is unknown ({which}): they are assumed to use "
                f"{_part(told.kinds[told.assumed[0]].utilisation)}."
            )
        if unsized := [names[job] for job, kind in told.kinds.items() if not kind.memory_mb]:
            found.append(
                f"The memory of {len(unsized)} of {jobs} jobs is unknown ({_some(unsized)}): they are assumed to fit "
                "beside any other job."
            )
        if trials := sum(job.spec.trial_group is not None for job in workload.jobs):
            found.append(
                f"{trials} of {jobs} jobs are trials of a search. None ends early, because their results are not simulated."
            )
        return found


def _agent_settings(text: str) -> AgentSettings:
    """The settings of --agents. Raises ConfigError."""
    values = numbers("--agents", text)
    if unknown := sorted(set(values) - {"switch_s", "noise", "step_noise"}):
        raise ConfigError(f"--agents: unknown {unknown[0]!r}; there are noise, step_noise and switch_s")
    try:
        return AgentSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--agents: {first['loc'][0]}={first['input']:g}: {first['msg']}") from None


def shared_by(
    policies: Sequence[PolicyChoice], options: SharingOptions, gpu_types: Sequence[str], learned: Learned | None = None
) -> Shared | None:
    """What simulations assume about co-located jobs; None: jobs share GPUs under none of the policies.

    Args:
        policies: all simulated policies.
        options: the options.
        gpu_types: GPU types of the cluster.
        learned: what the site has learned, for use without a table.

    Raises:
        ConfigError: an option is wrong or has no effect.
    """
    sharing = tuple(str(policy) for policy in policies if sharing_parts(policy))
    file = options.pairs
    given = {
        "--pairs": file is not None,
        "--pair-types": options.pair_types,
        "--draw-kinds": options.draw_kinds,
        "--agents": options.agents,
        "--assume-utilisation": options.assume_utilisation is not None,
    }
    used = next((option for option, value in given.items() if value), None)
    if used is not None and not sharing:
        raise ConfigError(
            f"{used} is for policies that let jobs share GPUs, and none of {', '.join(map(str, policies))} does; "
            "name one, such as gandiva, or a stage, such as --stage gandiva-share"
        )
    if file is None and (options.pair_types or options.draw_kinds):
        raise ConfigError(
            f"{'--pair-types' if options.pair_types else '--draw-kinds'} applies to the table of --pairs; give --pairs, too"
        )
    settings = _agent_settings(options.agents)
    if not sharing:
        return None
    like = dict(learned.like) if learned is not None else {}
    if file is not None:
        pairs, source = _table(file, options.pair_types, gpu_types, like), str(file)
    elif learned is not None and learned.pairs.gpu_types:
        known = learned.pairs.gpu_types
        stands = {name: name if name in known else like.get(name, name) for name in gpu_types}
        pairs, source = learned.pairs.on_types(stands), learned.source
    else:
        pairs, source = Colocation(), ""
    return Shared(
        sharing,
        pairs,
        file,
        source,
        tuple(gpu_types),
        settings,
        options.draw_kinds,
        options.assume_utilisation,
        learned.gpu_memory_mb if learned is not None else {},
    )


def _table(file: Path, pair_types: str, gpu_types: Sequence[str], like: Mapping[str, str]) -> Colocation:
    """Read the pairs of a file, by the cluster's names of GPU types. Raises ConfigError."""
    try:
        table = read_pairs(file)
    except ColocationError as error:
        raise ConfigError(f"--pairs: {error}") from None
    except OSError as error:
        raise ConfigError(f"--pairs={file}: {error.strerror}") from None
    if not table.gpu_types:
        raise ConfigError(f"--pairs={file}: the table has no pairs; leave the option out")
    stands = {
        ours: theirs for ours, theirs in like.items() if theirs in table.gpu_types and ours not in table.gpu_types
    }
    for part in split(pair_types):
        ours, _, theirs = part.partition("=")
        if ours not in gpu_types or theirs not in table.gpu_types:
            raise ConfigError(
                f"--pair-types: {part!r} is not TYPE=TYPE of the cluster's ({', '.join(gpu_types)}) and the table's "
                f"({', '.join(table.gpu_types)})"
            )
        stands[ours] = theirs
    for name in gpu_types:
        if stands.setdefault(name, name) not in table.gpu_types:
            raise ConfigError(
                f"--pairs={file}: it has no pairs on {name}; it has {', '.join(table.gpu_types)}: say which of these "
                f"stands for it, such as --pair-types {name}={next(iter(table.gpu_types))}"
            )
    return table.on_types(stands)


def _part(utilisation: float) -> str:
    return (
        "all of a GPU, so that two of them gain nothing on one" if utilisation == 1 else f"{utilisation:.0%} of a GPU"
    )


def _some(names: Sequence[str]) -> str:
    """The most frequent names, as part of a sentence."""
    counts = Counter(names)
    shown = [f"{name} x{count}" if count > 1 else name for name, count in counts.most_common(SHOWN)]
    return ", ".join(shown) + (f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else "")
