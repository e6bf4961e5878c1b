/* The adaptive flags and what their values may look like. Nothing of Slurm in here, so that it can be tested alone. */
#ifndef PENSTOCK_FLAGS_H
#define PENSTOCK_FLAGS_H

#include <stdbool.h>
#include <stddef.h>

struct flag {
	char *name;     /* as in --name; not const because Slurm's struct spank_option is not */
	char *arginfo;  /* what --help shows after =, NULL where there is no value */
	char *usage;    /* what --help says */
	int has_arg;    /* 0 none, 1 required, 2 optional: as Slurm and getopt count */
	int kind;            /* what values look like */
	const char *example; /* a good value */
	const char *absent;  /* the value of a flag that is given without one */
};

enum { PENSTOCK_FLAGS = 19 };   /* how many there are */
enum { PENSTOCK_ADAPTIVE = 0 }; /* the index of the one that the others need */

extern const struct flag penstock_flags[PENSTOCK_FLAGS];

/* Whether a value is of the flag's form. */
bool penstock_valid(const struct flag *flag, const char *value);

/* What a good value is, in words. */
const char *penstock_form(const struct flag *flag);

/* The flag of this name of `length` bytes, or NULL. */
const struct flag *penstock_flag(const char *name, size_t length);

/* Writes the name under which a flag travels, PENSTOCK_MIN_GPUS of min-gpus, and returns `name`. */
char *penstock_variable(const struct flag *flag, char *name, size_t size);

#endif
