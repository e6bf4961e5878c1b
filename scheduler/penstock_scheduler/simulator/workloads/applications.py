"""The models that published workloads train: which family of the catalogue each is, and how long a whole training
is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Application:
    """A training as Pollux and Sia define it. Batches in samples; `epochs` until it ends."""

    family: str
    """In the catalogue of model families."""
    initial_batch: int
    max_batch: int
    epochs: int
    epoch_samples: int
    """In one epoch: the size of its training set. Of deepspeech2 and ncf, what the recorded trainings counted."""
    hours: str
    """GPU-hours that Sia's authors put it for when they draw it: S up to 1, M up to 10, L up to 100, XL above."""


APPLICATIONS = {
    "cifar10": Application("resnet18-cifar10", 128, 4096, 100, 50_000, "S"),
    "bert": Application("bert-squad", 12, 384, 2, 88_644, "M"),
    "deepspeech2": Application("deepspeech2", 20, 640, 80, 7_134, "M"),
    "yolov3": Application("yolov3", 8, 512, 50, 16_551, "L"),
    "imagenet": Application("resnet50-imagenet", 200, 12_800, 90, 1_281_167, "XL"),
    "ncf": Application("ncf", 256, 32_768, 10, 4_970_854, "S"),
}
"""By the name in published workloads. petuum/adaptdl, branch osdi21-artifact, and Sia, sections 4 and 5."""

OF_FAMILY = {application.family: application for application in APPLICATIONS.values()}


def application_of(model: str) -> Application | None:
    """By either name; None if no published workload trains it."""
    return APPLICATIONS.get(model) or OF_FAMILY.get(model)
