/* Counts what changes files below one folder, and at the n-th such call kills the process or fails
 * the call. Loaded by LD_PRELOAD; asleep until disaster_arm() is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OFF, RECORD, KILL, FAIL, FAIL_ON };

static int mode = OFF, failure = 0, log_to = -1;
static long point = 0;
static atomic_long calls = 0;
static char root[PATH_MAX];

/* action: one of the enum. n: the call, from 1. code: errno of a failure. log: a descriptor that
 * gets one line for each call: its name, when it was made (ns, one clock for all processes), of an
 * open file its number and its size before, the path; behind it, where calls are recorded, frames. */
void disaster_arm(const char *folder, int action, long n, int code, int log) {
    snprintf(root, sizeof root, "%s", folder);
    point = n, failure = code, log_to = log;
    atomic_store(&calls, 0);
    mode = action;
}

static int below(const char *path) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static void of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void of_name(int folder, const char *name, char *path) {
    char base[PATH_MAX] = "";
    if (name[0] != '/') {
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0) base[0] = 0;
        } else
            of_descriptor(folder, base);
    }
    if (snprintf(path, PATH_MAX, base[0] ? "%s/%s" : "%s%s", base, name) >= PATH_MAX) path[0] = 0;
}

/* Lists a call; where all are recorded, with the lines of Python that made it. The interpreter is not
 * asked to wait: a thread's own frames stand still while it is here. */
static void list(const char *call, const char *path, int descriptor) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    char line[PATH_MAX + 128];
    struct stat file = {0};
    if (descriptor >= 0) fstat(descriptor, &file);
    pthread_mutex_lock(&one_at_a_time);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int length = snprintf(line, sizeof line, "%s\t%lld\t%llu\t%lld\t%s\n", call,
                          now.tv_sec * 1000000000LL + now.tv_nsec, (unsigned long long)file.st_ino,
                          (long long)file.st_size, path);
    syscall(SYS_write, log_to, line, length);
    if (mode == RECORD) {
        void *(*thread)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
        void (*dump)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
        void *state = thread && dump ? thread() : NULL;
        if (state) dump(log_to, state);
    }
    pthread_mutex_unlock(&one_at_a_time);
}

