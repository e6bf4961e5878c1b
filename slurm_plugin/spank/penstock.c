/* Adds the adaptive flags to sbatch, salloc and srun, and binds the tasks of jobs that share GPUs.
 *
 * Submission. The plugin refuses a malformed value at once. It sends the other values to slurmctld in the job's SPANK
 * environment, one variable for each flag. There job_submit.lua checks them together and against the site, and writes
 * the job spec. Nothing here talks to penstockd, so jobs can be submitted while penstockd is down.
 *
 * A value comes from the first of these that has one: the command line or an #SBATCH line; the environment
 * (PENSTOCK_MAX_GPUS for --max-gpus); the arguments in plugstack.conf. The last two apply only to a job that is
 * adaptive already.
 *
 * Nodes. The plugin binds only jobs that have no GPUs from Slurm and for which the node's penstock-agent has made a
 * folder. Such a job gets CUDA_VISIBLE_DEVICES from the folder once its first time slice begins and its device cgroup
 * permits the GPUs. It sees no GPU if that takes longer than WAIT_DS, or if the folder is not the agent's. A pack that
 * uses the site's NVIDIA MPS also gets CUDA_MPS_PIPE_DIRECTORY, and a job with limits the variables that set them. On a node without an agent the plugin does nothing. On
 * nodes whose jobs share no GPUs and have one task on each node, the plugin need not be installed if plugstack.conf
 * calls it `optional`.
 */
#include "devices.h"
#include "flags.h"
#include "version.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#pragma GCC visibility push(default)
#include <slurm/spank.h>
SPANK_PLUGIN(penstock, 1)
#pragma GCC visibility pop

enum { NAME_SIZE = 80, PATH_SIZE = 1024 };

/* The agent finds this text to learn the plugin's version. */
__attribute__((used)) static const char release[] = "penstock.so of Penstock " PENSTOCK_VERSION;

/* Tenths of a second that a task waits for its first time slice. The signals that end the job end the waiting
 * process too. */
enum { WAIT_DS = 9000 };

#define RUN_DIR "run_dir=" /* argument in plugstack.conf */
static const char default_run_dir[] = "/run/penstock";

/* Through variables with this prefix, Slurm gives an sbatch inside a job the flags of that job. */
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_penstock_"

static char *values[PENSTOCK_FLAGS]; /* by index in penstock_flags; NULL: not given */
static int adaptive_by_environment = 1;
static uid_t daemon_uid; /* slurmd's user, which may be the agent's where slurmd does not run as root */

/* Whether this process submits a job. False for one that starts a step inside a job or runs on a node. */
static int submits(void)
{
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		return 1;
	case S_CTX_LOCAL:
		return !getenv("SLURM_JOB_ID");
	default:
		return 0;
	}
}

static void keep(size_t index, const char *value)
{
	free(values[index]);
	values[index] = strdup(value);
	if (!values[index])
		slurm_error("penstock: out of memory");
}

enum { SHOWN_SIZE = 81 };

/* What a user typed, shortened and with ? for every byte that is not printable ASCII. */
static const char *shown(const char *value, char *text)
{
	size_t i;

	for (i = 0; value && value[i] && i < SHOWN_SIZE - 1; i++)
		text[i] = value[i] >= ' ' && value[i] <= '~' ? value[i] : '?';
	text[i] = '\0';
	return text;
}

/* Slurm's callback for the flag at index `val`. */
static int take_flag(int val, const char *value, int remote)
{
	const struct flag *flag = &penstock_flags[val];
	char text[SHOWN_SIZE];

	if (remote)
		return ESPANK_SUCCESS;
	if (!submits()) {
		slurm_error("penstock: --%s is for submitting a job, but srun starts a step inside job %s: leave the flag out", flag->name,
			    getenv("SLURM_JOB_ID"));
		return ESPANK_BAD_ARG;
	}
	if (!value || (flag->has_arg == 2 && !strcmp(value, "(null)"))) /* as Slurm 22.05 sometimes writes a missing value */
		value = flag->bare;
	if (!value || !penstock_valid(flag, value)) {
		slurm_error("penstock: --%s=%s: give %s, such as --%s=%s", flag->name, shown(value, text), flag->form,
			    flag->name, flag->example);
		return ESPANK_BAD_ARG;
	}
	keep((size_t)val, value);
	return ESPANK_SUCCESS;
}

