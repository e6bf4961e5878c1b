"""`penstock usage JOB`: how well a job uses, or used, its GPUs, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from penstock_profiles.sensitivity import Option
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.messages import ExplanationView, JobView, ShareView
from penstock_scheduler.cli.ask import ask, hours, print_fields
from penstock_scheduler.cli.options import check_prices
from penstock_scheduler.model import Configuration
from penstock_scheduler.people.units import duration, money
from penstock_scheduler.rounds.policies.tuning import Amount
from penstock_scheduler.rounds.shares import describe_sensitivity

BUSY, AS_EXPECTED, SCALES, USEFUL = 0.5, 0.8, 0.5, 0.5
"""Shares below which there is advice: of the time in which the GPUs were busy, of measured in expected goodput, of goodput per
GPU in that of a single GPU, and of goodput in throughput."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How well a job uses its GPUs, on the configuration of its newest observation. None: not known.

    Goodput is in samples of the initial batch size per second, throughput in samples per second.
    """

    configuration: str | None = None
    throughput: float | None = None
    """Measured."""
    goodput: float | None = None
    """Measured."""
    expected_goodput: float | None = None
    """By the job's model. None after the end of the job: the round has no model of it."""
    utilisation: float | None = None
    """Share of the time in which the GPUs were busy."""
    share_of_best: float | None = None
    """Goodput over that of its best configuration: both expected, or after the end both measured."""
    scaling: float | None = None
    """Goodput per GPU over that of a single GPU of the type: both expected, or after the end both measured."""

    @property
    def useful(self) -> float | None:
        """Measured goodput over measured throughput."""
        return self.goodput / self.throughput if self.goodput is not None and self.throughput else None

    @property
    def as_expected(self) -> float | None:
        """Measured over expected goodput."""
        return self.goodput / self.expected_goodput if self.goodput is not None and self.expected_goodput else None

    @property
    def advice(self) -> str:
        """The most useful thing to do, in a sentence."""
        if self.throughput is None:
            return "It has reported no step times, so nothing is known of its speed: see docs/user/executor-inside.md."
        if self.utilisation is not None and self.utilisation < BUSY:
            return f"Its GPUs were busy for {self.utilisation:.0%} of the time: give it more CPUs, or speed up its input data."
        if self.as_expected is not None and self.as_expected < AS_EXPECTED:
            return (
                f"It makes {self.as_expected:.0%} of the progress that is expected on {self.configuration}: look for slow input "
                "data and for other load on its nodes."
            )
        if self.scaling is not None and self.scaling < SCALES:
            return f"Each GPU does {self.scaling:.0%} of the work of a single one: a lower --max-gpus saves GPU-hours."
        if self.useful is not None and self.useful < USEFUL:
            return (
                f"Only {self.useful:.0%} of its throughput is progress: a smaller batch, or fewer GPUs, save GPU-hours."
            )
        return "It uses its GPUs well."


def of_job(
    expected: Mapping[Configuration, float], observations: Sequence[Observation], held: Configuration | None = None
) -> Efficiency:
    """How well a job uses its GPUs.

    Args:
        expected: expected goodput of each configuration; empty: not known.
        observations: newest last.
        held: the configuration that the job has now, which counts while there is no observation.
    """
    newest = observations[-1] if observations else None
    measured = {_configuration(each): each.goodput for each in observations if each.goodput is not None}
    now, known = held if newest is None else _configuration(newest), expected or measured
    if now is None:
        return Efficiency()
    best, here = max(known.values(), default=None), known.get(now)
    single = known.get(Configuration(1, 1, now.gpu_type))
    return Efficiency(
        str(now),
        None if newest is None else newest.samples_per_s,
        None if newest is None else newest.goodput,
        expected.get(now),
        None if newest is None else newest.utilisation,
        here / best if here is not None and best else None,
        here / (now.gpus * single) if here is not None and single else None,
    )


