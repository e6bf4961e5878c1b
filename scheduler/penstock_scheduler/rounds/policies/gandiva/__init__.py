"""Gandiva: jobs get time slices and share GPUs where that pays, instead of waiting for GPUs of their own.

After *Gandiva: Introspective cluster scheduling for deep learning* (Xiao et al., OSDI '18).
Each round goes through these steps.

1. **Undo packs** (`moves`). A pack is taken apart when its jobs' throughputs, each relative to running alone,
   add up to no more than time slices would give (`sharing.packing`). While GPUs are idle, the worst of the other packs are taken
   apart, too.
2. **Shrink** (`moves`). Jobs that have grown give back what they can on nodes where jobs have time slices.
3. **Land** (`landing`; Algorithm 1 of the paper, in `sharing.gandiva`). A job between two runs goes on to where it was sent,
   if those GPUs are free. Each other job of the queue takes the first of these places that exists: free GPUs of one node; GPUs
   that grown jobs give back, on the node where they give back the fewest; a node that migration can empty; time slices on a
   node whose jobs want up to `max_height` times its GPUs.
4. **Migrate** (`moves`). Packs leave nodes with time slices for free GPUs, or for nodes with less
   load. Jobs leave packs for free GPUs.
5. **Pack** (`moves`). On nodes that still have time slices, the pairs of jobs with the largest expected gain share GPUs.
6. **Grow** (`moves`). While no job waits, jobs that declared `grow_shrink` take GPUs of their node that have been
   idle for `idle_s`.

The mode `reactive` has only steps 2, 3 and 6.

A job that was moved, packed or unpacked neither migrates nor grows for `interval_s`, and is not packed for `pack_interval_s`.
A pack that does not pay is undone at any time, and GPUs that others need are given back at any time.

Trials of one search (`trials`, `trial_group`; section 5.3): trials with much worse reports than others after as much training
are set aside. They give back their GPUs and wait until others become worse (`sharing.groups`). The more promising trials land
first. Where trials have time slices, the better ones go first. No trial is judged before every trial had a first slice.

Memory: where a GPU's memory size is known, each job of a pack has a memory limit, and a job whose memory use is unknown is not
packed. On a cluster without agents no jobs share GPUs. This policy is then Algorithm 1 with a queue.

Departures from the paper:

- A job is never spread over parts of several nodes, because Slurm asks for the same number of GPUs on each node of a job. So
  there are no parts to bring together later. Jobs of several nodes get whole nodes to themselves.
- Jobs that may not be moved get no time slices.
"""

from penstock_scheduler.rounds.policies.gandiva.policy import Gandiva
from penstock_scheduler.rounds.policies.gandiva.state import colocation
from penstock_scheduler.rounds.policies.gandiva.trials import GandivaSettings

__all__ = ["Gandiva", "GandivaSettings", "colocation"]
