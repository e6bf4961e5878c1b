/* Submits a job whose SPANK environment, and with a third argument admin comment, are whatever its caller likes: what an
 * ill-meaning user can do without our plugin. forge WORKDIR 'A=1 B=2' [ADMIN_COMMENT] */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	static char *environment[] = {"PATH=/usr/bin:/bin", NULL};
	static char *command[] = {"forged"};
	static char *flags[64];
	job_desc_msg_t job;
	submit_response_msg_t *answer = NULL;
	int n = 0;

	slurm_init(NULL);
	slurm_init_job_desc_msg(&job);
	for (char *at = strtok(arguments[2], "\t"); at && n < 64; at = strtok(NULL, "\t"))
		flags[n++] = at;
	job.name = "forged";
	job.script = "#!/bin/sh\ntrue\n";
	job.environment = environment;
	job.env_size = 1;
	job.argv = command;
	job.argc = 1;
	job.work_dir = arguments[1];
	job.std_out = job.std_err = "/dev/null";
	job.user_id = getuid();
	job.group_id = getgid();
	job.spank_job_env = flags;
	job.spank_job_env_size = (uint32_t)n;
	job.priority = count > 4 ? 1 : NO_VAL;
	if (count > 3 && *arguments[3])
		job.admin_comment = arguments[3];
	if (slurm_submit_batch_job(&job, &answer)) {
		fprintf(stderr, "%s%s\n", answer && answer->job_submit_user_msg ? answer->job_submit_user_msg : "",
			slurm_strerror(errno));
		return 1;
	}
	if (answer->job_submit_user_msg)
		fprintf(stderr, "%s\n", answer->job_submit_user_msg);
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(26, 5, 0)
	printf("%u\n", answer->step_id.job_id);
#else
	printf("%u\n", answer->job_id);
#endif
	return 0;
}
