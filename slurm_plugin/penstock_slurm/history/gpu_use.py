"""How busy the GPUs of past jobs were, from a Prometheus that the site has already. It only asks.

Sources of the presets' names: NVIDIA's dcgm-exporter with `--hpc-job-mapping-dir`, the exporter that jobstats uses
(nvidia_gpu_prometheus_exporter), and slurm-job-exporter of Calcul Québec.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import httpx

from penstock_scheduler.people.errors import ConfigError, PenstockError

PRESETS = (
    "DCGM_FI_DEV_GPU_UTIL:hpc_job",
    "nvidia_gpu_duty_cycle:jobid",
    "slurm_job_utilization_gpu:slurmjobid",
)
"""METRIC:LABEL: a percentage of the time in which a GPU was busy, and the label that has the number of the job."""

STEP_S = 300.0
"""Seconds between two looks at a GPU. Prometheus looks back as long for a sample."""

CHUNK_S = 86_400.0
"""A question is about so much time, so that it stays within Prometheus' limits."""

TIMEOUT_S = 300.0

_METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?:([a-zA-Z_][a-zA-Z0-9_]*)")


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How busy the GPUs of a job were, as far as Prometheus has seen them."""

    seen_gpu_h: float
    """GPU-hours in which Prometheus has samples."""
    busy_gpu_h: float
    """The part of them in which the GPUs were busy."""
    idle_gpu_h: float
    """The part of them in which a GPU was at 0 %."""

    def plus(self, other: GpuUse) -> GpuUse:
        """Both together."""
        return GpuUse(
            self.seen_gpu_h + other.seen_gpu_h, self.busy_gpu_h + other.busy_gpu_h, self.idle_gpu_h + other.idle_gpu_h
        )


class Prometheus:
    """A site's Prometheus, or what answers its API, such as Thanos, Mimir or VictoriaMetrics.

    Args:
        url: its address, perhaps with a user and a password, and a path.
        metric: METRIC:LABEL, perhaps with matchers in braces after METRIC. By default the first of `PRESETS` that it has.
        step_s: seconds between two looks.
        transport: how requests are sent. The default is httpx's.

    Raises:
        ConfigError: the address or the metric has another form.
    """

    def __init__(
        self,
        url: str,
        metric: str | None = None,
        step_s: float = STEP_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not re.match(r"https?://[^/]", url):
            raise ConfigError("--prometheus: give an address such as http://prometheus:9090")
        if metric is not None and _METRIC.fullmatch(metric) is None:
            raise ConfigError(
                f"--gpu-metric={metric}: give the metric and the label that has the job's number, such as "
                'nvidia_gpu_duty_cycle{cluster="c1"}:jobid'
            )
        self._metrics = PRESETS if metric is None else (metric,)
        self.step_s = step_s
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S, transport=transport)
        self._name = self._http.base_url.host

    def use(self, jobs: Collection[str], begin_s: float, end_s: float) -> dict[str, GpuUse]:
        """Job -> how busy its GPUs were in a period. Jobs that Prometheus has not seen are missing.

        Args:
            jobs: the numbers of the jobs that count, as SLURM_JOB_ID has them.
            begin_s, end_s: s since 1970.

        Raises:
            PenstockError: Prometheus does not answer, refuses, or has none of the metrics with a job's number.
        """
        selector, label = self._chosen(begin_s, end_s)
        found: dict[str, GpuUse] = {}
        while begin_s < end_s:
            until_s = min(begin_s + CHUNK_S, end_s)
            for job, seen in self._between(selector, label, begin_s, until_s).items():
                if job in jobs:
                    found[job] = found[job].plus(seen) if job in found else seen
            begin_s = until_s
        return found

    def _chosen(self, begin_s: float, end_s: float) -> tuple[str, str]:
        """A selector of the series of jobs' GPUs, and the label that has the job."""
        for metric in self._metrics:
            match = _METRIC.fullmatch(metric)
            assert match is not None
            name, matchers, label = match.groups()
            selector = f'{name}{{{f"{matchers}," if matchers else ""}{label}!~"|0"}}'
            about = {"match[]": selector, "start": f"{begin_s:.3f}", "end": f"{end_s:.3f}"}
            if self._ask(f"/api/v1/label/{label}/values", about):
                return selector, label
        raise PenstockError(
            f"Prometheus on {self._name} has no series with a job's number in this time; looked for "
            f"{', '.join(self._metrics)}. Name the metric of your exporter with --gpu-metric METRIC:LABEL"
        )

    def _between(self, selector: str, label: str, begin_s: float, until_s: float) -> dict[str, GpuUse]:
        """Job -> how busy its GPUs were in begin_s < time <= until_s."""
        look_h = self.step_s / 3600
        span = f"[{until_s - begin_s:.0f}s:{self.step_s:.0f}s]"
        seen = self._sums(f"sum by ({label}) (count_over_time({selector}{span}))", label, until_s)
        idle = self._sums(f"sum by ({label}) (count_over_time(({selector} == 0){span}))", label, until_s)
        percent = self._sums(f"sum by ({label}) (sum_over_time({selector}{span}))", label, until_s)
        return {
            job: GpuUse(looks * look_h, percent[job] / 100 * look_h, idle.get(job, 0.0) * look_h)
            for job, looks in seen.items()
            if math.isfinite(percent.get(job, math.nan))
        }

    def _sums(self, query: str, label: str, at_s: float) -> dict[str, float]:
        answer = self._ask("/api/v1/query", {"query": query, "time": f"{at_s:.3f}"})
        try:
            return {each["metric"][label]: float(each["value"][1]) for each in answer["result"]}
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._error("its answer has another form than Prometheus'") from None

    def _ask(self, path: str, parameters: dict[str, str]) -> Any:
        try:
            response = self._http.get(path, params=parameters)
            said = response.json()
        except httpx.HTTPError as error:
            raise self._error(str(error) or type(error).__name__) from None
        except ValueError:
            raise self._error(f"HTTP {response.status_code}, and no JSON: is this Prometheus' address?") from None
        if not isinstance(said, dict) or said.get("status") != "success" or "data" not in said:
            why = said.get("error") if isinstance(said, dict) else None
            raise self._error(f"HTTP {response.status_code}: {why or 'no success'}")
        return said["data"]

    def _error(self, text: str) -> PenstockError:
        return PenstockError(f"Prometheus on {self._name}: {text}")
