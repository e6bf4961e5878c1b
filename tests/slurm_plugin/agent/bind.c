/* Says what the plugin would tell a task: bind FOLDER NUMBER [TENTHS OF A SECOND] */
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	char devices[PENSTOCK_DEVICES_SIZE], mps[PENSTOCK_FOLDER_SIZE];
	enum penstock_devices found;

	if (count != 3 && count != 4)
		return 2;
	found = penstock_devices(arguments[1], (unsigned)atoi(arguments[2]), geteuid(), count == 4 ? (unsigned)atoi(arguments[3]) : 1,
				 devices, mps);
	printf("%d [%s] [%s]\n", (int)found, devices, mps);
	return 0;
}
