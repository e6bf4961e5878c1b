"""The book of free GPUs: what a policy may still allocate in a round, and to which jobs.

`FreeGpus` knows the nodes, the partitions, reservations and node choices by which they are open to a job, the limits on users,
accounts and QOS, and the switches of the topology. A policy that allocates through it cannot forget one of them:

    free = FreeGpus.of(snapshot)
    where = free.find(job, options)      # the first of these configurations for which the job may have GPUs now; or None
    if where is not None:
        free.take(job, where)            # from the nodes, and from every limit that covers the job

Three kinds of jobs have GPUs when a round begins. `common.pinned` names the jobs that the round must not change: `take` their
GPUs first. For a running job that the policy would keep, `may_stay` tells whether its GPUs are still there. For a job that the
policy stops, `give_back` returns them. `copy` is cheap: the copy shares all counts until one of the two changes, so a policy can
try a sequence of steps and drop it.

Which GPUs a job gets: part of a node comes from the fullest node with room. Several nodes are taken
whole, from the switch with just enough idle nodes, else from as few switches as possible. A job of a size that no whole nodes
add up to (10 GPUs on nodes of 8) takes the same part of each of its nodes, because Slurm gives a job as many GPUs on each.

A policy that lets jobs share GPUs counts the packs of each node itself (`policies.gandiva.node`), out of what `on` says is
left for them; `charge` counts a sharing job against the limits alone. `Timeline` is the same book over time, for backfill.
`placement.place` is the batch version, for policies that choose configurations first and nodes later; it may move jobs.

Rooms: `access` (partitions, reservations and node choices), `allowance` (limits), `amounts` (CPUs and memory), `book`
(`FreeGpus`), `index` (nodes by free GPUs and switch), `timeline`.
"""

from penstock_scheduler.rounds.free_gpus.access import (
    Access,
    Choices,
    Door,
    access_of,
    choice_text,
    choices_of,
    doors,
    is_open,
    open_nodes,
    opens,
)
from penstock_scheduler.rounds.free_gpus.allowance import Allowance
from penstock_scheduler.rounds.free_gpus.amounts import Amounts
from penstock_scheduler.rounds.free_gpus.book import FreeGpus, changed_nodes
from penstock_scheduler.rounds.free_gpus.index import NodeIndex
from penstock_scheduler.rounds.free_gpus.timeline import Timeline

__all__ = [
    "Access",
    "Allowance",
    "Amounts",
    "Choices",
    "Door",
    "FreeGpus",
    "NodeIndex",
    "Timeline",
    "access_of",
    "changed_nodes",
    "choice_text",
    "choices_of",
    "doors",
    "is_open",
    "open_nodes",
    "opens",
]
