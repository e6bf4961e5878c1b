/* The adaptive flags and the form of their values. Nothing here needs Slurm, so that it can be tested alone. */
#ifndef PENSTOCK_FLAGS_H
#define PENSTOCK_FLAGS_H

#include <stdbool.h>
#include <stddef.h>

struct flag {
	char *name;          /* as in --name; not const because Slurm's struct spank_option is not */
	char *arginfo;       /* what --help shows after =, NULL if the flag takes no value */
	char *usage;         /* what --help says */
	int has_arg;         /* 0 none, 1 required, 2 optional: as Slurm and getopt count */
	int syntax;          /* how values are written */
	const char *form;    /* what a good value looks like, for messages */
	const char *choices; /* the good values, separated by |, if there are only a few; otherwise NULL */
	const char *example; /* a good value */
	const char *bare;    /* the value of a flag that is given without one, NULL if it needs one */
};

enum {
	PENSTOCK_ADAPTIVE = 0, /* index of the flag that all others need */
	PENSTOCK_FLAGS = 0     /* number of flags */
#define FLAG(...) +1
#include "flags.def"
#undef FLAG
};

extern const struct flag penstock_flags[PENSTOCK_FLAGS];

/* Whether a value is of the flag's form. */
bool penstock_valid(const struct flag *flag, const char *value);

/* The flag of this name of `length` bytes, or NULL. */
const struct flag *penstock_flag(const char *name, size_t length);

/* Writes the name of the variable that carries a flag, such as PENSTOCK_MIN_GPUS for min-gpus, and returns `name`. */
char *penstock_variable(const struct flag *flag, char *name, size_t size);

#endif
