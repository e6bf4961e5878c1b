/* Which GPUs a job may use that holds none by Slurm, from the file of the node's agent. Nothing of Slurm in here. */
#ifndef PENSTOCK_DEVICES_H
#define PENSTOCK_DEVICES_H

#include <stddef.h>
#include <sys/types.h>

enum { PENSTOCK_DEVICES_SIZE = 256, PENSTOCK_FOLDER_SIZE = 256 };

enum penstock_devices {
	PENSTOCK_NO_SHARER, /* the agent knows nothing of the job: it is not ours to bind */
	PENSTOCK_BOUND,     /* `devices` has the indexes, such as 0,1, and `mps` a folder or "" */
	PENSTOCK_TOO_LATE,  /* it shares, and had no turn in that time, or was let go of while it waited */
	PENSTOCK_DENIED,    /* it had a turn, and in that time its device cgroup was not opened for these GPUs */
	PENSTOCK_NOT_OURS,  /* what is there belongs to somebody else, or holds something else */
};

/* The agent's folder with %n replaced by the node's name; NULL if `size` is too small for it. */
char *penstock_run_dir(const char *pattern, const char *node, char *folder, size_t size);

/* Waits for folder/NUMBER/devices, if there is a folder/NUMBER, while it is there, for at most so many tenths of a second. What is
 * read must belong to root or to `owner`. With it comes what is in two files that were written before it:
 * - folder/NUMBER/mps: the folder of the MPS control daemon that the job is to use; most have none.
 * - folder/NUMBER/gpus: the device files of the node's GPUs, by index. It waits until the task's device cgroup lets it at its own.
 *   Those that are denied CUDA does not count, so `devices` then has the indexes among the others, as Slurm's own jobs find them.
 *   Not so with MPS, where they are as its daemon counts them. */
enum penstock_devices penstock_devices(const char *folder, unsigned number, uid_t owner, unsigned most_ds,
				       char devices[PENSTOCK_DEVICES_SIZE], char mps[PENSTOCK_FOLDER_SIZE]);

#endif
