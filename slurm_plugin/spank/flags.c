/* What a value looks like, and no more: whether it suits the others and the site, job_submit.lua knows. Its readers accept
 * the same values; the tests hold the two against each other. */
#include "flags.h"

#include <stdio.h>
#include <string.h>

enum {
	MOST_DIGITS = 9,  /* of a count: all fit into a C int and a double */
	MOST_NAME = 64,   /* of a GPU type, a model family, a group */
	MOST_VALUE = 1024 /* of a list */
};

/* Skips `least` to `most` digits; NULL if there are fewer or more. isdigit is not used: it may go by the locale. */
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

/* Skips a name: letters, digits and ._+- after a letter or digit. None of them means anything to JSON or Lua. */
static const char *name(const char *at)
{
	static const char first[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-";
	size_t length;

	if (!at || strchr("._+-", *at))
		return NULL;
	length = strspn(at, first);
	return length >= 1 && length <= MOST_NAME ? at + length : NULL;
}

static bool one_of(const char *value, const char *const *words)
{
	for (; *words; words++)
		if (!strcmp(value, *words))
			return true;
	return false;
}

static bool is_mode(const char *value)
{
	static const char *const words[] = {"adaptive", "strong-scaling", "rigid", NULL};

	return one_of(value, words);
}

static bool is_class(const char *value)
{
	static const char *const words[] = {"guaranteed", "opportunistic", NULL};

	return one_of(value, words);
}

static bool is_burst(const char *value)
{
	static const char *const words[] = {"never", "allowed", "only", NULL};

	return one_of(value, words);
}

static bool is_estimator(const char *value)
{
	static const char *const words[] = {"training", "throughput", "latency", "table", NULL};

	return one_of(value, words);
}

static bool is_switch(const char *value)
{
	static const char *const words[] = {"yes", "no", NULL};

	return one_of(value, words);
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

/* Skips two-part pieces of a time: one or two digits below `limit`. */
static const char *part(const char *at, int limit)
{
	const char *end = digits(at, 1, 2);
	int value = 0;

	for (; end && at < end; at++)
		value = 10 * value + (*at - '0');
	return end && value < limit ? end : NULL;
}

/* As --time has it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; but not 0. */
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

enum kind {
#define KIND(kind, form) kind,
#define FLAG(name, arginfo, usage, has_arg, kind, example, absent)
#include "flags.def"
#undef KIND
#undef FLAG
	KINDS
};

static const char *const forms[KINDS] = {
#define KIND(kind, form) form,
#define FLAG(name, arginfo, usage, has_arg, kind, example, absent)
#include "flags.def"
#undef KIND
#undef FLAG
};

static bool (*const checks[KINDS])(const char *value) = {
	[MODE] = is_mode,	[COUNT] = is_count,	[TYPES] = is_types,	  [UNITS] = is_units, [NAME] = is_name,
	[CLASS] = is_class,	[SWITCH] = is_switch, [BURST] = is_burst, [DOLLARS] = is_dollars, [SIZE] = is_size,
	[TIME] = is_time,	[ESTIMATOR] = is_estimator,
};

const struct flag penstock_flags[PENSTOCK_FLAGS] = {
#define KIND(kind, form)
#define FLAG(name, arginfo, usage, has_arg, kind, example, absent) {name, arginfo, usage, has_arg, kind, example, absent},
#include "flags.def"
#undef KIND
#undef FLAG
};

bool penstock_valid(const struct flag *flag, const char *value)
{
	return checks[flag->kind](value);
}

const char *penstock_form(const struct flag *flag)
{
	return forms[flag->kind];
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
