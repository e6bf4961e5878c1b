/* Counts and slows down calls on files below $SLOW_FILES_ROOT, as a shared file system would: LD_PRELOAD=slow_files.so.
 *
 * Each call by path (open, stat, list, rename, make, delete, change owner) and each fsync there takes $SLOW_FILES_US
 * microseconds more. Reads and writes of open files cost nothing more. slow_files_count() is the number of calls so far.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static long calls;

long slow_files_count(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

static void slow(void) {
    const char *us = getenv("SLOW_FILES_US");
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (us != NULL) usleep(strtoul(us, NULL, 10));
}

static int below(const char *path) {
    const char *root = getenv("SLOW_FILES_ROOT");
    return root != NULL && path != NULL && strncmp(path, root, strlen(root)) == 0;
}

static void by_path(const char *path) {
    if (below(path)) slow();
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define MODE \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest)

int open(const char *path, int flags, ...) { MODE; REAL(open); by_path(path); return real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; REAL(open64); by_path(path); return real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE; REAL(openat); by_path(path); return real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE; REAL(openat64); by_path(path); return real(at, path, flags, mode); }
DIR *opendir(const char *path) { REAL(opendir); by_path(path); return real(path); }
int stat(const char *path, struct stat *to) { REAL(stat); by_path(path); return real(path, to); }
int stat64(const char *path, struct stat64 *to) { REAL(stat64); by_path(path); return real(path, to); }
int lstat(const char *path, struct stat *to) { REAL(lstat); by_path(path); return real(path, to); }
int lstat64(const char *path, struct stat64 *to) { REAL(lstat64); by_path(path); return real(path, to); }
int fstatat(int at, const char *path, struct stat *to, int flags) { REAL(fstatat); by_path(path); return real(at, path, to, flags); }
int fstatat64(int at, const char *path, struct stat64 *to, int flags) { REAL(fstatat64); by_path(path); return real(at, path, to, flags); }
int access(const char *path, int how) { REAL(access); by_path(path); return real(path, how); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); by_path(path); return real(path, mode); }
int unlink(const char *path) { REAL(unlink); by_path(path); return real(path); }
int rmdir(const char *path) { REAL(rmdir); by_path(path); return real(path); }
int rename(const char *from, const char *to) { REAL(rename); by_path(from); return real(from, to); }
int chown(const char *path, uid_t uid, gid_t gid) { REAL(chown); by_path(path); return real(path, uid, gid); }
int lchown(const char *path, uid_t uid, gid_t gid) { REAL(lchown); by_path(path); return real(path, uid, gid); }

int fsync(int file) {
    REAL(fsync);
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = '\0';
        by_path(path);
    }
    return real(file);
}
