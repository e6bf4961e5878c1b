#include "devices.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

char *penstock_run_dir(const char *pattern, const char *node, char *folder, size_t size)
{
	size_t used = 0;

	for (; *pattern; pattern++) {
		const int is_node = pattern[0] == '%' && pattern[1] == 'n';
		const char *piece = is_node ? node : pattern;
		const size_t length = is_node ? strlen(node) : 1;

		if (used + length + 1 > size)
			return NULL;
		memcpy(folder + used, piece, length);
		used += length;
		pattern += is_node;
	}
	folder[used] = '\0';
	return folder;
}

enum { MOST_GPUS = 64 };

static int belongs(int descriptor, mode_t type, uid_t owner)
{
	struct stat status;

	return !fstat(descriptor, &status) && (status.st_mode & S_IFMT) == type &&
	       (status.st_uid == 0 || status.st_uid == owner) && !(status.st_mode & S_IWOTH);
}

/* Reads a file of the agent without its last newline. Returns 1; 0 if there is no file; -1 if it belongs to another
 * user, is empty or is too long. */
static int read_text(int folder, const char *name, uid_t owner, char *text, size_t size)
{
	const int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	ssize_t length = -1;

	if (file < 0)
		return 0;
	if (belongs(file, S_IFREG, owner))
		length = read(file, text, size);
	close(file);
	while (length > 0 && text[length - 1] == '\n')
		length--;
	if (length <= 0 || (size_t)length >= size)
		return -1;
	text[length] = '\0';
	return 1;
}

static int are_indexes(const char *text)
{
	return text[strspn(text, "0123456789,")] == '\0';
}

/* Rewrites `devices` as indexes among those of the node's GPUs that the device cgroup permits. Returns 0 if one of
 * `devices` is denied. access() opens nothing, and EPERM comes from the cgroup (a file's mode gives EACCES). Where
 * the cgroup denies a GPU, one without a device file is not visible either. Changes `files`. */
static int count_seen(char *files, char devices[PENSTOCK_DEVICES_SIZE])
{
	char counted[PENSTOCK_DEVICES_SIZE] = "", *rest = NULL, *next = devices;
	int faults[MOST_GPUS], denies = 0;
	size_t gpus = 0, used = 0;

	for (char *path = strtok_r(files, "\n", &rest); path && gpus < MOST_GPUS; path = strtok_r(NULL, "\n", &rest)) {
		faults[gpus] = access(path, R_OK | W_OK) ? errno : 0;
		denies |= faults[gpus++] == EPERM;
	}
	for (next += strspn(next, ","); *next; next += strspn(next, ",")) {
		const unsigned long index = strtoul(next, &next, 10);
		unsigned long seen = index;

		if (index < gpus && faults[index] == EPERM)
			return 0;
		for (size_t i = 0; i < gpus && i < index; i++)
			seen -= denies && (faults[i] == EPERM || faults[i] == ENOENT);
		used += (size_t)snprintf(counted + used, sizeof(counted) - used, "%s%lu", used ? "," : "", seen);
	}
	memcpy(devices, counted, sizeof(counted)); /* never longer than before */
	return 1;
}

enum penstock_devices penstock_devices(const char *folder, unsigned number, uid_t owner, unsigned most_ds,
				       char devices[PENSTOCK_DEVICES_SIZE], char mps[PENSTOCK_FOLDER_SIZE],
				       char limits[PENSTOCK_LIMITS_SIZE])
{
	const struct timespec tenth = {0, 100000000};
	enum penstock_devices found;
	char path[4096], files[4096];

	*devices = *mps = *limits = '\0';
	if (snprintf(path, sizeof(path), "%s/%u", folder, number) >= (int)sizeof(path))
		return PENSTOCK_NO_SHARER;
	for (unsigned waited = 0;; waited++) {
		/* Opened again each time, because an agent that releases the job removes the folder. */
		const int job = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		int state = 0;

		found = PENSTOCK_TOO_LATE;
		if (job < 0) { /* If the folder was there before, the job has no GPUs of its own and must not see all of them. */
			if (!waited)
				found = PENSTOCK_NO_SHARER;
			break;
		}
		if (!belongs(job, S_IFDIR, owner))
			found = PENSTOCK_NOT_OURS;
		else
			state = read_text(job, "devices", owner, devices, PENSTOCK_DEVICES_SIZE);
		if (state)
			found = state > 0 && are_indexes(devices) ? PENSTOCK_BOUND : PENSTOCK_NOT_OURS;
		if (found == PENSTOCK_BOUND && read_text(job, "mps", owner, mps, PENSTOCK_FOLDER_SIZE) <= 0)
			*mps = '\0'; /* the job can run without MPS */
		if (found == PENSTOCK_BOUND && read_text(job, "limits", owner, limits, PENSTOCK_LIMITS_SIZE) < 0)
			found = PENSTOCK_NOT_OURS; /* without its limits it could take what belongs to the jobs beside it */
		if (found == PENSTOCK_BOUND && read_text(job, "gpus", owner, files, sizeof(files)) > 0) {
			char seen[PENSTOCK_DEVICES_SIZE];

			memcpy(seen, devices, sizeof(seen));
			if (!count_seen(files, seen))
				found = PENSTOCK_DENIED;
			else if (!*mps)
				memcpy(devices, seen, sizeof(seen));
		}
		close(job);
		if ((found != PENSTOCK_TOO_LATE && found != PENSTOCK_DENIED) || waited >= most_ds)
			break;
		nanosleep(&tenth, NULL);
	}
	if (found != PENSTOCK_BOUND)
		*devices = *mps = *limits = '\0';
	return found;
}
