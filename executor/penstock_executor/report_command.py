"""`penstock-report`: reports and requests for jobs that do not use Python or PyTorch.

::

    epoch=$(penstock-report begin --checkpoints "$folder" --total 1e6)   # claim an epoch for this run of the job
    penstock-report steps --epoch $epoch --steps 20 --step-time-s 0.5 --atomic-batch 64 --progress 1280
    request=$(penstock-report poll --epoch $epoch) && save && penstock-report saved --epoch $epoch --request "$request"
    ... penstock-report metric --epoch $epoch --progress 1280 0.91   # what the model has reached, for a search
    penstock-report end --epoch $epoch --outcome completed --progress 1e6

Each call writes or reads one message of `penstock_profiles.wire` in the job's spool. docs/user/executor-inside.md describes
the files, for programs that write them without this command. Without Penstock or Slurm nothing is reported, `poll`
finds nothing, and the script runs unchanged.

Exit status: 0: success. 1: `poll` found no request. 2: wrong options or variables, with a message on standard error.
75: a later run of the job has begun, so this one must stop and write nothing more.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from penstock_executor.allocation import UnknownAllocation, find_allocation
from penstock_executor.client import Client, connect, reconnect
from penstock_executor.environment import Environment, EnvironmentDisagrees, read_environment
from penstock_profiles.wire import CPU, Checkpointed, Observation, Result, Started

OK, NO_REQUEST, WRONG, SUPERSEDED = 0, 1, 2, 75
"""Exit statuses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        environment = read_environment()
        if options.verb == "begin":
            return _begin(options, environment)
        client = reconnect(options.epoch, options.checkpoints, environment)
        if client.superseded:
            text = f"a run later than epoch {options.epoch} has begun, so this run must stop"
            print(f"penstock-report: {text}", file=sys.stderr)  # noqa: T201
            return SUPERSEDED
        verbs = {"poll": _poll, "steps": _steps, "saved": _saved, "metric": _metric, "end": _end}
        status = verbs[options.verb](options, client)
        client.flush()
        return status
    except (EnvironmentDisagrees, UnknownAllocation, ValidationError, OSError) as error:
        print(f"penstock-report: {error}", file=sys.stderr)  # noqa: T201
        return WRONG


def _begin(options: argparse.Namespace, environment: Environment) -> int:
    client = connect(options.checkpoints, environment)
    if environment.job_id is not None:
        allocation = find_allocation(environment, options.gpu_type or (None if environment.gpus_on_node else CPU))
        client.report(
            Started(
                gpu_type=allocation.gpu_type,
                gpu_ids=allocation.gpu_ids,
                progress=options.progress,
                total=options.total,
                usr2=options.usr2,
                survives_losing_nodes=options.survives_losing_nodes,
            )
        )
        client.flush()
    print(client.epoch)  # noqa: T201
    return OK


def _poll(options: argparse.Namespace, client: Client) -> int:
    request = client.poll()
    answered = {body.request for body in client.reported() if isinstance(body, Checkpointed)}
    if request is None or request.id in answered:
        return NO_REQUEST
    print(request.id)  # noqa: T201
    return OK


def _steps(options: argparse.Namespace, client: Client) -> int:
    began = [body for body in client.reported() if isinstance(body, Started)]
    gpu_type = began[-1].gpu_type if began else CPU
    gpu_ids = began[-1].gpu_ids if began else {}
    client.report(
        Observation(
            gpu_type=gpu_type,
            nodes=max(len(gpu_ids), 1),
            gpus=max(sum(map(len, gpu_ids.values())), 1),
            gpus_per_replica=options.gpus_per_replica,
            atomic_batch=options.atomic_batch,
            accumulation_steps=options.accumulation_steps,
            steps=options.steps,
            step_time_s=options.step_time_s,
            sync_time_s=options.sync_time_s,
            progress=options.progress,
        )
    )
    return OK


def _saved(options: argparse.Namespace, client: Client) -> int:
    client.report(Checkpointed(request=options.request, progress=options.progress, seconds=options.seconds))
    return OK


def _metric(options: argparse.Namespace, client: Client) -> int:
    if math.isfinite(options.value):  # a trial that diverges keeps its last result
        client.report(Result(metric=-options.value if options.minimize else options.value, progress=options.progress))
    return OK


def _end(options: argparse.Namespace, client: Client) -> int:
    client.close(options.outcome, options.progress, options.text)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock-report", description="Reports the progress of a job to Penstock, and reads its requests."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.add_argument(
            "--checkpoints", type=Path, metavar="DIR", help="folder of the job's checkpoints, on a shared file system"
        )
        if name != "begin":
            made.add_argument("--epoch", type=int, required=True, help="the epoch that `begin` printed")
        if name != "poll":
            made.add_argument(
                "--progress", type=float, default=0.0, metavar="SAMPLES", help="progress over all runs of the job (0)"
            )
        return made

    begin = verb("begin", "Report that a run begins; prints its epoch.")
    begin.add_argument("--total", type=float, metavar="SAMPLES", help="progress at which the job is done")
    begin.add_argument("--gpu-type", metavar="TYPE", help="GPU type, if Slurm does not report one")
    begin.add_argument(
        "--usr2",
        choices=["batch", "steps"],
        help="the batch script, or every process of the steps, handles SIGUSR2: send the signal with each request",
    )
    begin.add_argument(
        "--survives-losing-nodes", action="store_true", help="the run continues when Slurm takes nodes from it"
    )
    verb("poll", "Print the id of an unanswered request for a checkpoint; exit status 1 if there is none.")
    steps = verb("steps", "Report the steps made since the last report.")
    steps.add_argument("--steps", type=int, required=True, help="number of optimiser steps")
    steps.add_argument("--step-time-s", type=float, required=True, metavar="S", help="mean time of a step, in seconds")
    steps.add_argument(
        "--sync-time-s",
        type=float,
        metavar="S",
        help="part of it that waited for other processes' gradients, in seconds",
    )
    steps.add_argument(
        "--atomic-batch", type=int, required=True, metavar="SAMPLES", help="samples of one replica in a micro-step"
    )
    steps.add_argument(
        "--accumulation-steps", type=int, default=0, metavar="N", help="micro-steps before the last one of a step (0)"
    )
    steps.add_argument(
        "--gpus-per-replica", type=int, default=1, metavar="P", help="GPUs that hold one copy of the model together (1)"
    )
    saved = verb("saved", "Report that a checkpoint is on disk.")
    saved.add_argument("--request", help="id that `poll` printed, if this answers a request")
    saved.add_argument("--seconds", type=float, required=True, metavar="S", help="time that saving took, in seconds")
    metric = verb("metric", "Report the metric that the model has reached; a search compares its trials by it.")
    # argparse before Python 3.14 takes -1e-05 and -inf for options.
    metric._negative_number_matcher = re.compile(r"^-((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf(inity)?)$", re.IGNORECASE)
    metric.add_argument("value", type=float, metavar="VALUE", help="such as the accuracy on the validation set")
    metric.add_argument("--minimize", action="store_true", help="less is better, such as a loss")
    end = verb("end", "Report that the run is about to exit.")
    end.add_argument("--outcome", choices=["completed", "stopped", "superseded", "failed"], required=True)
    end.add_argument("--text", default="", help="an explanation for people to read")
    return parser


if __name__ == "__main__":
    sys.exit(main())
