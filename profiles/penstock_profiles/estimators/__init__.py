"""What the scheduler knows about a job's speed: one `Estimator` per job, which evaluates whole columns of
configurations.

Estimators are plain data, so that a snapshot can be saved as JSON and decided again: validate and dump `AnyEstimator`
with pydantic, which distinguishes the kinds by the field `kind`. A new kind is one dataclass in a module here and one
name in the union below.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock_profiles.estimators.base import Batch, Estimator, IntArray
from penstock_profiles.estimators.inference import (
    BatchInferenceEstimator,
    LatencyInferenceEstimator,
    LinearEstimator,
    TableEstimator,
)
from penstock_profiles.estimators.pipeline import PipelineEstimator, PipelineGpu
from penstock_profiles.estimators.training import BATCHES_TRIED, GpuModel, TrainingEstimator

AnyEstimator = Annotated[
    TrainingEstimator
    | PipelineEstimator
    | BatchInferenceEstimator
    | LatencyInferenceEstimator
    | TableEstimator
    | LinearEstimator,
    Field(discriminator="kind"),
]

__all__ = [
    "BATCHES_TRIED",
    "AnyEstimator",
    "Batch",
    "BatchInferenceEstimator",
    "Estimator",
    "GpuModel",
    "IntArray",
    "LatencyInferenceEstimator",
    "LinearEstimator",
    "PipelineEstimator",
    "PipelineGpu",
    "TableEstimator",
    "TrainingEstimator",
]
