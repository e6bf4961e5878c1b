/* Reads from the node's agent which GPUs a job may use that has none from Slurm. Nothing here needs Slurm. */
#ifndef PENSTOCK_DEVICES_H
#define PENSTOCK_DEVICES_H

#include <stddef.h>
#include <sys/types.h>

enum { PENSTOCK_DEVICES_SIZE = 256, PENSTOCK_FOLDER_SIZE = 256, PENSTOCK_LIMITS_SIZE = 1024 };

enum penstock_devices {
	PENSTOCK_NO_SHARER, /* the agent does not know the job: it is not to be bound */
	PENSTOCK_BOUND,     /* `devices` has the indexes, such as 0,1; `mps` a folder or ""; `limits` lines or "" */
	PENSTOCK_TOO_LATE,  /* the job shares GPUs, but had no time slice in that time, or the agent released it meanwhile */
	PENSTOCK_DENIED,    /* the job had a time slice, but its device cgroup denied these GPUs all the time */
	PENSTOCK_NOT_OURS,  /* the folder or a file belongs to another user, or does not hold what it should */
};

/* The agent's folder with %n replaced by the node's name; NULL if `size` is too small for it. */
char *penstock_run_dir(const char *pattern, const char *node, char *folder, size_t size);

/* Waits for folder/NUMBER/devices for at most `most_ds` tenths of a second, as long as folder/NUMBER exists. The
 * files must belong to root or to `owner`. The agent writes three other files before `devices`:
 * - folder/NUMBER/mps: the folder of the MPS control daemon that the job uses; usually absent.
 * - folder/NUMBER/limits: variables that limit the job, each on a line as NAME=VALUE; usually absent.
 * - folder/NUMBER/gpus: the device files of the node's GPUs, by index. The function also waits until the task's
 *   device cgroup permits the job's GPUs. CUDA does not count denied GPUs, so `devices` then has the indexes among
 *   the others, as in Slurm's own jobs. With MPS the indexes stay as they are, because its daemon sees all GPUs. */
enum penstock_devices penstock_devices(const char *folder, unsigned number, uid_t owner, unsigned most_ds,
				       char devices[PENSTOCK_DEVICES_SIZE], char mps[PENSTOCK_FOLDER_SIZE],
				       char limits[PENSTOCK_LIMITS_SIZE]);

#endif
