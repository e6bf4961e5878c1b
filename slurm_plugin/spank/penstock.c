/* Gives sbatch, salloc and srun the adaptive flags.
 *
 * A value that is malformed is refused on the spot. The others travel to slurmctld in the job's SPANK environment, one
 * variable for each flag, where job_submit.lua checks them together and against the site, and writes the job's spec.
 * Nothing here talks to penstockd: while it is away, jobs are submitted as ever.
 *
 * On the nodes it binds the tasks of jobs that share GPUs, and only those: a job without GPUs of Slurm's for which the node's
 * penstock-agent has made a folder gets CUDA_VISIBLE_DEVICES from there, when its first turn comes and its device cgroup lets it at
 * them. If that takes longer than WAIT_DS, or what is there is not the agent's, it sees no GPU at all. A pack that goes through the site's NVIDIA MPS gets
 * CUDA_MPS_PIPE_DIRECTORY from there as well. Where no agent runs it does nothing, and on nodes whose jobs share nothing it may be
 * missing if plugstack.conf calls it `optional`.
 *
 * Where a value comes from, the first that has one: the command line or an #SBATCH line; the environment, PENSTOCK_MAX_GPUS
 * for --max-gpus; the arguments in plugstack.conf. The last two count for jobs that are adaptive anyway.
 */
#include "devices.h"
#include "flags.h"

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

/* By this the agent tells which plugin its node has. The number is penstock_scheduler.__version__. */
__attribute__((used)) static const char release[] = "penstock.so of Penstock 0.1.0";

/* Tenths of a second that a task waits for its first turn: some slices of a minute. Its process is not stopped meanwhile, and ends
 * by the signals that end the job. */
enum { WAIT_DS = 9000 };

#define RUN_DIR "run_dir=" /* argument in plugstack.conf */
static const char default_run_dir[] = "/run/penstock";

/* Slurm gives a nested sbatch the flags of the job that it runs in through variables of this name. */
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_penstock_"

static char *values[PENSTOCK_FLAGS]; /* by index in penstock_flags; NULL: not given */
static int adaptive_by_environment = 1;
static uid_t daemon_uid; /* slurmd's: an agent may run as it where that is not root */

/* Whether this process asks for a job, as opposed to starting a step inside one or running on a node. */
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

/* What a user typed, safe and short enough for a message; a sign of several bytes is not cut in two. */
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
		slurm_error("penstock: --%s asks for a job, and inside job %s srun starts a step: leave it out", flag->name,
			    getenv("SLURM_JOB_ID"));
		return ESPANK_BAD_ARG;
	}
	if (!value || (flag->has_arg == 2 && !strcmp(value, "(null)"))) /* so Slurm 22.05 writes a missing one at times */
		value = flag->bare;
	if (!value || !penstock_valid(flag, value)) {
		slurm_error("penstock: --%s=%s: give %s, such as --%s=%s", flag->name, shown(value, text), flag->form,
			    flag->name, flag->example);
		return ESPANK_BAD_ARG;
	}
	keep((size_t)val, value);
	return ESPANK_SUCCESS;
}

/* Fills in what was not given by a flag. A bad value is told here and goes on all the same: job_submit.lua refuses it, while
 * Slurm would not let an optional plugin stop the job. */
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
		/* The job does not inherit it, so that an sbatch inside the job is plain unless it asks itself. */
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
			slurm_error("penstock: cannot hand on --%s: %s", penstock_flags[i].name, spank_strerror(status));
	}
	return ESPANK_SUCCESS;
}

/* Whether Slurm itself has given the task GPUs; it takes these out of the environment of jobs without. */
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

/* As the job's user, in the process that becomes its task. */
__attribute__((visibility("default"))) int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
	const char *pattern = default_run_dir;
	char node[256], folder[PATH_SIZE], devices[PENSTOCK_DEVICES_SIZE], mps[PENSTOCK_FOLDER_SIZE];
	uint32_t number = 0;

	for (int i = 0; i < count; i++)
		if (!strncmp(arguments[i], RUN_DIR, sizeof(RUN_DIR) - 1))
			pattern = arguments[i] + sizeof(RUN_DIR) - 1;
	if (spank_getenv(spank, "SLURMD_NODENAME", node, sizeof(node)) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_ID, &number) != ESPANK_SUCCESS ||
	    !penstock_run_dir(pattern, node, folder, sizeof(folder)))
		return ESPANK_SUCCESS;
	if (pattern != default_run_dir) /* where the job finds its agent */
		spank_setenv(spank, "PENSTOCK_RUN_DIR", folder, 0);
	if (has_gpus(spank))
		return ESPANK_SUCCESS;
	switch (penstock_devices(folder, number, daemon_uid, WAIT_DS, devices, mps)) {
	case PENSTOCK_NO_SHARER:
		return ESPANK_SUCCESS;
	case PENSTOCK_BOUND:
		break;
	case PENSTOCK_TOO_LATE:
		slurm_error("penstock: no turn on the shared GPUs of %s in %d s: the task sees none; ask the site whether "
			    "penstock-agent runs there", node, WAIT_DS / 10);
		break;
	case PENSTOCK_DENIED:
		slurm_error("penstock: the device cgroup kept the shared GPUs of %s from the task for %d s: it sees none; tell the site that "
			    "`penstock slurm check` says why", node, WAIT_DS / 10);
		break;
	case PENSTOCK_NOT_OURS:
		slurm_error("penstock: %s/%u is not the agent's: the task sees no GPU; tell the site", folder, number);
		break;
	}
	spank_setenv(spank, "CUDA_VISIBLE_DEVICES", devices, 1);
	if (*mps)
		spank_setenv(spank, "CUDA_MPS_PIPE_DIRECTORY", mps, 1);
	if (*devices) { /* scripts start a process for each, by Slurm's own count, which is not there without a GRES */
		char count_text[16];
		unsigned gpus = 1;

		for (const char *text = devices; *text; text++)
			gpus += *text == ',';
		snprintf(count_text, sizeof(count_text), "%u", gpus);
		spank_setenv(spank, "SLURM_GPUS_ON_NODE", count_text, 1);
	}
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
