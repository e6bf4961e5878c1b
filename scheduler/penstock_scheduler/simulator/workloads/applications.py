"""Models of published workloads: the family of each in the catalogue, and the length of a whole training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Application:
    """A training as Pollux and Sia define it. Batch sizes are in samples; `epochs` is the number of epochs until it
    ends."""

    family: str
    """Name in the catalogue of model families."""
    initial_batch: int
    max_batch: int
    epochs: int
    epoch_samples: int
    """Samples of one epoch: the size of its training set. For deepspeech2 and ncf, as the recorded trainings
    counted."""
    hours: str
    """Class of GPU-hours for which Sia's authors draw it: S up to 1, M up to 10, L up to 100, XL above."""


APPLICATIONS = {
    "cifar10": Application("resnet18-cifar10", 128, 4096, 100, 50_000, "S"),
    "bert": Application("bert-squad", 12, 384, 2, 88_644, "M"),
    "deepspeech2": Application("deepspeech2", 20, 640, 80, 7_134, "M"),
    "yolov3": Application("yolov3", 8, 512, 50, 16_551, "L"),
    "imagenet": Application("resnet50-imagenet", 200, 12_800, 90, 1_281_167, "XL"),
    "ncf": Application("ncf", 256, 32_768, 10, 4_970_854, "S"),
}
"""Name in published workloads -> application. From petuum/adaptdl, branch osdi21-artifact, and Sia, sections 4 and
5."""

OF_FAMILY = {application.family: application for application in APPLICATIONS.values()}


def application_of(model: str) -> Application | None:
    """The application by its own or its family's name; None if no published workload trains it."""
    return APPLICATIONS.get(model) or OF_FAMILY.get(model)