/* Sets a flag that was not given. A bad value is reported here and sent all the same, because job_submit.lua will
 * refuse it: Slurm does not let an optional plugin stop a job here. */
static void take_default(size_t index, const char *where, const char *value)
{
	const struct flag *flag = &penstock_flags[index];
	char text[SHOWN_SIZE];

	if (values[index])
		return;
	if (!penstock_valid(flag, value))
		slurm_error("penstock: %s: --%s=%s: give %s, such as %s", where, flag->name, shown(value, text), flag->form,
			    flag->example);
	keep(index, value);
}

static void take_environment(void)
{
	char name[NAME_SIZE];

	for (size_t i = 0; i < PENSTOCK_FLAGS; i++) {
		const char *value = getenv(penstock_variable(&penstock_flags[i], name, sizeof(name)));

		if (value && *value && adaptive_by_environment && (i == PENSTOCK_ADAPTIVE || values[PENSTOCK_ADAPTIVE]))
			take_default(i, name, value);
		/* The job does not inherit it: an sbatch inside the job submits a plain job unless it has flags of
		 * its own. */
		unsetenv(name);
	}
}

static void take_arguments(int count, char **arguments)
{
	for (int i = 0; i < count; i++) {
		const char *argument = arguments[i];
		const char *equals = strchr(argument, '=');
		const struct flag *flag = equals ? penstock_flag(argument, (size_t)(equals - argument)) : NULL;

		if (!strcmp(argument, "environment=ignore") || !strncmp(argument, RUN_DIR, sizeof(RUN_DIR) - 1))
			continue;
		if (flag && flag != &penstock_flags[PENSTOCK_ADAPTIVE])
			take_default((size_t)(flag - penstock_flags), "plugstack.conf", equals + 1);
		else
			slurm_error("penstock: plugstack.conf: %s: give environment=ignore, run_dir=/run/penstock, or a flag's default such as "
				    "checkpoint-every=30", argument);
	}
}

__attribute__((visibility("default"))) int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	int status = ESPANK_SUCCESS;
	const spank_context_t context = spank_context();

	if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
		return status;
	daemon_uid = geteuid();
	for (int i = 0; i < count; i++)
		if (!strcmp(arguments[i], "environment=ignore"))
			adaptive_by_environment = 0;
	for (size_t i = 0; i < PENSTOCK_FLAGS && status == ESPANK_SUCCESS; i++) {
		const struct flag *flag = &penstock_flags[i];
		struct spank_option option = {flag->name, flag->arginfo, flag->usage, flag->has_arg, (int)i, take_flag};
		char name[sizeof(INHERITED) + NAME_SIZE] = INHERITED;

		strncat(name, flag->name, NAME_SIZE);
		for (char *at = name; *at; at++)
			if (*at == '-')
				*at = '_';
		unsetenv(name);
		status = (int)spank_option_register(spank, &option);
	}
	return status;
}

__attribute__((visibility("default"))) int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
	char name[NAME_SIZE];

	if (!submits())
		return ESPANK_SUCCESS;
	take_environment();
	if (values[PENSTOCK_ADAPTIVE])
		take_arguments(count, arguments);
	for (size_t i = 0; i < PENSTOCK_FLAGS; i++) {
		spank_err_t status = ESPANK_SUCCESS;

		if (values[i])
			status = spank_job_control_setenv(
				spank, penstock_variable(&penstock_flags[i], name, sizeof(name)), values[i], 1);
		if (status != ESPANK_SUCCESS)
			slurm_error("penstock: --%s cannot be sent to slurmctld: %s", penstock_flags[i].name, spank_strerror(status));
	}
	return ESPANK_SUCCESS;
}

