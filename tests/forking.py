"""Processes forked from one that has imported their modules, since importing takes most of the time of short processes.

Each pytest process has one such process, which all its tests share.
"""

import multiprocessing

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "penstock_scheduler.daemon.penstockd",
        "penstock_scheduler.daemon.service.app",
        "penstock_scheduler.daemon.service.process",
        "penstock_scheduler.daemon.service.server",
        "penstock_slurm.cluster",
        "penstock_slurm.act.submitter",
        "uvicorn.lifespan.on",
        "uvicorn.protocols.http.auto",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "penstock_executor.training.starting",
        "tests.frozen",
    ]
)
"""Modules that are not installed are skipped."""