def show_job(job: str, prices: Mapping[str, float] | None, *, as_json: bool) -> None:
    """Show how well a job uses its GPUs, or used them, with advice, and what they cost.

    Where the policy allocates CPUs and memory, also what other amounts of them would change.

    Args:
        prices: GPU type -> price of a GPU-hour, USD; None: the site's.
    """
    view, explanation, history, known = ask(
        lambda penstock: (
            penstock.job(job),
            penstock.explain(job),
            penstock.history(job),
            penstock.usage(from_s=0.0, to_s=0.0).prices if prices is None else prices,
        )
    )
    if prices is not None:
        check_prices(prices, view.gpu_seconds)
    usd = {name: amount / 3600 * known[name] for name, amount in view.gpu_seconds.items() if name in known}
    reports = sorted(map(Report.model_validate, history.observations), key=lambda each: (each.epoch, each.sequence))
    observations = [each.body for each in reports if isinstance(each.body, Observation)]
    expected = {
        Configuration(each.nodes, each.gpus, each.gpu_type): each.goodput for each in explanation.configurations
    }
    has = view.allocation
    held = Configuration(len(has.nodes), has.gpus, has.gpu_type) if has is not None else None
    found = of_job(expected, observations, held)
    cost_s = explanation.restart_cost_s
    lost_s = view.restarts * cost_s if cost_s is not None else None
    if as_json:
        typer.echo(json.dumps(_document(view, explanation, found, lost_s) | {"usd": usd}))
        return
    where = f" on {found.configuration}" if found.configuration else ""
    print_fields(
        {
            "GPU-hours": ", ".join(f"{hours(amount)} of {name}" for name, amount in sorted(view.gpu_seconds.items()))
            or "none yet",
            "cost": ", ".join(f"{money(cost)} USD for {name}" for name, cost in sorted(usd.items())),
            "throughput": _rate(found.throughput, f"samples/s{where}, measured"),
            "goodput": _rate(found.goodput, f"samples/s of progress{where}, measured"),
            "expected": _rate(found.expected_goodput, f"samples/s of progress{where}")
            + (f"; measured is {found.as_expected:.0%} of it" if found.as_expected is not None else ""),
            "useful": _share(found.useful, "of the throughput is progress"),
            "busy": _share(found.utilisation, "of the time, by NVML"),
            "relative": _share(found.share_of_best, "of the goodput of its best configuration"),
            "scaling": _share(found.scaling, "of linear: its goodput per GPU, relative to a single GPU"),
            "restarts": f"{view.restarts}" + (f", which cost about {duration(lost_s)} of training" if lost_s else ""),
            **_shares(explanation.share),
            "advice": found.advice,
        }
    )


def _document(view: JobView, explanation: ExplanationView, found: Efficiency, lost_s: float | None) -> dict[str, Any]:
    return {
        "job": view.id,
        "gpu_hours": {gpu_type: amount / 3600 for gpu_type, amount in view.gpu_seconds.items()},
        "samples": view.progress,
        **asdict(found),
        "restarts": view.restarts,
        "restart_seconds": lost_s,
        "share": None if explanation.share is None else explanation.share.model_dump(mode="json"),
        "advice": found.advice,
    }


def _configuration(observation: Observation) -> Configuration:
    return Configuration(observation.nodes, observation.gpus, observation.gpu_type)


def _shares(share: ShareView | None) -> dict[str, str]:
    """The lines about CPU and memory; none if the policy does not allocate them."""
    if share is None:
        return {}
    has, part = Amount(share.cpus, share.memory_mb), Amount(share.part_cpus, share.part_memory_mb)
    options = [Option(option.cpus, option.memory_mb, option.speed) for option in share.sensitivity]
    speed = f"; {share.speed:.2f} times as fast as with that" if share.profile else ""
    sensitivity = f"{describe_sensitivity(options)}, by the profile {share.profile}" if share.profile else "not known"
    return {
        "share": f"{has} on each node; proportional to its GPUs would be {part}{speed}",
        "sensitivity": sensitivity,
    }


def _rate(rate: float | None, unit: str) -> str:
    return "not known" if rate is None else f"{rate:.3g} {unit}"


def _share(share: float | None, of_what: str) -> str:
    return "not known" if share is None else f"{share:.0%} {of_what}"