/* What job_submit.lua writes in place of numbers that follow from the run: of tasks, of GPUs, and of a task's CPUs. */
static const char uncounted[] = "one-a-GPU-but-this-node-lacks-penstock.so";

/* The number at the beginning of a variable such as SLURM_TASKS_PER_NODE, 4 or 2(x3); 0: there is none. */
static unsigned long number_of(spank_t spank, const char *name)
{
	char value[64];

	return spank_getenv(spank, name, value, sizeof(value)) == ESPANK_SUCCESS ? strtoul(value, NULL, 10) : 0;
}

/* Replaces the mark in a variable, or removes the variable where the run has no such number. */
static void count_one(spank_t spank, const char *name, unsigned long number)
{
	char value[64];

	if (spank_getenv(spank, name, value, sizeof(value)) != ESPANK_SUCCESS || strcmp(value, uncounted))
		return;
	snprintf(value, sizeof(value), "%lu", number);
	if (number)
		spank_setenv(spank, name, value, 1);
	else
		spank_unsetenv(spank, name);
}

/* Gives the batch script the numbers of this run. Slurm keeps SLURM_TASKS_PER_NODE, SLURM_JOB_NUM_NODES,
 * SLURM_CPUS_ON_NODE and, for a job with GPUs, SLURM_GPUS_ON_NODE up to date; since 24.11, SLURM_NTASKS and SLURM_NPROCS,
 * too. All nodes of a run are alike. Without the numbers, srun refuses what stands in their place. */
static void count(spank_t spank)
{
	const unsigned long nodes = number_of(spank, "SLURM_JOB_NUM_NODES"), tasks = number_of(spank, "SLURM_TASKS_PER_NODE");
	const unsigned long gpus = number_of(spank, "SLURM_GPUS_ON_NODE"), cpus = number_of(spank, "SLURM_CPUS_ON_NODE");

	if (!nodes || !tasks)
		return;
	count_one(spank, "SLURM_NTASKS", nodes * tasks);
	count_one(spank, "SLURM_NPROCS", nodes * tasks);
	count_one(spank, "SLURM_NTASKS_PER_NODE", tasks);
	count_one(spank, "SLURM_CPUS_PER_TASK", cpus / tasks);
	count_one(spank, "SLURM_GPUS", nodes * gpus);
	count_one(spank, "SLURM_GPUS_PER_NODE", gpus);
	count_one(spank, "SLURM_GPUS_PER_TASK", gpus % tasks ? 0 : gpus / tasks);
	count_one(spank, "SLURM_NTASKS_PER_GPU", gpus && !(tasks % gpus) ? tasks / gpus : 0);
	count_one(spank, "SLURM_TRES_PER_TASK", 0);
}

/* Whether Slurm has allocated GPUs to the task. Slurm removes these variables from the environment of other jobs. */
static int has_gpus(spank_t spank)
{
	static const char *const names[] = {"CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"};
	char value[PENSTOCK_DEVICES_SIZE];

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
		const spank_err_t status = spank_getenv(spank, names[i], value, sizeof(value));

		if (status == ESPANK_NOSPACE || (status == ESPANK_SUCCESS && *value))
			return 1;
	}
	return 0;
}

/* Sets the variables of the agent's lines NAME=VALUE, which it changes. A library that the job preloads itself stays, after
 * the agent's: without it the program might not start. */
