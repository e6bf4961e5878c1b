/* A stand-in for NVIDIA's driver: what is loaded as libcuda.so.1 in tests, on machines without a GPU.
 *
 * The folder that the environment variable FAKE_CUDA names has a file for each process that uses CUDA, named by its number,
 * with the letter of its state: r(unning), l(ocked), c(heckpointed), f(ailed). As with the real one, the process itself does
 * the work: a call hangs while the process is stopped. The file `lock`, `checkpoint`, `restore` or `unlock` says what that call
 * does instead: a number is the error that it returns, `hang` never returns, `slow N` takes N ms, `break N` returns the error N
 * and leaves the process failed. Each call is noted in the file `calls`. It shows that our code asks as the manual says; it
 * cannot show what a real driver answers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, INVALID_VALUE = 1, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401 };

typedef struct { unsigned timeout_ms, reserved0; unsigned long long reserved1[7]; } lock_args;
typedef struct { unsigned long long reserved[8]; } args;

static FILE *file(const char *name, const char *mode) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", getenv("FAKE_CUDA"), name);
  return fopen(path, mode);
}

static char letter(int pid) {
  char name[32], found = 0;
  snprintf(name, sizeof name, "%d", pid);
  FILE *state = file(name, "r");
  if (!state) return 0;
  if (fread(&found, 1, 1, state) != 1) found = 0;
  fclose(state);
  return found;
}

static void set(int pid, char letter) {
  char name[32];
  snprintf(name, sizeof name, "%d", pid);
  FILE *state = file(name, "r+");
  fputc(letter, state);
  fclose(state);
}

static int stopped(int pid) {
  char path[64], line[512], *end, found = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *stat = fopen(path, "r");
  if (!stat) return 0;
  if (fgets(line, sizeof line, stat) && (end = strrchr(line, ')'))) found = end[2] == 'T';
  fclose(stat);
  return found;
}

static int call(const char *name, int pid, char before, char after, int all_zero) {
  FILE *calls = file("calls", "a"), *how;
  char text[64] = "";
  fprintf(calls, "%s %d %d\n", name, pid, (int)getuid());
  fclose(calls);
  while (stopped(pid)) usleep(10000);
  if (!all_zero) return INVALID_VALUE;
  if (!letter(pid)) return NOT_INITIALIZED;
  if ((how = file(name, "r"))) {
    if (!fgets(text, sizeof text, how)) text[0] = 0;
    fclose(how);
  }
  while (!strncmp(text, "hang", 4)) usleep(10000);
  if (!strncmp(text, "slow ", 5)) usleep(1000 * atoi(text + 5));
  if (!strncmp(text, "break ", 6)) {
    set(pid, 'f');
    return atoi(text + 6);
  }
  if (atoi(text)) return atoi(text);
  if (letter(pid) != before) return ILLEGAL_STATE;
  set(pid, after);
  return OK;
}

static int zero(const args *given) {
  static const args none;
  return given && !memcmp(given, &none, sizeof none);
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }

int cuGetErrorString(int code, const char **text) {
  static char said[32];
  snprintf(said, sizeof said, "error number %d", code);
  *text = said;
  return OK;
}

int cuCheckpointProcessGetState(int pid, int *state) {
  char found = letter(pid);
  if (!found) return NOT_INITIALIZED;
  *state = (int)(strchr("rlcf", found) - "rlcf");
  return OK;
}

int cuCheckpointProcessLock(int pid, lock_args *given) {
  args rest = {{0}};
  memcpy(rest.reserved, given->reserved1, sizeof given->reserved1);
  return call("lock", pid, 'r', 'l', given->timeout_ms && !given->reserved0 && zero(&rest));
}

int cuCheckpointProcessCheckpoint(int pid, args *given) { return call("checkpoint", pid, 'l', 'c', zero(given)); }
int cuCheckpointProcessRestore(int pid, args *given) { return call("restore", pid, 'c', 'l', zero(given)); }
int cuCheckpointProcessUnlock(int pid, args *given) { return call("unlock", pid, 'l', 'r', zero(given)); }
