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

/* Indexes and commas, and a line's end. */
static int take(const char *text, size_t length, char devices[PENSTOCK_DEVICES_SIZE])
{
	while (length > 0 && text[length - 1] == '\n')
		length--;
	if (length == 0 || length >= PENSTOCK_DEVICES_SIZE)
		return 0;
	for (size_t i = 0; i < length; i++)
		if (text[i] != ',' && (text[i] < '0' || text[i] > '9'))
			return 0;
	memcpy(devices, text, length);
	devices[length] = '\0';
	return 1;
}

enum penstock_devices penstock_devices(const char *folder, unsigned number, uid_t owner, unsigned most_ds,
				       char devices[PENSTOCK_DEVICES_SIZE])
{
	const struct timespec tenth = {0, 100000000};
	enum penstock_devices found = PENSTOCK_TOO_LATE;
	char path[4096], text[PENSTOCK_DEVICES_SIZE + 1];

	if (snprintf(path, sizeof(path), "%s/%u", folder, number) >= (int)sizeof(path))
		return PENSTOCK_NO_SHARER;
	for (unsigned waited = 0; found == PENSTOCK_TOO_LATE; waited++) {
		/* Opened anew each time: an agent that lets go of the job takes the folder away. */
		const int job = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		int file = -1;

		if (job < 0) /* one that was there: the job has no GPUs of its own, and must not see all of them */
			return waited ? PENSTOCK_TOO_LATE : PENSTOCK_NO_SHARER;
		if (!belongs(job, S_IFDIR, owner))
			found = PENSTOCK_NOT_OURS;
		else
			file = openat(job, "devices", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		if (file >= 0) {
			const ssize_t length = belongs(file, S_IFREG, owner) ? read(file, text, sizeof(text)) : -1;

			found = length > 0 && take(text, (size_t)length, devices) ? PENSTOCK_BOUND : PENSTOCK_NOT_OURS;
			close(file);
		}
		close(job);
		if (found == PENSTOCK_TOO_LATE) {
			if (waited >= most_ds)
				break;
			nanosleep(&tenth, NULL);
		}
	}
	return found;
}
