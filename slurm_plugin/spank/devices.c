#include "devices.h"

#include <fcntl.h>
#include <stdio.h>
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

static int belongs(int descriptor, mode_t type, uid_t owner)
{
	struct stat status;

	return !fstat(descriptor, &status) && (status.st_mode & S_IFMT) == type &&
	       (status.st_uid == 0 || status.st_uid == owner) && !(status.st_mode & S_IWOTH);
}

/* Reads one line of a file that is the agent's; 0: there is none, -1: it is somebody else's, empty or too long. */
static int read_line(int folder, const char *name, uid_t owner, char *line, size_t size)
{
	const int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	ssize_t length = -1;

	if (file < 0)
		return 0;
	if (belongs(file, S_IFREG, owner))
		length = read(file, line, size);
	close(file);
	while (length > 0 && line[length - 1] == '\n')
		length--;
	if (length <= 0 || (size_t)length >= size)
		return -1;
	line[length] = '\0';
	return 1;
}

static int are_indexes(const char *text)
{
	return text[strspn(text, "0123456789,")] == '\0';
}

enum penstock_devices penstock_devices(const char *folder, unsigned number, uid_t owner, unsigned most_ds,
				       char devices[PENSTOCK_DEVICES_SIZE], char mps[PENSTOCK_FOLDER_SIZE])
{
	const struct timespec tenth = {0, 100000000};
	enum penstock_devices found = PENSTOCK_TOO_LATE;
	char path[4096];

	*devices = *mps = '\0';
	if (snprintf(path, sizeof(path), "%s/%u", folder, number) >= (int)sizeof(path))
		return PENSTOCK_NO_SHARER;
	for (unsigned waited = 0; found == PENSTOCK_TOO_LATE; waited++) {
		/* Opened anew each time: an agent that lets go of the job takes the folder away. */
		const int job = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		int told = 0;

		if (job < 0) /* one that was there: the job has no GPUs of its own, and must not see all of them */
			return waited ? PENSTOCK_TOO_LATE : PENSTOCK_NO_SHARER;
		if (!belongs(job, S_IFDIR, owner))
			found = PENSTOCK_NOT_OURS;
		else
			told = read_line(job, "devices", owner, devices, PENSTOCK_DEVICES_SIZE);
		if (told)
			found = told > 0 && are_indexes(devices) ? PENSTOCK_BOUND : PENSTOCK_NOT_OURS;
		if (found == PENSTOCK_BOUND && read_line(job, "mps", owner, mps, PENSTOCK_FOLDER_SIZE) <= 0)
			*mps = '\0'; /* without it the job runs as well */
		close(job);
		if (found == PENSTOCK_TOO_LATE) {
			if (waited >= most_ds)
				break;
			nanosleep(&tenth, NULL);
		}
	}
	if (found != PENSTOCK_BOUND)
		*devices = '\0';
	return found;
}
