/* A stand-in for NVIDIA's driver library: what pynvml loads as libnvidia-ml.so.1 in tests, on machines without a GPU.
 *
 * It answers from a scenario, the text file that the environment variable FAKE_NVML names, read again for every call so
 * that a test can change it under a running program. It shows that our code asks as the library's header says and survives
 * its answers; it cannot show what a real driver answers.
 *
 * Lines are `key value`. Keys of the library: init, count, driver, open_log, stray_xid (of no GPU). Keys of GPU 0: 0.name,
 * 0.uuid, 0.total and 0.used (MiB), 0.busy and 0.mem_busy (percent), 0.pids (PID:MiB PID:- …), 0.shares (PID:percent …),
 * 0.stamp (of the shares), 0.mig (how many MIG devices; -1: in MIG mode without any), 0.xid, and the NVML error codes
 * 0.handle_error, 0.error (of every question about it), 0.busy_error, 0.pids_error; 0.nvlinks (what is at the other end of
 * each: a GPU's index, `s` an NVSwitch, `-` the link is down) and 0.over_1 (the level of what it has in common with GPU 1 on
 * PCIe). Keys of its first MIG device: 0.m0.name and so on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE, TIMEOUT = 10 };

typedef struct device { int gpu, mig; } *device_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; unsigned long long stamp; unsigned sm, mem, enc, dec; } share_t;
typedef struct { device_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;

static struct device gpus[8], migs[8][8];
static int watched[8], told[8], told_stray, opened;

static int value(const char *key, char *out) {
  char line[512], name[64];
  int found = 0, start;
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  while (file && !found && fgets(line, sizeof line, file))
    if (sscanf(line, "%63s %n", name, &start) == 1 && !strcmp(name, key)) {
      line[strcspn(line, "\n")] = 0;
      strcpy(out, line + start);
      found = 1;
    }
  if (file) fclose(file);
  return found;
}

static int number(const char *key, int otherwise) {
  char text[512];
  return value(key, text) ? atoi(text) : otherwise;
}

static const char *of(device_t device, const char *field) {
  static char key[64];
  if (device->mig < 0) sprintf(key, "%d.%s", device->gpu, field);
  else sprintf(key, "%d.m%d.%s", device->gpu, device->mig, field);
  return key;
}

/* The error of a question about the device: that of the question, of the device, or of the GPU that it is part of. */
static int fails(device_t device, const char *question) {
  if (!opened) return UNINITIALIZED;
  int gpu = number(of(&gpus[device->gpu], "error"), OK);
  return gpu ? gpu : number(of(device, question), OK);
}

static int copy(device_t device, const char *field, char *out, unsigned length) {
  char text[512];
  int error = fails(device, "error");
  if (!error && !value(of(device, field), text)) error = NOT_SUPPORTED;
  if (!error) snprintf(out, length, "%s", text);
  return error;
}

static void log_open(const char *what) {
  char path[512];
  FILE *file = value("open_log", path) ? fopen(path, "a") : NULL;
  if (file) fprintf(file, "%s\n", what), fclose(file);
}

int nvmlInitWithFlags(unsigned flags) {
  int error = number("init", OK);
  if (!error && !number("count", 0) && !(flags & 1)) error = NOT_FOUND;
  if (!error) opened = 1, log_open("init");
  return error;
}

int nvmlShutdown(void) { opened = 0; log_open("shutdown"); return OK; }
const char *nvmlErrorString(int error) { return error == 27 ? "not ready" : "error of the stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("count", 0); return opened ? OK : UNINITIALIZED; }

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
  char text[512];
  if (!value("driver", text)) return NOT_SUPPORTED;
  snprintf(out, length, "%s", text);
  return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
  gpus[index] = (struct device){index, -1};
  *device = &gpus[index];
  return number(of(*device, "handle_error"), OK);
}

int nvmlDeviceGetName(device_t device, char *out, unsigned length) { return copy(device, "name", out, length); }
int nvmlDeviceGetUUID(device_t device, char *out, unsigned length) { return copy(device, "uuid", out, length); }

int nvmlDeviceGetMemoryInfo(device_t device, unsigned long long *total_free_used) {
  int error = fails(device, "error"), total = number(of(device, "total"), -1);
  if (!error && total < 0) error = NOT_SUPPORTED;
  if (error) return error;
  total_free_used[0] = (unsigned long long)total << 20;
  total_free_used[2] = (unsigned long long)number(of(device, "used"), 0) << 20;
  total_free_used[1] = total_free_used[0] - total_free_used[2];
  return OK;
}

/* As the real one, a MIG device has none. If asked all the same, this one answers, so that a test sees it. */
int nvmlDeviceGetUtilizationRates(device_t device, unsigned *gpu_memory) {
  int error = fails(device, "busy_error");
  gpu_memory[0] = number(of(device, "busy"), 0);
  gpu_memory[1] = number(of(device, "mem_busy"), 0);
  return error;
}

