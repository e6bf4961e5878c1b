"""`penstock-report`: what a job that is no Python program, or no PyTorch, says to Penstock and hears from it.

::

    epoch=$(penstock-report begin --checkpoints "$folder" --total 1e6)   # which run of the job this is; claims it
    penstock-report steps --epoch $epoch --steps 20 --step-time-s 0.5 --atomic-batch 64 --progress 1280
    request=$(penstock-report poll --epoch $epoch) && save && penstock-report saved --epoch $epoch --request "$request" ...
    penstock-report metric --epoch $epoch --progress 1280 0.91   # what the model reaches by now, for a search
    penstock-report end --epoch $epoch --outcome completed --progress 1e6

Each call is one message of `penstock_profiles.wire` in the job's spool, which docs/user/executor.md describes for those who
would rather write the files themselves. Without Penstock or Slurm, nothing is said, `poll` finds nothing, and a script runs
unchanged.

Exit status: 0; `poll` without a request 1; 75 when a later run of the job has begun, so that this one must stop and write nothing
more; 2 for wrong options or variables, with a sentence on standard error.
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

FINE, NOTHING, WRONG, SUPERSEDED = 0, 1, 2, 75


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        environment = read_environment()
        if options.verb == "begin":
            return _begin(options, environment)
        client = reconnect(options.epoch, options.checkpoints, environment)
        if client.superseded:
            print(f"penstock-report: a later run than epoch {options.epoch} has begun: stop", file=sys.stderr)  # noqa: T201
            return SUPERSEDED
        verbs = {"poll": _poll, "steps": _steps, "saved": _saved, "metric": _metric, "end": _end}
        status = verbs[options.verb](options, client)
        client.hand_over()
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
        client.hand_over()
    print(client.epoch)  # noqa: T201
    return FINE


def _poll(options: argparse.Namespace, client: Client) -> int:
    request = client.poll()
    answered = {body.request for body in client.said() if isinstance(body, Checkpointed)}
    if request is None or request.id in answered:
        return NOTHING
    print(request.id)  # noqa: T201
    return FINE


def _steps(options: argparse.Namespace, client: Client) -> int:
    began = [body for body in client.said() if isinstance(body, Started)]
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
    return FINE


def _saved(options: argparse.Namespace, client: Client) -> int:
    client.report(Checkpointed(request=options.request, progress=options.progress, seconds=options.seconds))
    return FINE


def _metric(options: argparse.Namespace, client: Client) -> int:
    if math.isfinite(options.value):  # a trial that has diverged stays at what it had reached
        client.report(Result(metric=-options.value if options.minimize else options.value, progress=options.progress))
    return FINE


def _end(options: argparse.Namespace, client: Client) -> int:
    client.close(options.outcome, options.progress, options.text)
    return FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock-report", description="Tells Penstock how a job goes, and says when to save."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.add_argument(
            "--checkpoints", type=Path, metavar="DIR", help="the job's checkpoints, on a shared file system"
        )
        if name != "begin":
            made.add_argument("--epoch", type=int, required=True, help="what `begin` printed")
        if name != "poll":
            made.add_argument(
                "--progress", type=float, default=0.0, metavar="SAMPLES", help="so far, over all runs of the job (0)"
            )
        return made

    begin = verb("begin", "A run begins: prints its epoch.")
    begin.add_argument("--total", type=float, metavar="SAMPLES", help="progress at which the job is done")
    begin.add_argument("--gpu-type", metavar="TYPE", help="where Slurm does not say it")
    begin.add_argument(
        "--usr2",
        choices=["batch", "steps"],
        help="a handler for SIGUSR2 is in place, in the batch script or all processes of the steps: send one with each request",
    )
    begin.add_argument(
        "--survives-losing-nodes", action="store_true", help="the run goes on when Slurm takes nodes from it"
    )
    verb("poll", "Prints the request for a checkpoint that waits for an answer; status 1 if there is none.")
    steps = verb("steps", "Steps were made since the last report.")
    steps.add_argument("--steps", type=int, required=True, help="how many")
    steps.add_argument("--step-time-s", type=float, required=True, metavar="S", help="mean time of one, seconds")
    steps.add_argument("--sync-time-s", type=float, metavar="S", help="of that, waiting for other processes' gradients")
    steps.add_argument(
        "--atomic-batch", type=int, required=True, metavar="SAMPLES", help="of one replica in a micro-step"
    )
    steps.add_argument("--accumulation-steps", type=int, default=0, help="micro-steps before a step's last (0)")
    steps.add_argument(
        "--gpus-per-replica", type=int, default=1, metavar="P", help="GPUs that hold one copy of the model together (1)"
    )
    saved = verb("saved", "A checkpoint is on disk.")
    saved.add_argument("--request", help="what `poll` printed, if it was asked for")
    saved.add_argument("--seconds", type=float, required=True, metavar="S", help="how long it took")
    metric = verb("metric", "What the model reaches by now: trials of a search are compared by it.")
    # argparse, before 3.14, takes -1e-05 and -inf for options.
    metric._negative_number_matcher = re.compile(r"^-((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf(inity)?)$", re.IGNORECASE)
    metric.add_argument("value", type=float, metavar="VALUE", help="such as the accuracy on the validation set")
    metric.add_argument("--minimize", action="store_true", help="less is better, as of a loss")
    end = verb("end", "The run is about to exit.")
    end.add_argument("--outcome", choices=["completed", "stopped", "superseded", "failed"], required=True)
    end.add_argument("--text", default="", help="for people to read")
    return parser


if __name__ == "__main__":
    sys.exit(main())
