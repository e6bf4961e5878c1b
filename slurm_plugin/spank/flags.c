/* Checks the form of a flag's value. Whether the value suits the other flags and the site, job_submit.lua checks.
 * Its readers accept the same values; the tests compare the two. */
#include "flags.h"

#include <stdio.h>
#include <string.h>

enum {
	MOST_DIGITS = 9,  /* of a count: all fit into a C int and a double */
	MOST_NAME = 64,   /* of a GPU type, a model family, a group */
	MOST_VALUE = 1024 /* of a list */
};

/* Skips `least` to `most` digits; NULL if there are fewer or more. isdigit is not used because it may follow the
 * locale. */
static const char *digits(const char *at, int least, int most)
{
	int count = 0;

	if (!at)
		return NULL;
	while (*at >= '0' && *at <= '9') {
		at++;
		count++;
	}
	return count >= least && count <= most ? at : NULL;
}

/* Skips a whole number from 1. */
static const char *number(const char *at)
{
	return at && *at != '0' ? digits(at, 1, MOST_DIGITS) : NULL;
}

/* Skips a name: letters, digits and ._+- after a letter or digit. JSON and Lua need not quote any of them. */
static const char *name(const char *at)
{
	static const char first[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-";
	size_t length;

	if (!at || strchr("._+-", *at))
		return NULL;
	length = strspn(at, first);
	return length >= 1 && length <= MOST_NAME ? at + length : NULL;
}

/* Whether a value is one of the choices, which | separates. */
static bool one_of(const char *value, const char *choices)
{
	const size_t length = strlen(value);

	for (;;) {
		const size_t choice = strcspn(choices, "|");

		if (choice == length && !strncmp(value, choices, length))
			return true;
		if (!choices[choice])
			return false;
		choices += choice + 1;
	}
}

static bool is_count(const char *value)
{
	const char *end = number(value);

	return end && !*end;
}

static bool is_name(const char *value)
{
	const char *end = name(value);

	return end && !*end;
}

/* a100,t4 or ^t4,^rtx */
static bool is_types(const char *value)
{
	const bool excludes = *value == '^';

	if (strlen(value) > MOST_VALUE)
		return false;
	for (;;) {
		if (excludes && *value++ != '^')
			return false;
		value = name(value);
		if (!value)
			return false;
		if (!*value)
			return true;
		if (*value++ != ',')
			return false;
	}
}

/* 4 or a100=2,rtx=8 */
static bool is_units(const char *value)
{
	if (is_count(value))
		return true;
	if (strlen(value) > MOST_VALUE)
		return false;
	for (;;) {
		value = name(value);
		if (!value || *value++ != '=')
			return false;
		value = number(value);
		if (!value)
			return false;
		if (!*value)
			return true;
		if (*value++ != ',')
			return false;
	}
}

/* 40 or 12.50, but not 0 */
static bool is_dollars(const char *value)
{
	const char *end = digits(value, 1, MOST_DIGITS);

	if (end && *end == '.')
		end = digits(end + 1, 1, 2);
	return end && !*end && strpbrk(value, "123456789");
}

/* 500G */
static bool is_size(const char *value)
{
	const char *end = *value != '0' ? digits(value, 1, 6) : NULL;

	return end && *end && strchr("KMGT", *end) && !end[1];
}

/* Skips one part of a time: one or two digits, a number below `limit`. */
static const char *part(const char *at, int limit)
{
	const char *end = digits(at, 1, 2);
	int value = 0;

	for (; end && at < end; at++)
		value = 10 * value + (*at - '0');
	return end && value < limit ? end : NULL;
}

/* As --time takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; but not 0. */
static bool is_time(const char *value)
{
	const char *end = digits(value, 1, 6);
	int parts = 2; /* that may follow after a colon */

	if (end && *end == '-')
		end = part(end + 1, 24);
	for (; end && *end == ':' && parts; parts--)
		end = part(end + 1, 60);
	return end && !*end && strpbrk(value, "123456789");
}

enum syntax { CHOICE, COUNT, TYPES, UNITS, NAME, SWITCH, DOLLARS, SIZE, TIME, SYNTAXES };

/* NULL: the flag has choices. */
static bool (*const checks[SYNTAXES])(const char *value) = {
	[COUNT] = is_count, [TYPES] = is_types, [UNITS] = is_units, [NAME] = is_name,
	[DOLLARS] = is_dollars, [SIZE] = is_size, [TIME] = is_time,
};

const struct flag penstock_flags[PENSTOCK_FLAGS] = {
#define FLAG(...) {__VA_ARGS__},
#include "flags.def"
#undef FLAG
};

bool penstock_valid(const struct flag *flag, const char *value)
{
	return flag->choices ? one_of(value, flag->choices) : checks[flag->syntax](value);
}

const struct flag *penstock_flag(const char *name, size_t length)
{
	for (size_t i = 0; i < PENSTOCK_FLAGS; i++)
		if (strlen(penstock_flags[i].name) == length && !strncmp(penstock_flags[i].name, name, length))
			return &penstock_flags[i];
	return NULL;
}

char *penstock_variable(const struct flag *flag, char *name, size_t size)
{
	snprintf(name, size, "PENSTOCK_%s", flag->name);
	for (char *at = name; *at; at++)
		if (*at == '-')
			*at = '_';
		else if (*at >= 'a' && *at <= 'z')
			*at = (char)(*at - 'a' + 'A');
	return name;
}
