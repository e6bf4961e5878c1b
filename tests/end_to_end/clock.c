/*
 * LD_PRELOAD library: a process whose wall clock is set to another time while it runs.
 *
 * PENSTOCK_TEST_CLOCK names a file with one double: by how many seconds the wall clock is ahead. Monotonic clocks stay as they
 * are, as on a machine whose clock is set. (libfaketime 0.9.10 breaks Python's time.sleep.)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);
static const volatile double *ahead;

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("PENSTOCK_TEST_CLOCK");
	int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

	real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	if (file >= 0) {
		void *found = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);

		if (found != MAP_FAILED)
			ahead = found;
		close(file);
	}
}

int clock_gettime(clockid_t id, struct timespec *now)
{
	int failed;

	if (!real)
		real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	failed = real(id, now);
	if (!failed && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
		now->tv_sec += (time_t)*ahead;
	return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec found;

	(void)zone;
	if (clock_gettime(CLOCK_REALTIME, &found))
		return -1;
	now->tv_sec = found.tv_sec;
	now->tv_usec = found.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *into)
{
	struct timespec found;

	clock_gettime(CLOCK_REALTIME, &found);
	if (into)
		*into = found.tv_sec;
	return found.tv_sec;
}
