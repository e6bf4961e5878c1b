"""Sia: a goodput-optimal allocation for elastic jobs on mixed GPU types.

After *Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling* (Jayaram Subramanya et al., SOSP '23). The policy
chooses a configuration (number of nodes, number of GPUs, GPU type) for every job at once, so that the whole cluster trains as
much as possible and no job is left far behind. Each round goes through these steps.

1. **Evaluate** (`matrix`). For each job, the model gives a goodput on each configuration that the
   job spec and the cluster allow. Dividing a job's row by its smallest entry makes jobs comparable. The result is the *gain*:
   1 on the job's slowest configuration, or the number of GPUs for a rigid job, or the unit for a job in units of several GPUs.
2. **Bound growth, and measure** (`matrix`; section 3.1). A job whose scaling is unknown starts on its fewest GPUs
   and at most quadruples (`growth`; in the paper, it doubles) from one round to the next. What it would gain from more GPUs
   than it has had is not taken from its model alone (`unproven_power`). With `measure_gpu_s`, a job whose speed on some GPU
   types is unknown first trains on one GPU of each.
3. **Price the restart** (`costs`; section 3.4 of the paper). Moving a job costs a restart. So every entry but the
   one that the job holds is multiplied by the job's restart factor, the share of its goodput that survives a move. The paper's
   factor knows the job's age; ours also asks whether what the job has left is worth a restart.
4. **Weigh** (`costs`; not in the paper). A job weighs the less, the more work it has left.
5. **Solve** (`program`; equations 1 and 2). An integer program picks at most one configuration for each job within
   the GPUs of each type, so that the sum of gain ** p is best. With p < 0, the default, that sum is minimised, which favours
   the jobs that have least. Partitions, reservations and the limits of users, accounts and QOS are further rows. Jobs that may
   not move, and jobs on their way from an earlier round, are taken out beforehand together with their GPUs.
6. **Offer the cloud** (`cloud`; not in the paper). Where the site has a cloud, its offers are further configurations, with a
   price, for jobs whose waiting budget is over. See docs/admin/bursting.md.
7. **Place** (`penstock_scheduler.rounds.placement`). Placement finds the nodes. A job for which it finds none takes its next best
   entry for which there is room.

Leaving a job out costs `allocation_lambda`. It must exceed 1, the cost of a job on its slowest configuration, or no job would
run. A job's first GPU is worth `allocation_lambda` - 1 and its second at most 1 - 2 ** p. With 2, for every p < 0, no job waits
for its first GPU while others that can be moved have a second. The paper's 1.1 does not promise that.

Between two equally good choices, a job keeps what it has (`KEEP_BONUS`). After that, the older job is preferred (`AGE_BONUS`).
So the same snapshot gives the same plan, whatever the order of its jobs.

Other departures: the restart factor also applies to being stopped, costs are not rounded, and a job may have more than 64 GPUs.
The presets `sia:artifact` and `sia:paper` set each of these as in the authors' artifact and in the paper: see `settings`.
"""

from penstock_scheduler.rounds.policies.sia.costs import restart_factor
from penstock_scheduler.rounds.policies.sia.policy import Sia
from penstock_scheduler.rounds.policies.sia.settings import ARTIFACT, PAPER, SiaSettings

__all__ = ["ARTIFACT", "PAPER", "Sia", "SiaSettings", "restart_factor"]
