/* On a gateway node: runs a cloud runner in place of the batch script, which runs on a cloud instance that Slurm cannot
 * reach.
 *
 * To Slurm the cloud runner is the job's task. It has the script's environment, folder, output, limits and signals, and
 * its exit status is the job's. Its arguments are the share and the script's path. In plugstack.conf, on the gateway
 * nodes only:
 *
 *   required /usr/local/lib/penstock/cloud_runner.so partition=burst cloud_runner=/usr/bin/penstock-cloud-runner share=/shared/penstock
 *
 * Jobs of other partitions are not affected. A script never runs on a gateway node: if the cloud runner cannot be
 * started, or srun starts a step, the task ends. The cloud runner needs penstockd only to begin, and goes on while
 * penstockd is down.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#pragma GCC visibility push(default)
#include <slurm/spank.h>
SPANK_PLUGIN(penstock_cloud_runner, 1)
#pragma GCC visibility pop
#include <slurm/slurm.h>

enum { NAME_SIZE = 256, NOT_STARTED = 127 };

static char *argument(int count, char **arguments, const char *name)
{
	const size_t length = strlen(name);

	for (int i = 0; i < count; i++)
		if (!strncmp(arguments[i], name, length) && arguments[i][length])
			return arguments[i] + length;
	return NULL;
}

/* Does not return if the task becomes a cloud runner. */
__attribute__((visibility("default"))) int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
	const char *partition = argument(count, arguments, "partition=");
	char *cloud_runner = argument(count, arguments, "cloud_runner="), *share = argument(count, arguments, "share=");
	char here[NAME_SIZE], **script = NULL, **environment = NULL;
	uint32_t step = 0;
	int words = 0;

	if (!partition || !cloud_runner || !share) {
		slurm_error("penstock: plugstack.conf: cloud_runner.so needs partition=, cloud_runner= and share=");
		return ESPANK_BAD_ARG;
	}
	if (spank_getenv(spank, "SLURM_JOB_PARTITION", here, sizeof(here)) != ESPANK_SUCCESS || strcmp(here, partition))
		return ESPANK_SUCCESS;
	if (spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step != SLURM_BATCH_SCRIPT ||
	    spank_get_item(spank, S_JOB_ARGV, &words, &script) != ESPANK_SUCCESS || words < 1 ||
	    spank_get_item(spank, S_JOB_ENV, &environment) != ESPANK_SUCCESS) {
		slurm_error("penstock: partition %s runs only batch scripts, in the cloud; use sbatch", here);
		_exit(NOT_STARTED);
	}
	execve(cloud_runner, (char *[]){cloud_runner, share, script[0], NULL}, environment);
	slurm_error("penstock: %s cannot be started: %s", cloud_runner, strerror(errno));
	_exit(NOT_STARTED);
}
