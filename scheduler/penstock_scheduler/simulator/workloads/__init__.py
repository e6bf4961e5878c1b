"""Workloads: jobs to simulate, from our own files, published traces, a site's history or a generator."""

from penstock_scheduler.simulator.workloads.frames import from_frame, to_frame
from penstock_scheduler.simulator.workloads.generate import GeneratorSettings, generate
from penstock_scheduler.simulator.workloads.own import write
from penstock_scheduler.simulator.workloads.reading import FORMATS, read_workload
from penstock_scheduler.simulator.workloads.table import BadInput, InputProblem, Wrong
from penstock_scheduler.simulator.workloads.workload import (
    APPLICATIONS,
    Application,
    Workload,
    WorkloadJob,
    application_of,
    jittered,
    rigid_spec,
)

__all__ = [
    "APPLICATIONS",
    "FORMATS",
    "Application",
    "BadInput",
    "GeneratorSettings",
    "InputProblem",
    "Workload",
    "WorkloadJob",
    "Wrong",
    "application_of",
    "from_frame",
    "generate",
    "jittered",
    "read_workload",
    "rigid_spec",
    "to_frame",
    "write",
]