static void set_limits(spank_t spank, char *lines)
{
	char *rest = NULL, before[PATH_SIZE], both[PATH_SIZE + PENSTOCK_LIMITS_SIZE];

	for (char *line = strtok_r(lines, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		char *value = strchr(line, '=');
		spank_err_t status = ESPANK_ENV_NOEXIST;

		if (!value)
			continue;
		*value++ = '\0';
		if (!strcmp(line, "LD_PRELOAD"))
			status = spank_getenv(spank, line, before, sizeof(before));
		if (status == ESPANK_NOSPACE) {
			slurm_error("penstock: LD_PRELOAD is too long to add %s, so the job's GPU memory is not limited", value);
			continue;
		}
		snprintf(both, sizeof(both), "%s%s%s", value, status == ESPANK_SUCCESS && *before ? ":" : "",
			 status == ESPANK_SUCCESS ? before : "");
		spank_setenv(spank, line, both, 1);
	}
}

/* Binds the task of a job that shares GPUs to these. */
static void bind_gpus(spank_t spank, int argument_count, char **arguments)
{
	const char *pattern = default_run_dir;
	char node[256], folder[PATH_SIZE], devices[PENSTOCK_DEVICES_SIZE], mps[PENSTOCK_FOLDER_SIZE];
	char limits[PENSTOCK_LIMITS_SIZE];
	uint32_t number = 0;

	for (int i = 0; i < argument_count; i++)
		if (!strncmp(arguments[i], RUN_DIR, sizeof(RUN_DIR) - 1))
			pattern = arguments[i] + sizeof(RUN_DIR) - 1;
	if (spank_getenv(spank, "SLURMD_NODENAME", node, sizeof(node)) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_ID, &number) != ESPANK_SUCCESS ||
	    !penstock_run_dir(pattern, node, folder, sizeof(folder)))
		return;
	if (pattern != default_run_dir) /* how the job finds its agent */
		spank_setenv(spank, "PENSTOCK_RUN_DIR", folder, 0);
	if (has_gpus(spank))
		return;
	switch (penstock_devices(folder, number, daemon_uid, WAIT_DS, devices, mps, limits)) {
	case PENSTOCK_NO_SHARER:
		return;
	case PENSTOCK_BOUND:
		break;
	case PENSTOCK_TOO_LATE:
		slurm_error("penstock: the job had no time slice on the shared GPUs of %s within %d s, so the task sees no GPU; ask the "
			    "site's admin whether penstock-agent runs there", node, WAIT_DS / 10);
		break;
	case PENSTOCK_DENIED:
		slurm_error("penstock: the device cgroup denied the shared GPUs of %s to the task for %d s, so it sees no GPU; ask the site's "
			    "admin to run `penstock slurm check` there", node, WAIT_DS / 10);
		break;
	case PENSTOCK_NOT_OURS:
		slurm_error("penstock: %s/%u does not belong to the agent, so the task sees no GPU; tell the site's admin", folder, number);
		break;
	}
	spank_setenv(spank, "CUDA_VISIBLE_DEVICES", devices, 1);
	if (*mps)
		spank_setenv(spank, "CUDA_MPS_PIPE_DIRECTORY", mps, 1);
	set_limits(spank, limits);
	if (*devices) { /* Scripts start one process for each GPU by this count, which Slurm does not set without a GRES. */
		char count_text[16];
		unsigned gpus = 1;

		for (const char *text = devices; *text; text++)
			gpus += *text == ',';
		snprintf(count_text, sizeof(count_text), "%u", gpus);
		spank_setenv(spank, "SLURM_GPUS_ON_NODE", count_text, 1);
	}
}

/* Runs as the job's user, in the process that becomes the task. */
__attribute__((visibility("default"))) int slurm_spank_task_init(spank_t spank, int argument_count, char **arguments)
{
	bind_gpus(spank, argument_count, arguments);
	count(spank);
	return ESPANK_SUCCESS;
}

__attribute__((visibility("default"))) int slurm_spank_exit(spank_t spank, int count, char **arguments)
{
	(void)spank;
	(void)count;
	(void)arguments;
	for (size_t i = 0; i < PENSTOCK_FLAGS; i++) {
		free(values[i]);
		values[i] = NULL;
	}
	return ESPANK_SUCCESS;
}
