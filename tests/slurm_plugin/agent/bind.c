/* Says what the plugin would tell a task of each of these jobs: bind FOLDER TENTHS-OF-A-SECOND NUMBER... */
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	char devices[PENSTOCK_DEVICES_SIZE], mps[PENSTOCK_FOLDER_SIZE], limits[PENSTOCK_LIMITS_SIZE];
	enum penstock_devices found;

	if (count < 4)
		return 2;
	for (int job = 3; job < count; job++) {
		found = penstock_devices(arguments[1], (unsigned)atoi(arguments[job]), geteuid(), (unsigned)atoi(arguments[2]),
					 devices, mps, limits);
		printf("%d [%s] [%s]", (int)found, devices, mps);
		for (char *text = limits; *text; text++)
			putchar(*text == '\n' ? ' ' : *text);
		putchar('\n');
	}
	return 0;
}
