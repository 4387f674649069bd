/* Counts the calls that change what lies below a folder, and lets one of them fail or be the last: loaded with LD_PRELOAD.

   Nothing happens until the process calls `crash_arm`. Every counted call is a line of the log: its number, name and path. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long count, at;
static int number, lasting, armed, log_fd = -1;

/* Call `at` (counted from 1, 0 for none) fails with `failure`, and all later ones too if `forever`; 0 is SIGKILL, -1 half of the bytes. */
void crash_arm(const char *below, const char *log, long call, int failure, int forever) {
    snprintf(root, sizeof root, "%s", below);
    count = 0, at = call, number = failure, lasting = forever, armed = 1;
    log_fd = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static int below(int folder, const char *path) {
    char whole[2 * PATH_MAX], link[64];
    ssize_t length = 0;
    if (!armed || !path) return 0;
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX)) return 0;
            length = (ssize_t)strlen(whole);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            if ((length = readlink(link, whole, PATH_MAX - 1)) < 0) return 0;
        }
        snprintf(whole + length, sizeof whole - (size_t)length, "/%s", path);
        path = whole;
    }
    return strncmp(path, root, strlen(root)) == 0;
}

static int held(int fd) {
    char link[64], path[PATH_MAX];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(AT_FDCWD, path);
}

/* A disk that is full takes no new bytes and names, but everything can be read and removed. */
static int needs_room(const char *name) {
    static const char *const others[] = {"unlink", "rmdir", "open", "read-open"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(others[i], name) == 0) return 0;
    return 1;
}

static int fails(const char *name, const char *path) {
    char line[PATH_MAX + 64];
    long now = __sync_add_and_fetch(&count, 1);
    if (log_fd >= 0) {
        int length = snprintf(line, sizeof line, "%ld %s %s\n", now, name, path ? path : "");
        if (syscall(SYS_write, log_fd, line, (size_t)length) < 0) abort();
    }
    if (!at || now < at || (now > at && !lasting)) return 0;
    if (number == 0) kill(getpid(), SIGKILL);
    if (number < 0 || ((number == ENOSPC || number == EDQUOT) && !needs_room(name))) return 0;
    if (number == EROFS && strcmp(name, "read-open") == 0) return 0;
    errno = number;
    return 1;
}

static size_t some_of(size_t size) {
    return number == -1 && at && (count == at || (lasting && count > at)) && size > 1 ? size / 2 : size;
}

/* Calls named in $CRASH_LACKING are those that a system does not have. */
static int lacking(const char *name, int number_of_error) {
    const char *named = armed ? getenv("CRASH_LACKING") : NULL;
    if (!named || !strstr(named, name)) return 0;
    errno = number_of_error;
    return 1;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define GIVE_UP(condition, name, path) do { if ((condition) && fails(name, path)) return -1; } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (held(fd)) { GIVE_UP(1, "write", NULL); size = some_of(size); }
    return real(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    if (held(fd)) { GIVE_UP(1, "pwrite", NULL); size = some_of(size); }
    return real(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *data, int parts) {
    REAL(writev);
    GIVE_UP(held(fd), "writev", NULL);
    return real(fd, data, parts);
}
ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t offset) {
    REAL(pwritev);
    GIVE_UP(held(fd), "pwritev", NULL);
    return real(fd, data, parts, offset);
}
ssize_t pwritev64(int fd, const struct iovec *data, int parts, off_t offset) { return pwritev(fd, data, parts, offset); }
ssize_t copy_file_range(int from, off_t *start, int fd, off_t *offset, size_t size, unsigned flags) {
    REAL(copy_file_range);
    if (held(fd) && lacking("copy_file_range", EXDEV)) return -1;
    if (held(fd)) { GIVE_UP(1, "copy_file_range", NULL); size = some_of(size); }
    return real(from, start, fd, offset, size, flags);
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    GIVE_UP(held(fd), "ftruncate", NULL);
    return real(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int fsync(int fd) {
    REAL(fsync);
    GIVE_UP(held(fd), "fsync", NULL);
    return real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    GIVE_UP(held(fd), "fdatasync", NULL);
    return real(fd);
}

int openat(int folder, const char *path, int flags, ...) {
    REAL(openat);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    GIVE_UP(below(folder, path), flags & O_CREAT ? "create" : flags & (O_WRONLY | O_RDWR) ? "open" : "read-open", path);
    return real(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return openat(folder, path, flags, mode);
}
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return openat(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return openat(AT_FDCWD, path, flags, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    GIVE_UP(below(folder, path), "mkdir", path);
    return real(folder, path, mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int renameat(int above, const char *old, int below_what, const char *new) {
    REAL(renameat);
    GIVE_UP(below(above, old) || below(below_what, new), "rename", new);
    return real(above, old, below_what, new);
}
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }
int renameat2(int above, const char *old, int below_what, const char *new, unsigned flags) {
    int (*real)(int, const char *, int, const char *, unsigned) = dlsym(RTLD_NEXT, "renameat2");
    if (below(above, old) && lacking("renameat2", ENOSYS)) return -1;
    GIVE_UP(below(above, old) || below(below_what, new), "renameat2", new);
    return real(above, old, below_what, new, flags);
}
int linkat(int above, const char *old, int below_what, const char *new, int flags) {
    REAL(linkat);
    if (below(below_what, new) && lacking("link", EPERM)) return -1;
    GIVE_UP(below(below_what, new), "link", new);
    return real(above, old, below_what, new, flags);
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    GIVE_UP(below(folder, path), flags & AT_REMOVEDIR ? "rmdir" : "unlink", path);
    return real(folder, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
