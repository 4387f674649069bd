/* Makes files below $APPENDING append-only, as mounts of HDFS and of object stores are: loaded with LD_PRELOAD.

   RENAMES says what can be renamed there: all (default), files, none. FAIL_AFTER: writing fails after so many bytes in all (EIO). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long long written;

static int below(const char *path) {
    const char *root = getenv("APPENDING");
    char whole[PATH_MAX];
    if (!root || !path) return 0;
    if (path[0] != '/') {
        if (!getcwd(whole, sizeof whole - strlen(path) - 2)) return 0;
        strcat(strcat(whole, "/"), path);
        path = whole;
    }
    return strncmp(path, root, strlen(root)) == 0;
}

static int held(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static off_t end_of(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 ? status.st_size : -1;
}

static int broken(size_t count) {
    const char *limit = getenv("FAIL_AFTER");
    if (limit && __sync_add_and_fetch(&written, (long long)count) > atoll(limit)) {
        errno = EIO;
        return 1;
    }
    return 0;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define REFUSE(number) do { errno = number; return -1; } while (0)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write);
    if (held(fd)) {
        if (lseek(fd, 0, SEEK_CUR) != end_of(fd)) REFUSE(EOPNOTSUPP);
        if (broken(count)) return -1;
    }
    return real(fd, data, count);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) {
    REAL(pwrite);
    if (held(fd) && offset != end_of(fd)) REFUSE(EOPNOTSUPP);
    return real(fd, data, count, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off_t offset) { return pwrite(fd, data, count, offset); }

ssize_t pwritev(int fd, const struct iovec *data, int count, off_t offset) {
    REAL(pwritev);
    if (held(fd) && offset != end_of(fd)) REFUSE(EINVAL);
    return real(fd, data, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *data, int count, off_t offset) { return pwritev(fd, data, count, offset); }

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    if (held(fd) && size) REFUSE(EPERM);
    return real(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
    REAL(fallocate);
    if (held(fd)) REFUSE(EOPNOTSUPP);
    return real(fd, mode, offset, size);
}
int fallocate64(int fd, int mode, off_t offset, off_t size) { return fallocate(fd, mode, offset, size); }
int posix_fallocate(int fd, off_t offset, off_t size) {
    REAL(posix_fallocate);
    return held(fd) ? EOPNOTSUPP : real(fd, offset, size);
}

ssize_t copy_file_range(int from, off_t *start, int fd, off_t *offset, size_t count, unsigned flags) {
    REAL(copy_file_range);
    if (held(fd)) REFUSE(EOPNOTSUPP);
    return real(from, start, fd, offset, count, flags);
}

static int refused(const char *path, int *number) {
    const char *renames = getenv("RENAMES");
    struct stat status;
    if (!renames || strcmp(renames, "all") == 0 || !below(path)) return 0;
    if (strcmp(renames, "files") == 0 && (stat(path, &status) != 0 || !S_ISDIR(status.st_mode))) return 0;
    *number = EXDEV;
    return 1;
}

int rename(const char *old, const char *new) {
    REAL(rename);
    int number;
    if (refused(old, &number)) REFUSE(number);
    return real(old, new);
}

int renameat2(int above, const char *old, int below_what, const char *new, unsigned flags) {
    int (*real)(int, const char *, int, const char *, unsigned) = dlsym(RTLD_NEXT, "renameat2");
    int number;
    if (refused(old, &number)) REFUSE(number);
    if (below(old)) REFUSE(EINVAL);
    return real(above, old, below_what, new, flags);
}

int link(const char *old, const char *new) {
    REAL(link);
    if (below(new)) REFUSE(EPERM);
    return real(old, new);
}

int linkat(int above, const char *old, int below_what, const char *new, int flags) {
    REAL(linkat);
    if (below(new)) REFUSE(EPERM);
    return real(above, old, below_what, new, flags);
}
