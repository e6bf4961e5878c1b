/* For tests: reads NAME=VALUE from standard input, each ended by a zero byte, and prints whether the plugin takes
 * it. With --list prints each flag's name, variable, has_arg and example. */
#include "flags.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void judge(const char *line)
{
	const char *equals = strchr(line, '=');
	const struct flag *flag = equals ? penstock_flag(line, (size_t)(equals - line)) : NULL;

	puts(!flag ? "unknown" : penstock_valid(flag, equals + 1) ? "good" : "bad");
}

int main(int count, char **arguments)
{
	char *line = NULL;
	size_t size = 0;

	if (count == 2 && !strcmp(arguments[1], "--list")) {
		for (size_t i = 0; i < PENSTOCK_FLAGS; i++) {
			char name[80];

			printf("%s %s %d %s\n", penstock_flags[i].name,
			       penstock_variable(&penstock_flags[i], name, sizeof(name)), penstock_flags[i].has_arg,
			       penstock_flags[i].example);
		}
		return 0;
	}
	while (getdelim(&line, &size, '\0', stdin) > 0)
		judge(line);
	free(line);
	return 0;
}
