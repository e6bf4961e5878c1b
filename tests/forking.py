"""Processes that are forked from one which has imported what they need: importing takes most of the time of short ones.

There is one such process for each of pytest's, whoever forks, so that it imports for all of them.
"""

import multiprocessing

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "penstock_scheduler.daemon",
        "penstock_scheduler.service.app",
        "penstock_scheduler.service.server",
        "penstock_slurm.cluster",
        "penstock_slurm.submitter",
        "uvicorn.lifespan.on",
        "uvicorn.protocols.http.auto",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "penstock_executor.training.starting",
    ]
)
"""What is not installed is passed over."""
