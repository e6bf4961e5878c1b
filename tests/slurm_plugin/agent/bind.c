/* Says what the plugin would tell a task of each of these jobs: bind FOLDER TENTHS-OF-A-SECOND NUMBER... */
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	char devices[PENSTOCK_DEVICES_SIZE], mps[PENSTOCK_FOLDER_SIZE];
	enum penstock_devices found;

	if (count < 4)
		return 2;
	for (int job = 3; job < count; job++) {
		found = penstock_devices(arguments[1], (unsigned)atoi(arguments[job]), geteuid(), (unsigned)atoi(arguments[2]),
					 devices, mps);
		printf("%d [%s] [%s]\n", (int)found, devices, mps);
	}
	return 0;
}