static int processes(device_t device, unsigned *count, process_t *out) {
  char text[512], used[32], *rest = text;
  unsigned pid, found = 0, room = *count;
  int error = fails(device, "pids_error"), length;
  if (error) return error;
  if (!value(of(device, "pids"), text)) *text = 0;
  for (; sscanf(rest, "%u:%31s%n", &pid, used, &length) == 2; rest += length, found++)
    if (found < room)
      out[found] = (process_t){pid, *used == '-' ? ~0ULL : strtoull(used, NULL, 10) << 20, ~0u, ~0u};
  *count = found;
  return found > room ? INSUFFICIENT_SIZE : OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *out) {
  return processes(device, count, out);
}
#endif
int nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *count, process_t *out) {
  return processes(device, count, out);
}

int nvmlDeviceGetProcessUtilization(device_t device, share_t *out, unsigned *count, unsigned long long since) {
  char text[512], *rest = text;
  unsigned pid, share, found = 0;
  int error = fails(device, "pids_error"), length, stamp = number(of(device, "stamp"), 1);
  if (error) return error;
  if (!value(of(device, "shares"), text) || (unsigned long long)stamp <= since) return NOT_FOUND;
  if (!out) { *count = 8; return INSUFFICIENT_SIZE; }
  for (; sscanf(rest, "%u:%u%n", &pid, &share, &length) == 2; rest += length)
    out[found++] = (share_t){pid, stamp, share, 0, 0, 0};
  *count = found;
  return OK;
}

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
  int migs = number(of(device, "mig"), 0);
  *current = *pending = migs != 0;
  return migs ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
  *count = number(of(device, "mig"), 0) ? 7 : 0;
  return fails(device, "error");
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *mig) {
  migs[device->gpu][index] = (struct device){device->gpu, index};
  *mig = &migs[device->gpu][index];
  return (int)index < number(of(device, "mig"), 0) ? OK : NOT_FOUND;
}

int nvmlDeviceGetSupportedEventTypes(device_t device, unsigned long long *types) {
  *types = number(of(device, "xid"), -1) >= 0 ? 8 : 0;
  return OK;
}

int nvmlEventSetCreate(void **set) { *set = watched; return OK; }
int nvmlEventSetFree(void *set) { log_open("events freed"); return set == watched ? OK : NOT_FOUND; }

int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, void *set) {
  watched[device->gpu] = set == watched && types == 8;
  return OK;
}

int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
  (void)set, (void)timeout_ms;
  int stray = number("stray_xid", 0);
  if (stray && !told_stray) {
    told_stray = 1;
    *event = (event_t){NULL, 8, stray, ~0u, ~0u};
    return OK;
  }
  for (int gpu = 0; gpu < 8; gpu++) {
    int xid = number(of(&gpus[gpu], "xid"), 0);
    if (watched[gpu] && xid > 0 && xid != told[gpu]) {
      told[gpu] = xid;
      *event = (event_t){&gpus[gpu], 8, xid, ~0u, ~0u};
      return OK;
    }
  }
  return TIMEOUT;
}

static int link_end(device_t device, unsigned link, char *out) {
  char text[512], *rest = text;
  int error = fails(device, "error"), length;
  if (!error && !value(of(device, "nvlinks"), text)) error = NOT_SUPPORTED;
  if (error) return error;
  for (; sscanf(rest, "%15s%n", out, &length) == 1; rest += length)
    if (!link--) return OK;
  return INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *active) {
  char end[16] = "-";
  int error = link_end(device, link, end);
  *active = *end != '-';
  return error;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetNvLinkRemoteDeviceType(device_t device, unsigned link, unsigned *type) {
  char end[16] = "-";
  int error = link_end(device, link, end);
  *type = *end == 's' ? 2 : 0;
  return error;
}
#endif

/* A GPU and those that are linked to it spell its address in letters of another size, which our code is not to mind. */
static void at(pci_t *pci, unsigned bus, int large) {
  *pci = (pci_t){.bus = bus};
  sprintf(pci->bus_id, large ? "%08X:%02X:%02X.0" : "%08x:%02x:%02x.0", pci->domain, pci->bus, pci->device);
}

int nvmlDeviceGetPciInfo_v3(device_t device, pci_t *pci) {
  at(pci, 0xa0 + device->gpu, device->gpu % 2);
  return fails(device, "error");
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t device, unsigned link, pci_t *pci) {
  char end[16] = "-";
  int error = link_end(device, link, end);
  at(pci, *end == 's' ? 0xf0 : 0xa0 + atoi(end), atoi(end) % 2 == 0);
  return error;
}

int nvmlDeviceGetTopologyCommonAncestor(device_t one, device_t other, unsigned *level) {
  char field[16];
  sprintf(field, "over_%d", other->gpu);
  int error = fails(one, "error"), found;
  if (!error) error = fails(other, "error");
  *level = found = number(of(one, field), -1);
  return error ? error : found < 0 ? NOT_SUPPORTED : OK;
}