/* Whether the call fails. part: of a write that is killed, this much is written. */
static int strikes(const char *call, const char *path, int descriptor, const void *part, size_t size) {
    if (mode == OFF || !below(path)) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (log_to >= 0) list(call, path, descriptor);
    if (mode == KILL && number == point) {
        if (part) syscall(SYS_write, descriptor, part, size / 2);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if ((mode == FAIL && number == point) || (mode == FAIL_ON && number >= point)) {
        errno = failure;
        return 1;
    }
    return 0;
}

static int at_descriptor(const char *call, int descriptor, const void *part, size_t size) {
    char path[PATH_MAX];
    if (mode == OFF) return 0;
    of_descriptor(descriptor, path);
    return strikes(call, path, descriptor, part, size);
}

static int at_name(const char *call, int folder, const char *name) {
    char path[PATH_MAX];
    if (mode == OFF) return 0;
    of_name(folder, name, path);
    return strikes(call, path, -1, NULL, 0);
}

#define NEXT(result, name, ...)                                  \
    static result (*next)(__VA_ARGS__);                          \
    if (!next) next = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    return at_descriptor("write", fd, data, size) ? -1 : next(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    NEXT(ssize_t, "pwrite", int, const void *, size_t, off_t);
    return at_descriptor("pwrite", fd, NULL, 0) ? -1 : next(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return at_descriptor("pwrite", fd, NULL, 0) ? -1 : next(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(ssize_t, "writev", int, const struct iovec *, int);
    return at_descriptor("writev", fd, NULL, 0) ? -1 : next(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    NEXT(ssize_t, "pwritev", int, const struct iovec *, int, off_t);
    return at_descriptor("pwritev", fd, NULL, 0) ? -1 : next(fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    NEXT(ssize_t, "pwritev64", int, const struct iovec *, int, off64_t);
    return at_descriptor("pwritev", fd, NULL, 0) ? -1 : next(fd, parts, count, at);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    NEXT(ssize_t, "sendfile", int, int, off_t *, size_t);
    return at_descriptor("sendfile", to, NULL, 0) ? -1 : next(to, from, at, size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    NEXT(ssize_t, "sendfile64", int, int, off64_t *, size_t);
    return at_descriptor("sendfile", to, NULL, 0) ? -1 : next(to, from, at, size);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    NEXT(ssize_t, "copy_file_range", int, off64_t *, int, off64_t *, size_t, unsigned);
    return at_descriptor("copy_file_range", to, NULL, 0) ? -1 : next(from, a, to, b, size, flags);
}
int ftruncate(int fd, off_t size) {
    NEXT(int, "ftruncate", int, off_t);
    return at_descriptor("ftruncate", fd, NULL, 0) ? -1 : next(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    NEXT(int, "ftruncate64", int, off64_t);
    return at_descriptor("ftruncate", fd, NULL, 0) ? -1 : next(fd, size);
}
int fsync(int fd) {
    NEXT(int, "fsync", int);
    return at_descriptor("fsync", fd, NULL, 0) ? -1 : next(fd);
}
int fdatasync(int fd) {
    NEXT(int, "fdatasync", int);
    return at_descriptor("fdatasync", fd, NULL, 0) ? -1 : next(fd);
}
int rename(const char *from, const char *to) {
    NEXT(int, "rename", const char *, const char *);
    return at_name("rename", AT_FDCWD, to) ? -1 : next(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    NEXT(int, "renameat", int, const char *, int, const char *);
    return at_name("rename", b, to) ? -1 : next(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NEXT(int, "renameat2", int, const char *, int, const char *, unsigned);
    return at_name("rename", b, to) ? -1 : next(a, from, b, to, flags);
}
int link(const char *from, const char *to) {
    NEXT(int, "link", const char *, const char *);
    return at_name("link", AT_FDCWD, to) ? -1 : next(from, to);
}
int unlink(const char *name) {
    NEXT(int, "unlink", const char *);
    return at_name("unlink", AT_FDCWD, name) ? -1 : next(name);
}
int unlinkat(int folder, const char *name, int flags) {
    NEXT(int, "unlinkat", int, const char *, int);
    return at_name(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, name) ? -1
                                                                            : next(folder, name, flags);
}
int rmdir(const char *name) {
    NEXT(int, "rmdir", const char *);
    return at_name("rmdir", AT_FDCWD, name) ? -1 : next(name);
}
int mkdir(const char *name, mode_t rights) {
    NEXT(int, "mkdir", const char *, mode_t);
    return at_name("mkdir", AT_FDCWD, name) ? -1 : next(name, rights);
}
int mkdirat(int folder, const char *name, mode_t rights) {
    NEXT(int, "mkdirat", int, const char *, mode_t);
    return at_name("mkdir", folder, name) ? -1 : next(folder, name, rights);
}

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))
#define OPENING(flags)                                    \
    mode_t rights = 0;                                    \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {              \
        va_list more;                                     \
        va_start(more, flags);                            \
        rights = va_arg(more, mode_t);                    \
        va_end(more);                                     \
    }

int open(const char *name, int flags, ...) {
    NEXT(int, "open", const char *, int, ...);
    OPENING(flags)
    return WRITES(flags) && at_name("open", AT_FDCWD, name) ? -1 : next(name, flags, rights);
}
int open64(const char *name, int flags, ...) {
    NEXT(int, "open64", const char *, int, ...);
    OPENING(flags)
    return WRITES(flags) && at_name("open", AT_FDCWD, name) ? -1 : next(name, flags, rights);
}
int openat(int folder, const char *name, int flags, ...) {
    NEXT(int, "openat", int, const char *, int, ...);
    OPENING(flags)
    return WRITES(flags) && at_name("open", folder, name) ? -1 : next(folder, name, flags, rights);
}
int openat64(int folder, const char *name, int flags, ...) {
    NEXT(int, "openat64", int, const char *, int, ...);
    OPENING(flags)
    return WRITES(flags) && at_name("open", folder, name) ? -1 : next(folder, name, flags, rights);
}
FILE *fopen(const char *name, const char *how) {
    NEXT(FILE *, "fopen", const char *, const char *);
    return strpbrk(how, "wa+") && at_name("open", AT_FDCWD, name) ? NULL : next(name, how);
}
FILE *fopen64(const char *name, const char *how) {
    NEXT(FILE *, "fopen64", const char *, const char *);
    return strpbrk(how, "wa+") && at_name("open", AT_FDCWD, name) ? NULL : next(name, how);
}
